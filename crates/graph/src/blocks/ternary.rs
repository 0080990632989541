//! The formats whose elements are −1, 0 or 1 times a scale: TQ1_0 and TQ2_0.

#![expect(clippy::indexing_slicing, reason = "indices are taken modulo the length")]
#![allow(non_camel_case_types, reason = "the names are those of the file format")]

use bytemuck::{Pod, Zeroable};

use super::block::{QuantizeBlock, block_format};
use super::fit::fit_ternary;
use super::half_bytes::HalfBytes;

/// 1.7 bits per element: `value = scale × (quant − 1)`, five quants of 0, 1 or 2 to a byte.
///
/// The quants of a byte are the digits of a number in base three, the first element's digit first. The number is stored
/// as the fraction of 3⁵ that it is, in 256ths, rounded up: multiplied by three, the first digit is the carry, and the
/// rest of the fraction has the others.
///
/// ```text
/// byte  0                   32                  48                 52      54
///       | quants 5 × 32 …   | quants 5 × 16 …   | quants 4 × 4 …   | scale |
///       | 32 bytes          | 16 bytes          | 4 bytes          |  f16  |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTQ1_0 {
    /// 32 bytes with elements 0–159, 16 with 160–239, 4 with 240–255; consecutive elements in consecutive bytes.
    pub quants: [[u8; 4]; 13],
    /// The scale.
    pub scale: HalfBytes,
}
block_format!(BlockTQ1_0, TQ1_0, 256 elements in 54 bytes);

impl BlockTQ1_0 {
    /// The byte and the digit of element `i % 256`.
    #[inline]
    fn place(i: usize) -> (usize, usize) {
        match i % 256 {
            i @ 0..160 => (i % 32, i / 32),
            i @ 160..240 => (32 + i % 16, (i - 160) / 16),
            i => (48 + i % 4, (i - 240) / 4),
        }
    }

    /// The quant of element `i % 256`, offset removed: −1 to 1.
    #[inline]
    pub fn quant(&self, i: usize) -> i8 {
        const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
        let (byte, digit) = BlockTQ1_0::place(i);
        let fraction = self.quants.as_flattened()[byte].wrapping_mul(POWERS[digit]);
        ((u16::from(fraction) * 3) >> 8) as i8 - 1
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let scale = self.scale.to_f32();
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.quant(i));
        }
    }
}

impl QuantizeBlock for BlockTQ1_0 {
    fn quantize(values: &[f32; 256]) -> Self {
        let (scale, quants) = fit_ternary(values);
        let mut numbers = [[0_u16; 4]; 13];
        for (i, quant) in quants.iter().enumerate() {
            let (byte, digit) = BlockTQ1_0::place(i);
            numbers.as_flattened_mut()[byte] += u16::from(*quant) * [81, 27, 9, 3, 1][digit];
        }
        let quants = numbers.map(|four| four.map(|number| (number * 256).div_ceil(243) as u8));
        BlockTQ1_0 { quants, scale: HalfBytes::from_f32_finite(scale) }
    }
}

/// 2 bits per element: `value = scale × (quant − 1)`.
///
/// ```text
/// byte  0                      64      66
///       | quants 4 × 2 bit …   | scale |
///       | 64 bytes             |  f16  |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTQ2_0 {
    /// Each 32 bytes hold 128 elements: the first 32 in bits 0–1, the next in bits 2–3, and so on.
    pub quants: [u8; 64],
    /// The scale.
    pub scale: HalfBytes,
}
block_format!(BlockTQ2_0, TQ2_0, 256 elements in 66 bytes);

impl BlockTQ2_0 {
    /// The quant of element `i % 256`, offset removed: −1 to 2, of which quantizers use −1 to 1.
    #[inline]
    pub fn quant(&self, i: usize) -> i8 {
        (self.quants[i / 128 % 2 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8 - 1
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let scale = self.scale.to_f32();
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.quant(i));
        }
    }
}

impl QuantizeBlock for BlockTQ2_0 {
    fn quantize(values: &[f32; 256]) -> Self {
        let (scale, quants) = fit_ternary(values);
        let mut block = BlockTQ2_0 { quants: [0; 64], scale: HalfBytes::from_f32_finite(scale) };
        for (i, quant) in quants.iter().enumerate() {
            block.quants[i / 128 * 32 + i % 32] |= quant << (i % 128 / 32 * 2);
        }
        block
    }
}
