//! Errors of evaluation.

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
    /// The graph has no tensor or node with this index: the id belongs to another graph.
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
        /// The size that its type and shape require.
        expected: usize,
        /// The size given.
        found: usize,
    },
    /// A tensor was read before it was set or computed.
    #[error("\"{0}\" has no value yet: set it, or run the graph first")]
    Unset(String),
    /// A tensor could not be read.
    #[error("{name}: {error}")]
    Tensor {
        /// The tensor.
        name: String,
        /// The reason.
        error: EvalError,
    },
    /// The graphs of ranks do not belong together.
    #[error("{0}")]
    Ranks(String),
    /// A node could not be computed.
    #[error("{node}: {error}")]
    Node {
        /// The node.
        node: String,
        /// The reason.
        error: EvalError,
    },
}

/// Why a node could not be computed, or a tensor not read.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum EvalError {
    /// The id of a row or an expert is out of range.
    #[error("id {id} at {at:?} is out of range: there are {count}")]
    Id {
        /// The id found.
        id: i64,
        /// Its position among the ids, over four dimensions.
        at: [usize; 4],
        /// The number of rows or experts.
        count: usize,
    },
    /// A query names a row that the page table does not have.
    #[error("query {query} uses row {table} of a page table of {tables}")]
    Table {
        /// The query.
        query: usize,
        /// The row that it names.
        table: i64,
        /// The rows of the page table.
        tables: usize,
    },
    /// A page lies outside keys and values.
    #[error("query {query} uses page {page}, but there are {rows} rows")]
    Page {
        /// The query.
        query: usize,
        /// The page.
        page: i64,
        /// The rows of keys and values.
        rows: usize,
    },
    /// A span ends past the last key.
    #[error("query {query} sees keys {first}..{end}, but there are {count}")]
    Span {
        /// The query.
        query: usize,
        /// The first visible key.
        first: i64,
        /// One past the last visible key.
        end: i64,
        /// The number of keys.
        count: usize,
    },
    /// The operation does not take this number of inputs.
    #[error("the operation does not take {0} inputs")]
    Arity(usize),
    /// A byte range is shorter than its tensor.
    #[error("memory ends before the tensor does")]
    Memory,
    /// The tensor has too many elements.
    #[error("{0} elements are too many to evaluate")]
    TooLarge(usize),
    /// Values of this type cannot be read or written.
    #[error("{0} values cannot be evaluated")]
    Type(DType),
    /// A block could not be quantized or dequantized.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A collective of several ranks in one rank's oracle.
    #[error("{0} ranks compute it together: RankOracle evaluates their graphs")]
    Ranks(usize),
    /// A custom operation failed.
    #[error("{0}")]
    Custom(String),
    /// The oracle does not support the operation.
    #[error("the oracle does not support this operation")]
    Operation,
}
