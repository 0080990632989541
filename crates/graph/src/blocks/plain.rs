//! The plain floating-point types, which have blocks of one element.
//!
//! The callers have checked that both slices have the same number of elements.

use half::{bf16, f16};

use super::error::FormatError;

/// Converts each `N` bytes to a value.
fn read_all<const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    read: impl Fn([u8; N]) -> f32,
) -> Result<(), FormatError> {
    let (groups, _) = bytes.as_chunks::<N>();
    for (value, group) in out.iter_mut().zip(groups) {
        *value = read(*group);
    }
    Ok(())
}

/// Converts each value to `N` bytes.
fn write_all<const N: usize>(
    values: &[f32],
    out: &mut [u8],
    write: impl Fn(f32) -> [u8; N],
) -> Result<(), FormatError> {
    let (groups, _) = out.as_chunks_mut::<N>();
    for (group, value) in groups.iter_mut().zip(values) {
        *group = write(*value);
    }
    Ok(())
}

pub(super) fn dequantize_f32(bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    read_all(bytes, out, f32::from_le_bytes)
}

pub(super) fn dequantize_f16(bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    read_all(bytes, out, |b| f16::from_le_bytes(b).to_f32())
}

pub(super) fn dequantize_bf16(bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    read_all(bytes, out, |b| bf16::from_le_bytes(b).to_f32())
}

pub(super) fn quantize_f32(values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    write_all(values, out, f32::to_le_bytes)
}

pub(super) fn quantize_f16(values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    write_all(values, out, |v| f16::from_f32(v).to_le_bytes())
}

pub(super) fn quantize_bf16(values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    write_all(values, out, |v| bf16::from_f32(v).to_le_bytes())
}
