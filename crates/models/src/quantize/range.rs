//! Values that are too large for a type: its scales are F16, or smaller, and the quantizer would clamp them.

use quadriga_graph::DType;
use quadriga_graph::blocks::FormatError;

use super::kernels::quantize_rows;
use super::rows::{dequantize, squared_error};

/// Magnitudes below this are held by every type: NVFP4, whose scales have the least range, goes to 1344.
const HELD_BY_ALL: f32 = 512.0;

/// How much larger a squared error may be than that of the same block scaled to 1, which no type clamps.
const MOST_ERROR: f64 = 1.5;

/// Why rows could not be quantized.
#[derive(Debug)]
pub(crate) enum RowsError {
    /// The type cannot be quantized to, or the lengths do not fit together.
    Format(FormatError),
    /// A value that the type cannot hold, and its index.
    Beyond { place: usize, value: f32 },
}

impl From<FormatError> for RowsError {
    fn from(error: FormatError) -> RowsError {
        RowsError::Format(error)
    }
}

/// As [`quantize_rows`]; values that the type cannot hold are an error.
pub(crate) fn quantize_in_range(
    dtype: DType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), RowsError> {
    quantize_rows(dtype, values, row_len, importance, out)?;
    check_range(dtype, values, row_len, importance, out)
}

/// An error if quantized rows have lost a value because the type cannot hold it.
pub(crate) fn check_range(
    dtype: DType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    quantized: &[u8],
) -> Result<(), RowsError> {
    if largest(values) < HELD_BY_ALL || dtype == DType::F32 {
        return Ok(());
    }
    if !dtype.is_quantized() {
        return check_float(dtype, values, quantized);
    }
    let length = dtype.block_len().max(1);
    let bytes = dtype.row_bytes(length).unwrap_or(1).max(1);
    let mut back = vec![0.0; length];
    for (index, (block, own)) in values.chunks_exact(length).zip(quantized.chunks_exact(bytes)).enumerate() {
        let most = largest(block);
        if most < HELD_BY_ALL {
            continue;
        }
        let column = index * length % row_len.max(1);
        let weights = importance.and_then(|all| all.get(column..column + length));
        dequantize(dtype, own, &mut back)?;
        let error = squared_error(block, &back, weights).0;
        if !error.is_finite() || error > MOST_ERROR * scaled_error(dtype, block, most, weights)? {
            let place = block.iter().position(|value| value.abs() == most).unwrap_or_default();
            let value = block.get(place).copied().unwrap_or(most);
            return Err(RowsError::Beyond { place: index * length + place, value });
        }
    }
    Ok(())
}

/// The error of a block that was scaled to about 1 by a power of two, which changes nothing but the range.
fn scaled_error(dtype: DType, block: &[f32], most: f32, weights: Option<&[f32]>) -> Result<f64, FormatError> {
    // A little is allowed to blocks that a type holds exactly.
    const ROUNDING: f64 = 1e-7;
    let exponent = f64::from(most).log2().ceil();
    let factor = (-exponent).exp2() as f32;
    let scaled: Vec<f32> = block.iter().map(|value| value * factor).collect();
    let mut bytes = vec![0; dtype.row_bytes(block.len()).unwrap_or_default()];
    let mut back = vec![0.0; block.len()];
    quantize_rows(dtype, &scaled, scaled.len(), weights, &mut bytes)?;
    dequantize(dtype, &bytes, &mut back)?;
    let (error, square) = squared_error(&scaled, &back, weights);
    Ok((error + ROUNDING * square) * (2.0 * exponent).exp2())
}

/// An error if a value has become infinite.
fn check_float(dtype: DType, values: &[f32], quantized: &[u8]) -> Result<(), RowsError> {
    let mut back = vec![0.0; values.len()];
    dequantize(dtype, quantized, &mut back)?;
    match back.iter().zip(values).position(|(back, value)| value.is_finite() && !back.is_finite()) {
        Some(place) => {
            Err(RowsError::Beyond { place, value: values.get(place).copied().unwrap_or_default() })
        }
        None => Ok(()),
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

#[cfg(test)]
mod tests {
    use quadriga_graph::DType;

    use super::*;
    use crate::quantize::is_target;

    fn block(scale: f32) -> Vec<f32> {
        (0..256).map(|index| scale * ((index * 37 % 101) as f32 / 50.0 - 1.0)).collect()
    }

    #[test]
    fn values_within_the_range_pass_and_others_are_named() {
        for dtype in DType::all().filter(|dtype| is_target(*dtype)) {
            let mut bytes = vec![0; dtype.row_bytes(256).unwrap()];
            for scale in [0.0, 1e-3, 1.0, 600.0, 1200.0] {
                let result = quantize_in_range(dtype, &block(scale), 256, None, &mut bytes);
                assert!(result.is_ok(), "{dtype} {scale}: {result:?}");
            }
            // Exponents of these have eight bits.
            if matches!(dtype, DType::F32 | DType::BF16 | DType::MXFP4) {
                continue;
            }
            let mut values = block(1.0);
            values[77] = -1e9;
            let result = quantize_in_range(dtype, &values, 256, None, &mut bytes);
            assert!(
                matches!(result, Err(RowsError::Beyond { place: 77, value: -1e9 })),
                "{dtype}: {result:?}"
            );
        }
        for (dtype, value) in [(DType::Q4_0, 1e6), (DType::Q4_1, 2e6), (DType::F16, 65520.0)] {
            let mut values = block(1.0);
            values[3] = value;
            let mut bytes = vec![0; dtype.row_bytes(256).unwrap()];
            assert!(quantize_in_range(dtype, &values, 256, None, &mut bytes).is_err(), "{dtype} {value}");
        }
        let mut bytes = vec![0; 512];
        assert!(quantize_in_range(DType::F16, &[65519.0; 256], 256, None, &mut bytes).is_ok());
    }
}
