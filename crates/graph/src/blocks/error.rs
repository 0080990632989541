//! Errors of quantization and dequantization.

use thiserror::Error;

use crate::dtype::DType;

/// Why values could not be quantized or dequantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// The type cannot be dequantized.
    #[error("{dtype} cannot be dequantized: convert the tensor to a supported type")]
    NoDequantize {
        /// The requested type.
        dtype: DType,
    },
    /// The type cannot be quantized to.
    #[error("f32 values cannot be quantized to {dtype}: use F16, BF16, Q8_0 or another supported type")]
    NoQuantize {
        /// The requested type.
        dtype: DType,
    },
    /// The bytes end in the middle of a block.
    #[error("{bytes} bytes are not a whole number of {dtype} blocks of {} bytes", dtype.block_bytes())]
    PartialBlock {
        /// The type of the blocks.
        dtype: DType,
        /// The number of bytes.
        bytes: usize,
    },
    /// The number of elements in the blocks differs from the number of values.
    #[error(
        "{bytes} bytes of {dtype} hold {} elements, not {elements}",
        bytes / dtype.block_bytes() * dtype.block_len()
    )]
    LengthMismatch {
        /// The type of the blocks.
        dtype: DType,
        /// The number of bytes.
        bytes: usize,
        /// The number of `f32` values.
        elements: usize,
    },
}
