//! Errors of planning and running.

use quadriga_graph::DType;
use thiserror::Error;

use crate::byte_text::byte_text;
use crate::memory::MemoryError;
use crate::{BackendError, ScheduleError, SnapshotError};

/// A failure of planning or running. What worked before still works, unless [a device is lost](RuntimeError::is_lost).
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A scheduler was made without backends.
    #[error("there is no backend to run on: give the scheduler at least one")]
    NoBackends,
    /// A pin, a placement or a budget names a backend that the scheduler does not have.
    #[error("{what} names backend {index}, but there are only {count}, counted from 0")]
    UnknownBackend {
        /// What named it.
        what: String,
        /// The number given.
        index: usize,
        /// How many backends there are.
        count: usize,
    },
    /// A pin names a tensor or node that the graph does not have.
    #[error("{what} {index} is pinned, but the graph has only {count}")]
    UnknownPin {
        /// "tensor" or "node".
        what: &'static str,
        /// The number given.
        index: usize,
        /// How many the graph has.
        count: usize,
    },
    /// Two pins place one storage on different backends: all nodes that write a storage run on its backend.
    #[error(
        "{tensor} is pinned to {first} and to {second}; all nodes that write one storage must run on one backend"
    )]
    PinConflict {
        /// The storage.
        tensor: String,
        /// One backend.
        first: String,
        /// Another.
        second: String,
    },
    /// No backend computes a node (together with the other nodes that write the same storage).
    #[error("no backend computes {node} ({operation}): {}", refusals_text(.refusals))]
    NoBackendSupports {
        /// The node.
        node: String,
        /// The operation with the types of its inputs and its result.
        operation: String,
        /// For each backend its name and its reason.
        refusals: Vec<(String, String)>,
    },
    /// A plan needs more bytes of a backend than its budget.
    #[error("{0}")]
    OverBudget(Box<OverBudget>),
    /// Memory could not be planned.
    #[error("{0}")]
    Memory(Box<MemoryError>),
    /// A plan that breaks the rules of plans: a bug in the scheduler.
    #[error("invalid plan: {0}")]
    BadPlan(String),
    /// A plan whose schedule breaks a rule: a bug in the scheduler.
    #[error("invalid plan: {0}")]
    BadSchedule(Box<ScheduleError>),
    /// A name that the graph does not have.
    #[error("the graph has no {what} named \"{name}\"{}", known_text(.known))]
    UnknownName {
        /// "input", "output", "weight", "state".
        what: &'static str,
        /// The name given.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// A tensor is not of the kind that the call needs.
    #[error("tensor {name} is not {expected}")]
    WrongKind {
        /// The tensor.
        name: String,
        /// What the call needs.
        expected: &'static str,
    },
    /// Elements of another type were given or requested.
    #[error("{name} has type {found}, not {given}")]
    WrongType {
        /// The tensor.
        name: String,
        /// Its type.
        found: DType,
        /// The type of the caller's elements.
        given: DType,
    },
    /// Another number of bytes was given or requested.
    #[error("{name} has {expected} bytes, not {found}")]
    WrongSize {
        /// The tensor.
        name: String,
        /// Its bytes.
        expected: usize,
        /// The caller's bytes.
        found: usize,
    },
    /// A slice of a weight does not exist.
    #[error("{name} has {count} slices: there is no slice {index}")]
    Slice {
        /// The weight.
        name: String,
        /// The slice.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// Another number of values was given.
    #[error("{name} has {expected} elements, not {found}")]
    WrongCount {
        /// The tensor.
        name: String,
        /// Its elements.
        expected: usize,
        /// The caller's values.
        found: usize,
    },
    /// Values cannot be converted between `f32` and the tensor's type.
    #[error("{name}: {reason}")]
    NoConversion {
        /// The tensor.
        name: String,
        /// Why not.
        reason: String,
    },
    /// A result whose elements are not contiguous was read as elements.
    #[error("{name} is a strided view; make it contiguous with cont()")]
    Strided {
        /// The tensor.
        name: String,
    },
    /// A run was started before an input or weight was set.
    #[error("{what} {name} was never set")]
    NotSet {
        /// "input" or "weight".
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The session has no plan yet.
    #[error("the session has no plan yet: prepare one")]
    NoPlan,
    /// A result was read before anything was run.
    #[error("nothing was run yet")]
    NothingRun,
    /// A result was read that is no longer in memory.
    #[error("output {name} was overwritten by another graph of the session, or its run failed; run it again")]
    Gone {
        /// The output's name.
        name: String,
    },
    /// Two graphs of a session have different states, or weights without data, of one name.
    #[error("{what} {name} was {before}, and is {after} in another graph of the session")]
    Conflict {
        /// "weight" or "state".
        what: &'static str,
        /// Its name.
        name: String,
        /// Its type, shape and backend so far.
        before: String,
        /// Its type, shape and backend in the new graph.
        after: String,
    },
    /// Memory of the caller that a run writes is that of another tensor, too.
    #[error(
        "the memory of {name} overlaps that of {other}, and a run writes it; bind them to separate regions"
    )]
    BoundOverlap {
        /// An input, state or output in memory of the caller.
        name: String,
        /// Another one.
        other: String,
    },
    /// Two outputs that are one tensor, or views of one, are bound to two regions.
    #[error("outputs {name} and {other} are one tensor, which cannot be in two regions; bind one of them")]
    BoundTwice {
        /// An output.
        name: String,
        /// Another one.
        other: String,
    },
    /// The plan belongs to other backends than the session.
    #[error("the plan was made for other backends than the session's")]
    ForeignPlan,
    /// A key was given for two graphs.
    #[error(
        "the key {key:?} stands for another graph of this session: {difference}; give each graph, and each model, keys of its own"
    )]
    OtherGraphOfKey {
        /// The numbers of the key.
        key: [u64; 4],
        /// What differs.
        difference: String,
    },
    /// Graphs with different weights were given for one model.
    #[error(
        "the graph with the key {key:?} has other weights than earlier ones of its model: {difference}; give each model a ModelId of its own"
    )]
    OtherModel {
        /// The numbers of the key.
        key: [u64; 4],
        /// What differs.
        difference: String,
    },
    /// The pending read was started by another session.
    #[error("the pending read belongs to another session: finish it there")]
    ForeignRead,
    /// States could not be saved or restored.
    #[error("{0}")]
    Snapshot(Box<SnapshotError>),
    /// Building a graph failed.
    #[error("{0}")]
    Build(String),
    /// A device failed.
    #[error("{}{error}", place_text(.split, .node))]
    Device {
        /// The backend.
        backend: String,
        /// The split that was compiled, copied to or run.
        split: Option<usize>,
        /// The node, the first of the split, or the tensor concerned.
        node: Option<String>,
        /// The backend's error.
        error: Box<BackendError>,
    },
    /// A state of the library that cannot be: a bug in it.
    #[error("internal error at {location}: {what}")]
    Internal {
        /// The condition that does not hold.
        what: &'static str,
        /// File and line.
        location: String,
    },
}

