//! The formats whose 4-bit codes index a table of non-uniform levels: IQ4_NL, IQ4_XS, MXFP4, NVFP4.
//!
//! Codes are packed as in the linear formats: in every 16 bytes, byte `i` holds the code of element `i` in its low
//! nibble and that of element `i + 16` in its high nibble. NVFP4 does the same in every 8 bytes.

#![expect(
    clippy::indexing_slicing,
    reason = "codes have 4 bits and the tables 16 entries; other indices are taken modulo the length"
)]
#![allow(non_camel_case_types, reason = "the names are those of the file format")]

use bytemuck::{Pod, Zeroable};

use super::block::{QuantizeBlock, block_format};
use super::fit::fit_levels;
use super::half_bytes::HalfBytes;
use super::linear::nibble;

/// The levels that the codes of [`BlockIQ4_NL`] and [`BlockIQ4_XS`] index.
pub const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The levels that the codes of [`BlockMXFP4`] and [`BlockNVFP4`] index: the values of an E2M1 float, doubled so that
/// they are integers. Code 8, negative zero, is zero.
pub const MXFP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 4-bit codes with one scale: `value = scale × level(code)`.
///
/// ```text
/// byte  0       2                   18
///       | scale | codes 2 × 4 bit … |
///       |  f16  | 16 bytes          |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ4_NL {
    /// The factor of the levels.
    pub scale: HalfBytes,
    /// The codes, two per byte.
    pub codes: [u8; 16],
}
block_format!(BlockIQ4_NL, IQ4_NL, 32 elements in 18 bytes);

impl BlockIQ4_NL {
    /// The level of element `i % 32`.
    #[inline]
    pub fn level(&self, i: usize) -> i8 {
        IQ4_LEVELS[usize::from(nibble(&self.codes, i))]
    }

    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let scale = self.scale.to_f32();
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.level(i));
        }
    }
}

/// 4-bit codes, 8 groups of 32 elements, each with a 6-bit scale:
/// `value = scale × (group scale − 32) × level(code)`.
///
/// ```text
/// byte  0       2             4            8                                136
///       | scale | scales high | scales low | codes: 8 groups of 16 bytes …  |
///       |  f16  |  8 × 2 bit  |  8 × 4 bit | each 2 × 4 bit per byte        |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ4_XS {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The two high bits of the group scales: group `g` at bit `2g` of the little-endian number.
    pub scales_high: [u8; 2],
    /// The four low bits of the group scales: byte `g / 2`, even groups in the low nibble.
    pub scales_low: [u8; 4],
    /// The codes of each group.
    pub codes: [[u8; 16]; 8],
}
block_format!(BlockIQ4_XS, IQ4_XS, 256 elements in 136 bytes);

impl BlockIQ4_XS {
    /// The scale of group `group % 8`, offset removed: −32 to 31.
    #[inline]
    pub fn group_scale(&self, group: usize) -> i8 {
        let low = self.scales_low[group / 2 % 4] >> (4 * (group % 2)) & 0x0f;
        let high = (u16::from_le_bytes(self.scales_high) >> (group % 8 * 2) & 3) as u8;
        (low | high << 4) as i8 - 32
    }

    /// The level of element `i % 256`.
    #[inline]
    pub fn level(&self, i: usize) -> i8 {
        IQ4_LEVELS[usize::from(nibble(&self.codes[i / 32 % 8], i))]
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let scale = self.scale.to_f32();
        for (group, values) in out.chunks_exact_mut(32).enumerate() {
            let group_scale = scale * f32::from(self.group_scale(group));
            for (i, value) in values.iter_mut().enumerate() {
                *value = group_scale * f32::from(self.level(32 * group + i));
            }
        }
    }
}

/// 4-bit floats with one power of two as scale (the OCP microscaling format): `value = scale × level(code)`.
///
/// ```text
/// byte  0          1                   17
///       | exponent | codes 2 × 4 bit … |
///       |    u8    | 16 bytes          |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockMXFP4 {
    /// The exponent of the scale (E8M0); 127 stands for 1.
    pub exponent: u8,
    /// The codes, two per byte.
    pub codes: [u8; 16],
}
block_format!(BlockMXFP4, MXFP4, 32 elements in 17 bytes);

