//! Errors of graph construction.

use std::panic::Location;

use thiserror::Error;

use crate::dtype::DType;

/// The rule that an operation's inputs or parameters broke.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum GraphErrorKind {
    /// An input has a type that the operation does not take.
    #[error("input {input} has type {found}; {expected} is needed")]
    Type {
        /// Which input, counted from 0.
        input: usize,
        /// Its type.
        found: DType,
        /// What the operation takes.
        expected: &'static str,
    },
    /// Shapes do not go together.
    #[error("{0}")]
    Shape(String),
    /// An input's elements do not lie as the operation needs them.
    #[error("the rows of input {input} are not dense; make it so with cont()")]
    Strided {
        /// Which input, counted from 0.
        input: usize,
    },
    /// A parameter is out of its range.
    #[error("{0}")]
    Parameter(String),
    /// A size does not fit into a machine word.
    #[error("its size in bytes overflows")]
    Overflow,
    /// A row is not a whole number of blocks.
    #[error("a row of {cols} elements is not a whole number of {dtype} blocks of {block}", block = .dtype.block_len())]
    Blocks {
        /// The type.
        dtype: DType,
        /// The row length.
        cols: usize,
    },
    /// A view reaches past the tensor it looks at.
    #[error("the view ends at byte {end} of a tensor of {bytes}")]
    OutOfRange {
        /// One past the last byte the view would touch.
        end: usize,
        /// The size of the tensor.
        bytes: usize,
    },
    /// The operation takes another number of inputs.
    #[error("takes {expected} inputs, not {found}")]
    Arity {
        /// What it takes.
        expected: &'static str,
        /// What it got.
        found: usize,
    },
    /// The value has since been overwritten.
    #[error("input {input} was overwritten by {writer}; use what {writer} returned")]
    Stale {
        /// Which input, counted from 0.
        input: usize,
        /// The node that wrote the storage.
        writer: String,
    },
    /// The target of a write is not a state or a computed tensor.
    #[error("input {input} cannot be written: only states and computed tensors can")]
    ReadOnly {
        /// Which input, counted from 0.
        input: usize,
    },
    /// The target of a write shares its memory with a tensor that was made an output before.
    #[error("this would overwrite the output \"{0}\"; output a copy of it, made with cont()")]
    OutputLost(String),
    /// Two things that are looked up by name have the same one.
    #[error("the name \"{0}\" is taken")]
    Duplicate(String),
    /// A tensor of another graph was used.
    #[error("input {input} belongs to another graph builder")]
    Foreign {
        /// Which input, counted from 0.
        input: usize,
    },
    /// The bytes given for a weight or constant do not match its type and shape.
    #[error("{found} bytes of data were given where {expected} are needed")]
    DataLength {
        /// What type and shape ask for.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// The graph has more tensors than its ids can number.
    #[error("a graph holds at most 4,294,967,294 tensors")]
    TooMany,
}

/// The first error made while building a graph.
#[derive(Clone, Debug, Error)]
#[error("{operation}{} ({location}): {kind}{}", scope_text(.scope), inputs_text(.inputs))]
pub struct BuildError {
    /// The operation, or the leaf or output that was declared.
    pub operation: String,
    /// The rule that was broken.
    pub kind: GraphErrorKind,
    /// Name, type and shape of each input.
    pub inputs: Vec<String>,
    /// The path of scopes it happened in.
    pub scope: String,
    /// The caller's line.
    pub location: &'static Location<'static>,
}

fn scope_text(scope: &str) -> String {
    if scope.is_empty() { String::new() } else { format!(" in {scope}") }
}

fn inputs_text(inputs: &[String]) -> String {
    if inputs.is_empty() { String::new() } else { format!("; inputs: {}", inputs.join(", ")) }
}
