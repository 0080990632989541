//! What can go wrong when blocks are read or written.

use thiserror::Error;

use crate::dtype::DType;

/// Why bytes could not be turned into values, or values into bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// There is no code that turns this type into `f32`.
    #[error("{dtype} cannot be turned into f32: store the tensor in a type that can be computed with")]
    NoDequantize {
        /// The type asked for.
        dtype: DType,
    },
    /// There is no code that makes this type from `f32`.
    #[error(
        "f32 values cannot be turned into {dtype}: use F16, BF16, Q8_0 or another type that can be written"
    )]
    NoQuantize {
        /// The type asked for.
        dtype: DType,
    },
    /// The bytes end in the middle of a block.
    #[error("{bytes} bytes are not a whole number of {dtype} blocks of {} bytes", dtype.block_bytes())]
    PartialBlock {
        /// The type of the blocks.
        dtype: DType,
        /// How many bytes there are.
        bytes: usize,
    },
    /// The blocks hold more or fewer elements than the other side has.
    #[error(
        "{bytes} bytes of {dtype} hold {} elements, not {elements}",
        bytes / dtype.block_bytes() * dtype.block_len()
    )]
    LengthMismatch {
        /// The type of the blocks.
        dtype: DType,
        /// How many bytes there are.
        bytes: usize,
        /// How many `f32` values there are.
        elements: usize,
    },
}
