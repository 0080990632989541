//! Errors of planning and allocation.

use super::packing::PackingError;
use crate::BackendError;
use crate::byte_text::{byte_text, free_text};

/// A failure of planning or of allocation. Earlier plans and allocations are not affected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A list that must have one entry for each tensor or node has another length.
    #[error("{found} {what} given, {expected} needed")]
    Length {
        /// The elements of the list.
        what: &'static str,
        /// The required length.
        expected: usize,
        /// The length given.
        found: usize,
    },
    /// The backend of a tensor or extra does not exist.
    #[error("{what} is on backend {backend}, but there are only {count}")]
    UnknownBackend {
        /// The tensor's name, or "extra" with its index.
        what: String,
        /// The index given.
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
    /// A node has an earlier step than one of its inputs.
    #[error(
        "{reader} runs in step {step}, but its input {source_name} is computed only in step {source_step}"
    )]
    Order {
        /// The node.
        reader: String,
        /// Its step.
        step: u32,
        /// Its input.
        source_name: String,
        /// The input's step.
        source_step: u32,
    },
    /// A step number that is too large, or an extra with an empty lifetime.
    #[error("{what} at step {step}: steps go up to 2^32 - 6, and a lifetime ends after it starts")]
    Step {
        /// The node, tensor or extra.
        what: String,
        /// The step.
        step: u32,
    },
    /// A tensor that is not in the graph.
    #[error("tensor {index} is not in the graph, which has {count}")]
    UnknownTensor {
        /// The index given.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A node writes into a tensor of another backend.
    #[error("{node} runs on backend {backend}, but writes into {target} on backend {target_backend}")]
    ForeignWrite {
        /// The node.
        node: String,
        /// The backend it runs on.
        backend: u16,
        /// The tensor it writes into.
        target: String,
        /// The backend of that tensor.
        target_backend: u16,
    },
    /// The storages cannot be packed.
    #[error(transparent)]
    Packing(#[from] PackingError),
    /// A backend refused an allocation.
    #[error("{backend}: cannot allocate {} for {purpose}{}: {source}", byte_text(*.wanted), free_text(.free))]
    Allocation {
        /// The backend's name.
        backend: String,
        /// The chunk and its largest tensor.
        purpose: String,
        /// Bytes requested.
        wanted: u64,
        /// Bytes free, if known.
        free: Option<u64>,
        /// The backend's error.
        source: Box<BackendError>,
    },
}
