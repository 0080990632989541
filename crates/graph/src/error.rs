//! Errors of graph construction.

use std::panic::Location;

use thiserror::Error;

use crate::dtype::DType;

/// The rule that a declaration or an operation violates.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum GraphErrorKind {
    /// The operation does not accept the type of an input.
    #[error("input {input} has type {found}; {expected} is needed")]
    Type {
        /// Which input, counted from 0.
        input: usize,
        /// Its type.
        found: DType,
        /// The types that the operation accepts.
        expected: &'static str,
    },
    /// Shapes do not match.
    #[error("{0}")]
    Shape(String),
    /// The operation needs an input with contiguous rows.
    #[error("the rows of input {input} are not contiguous; make a copy with cont()")]
    Strided {
        /// Which input, counted from 0.
        input: usize,
    },
    /// A parameter is out of its range.
    #[error("{0}")]
    Parameter(String),
    /// A size in bytes exceeds `usize`.
    #[error("the size in bytes overflows")]
    Overflow,
    /// A row is not a whole number of blocks.
    #[error("a row of {cols} elements is not a whole number of {dtype} blocks of {block}", block = .dtype.block_len())]
    Blocks {
        /// The type.
        dtype: DType,
        /// The row length.
        cols: usize,
    },
    /// A view ends past the end of its tensor.
    #[error("the view ends at byte {end} of a tensor of {bytes}")]
    OutOfRange {
        /// One past the last byte of the view.
        end: usize,
        /// The size of the tensor.
        bytes: usize,
    },
    /// The operation takes a different number of inputs.
    #[error("takes {expected} inputs, not {found}")]
    Arity {
        /// The number it takes.
        expected: &'static str,
        /// The number given.
        found: usize,
    },
    /// A write has overwritten the value since.
    #[error("input {input} was overwritten by {writer}; use the value that {writer} returned")]
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
    /// The target of a write shares its memory with an output.
    #[error("this would overwrite the output \"{0}\"; output a copy of it, made with cont()")]
    OutputLost(String),
    /// Another leaf or output has this name.
    #[error("the name \"{0}\" is already in use")]
    Duplicate(String),
    /// A value belongs to another builder.
    #[error("input {input} belongs to another graph builder")]
    Foreign {
        /// Which input, counted from 0.
        input: usize,
    },
    /// The bytes given for a weight or constant do not match its type and shape.
    #[error("{found} bytes of data were given where {expected} are needed")]
    DataLength {
        /// The number that type and shape require.
        expected: usize,
        /// The number given.
        found: usize,
    },
    /// A custom operation refuses its inputs, or its rule panicked.
    #[error("{0}")]
    Custom(String),
    /// The graph has more tensors than ids.
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
