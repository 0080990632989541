//! Quantized block formats: memory layout, quantization and dequantization.
//!
//! A quantized row is a sequence of blocks. Each block holds 32, 64 or 256 consecutive elements of the row as small
//! integers ("quants") with their scales. There is one `#[repr(C)]` struct per format. All of them consist of bytes, so
//! they have alignment 1, and [`as_blocks`] casts any byte slice of the right length without a copy. Numbers of more
//! than one byte are little-endian.
//!
//! [`dequantize`] and [`quantize`] process any number of whole blocks of any supported type; each struct has the same
//! for a single block. The code is the plain reference for optimized kernels.
//!
//! ```
//! use quadriga_graph::{DType, blocks};
//!
//! let row: Vec<f32> = (0..64).map(|i| i as f32 / 64.0).collect();
//! let mut bytes = vec![0; DType::Q8_0.row_bytes(row.len()).unwrap()];
//! blocks::quantize(DType::Q8_0, &row, &mut bytes)?;
//!
//! let mut back = vec![0.0; row.len()];
//! blocks::dequantize(DType::Q8_0, &bytes, &mut back)?;
//! assert!(row.iter().zip(&back).all(|(a, b)| (a - b).abs() < 0.004));
//! # Ok::<(), blocks::FormatError>(())
//! ```

mod block;
mod code_books;
mod error;
mod fit;
mod grid;
mod half_bytes;
mod k_quants;
mod linear;
mod nonlinear;
mod plain;
mod rescale;
mod ternary;

use crate::dtype::DType;

pub use block::{Block, QuantizeBlock};
pub use error::FormatError;
pub use grid::{
    BlockIQ1_M, BlockIQ1_S, BlockIQ2_S, BlockIQ2_XS, BlockIQ2_XXS, BlockIQ3_S, BlockIQ3_XXS, GridBlock,
};
pub use half_bytes::HalfBytes;
pub use k_quants::{BlockQ2_K, BlockQ3_K, BlockQ4_K, BlockQ5_K, BlockQ6_K, GroupScales};
pub use linear::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub use nonlinear::{BlockIQ4_NL, BlockIQ4_XS, BlockMXFP4, BlockNVFP4, IQ4_LEVELS, MXFP4_LEVELS};
pub use rescale::set_scale;
pub use ternary::{BlockTQ1_0, BlockTQ2_0};

/// Casts bytes to blocks without copying; any alignment is valid.
///
/// # Errors
///
/// [`FormatError::PartialBlock`] if the length is not a whole number of blocks.
pub fn as_blocks<B: Block>(bytes: &[u8]) -> Result<&[B], FormatError> {
    bytemuck::try_cast_slice(bytes)
        .map_err(|_| FormatError::PartialBlock { dtype: B::DTYPE, bytes: bytes.len() })
}

/// Casts bytes to mutable blocks without copying; any alignment is valid.
///
/// # Errors
///
/// [`FormatError::PartialBlock`] if the length is not a whole number of blocks.
pub fn as_blocks_mut<B: Block>(bytes: &mut [u8]) -> Result<&mut [B], FormatError> {
    let length = bytes.len();
    bytemuck::try_cast_slice_mut(bytes)
        .map_err(|_| FormatError::PartialBlock { dtype: B::DTYPE, bytes: length })
}

