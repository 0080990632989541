//! The formats of 32 elements with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! The `_0` formats store `value = scale × (quant − offset)`, the `_1` formats `value = scale × quant + minimum`.
//! Four-bit parts are packed two to a byte: byte `i` holds element `i` in its low nibble and element `i + 16` in its
//! high nibble.

#![expect(clippy::indexing_slicing, reason = "indices are taken modulo the length")]
#![allow(non_camel_case_types, reason = "the names are those of the file format")]

use bytemuck::{Pod, Zeroable};

use super::block::{QuantizeBlock, block_format};
use super::fit::{as_half, fit_centred, fit_from_minimum, fit_signed_bytes};
use super::half_bytes::HalfBytes;

/// The four bits of element `i % 32` in 16 bytes of which each holds element `i` (low) and `i + 16` (high).
#[inline]
pub(super) fn nibble(packed: &[u8; 16], i: usize) -> u8 {
    packed[i % 16] >> (i / 16 % 2 * 4) & 0x0f
}

/// Packs the low four bits of 32 numbers the way [`nibble`] reads them.
#[inline]
fn pack_nibbles(quants: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| (quants[i] & 0x0f) | (quants[i + 16] << 4))
}

/// The fifth bit of 32 numbers: bit `i` of the result is that of element `i`.
#[inline]
fn pack_fifth_bits(quants: &[u8; 32]) -> [u8; 4] {
    let bits = quants.iter().enumerate().fold(0, |bits, (i, quant)| bits | (u32::from(quant >> 4 & 1) << i));
    bits.to_le_bytes()
}

/// Scale and minimum as they are stored.
fn as_halves(scale: f32, minimum: f32) -> (f32, f32) {
    (as_half(scale), as_half(minimum))
}

/// 4 bits per element around zero: `value = scale × (quant − 8)`.
///
/// ```text
/// byte  0       2                    18
///       | scale | quants 2 × 4 bit … |
///       |  f16  | 16 bytes           |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// The scale; may be negative.
    pub scale: HalfBytes,
    /// The quants, two per byte.
    pub quants: [u8; 16],
}
block_format!(BlockQ4_0, Q4_0, 32 elements in 18 bytes);

impl BlockQ4_0 {
    /// The quant of element `i % 32`, offset removed: −8 to 7.
    #[inline]
    pub fn quant(&self, i: usize) -> i8 {
        nibble(&self.quants, i) as i8 - 8
    }

    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let scale = self.scale.to_f32();
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.quant(i));
        }
    }
}

impl QuantizeBlock for BlockQ4_0 {
    fn quantize(values: &[f32; 32]) -> Self {
        let (scale, quants) = fit_centred(values, 8.0, as_half);
        let scale = HalfBytes::from_f32_finite(scale);
        BlockQ4_0 { scale, quants: pack_nibbles(&quants) }
    }
}

/// 4 bits per element above a minimum: `value = scale × quant + minimum`.
///
/// ```text
/// byte  0       2         4                    20
///       | scale | minimum | quants 2 × 4 bit … |
///       |  f16  |   f16   | 16 bytes           |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    /// The scale.
    pub scale: HalfBytes,
    /// The value of quant 0.
    pub minimum: HalfBytes,
    /// The quants, two per byte.
    pub quants: [u8; 16],
}
block_format!(BlockQ4_1, Q4_1, 32 elements in 20 bytes);

impl BlockQ4_1 {
    /// The quant of element `i % 32`: 0 to 15.
    #[inline]
    pub fn quant(&self, i: usize) -> u8 {
        nibble(&self.quants, i)
    }

    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let (scale, minimum) = (self.scale.to_f32(), self.minimum.to_f32());
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.quant(i)) + minimum;
        }
    }
}

impl QuantizeBlock for BlockQ4_1 {
    fn quantize(values: &[f32; 32]) -> Self {
        let (scale, minimum, quants) = fit_from_minimum(values, 15.0, f32::MAX, as_halves);
        let (scale, minimum) = (HalfBytes::from_f32_finite(scale), HalfBytes::from_f32_finite(minimum));
        BlockQ4_1 { scale, minimum, quants: pack_nibbles(&quants) }
    }
}

