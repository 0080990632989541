//! What can go wrong while a graph is planned and run.

use quadriga_graph::DType;
use thiserror::Error;

use crate::BackendError;
use crate::memory::MemoryError;

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
    /// Two pins ask for different things of one storage: everything that writes a storage runs where it lives.
    #[error(
        "{tensor} is pinned to {first} and to {second}; all that writes one storage must run on one backend"
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
        /// What each backend that was asked said, with the backend's name.
        refusals: Vec<(String, String)>,
    },
    /// The bytes wanted on a backend are beyond its budget.
    #[error("{0}")]
    OverBudget(Box<OverBudget>),
    /// Memory could not be planned.
    #[error("{0}")]
    Memory(Box<MemoryError>),
    /// A plan that breaks its own rules: a mistake in the scheduler.
    #[error("the plan is wrong: {0}")]
    BadPlan(String),
    /// A name that the graph does not have.
    #[error("the graph has no {what} named \"{name}\"{}", known_text(.known))]
    UnknownName {
        /// "input", "output", "weight", "state".
        what: &'static str,
        /// The name given.
        name: String,
        /// Some that there are.
        known: Vec<String>,
    },
    /// A tensor is not what the call is for.
    #[error("tensor {name} is not {wanted}")]
    WrongKind {
        /// The tensor.
        name: String,
        /// What the call needs.
        wanted: &'static str,
    },
    /// Elements of another type were given or asked for.
    #[error("{name} has type {found}, not {given}")]
    WrongType {
        /// The tensor.
        name: String,
        /// Its type.
        found: DType,
        /// The type of the caller's elements.
        given: DType,
    },
    /// Another number of bytes was given or asked for.
    #[error("{name} has {expected} bytes, not {found}")]
    WrongSize {
        /// The tensor.
        name: String,
        /// Its bytes.
        expected: usize,
        /// The caller's bytes.
        found: usize,
    },
    /// A result was asked for whose elements do not lie one after another.
    #[error("{name} is a strided view; make it dense with cont()")]
    Strided {
        /// The tensor.
        name: String,
    },
    /// A run was asked for before an input or weight was set.
    #[error("{what} {name} was never set")]
    NotSet {
        /// "input" or "weight".
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// Something was asked of a session that has no plan yet.
    #[error("the session has no plan yet: prepare one")]
    NoPlan,
    /// A result was asked for before anything was run.
    #[error("nothing was run yet")]
    NothingRun,
    /// A result was asked for that is no longer there.
    #[error(
        "output {name} is gone: another graph of the session used its memory since, or a run failed; run it again"
    )]
    Gone {
        /// The output's name.
        name: String,
    },
    /// Two graphs of a family disagree about a tensor of one name.
    #[error("{what} {name} was {before}, and is {after} in another graph of the session")]
    Conflict {
        /// "weight" or "state".
        what: &'static str,
        /// Its name.
        name: String,
        /// Type and shape, or backend, it had.
        before: String,
        /// Type and shape, or backend, it would have.
        after: String,
    },
    /// The plan belongs to other backends than the session.
    #[error("the plan was made for other backends than the session's")]
    ForeignPlan,
    /// Building a graph failed.
    #[error("{0}")]
    Build(String),
    /// A device failed.
    #[error("{}{error}", place_text(.split, .node))]
    Device {
        /// The backend.
        backend: String,
        /// The split that was being prepared, fed or run.
        split: Option<usize>,
        /// The node, the first of the split, or the tensor concerned.
        node: Option<String>,
        /// What the backend said.
        error: Box<BackendError>,
    },
}

/// How far a plan is beyond a backend's budget, and what would fit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{backend}: {wanted} bytes are wanted ({weights} of weights, {state} of state, {compute} to compute), the budget \
     is {budget}: {} too many; {fitting} of its {weight_count} weights ({fitting_bytes} bytes) would fit",
    .wanted - .budget
)]
pub struct OverBudget {
    /// The backend.
    pub backend: String,
    /// Bytes of everything.
    pub wanted: u64,
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
    /// How many of them, in the order of their first use, fit beside state and arena.
    pub fitting: usize,
    /// Their bytes.
    pub fitting_bytes: u64,
}

impl From<MemoryError> for RuntimeError {
    fn from(error: MemoryError) -> RuntimeError {
        RuntimeError::Memory(Box::new(error))
    }
}

impl RuntimeError {
    /// Whether a device is gone. Then every later call that needs it fails the same way.
    pub fn is_lost(&self) -> bool {
        matches!(self, RuntimeError::Device { error, .. } if matches!(**error, BackendError::Lost { .. }))
    }

    /// Says where a backend failed.
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
