//! What can go wrong when a graph is evaluated.

use quadriga_graph::DType;
use quadriga_graph::blocks::FormatError;
use thiserror::Error;

/// Why a graph could not be evaluated.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum OracleError {
    /// The graph has no leaf or output of this name.
    #[error("the graph has no input, weight, state or output \"{0}\"")]
    NoSuchName(String),
    /// The graph has no tensor or node of this number: the id belongs to another graph.
    #[error("the graph has no tensor or node {0}")]
    NoSuchId(usize),
    /// A value was given for a constant.
    #[error("\"{0}\" is a constant of the graph and cannot be set")]
    Constant(String),
    /// The bytes given do not match the tensor's type and shape.
    #[error("\"{name}\" needs {expected} bytes, not {found}")]
    Length {
        /// The tensor.
        name: String,
        /// What its type and shape ask for.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// A tensor is read that nobody has set or computed.
    #[error("\"{0}\" has no value yet: set it, or run the graph first")]
    Unset(String),
    /// A tensor could not be read.
    #[error("{name}: {fault}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What was wrong.
        fault: Fault,
    },
    /// A node could not be computed.
    #[error("{node}: {fault}")]
    Node {
        /// The node.
        node: String,
        /// What was wrong.
        fault: Fault,
    },
}

/// What was wrong while one node was computed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// An id names a row, or an expert, that is not there.
    #[error("id {id} at {at:?} is out of range: there are {count}")]
    Id {
        /// The id found.
        id: i64,
        /// Where among the ids it stands, over four dimensions.
        at: [usize; 4],
        /// How many rows or experts there are.
        count: usize,
    },
    /// A span reaches past the keys.
    #[error("query {query} sees keys {first}..{end}, but there are {count}")]
    Span {
        /// The query.
        query: usize,
        /// The first key it sees.
        first: i64,
        /// One past the last key it sees.
        end: i64,
        /// How many keys there are.
        count: usize,
    },
    /// The node has another number of inputs than its operation takes.
    #[error("the operation does not take {0} inputs")]
    Arity(usize),
    /// A byte range is shorter than the tensor that should lie in it.
    #[error("memory ends before the tensor does")]
    Memory,
    /// The tensor has more elements than can be held.
    #[error("{0} elements are too many to evaluate")]
    TooLarge(usize),
    /// Values of this type can be neither read nor made.
    #[error("{0} values cannot be evaluated")]
    Type(DType),
    /// A block could not be read or made.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The operation is not known here.
    #[error("the oracle does not know this operation")]
    Operation,
}