/// 5 bits per element around zero: `value = scale × (quant − 16)`.
///
/// ```text
/// byte  0       2            6                        22
///       | scale | fifth bits | low bits 2 × 4 bit …   |
///       |  f16  | 32 × 1 bit | 16 bytes               |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// The scale; may be negative.
    pub scale: HalfBytes,
    /// The highest bit of each quant: bit `i` of the little-endian number is that of element `i`.
    pub fifth_bits: [u8; 4],
    /// The low four bits of the quants, two per byte.
    pub quants: [u8; 16],
}
block_format!(BlockQ5_0, Q5_0, 32 elements in 22 bytes);

impl BlockQ5_0 {
    /// The quant of element `i % 32`, offset removed: −16 to 15.
    #[inline]
    pub fn quant(&self, i: usize) -> i8 {
        let fifth = (u32::from_le_bytes(self.fifth_bits) >> (i % 32) & 1) as u8;
        (nibble(&self.quants, i) | fifth << 4) as i8 - 16
    }

    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let scale = self.scale.to_f32();
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.quant(i));
        }
    }
}

impl QuantizeBlock for BlockQ5_0 {
    fn quantize(values: &[f32; 32]) -> Self {
        let (scale, quants) = fit_centred(values, 16.0, as_half);
        let scale = HalfBytes::from_f32_finite(scale);
        BlockQ5_0 { scale, fifth_bits: pack_fifth_bits(&quants), quants: pack_nibbles(&quants) }
    }
}

/// 5 bits per element above a minimum: `value = scale × quant + minimum`.
///
/// ```text
/// byte  0       2         4            8                        24
///       | scale | minimum | fifth bits | low bits 2 × 4 bit …   |
///       |  f16  |   f16   | 32 × 1 bit | 16 bytes               |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    /// The scale.
    pub scale: HalfBytes,
    /// The value of quant 0.
    pub minimum: HalfBytes,
    /// The highest bit of each quant: bit `i` of the little-endian number is that of element `i`.
    pub fifth_bits: [u8; 4],
    /// The low four bits of the quants, two per byte.
    pub quants: [u8; 16],
}
block_format!(BlockQ5_1, Q5_1, 32 elements in 24 bytes);

impl BlockQ5_1 {
    /// The quant of element `i % 32`: 0 to 31.
    #[inline]
    pub fn quant(&self, i: usize) -> u8 {
        let fifth = (u32::from_le_bytes(self.fifth_bits) >> (i % 32) & 1) as u8;
        nibble(&self.quants, i) | fifth << 4
    }

    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let (scale, minimum) = (self.scale.to_f32(), self.minimum.to_f32());
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.quant(i)) + minimum;
        }
    }
}

impl QuantizeBlock for BlockQ5_1 {
    fn quantize(values: &[f32; 32]) -> Self {
        let (scale, minimum, quants) = fit_from_minimum(values, 31.0, f32::MAX, as_halves);
        let (scale, minimum) = (HalfBytes::from_f32_finite(scale), HalfBytes::from_f32_finite(minimum));
        BlockQ5_1 { scale, minimum, fifth_bits: pack_fifth_bits(&quants), quants: pack_nibbles(&quants) }
    }
}

/// 8 bits per element around zero: `value = scale × quant`.
///
/// ```text
/// byte  0       2                34
///       | scale | quants, i8 …   |
///       |  f16  | 32 bytes       |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// The scale.
    pub scale: HalfBytes,
    /// The quants, in the order of the elements.
    pub quants: [i8; 32],
}
block_format!(BlockQ8_0, Q8_0, 32 elements in 34 bytes);

impl BlockQ8_0 {
    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let scale = self.scale.to_f32();
        for (value, quant) in out.iter_mut().zip(self.quants) {
            *value = scale * f32::from(quant);
        }
    }
}

impl QuantizeBlock for BlockQ8_0 {
    fn quantize(values: &[f32; 32]) -> Self {
        let (scale, quants) = fit_signed_bytes(values);
        BlockQ8_0 { scale: HalfBytes::from_f32_finite(scale), quants }
    }
}