/// How many bytes a plan needs beyond a backend's budget, and how many weights would fit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{backend}: the plan needs {} ({} of weights, {} of state, {} to compute), {} more than the budget of {}; {} would fit",
    byte_text(*.needed), byte_text(*.weights), byte_text(*.state), byte_text(*.compute),
    byte_text(.needed.saturating_sub(*.budget)), byte_text(*.budget),
    fitting_text(*.fitting, *.weight_count, *.fitting_bytes)
)]
pub struct OverBudget {
    /// The backend.
    pub backend: String,
    /// Bytes that the plan needs in all.
    pub needed: u64,
    /// Bytes of weights and constants.
    pub weights: u64,
    /// Bytes of state.
    pub state: u64,
    /// Bytes of the arena.
    pub compute: u64,
    /// Bytes allowed.
    pub budget: u64,
    /// Weights that would be loaded there.
    pub weight_count: usize,
    /// How many of them fit beside state and arena, in the order of their first use.
    pub fitting: usize,
    /// Their bytes.
    pub fitting_bytes: u64,
}

fn fitting_text(fitting: usize, weight_count: usize, bytes: u64) -> String {
    match fitting {
        0 => "none of its weights".to_owned(),
        _ => format!("{fitting} of its {weight_count} weights ({})", byte_text(bytes)),
    }
}

impl From<MemoryError> for RuntimeError {
    fn from(error: MemoryError) -> RuntimeError {
        RuntimeError::Memory(Box::new(error))
    }
}

impl From<SnapshotError> for RuntimeError {
    fn from(error: SnapshotError) -> RuntimeError {
        RuntimeError::Snapshot(Box::new(error))
    }
}

impl RuntimeError {
    /// Whether a device is lost. Then every later call that needs it fails the same way.
    pub fn is_lost(&self) -> bool {
        matches!(self, RuntimeError::Device { error, .. } if matches!(**error, BackendError::Lost { .. }))
    }

    /// An error for a condition that always holds, with the caller's location.
    #[track_caller]
    pub(crate) fn internal(what: &'static str) -> RuntimeError {
        let caller = std::panic::Location::caller();
        RuntimeError::Internal { what, location: format!("{}:{}", caller.file(), caller.line()) }
    }

    /// The failure of a backend.
    pub(crate) fn device(error: BackendError) -> RuntimeError {
        let node = match &error {
            BackendError::Node { node, .. } | BackendError::Unsupported { node, .. } => Some(node.clone()),
            _ => None,
        };
        RuntimeError::Device {
            backend: error.backend().to_owned(),
            split: None,
            node,
            error: Box::new(error),
        }
    }

    /// Adds the split, and the node unless a closer one is known.
    pub(crate) fn in_split(mut self, number: usize, name: impl FnOnce() -> String) -> RuntimeError {
        if let RuntimeError::Device { split, node, .. } = &mut self {
            split.get_or_insert(number);
            node.get_or_insert_with(name);
        }
        self
    }

    /// Adds the tensor or node concerned, unless one is known.
    pub(crate) fn at(mut self, name: impl FnOnce() -> String) -> RuntimeError {
        if let RuntimeError::Device { node, .. } = &mut self {
            node.get_or_insert_with(name);
        }
        self
    }
}

fn refusals_text(refusals: &[(String, String)]) -> String {
    let all: Vec<String> = refusals.iter().map(|(backend, why)| format!("{backend}: {why}")).collect();
    all.join("; ")
}

fn known_text(known: &[String]) -> String {
    if known.is_empty() { String::new() } else { format!("; there are: {}", known.join(", ")) }
}

fn place_text(split: &Option<usize>, node: &Option<String>) -> String {
    match (split, node) {
        (Some(split), Some(node)) => format!("split {split} at {node}: "),
        (Some(split), None) => format!("split {split}: "),
        (None, Some(node)) => format!("{node}: "),
        (None, None) => String::new(),
    }
}