impl BlockMXFP4 {
    /// The factor of the levels: `2^(exponent − 128)`, half the stored scale because the levels are doubled.
    #[inline]
    pub fn scale(&self) -> f32 {
        // Exponents 0 and 1 give 2^-128 and 2^-127, which are subnormal in f32: a single bit of the mantissa.
        let bits = match self.exponent {
            0 => 0x0020_0000,
            1 => 0x0040_0000,
            exponent => (u32::from(exponent) - 1) << 23,
        };
        f32::from_bits(bits)
    }

    /// The level of element `i % 32`.
    #[inline]
    pub fn level(&self, i: usize) -> i8 {
        MXFP4_LEVELS[usize::from(nibble(&self.codes, i))]
    }

    /// Dequantizes the 32 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 32]) {
        let scale = self.scale();
        for (i, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(self.level(i));
        }
    }
}

/// 4-bit floats, 4 groups of 16 elements, each with an 8-bit float (E4M3 without sign) as scale:
/// `value = group scale × level(code)`.
///
/// ```text
/// byte  0              4                                     36
///       | group scales | codes: 4 groups of 8 bytes …        |
///       | 4 × u8       | each 2 × 4 bit per byte             |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockNVFP4 {
    /// The scale of each group: 4 bits of exponent, 3 of mantissa; bit 7 is ignored.
    pub group_scales: [u8; 4],
    /// The codes of each group: byte `i` holds element `i` in its low nibble and element `i + 8` in its high nibble.
    pub codes: [[u8; 8]; 4],
}
block_format!(BlockNVFP4, NVFP4, 64 elements in 36 bytes);

impl BlockNVFP4 {
    /// The factor of the levels for a scale: half of it, because the levels are doubled. `0x7f`, NaN in E4M3, is 0.
    #[inline]
    pub fn decode_scale(scale: u8) -> f32 {
        // The bits of the number are those of an f16 that is 2⁸ times smaller, subnormals included.
        let bits = if scale == 0x7f { 0 } else { u16::from(scale & 0x7f) << 7 };
        HalfBytes(bits.to_le_bytes()).to_f32() * 128.0
    }

    /// The code of element `i % 64`.
    #[inline]
    pub fn code(&self, i: usize) -> u8 {
        self.codes[i / 16 % 4][i % 8] >> (i / 8 % 2 * 4) & 0x0f
    }

    /// The level of element `i % 64`.
    #[inline]
    pub fn level(&self, i: usize) -> i8 {
        MXFP4_LEVELS[usize::from(self.code(i))]
    }

    /// Dequantizes the 64 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 64]) {
        for (group, values) in out.chunks_exact_mut(16).enumerate() {
            let scale = BlockNVFP4::decode_scale(self.group_scales[group]);
            for (i, value) in values.iter_mut().enumerate() {
                *value = scale * f32::from(self.level(16 * group + i));
            }
        }
    }
}

impl QuantizeBlock for BlockNVFP4 {
    fn quantize(values: &[f32; 64]) -> Self {
        /// The largest finite scale.
        const LARGEST: u8 = 0x7e;
        let mut block: BlockNVFP4 = Zeroable::zeroed();
        let (groups, _) = values.as_chunks::<16>();
        for (g, group) in groups.iter().enumerate() {
            let extreme = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            // The smallest scale that covers all values; finer ones may be better for most of them.
            let covers = |scale: &u8| BlockNVFP4::decode_scale(*scale) * 12.0 >= extreme;
            let covering = (0..LARGEST).find(covers).unwrap_or(LARGEST);
            let (scale, codes) = fit_levels(
                group,
                &MXFP4_LEVELS,
                covering.saturating_sub(4)..=covering,
                BlockNVFP4::decode_scale,
            );
            block.group_scales[g] = scale;
            block.codes[g] = std::array::from_fn(|i| codes[i] | codes[i + 8] << 4);
        }
        block
    }
}
