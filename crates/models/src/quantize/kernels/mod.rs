//! Quantization of rows: for each format a search for scales and quants with the least squared error, weighted by
//! importance.
//!
//! One group of elements is one SIMD lane: eight groups are searched at once, so that also the choice between candidates
//! is vector code. Each format tries a number of scales; for the quants that a scale leads to, the best scale is a
//! least-squares fit. Formats with two levels of scales then choose the integers of the groups by the error that they
//! really have, and fit the scale of the block to them.

mod affine;
mod code_book;
mod grid;
mod grid_book;
mod grid_pack;
mod group_scales;
mod groups;
mod kernel;
mod minimums;
mod one_scale;
mod packing;
mod simd;
mod symmetric;

use quadriga_graph::DType;
use quadriga_graph::blocks::*;

use grid::GridKernel;
use group_scales::{Iq4XsKernel, Q3Kernel, Q6Kernel};
pub use kernel::Instructions;
use kernel::{Rows, run};
use minimums::{OneLineKernel, Q2Kernel, Q4Kernel, Q5Kernel};
use one_scale::{Mxfp4Kernel, OneScaleKernel};

/// Whether [`quantize_rows`] can quantize to this type.
pub const fn is_target(dtype: DType) -> bool {
    dtype.is_computable()
}

/// Quantizes whole rows of `row_len` values to `dtype`, with the least squared error that the search finds.
///
/// With importance, a number per column, the error of each column counts as much as its number says. Values must be
/// finite; those beyond ±10⁹ are clamped.
///
/// ```
/// use quadriga_graph::DType;
/// use quadriga_models::quantize::quantize_rows;
///
/// let row: Vec<f32> = (0..256).map(|i| (i as f32 / 40.0).sin()).collect();
/// let mut bytes = vec![0; DType::Q4_K.row_bytes(256).unwrap()];
/// quantize_rows(DType::Q4_K, &row, 256, None, &mut bytes)?;
/// # Ok::<(), quadriga_graph::blocks::FormatError>(())
/// ```
///
/// # Errors
///
/// If the type cannot be quantized to, or the lengths do not fit together. Nothing is written then.
pub fn quantize_rows(
    dtype: DType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), FormatError> {
    quantize_rows_with(Instructions::Best, dtype, values, row_len, importance, out)
}

/// As [`quantize_rows`], with given instructions.
///
/// # Errors
///
/// As [`quantize_rows`].
pub fn quantize_rows_with(
    instructions: Instructions,
    dtype: DType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), FormatError> {
    let mismatch = FormatError::LengthMismatch { dtype, bytes: out.len(), elements: values.len() };
    let whole =
        row_len > 0 && values.len().is_multiple_of(row_len) && row_len.is_multiple_of(dtype.block_len());
    let weighted = importance.is_none_or(|importance| importance.len() == row_len);
    if !whole || !weighted || dtype.row_bytes(values.len()) != Some(out.len()) {
        return Err(mismatch);
    }
    let rows = Rows::new(values, row_len, importance);
    match dtype {
        DType::Q4_0 => run::<OneScaleKernel<BlockQ4_0>>(instructions, &rows, out),
        DType::Q5_0 => run::<OneScaleKernel<BlockQ5_0>>(instructions, &rows, out),
        DType::Q8_0 => run::<OneScaleKernel<BlockQ8_0>>(instructions, &rows, out),
        DType::IQ4_NL => run::<OneScaleKernel<BlockIQ4_NL>>(instructions, &rows, out),
        DType::MXFP4 => run::<Mxfp4Kernel>(instructions, &rows, out),
        DType::Q4_1 => run::<OneLineKernel<BlockQ4_1>>(instructions, &rows, out),
        DType::Q5_1 => run::<OneLineKernel<BlockQ5_1>>(instructions, &rows, out),
        DType::Q2_K => run::<Q2Kernel>(instructions, &rows, out),
        DType::Q3_K => run::<Q3Kernel>(instructions, &rows, out),
        DType::Q4_K => run::<Q4Kernel>(instructions, &rows, out),
        DType::Q5_K => run::<Q5Kernel>(instructions, &rows, out),
        DType::Q6_K => run::<Q6Kernel>(instructions, &rows, out),
        DType::IQ4_XS => run::<Iq4XsKernel>(instructions, &rows, out),
        DType::IQ1_S => run::<GridKernel<BlockIQ1_S>>(instructions, &rows, out),
        DType::IQ1_M => run::<GridKernel<BlockIQ1_M>>(instructions, &rows, out),
        DType::IQ2_XXS => run::<GridKernel<BlockIQ2_XXS>>(instructions, &rows, out),
        DType::IQ2_XS => run::<GridKernel<BlockIQ2_XS>>(instructions, &rows, out),
        DType::IQ2_S => run::<GridKernel<BlockIQ2_S>>(instructions, &rows, out),
        DType::IQ3_XXS => run::<GridKernel<BlockIQ3_XXS>>(instructions, &rows, out),
        DType::IQ3_S => run::<GridKernel<BlockIQ3_S>>(instructions, &rows, out),
        // Plain and ternary types, and NVFP4: importance changes nothing, or little.
        dtype => quantize(dtype, values, out),
    }
}