/// Dequantizes whole blocks of type `dtype`.
///
/// Supports every type for which [`DType::is_computable`] is true.
///
/// # Errors
///
/// If the type cannot be dequantized, or if `bytes` is not a whole number of blocks that hold exactly
/// `out.len()` elements. Nothing is written then.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    let dequantize_all: fn(&[u8], &mut [f32]) -> Result<(), FormatError> = match dtype {
        DType::F32 => plain::dequantize_f32,
        DType::F16 => plain::dequantize_f16,
        DType::BF16 => plain::dequantize_bf16,
        DType::Q4_0 => dequantize_blocks::<BlockQ4_0>,
        DType::Q4_1 => dequantize_blocks::<BlockQ4_1>,
        DType::Q5_0 => dequantize_blocks::<BlockQ5_0>,
        DType::Q5_1 => dequantize_blocks::<BlockQ5_1>,
        DType::Q8_0 => dequantize_blocks::<BlockQ8_0>,
        DType::Q2_K => dequantize_blocks::<BlockQ2_K>,
        DType::Q3_K => dequantize_blocks::<BlockQ3_K>,
        DType::Q4_K => dequantize_blocks::<BlockQ4_K>,
        DType::Q5_K => dequantize_blocks::<BlockQ5_K>,
        DType::Q6_K => dequantize_blocks::<BlockQ6_K>,
        DType::IQ4_NL => dequantize_blocks::<BlockIQ4_NL>,
        DType::IQ4_XS => dequantize_blocks::<BlockIQ4_XS>,
        DType::MXFP4 => dequantize_blocks::<BlockMXFP4>,
        DType::NVFP4 => dequantize_blocks::<BlockNVFP4>,
        DType::TQ1_0 => dequantize_blocks::<BlockTQ1_0>,
        DType::TQ2_0 => dequantize_blocks::<BlockTQ2_0>,
        DType::IQ1_S => dequantize_blocks::<BlockIQ1_S>,
        DType::IQ1_M => dequantize_blocks::<BlockIQ1_M>,
        DType::IQ2_XXS => dequantize_blocks::<BlockIQ2_XXS>,
        DType::IQ2_XS => dequantize_blocks::<BlockIQ2_XS>,
        DType::IQ2_S => dequantize_blocks::<BlockIQ2_S>,
        DType::IQ3_XXS => dequantize_blocks::<BlockIQ3_XXS>,
        DType::IQ3_S => dequantize_blocks::<BlockIQ3_S>,
        _ => return Err(FormatError::NoDequantize { dtype }),
    };
    check_lengths(dtype, bytes.len(), out.len())?;
    dequantize_all(bytes, out)
}

/// Quantizes values to whole blocks of type `dtype`.
///
/// Supports F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, NVFP4, TQ1_0 and TQ2_0. Any value is accepted,
/// see [`QuantizeBlock::quantize`]; F16 and BF16 round to nearest, ties to even.
///
/// # Errors
///
/// If the type cannot be quantized to, or if `out` is not a whole number of blocks that hold exactly
/// `values.len()` elements. Nothing is written then.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    let quantize_all: fn(&[f32], &mut [u8]) -> Result<(), FormatError> = match dtype {
        DType::F32 => plain::quantize_f32,
        DType::F16 => plain::quantize_f16,
        DType::BF16 => plain::quantize_bf16,
        DType::Q4_0 => quantize_blocks::<BlockQ4_0>,
        DType::Q4_1 => quantize_blocks::<BlockQ4_1>,
        DType::Q5_0 => quantize_blocks::<BlockQ5_0>,
        DType::Q5_1 => quantize_blocks::<BlockQ5_1>,
        DType::Q8_0 => quantize_blocks::<BlockQ8_0>,
        DType::Q4_K => quantize_blocks::<BlockQ4_K>,
        DType::Q6_K => quantize_blocks::<BlockQ6_K>,
        DType::NVFP4 => quantize_blocks::<BlockNVFP4>,
        DType::TQ1_0 => quantize_blocks::<BlockTQ1_0>,
        DType::TQ2_0 => quantize_blocks::<BlockTQ2_0>,
        _ => return Err(FormatError::NoQuantize { dtype }),
    };
    check_lengths(dtype, out.len(), values.len())?;
    quantize_all(values, out)
}

/// Checks that both lengths are the same number of whole blocks.
fn check_lengths(dtype: DType, bytes: usize, elements: usize) -> Result<(), FormatError> {
    if !bytes.is_multiple_of(dtype.block_bytes()) {
        return Err(FormatError::PartialBlock { dtype, bytes });
    }
    if dtype.row_bytes(elements) != Some(bytes) {
        return Err(FormatError::LengthMismatch { dtype, bytes, elements });
    }
    Ok(())
}

/// The error of the casts below; `check_lengths` has already ruled it out.
fn mismatch<B: Block>(bytes: usize, elements: usize) -> FormatError {
    FormatError::LengthMismatch { dtype: B::DTYPE, bytes, elements }
}

fn dequantize_blocks<B: Block>(bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    let elements = out.len();
    let arrays: &mut [B::Values] =
        bytemuck::try_cast_slice_mut(out).map_err(|_| mismatch::<B>(bytes.len(), elements))?;
    for (block, values) in as_blocks::<B>(bytes)?.iter().zip(arrays) {
        block.dequantize(values);
    }
    Ok(())
}

fn quantize_blocks<B: QuantizeBlock>(values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    let arrays: &[B::Values] =
        bytemuck::try_cast_slice(values).map_err(|_| mismatch::<B>(out.len(), values.len()))?;
    for (block, values) in as_blocks_mut::<B>(out)?.iter_mut().zip(arrays) {
        *block = B::quantize(values);
    }
    Ok(())
}
