//! Why memory could not be planned or had.

use super::packing::PackingError;
use crate::BackendError;

/// A failure of planning or of allocation. Whatever was planned or allocated before is still there.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A list that must have one entry for each tensor or node has another length.
    #[error("{found} {what} are given, {expected} are needed")]
    Length {
        /// What the list holds.
        what: &'static str,
        /// How many are needed.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// A tensor or extra is on a backend that is not among those given.
    #[error("{what} is on backend {backend}, of {count}")]
    UnknownBackend {
        /// The tensor's name, or "extra" with its number.
        what: String,
        /// The number given.
        backend: u16,
        /// How many backends there are.
        count: usize,
    },
    /// An alignment that is not a power of two.
    #[error("{backend}: alignment {alignment} is not a power of two")]
    Alignment {
        /// The backend's name.
        backend: String,
        /// The alignment.
        alignment: usize,
    },
    /// A node is to run before one that it needs.
    #[error(
        "{reader} is to run in step {step}, but what it reads, {source_name}, only in step {source_step}"
    )]
    Order {
        /// The node.
        reader: String,
        /// Its step.
        step: u32,
        /// What it needs.
        source_name: String,
        /// The step of that.
        source_step: u32,
    },
    /// A step beyond the last that can be counted, or an extra without a lifetime.
    #[error("{what} at step {step}: steps go up to 2^32 - 4, and a lifetime ends after it starts")]
    Step {
        /// What it belongs to.
        what: String,
        /// The step.
        step: u32,
    },
    /// A tensor that is not in the graph.
    #[error("tensor {index} is not in the graph, which has {count}")]
    UnknownTensor {
        /// The number given.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A node writes into a tensor of another backend.
    #[error("{node} runs on backend {backend}, but writes into {target}, which is on backend {home}")]
    ForeignWrite {
        /// The node.
        node: String,
        /// The backend it runs on.
        backend: u16,
        /// The tensor it writes into.
        target: String,
        /// Where that is.
        home: u16,
    },
    /// The sizes are beyond what can be packed.
    #[error(transparent)]
    Packing(#[from] PackingError),
    /// A backend did not give memory.
    #[error("{backend}: {wanted} bytes are wanted for {purpose}{}: {source}", free_text(.free))]
    Allocation {
        /// The backend's name.
        backend: String,
        /// What for: a tensor's name, if one alone is larger than the largest buffer, else the chunk.
        purpose: String,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes free, if known.
        free: Option<u64>,
        /// What the backend said.
        source: Box<BackendError>,
    },
}

fn free_text(free: &Option<u64>) -> String {
    free.map_or_else(String::new, |free| format!(", {free} are free"))
}
