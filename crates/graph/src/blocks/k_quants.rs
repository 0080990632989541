//! The formats of 256 elements with two levels of scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
//!
//! A super-block of 256 elements is divided into groups of 16 or 32. Each group has a small integer scale, which is
//! multiplied by the scale of the super-block. 32 consecutive elements share a bit position in 32 consecutive bytes;
//! `quant(i)` of each struct extracts the bits of element `i`.

#![expect(
    clippy::indexing_slicing,
    reason = "indices are taken modulo the length, or are those of the groups of one block"
)]
#![allow(non_camel_case_types, reason = "the names are those of the file format")]

use bytemuck::{Pod, Zeroable};

use super::block::{QuantizeBlock, block_format};
use super::fit::{as_half, fit_centred, fit_from_minimum, inverse, span};
use super::half_bytes::HalfBytes;

/// 2 bits per element, 16 groups of 16 elements:
/// `value = scale × group scale × quant − min scale × group minimum`.
///
/// ```text
/// byte  0                 16                     80      82          84
///       | group scales    | quants 4 × 2 bit …   | scale | min scale |
///       | 16 × (4+4) bit  | 64 bytes             |  f16  |    f16    |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_K {
    /// One byte per group: scale in the low nibble, minimum in the high nibble.
    pub group_scales: [u8; 16],
    /// Each 32 bytes hold 128 elements: the first 32 in bits 0–1, the next in bits 2–3, and so on.
    pub quants: [u8; 64],
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The factor of all group minimums.
    pub min_scale: HalfBytes,
}
block_format!(BlockQ2_K, Q2_K, 256 elements in 84 bytes);

impl BlockQ2_K {
    /// The quant of element `i % 256`: 0 to 3.
    #[inline]
    pub fn quant(&self, i: usize) -> u8 {
        self.quants[i / 128 % 2 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
    }

    /// Scale and minimum of group `group % 16`, each 0 to 15.
    #[inline]
    pub fn group_scale_and_minimum(&self, group: usize) -> (u8, u8) {
        let packed = self.group_scales[group % 16];
        (packed & 0x0f, packed >> 4)
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let (scale, min_scale) = (self.scale.to_f32(), self.min_scale.to_f32());
        for (group, values) in out.chunks_exact_mut(16).enumerate() {
            let (group_scale, group_minimum) = self.group_scale_and_minimum(group);
            let step = scale * f32::from(group_scale);
            let minimum = min_scale * f32::from(group_minimum);
            for (i, value) in values.iter_mut().enumerate() {
                *value = step * f32::from(self.quant(16 * group + i)) - minimum;
            }
        }
    }
}

/// 3 bits per element around zero, 16 groups of 16 elements: `value = scale × (group scale − 32) × (quant − 4)`.
///
/// ```text
/// byte  0             32                      96              108     110
///       | third bits  | low bits 4 × 2 bit …  | group scales  | scale |
///       | 256 × 1 bit | 64 bytes              | 16 × 6 bit    |  f16  |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3_K {
    /// The highest bit of each quant: element `i` in byte `i % 32`, bit `i / 32`.
    pub third_bits: [u8; 32],
    /// The two low bits. Each 32 bytes hold 128 elements: the first 32 in bits 0–1, the next in bits 2–3, and so on.
    pub quants: [u8; 64],
    /// The group scales. Group `g`: low four bits in byte `g % 8`, low nibble for `g < 8`, else high nibble; high two
    /// bits in byte `8 + g % 4` at bit `g / 4 × 2`.
    pub group_scales: [u8; 12],
    /// The factor of all group scales.
    pub scale: HalfBytes,
}
block_format!(BlockQ3_K, Q3_K, 256 elements in 110 bytes);

impl BlockQ3_K {
    /// The quant of element `i % 256`, offset removed: −4 to 3.
    #[inline]
    pub fn quant(&self, i: usize) -> i8 {
        let low = self.quants[i / 128 % 2 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        let third = self.third_bits[i % 32] >> (i / 32 % 8) & 1;
        (low | third << 2) as i8 - 4
    }

    /// The scale of group `group % 16`, offset removed: −32 to 31.
    #[inline]
    pub fn group_scale(&self, group: usize) -> i8 {
        let low = self.group_scales[group % 8] >> (group / 8 % 2 * 4) & 0x0f;
        let high = self.group_scales[8 + group % 4] >> (group / 4 % 4 * 2) & 3;
        (low | high << 4) as i8 - 32
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let scale = self.scale.to_f32();
        for (group, values) in out.chunks_exact_mut(16).enumerate() {
            let step = scale * f32::from(self.group_scale(group));
            for (i, value) in values.iter_mut().enumerate() {
                *value = step * f32::from(self.quant(16 * group + i));
            }
        }
    }
}

/// The packed scales and minimums of [`BlockQ4_K`] and [`BlockQ5_K`]: eight of each, 6 bits long, in 12 bytes.
///
/// ```text
/// byte  0–3   scale of groups 0–3 in bits 0–5, the two high bits of the scale of groups 4–7 in bits 6–7
/// byte  4–7   the same for the minimums
/// byte  8–11  the low four bits of groups 4–7: scale in the low nibble, minimum in the high nibble
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct GroupScales(pub [u8; 12]);

impl GroupScales {
    /// Scale and minimum of group `group % 8`, each 0 to 63.
    #[inline]
    pub fn get(&self, group: usize) -> (u8, u8) {
        let (bytes, group) = (&self.0, group % 8);
        if group < 4 {
            (bytes[group] & 0x3f, bytes[4 + group] & 0x3f)
        } else {
            let low = bytes[4 + group];
            let scale = low & 0x0f | bytes[group - 4] >> 6 << 4;
            let minimum = low >> 4 | bytes[group] >> 6 << 4;
            (scale, minimum)
        }
    }

    /// Packs scale and minimum of each group; only the low 6 bits of each are stored.
    pub fn pack(groups: &[(u8, u8); 8]) -> Self {
        let mut bytes = [0; 12];
        for i in 0..4 {
            let (near, far) = (groups[i], groups[i + 4]);
            bytes[i] = near.0 & 0x3f | far.0 >> 4 << 6;
            bytes[i + 4] = near.1 & 0x3f | far.1 >> 4 << 6;
            bytes[i + 8] = far.0 & 0x0f | far.1 << 4;
        }
        GroupScales(bytes)
    }
}

/// 4 bits per element, 8 groups of 32 elements:
/// `value = scale × group scale × quant − min scale × group minimum`.
///
/// ```text
/// byte  0       2           4                16                     144
///       | scale | min scale | group scales   | quants 2 × 4 bit …   |
///       |  f16  |    f16    | 8 × (6+6) bit  | 128 bytes            |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_K {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The factor of all group minimums.
    pub min_scale: HalfBytes,
    /// Scale and minimum of each group.
    pub group_scales: GroupScales,
    /// Each 32 bytes hold 64 elements: the first 32 in the low nibbles, the next 32 in the high nibbles.
    pub quants: [u8; 128],
}
block_format!(BlockQ4_K, Q4_K, 256 elements in 144 bytes);

impl BlockQ4_K {
    /// The quant of element `i % 256`: 0 to 15.
    #[inline]
    pub fn quant(&self, i: usize) -> u8 {
        self.quants[i / 64 % 4 * 32 + i % 32] >> (i % 64 / 32 * 4) & 0x0f
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let (scale, min_scale) = (self.scale.to_f32(), self.min_scale.to_f32());
        for (group, values) in out.chunks_exact_mut(32).enumerate() {
            let (group_scale, group_minimum) = self.group_scales.get(group);
            let step = scale * f32::from(group_scale);
            let minimum = min_scale * f32::from(group_minimum);
            for (i, value) in values.iter_mut().enumerate() {
                *value = step * f32::from(self.quant(32 * group + i)) - minimum;
            }
        }
    }
}

impl QuantizeBlock for BlockQ4_K {
    fn quantize(values: &[f32; 256]) -> Self {
        let (groups, _) = values.as_chunks::<32>();
        // The group with the widest range determines the scale of scales, the lowest minimum that of minimums.
        let (mut largest_scale, mut lowest_minimum) = (0.0f32, 0.0f32);
        for group in groups {
            let (lowest, highest) = span(group);
            largest_scale = largest_scale.max(highest / 15.0 - lowest.min(0.0) / 15.0);
            lowest_minimum = lowest_minimum.min(lowest);
        }
        let (scale, min_scale) = (as_half(largest_scale / 63.0), as_half(-lowest_minimum / 63.0));
        let (scale_inverse, min_inverse) = (inverse(scale), inverse(min_scale));
        let rounded = |steps: f32| (steps + 0.5).clamp(0.0, 63.0) as u8;

        let mut group_scales = [(0, 0); 8];
        let mut quants = [0; 128];
        for (g, group) in groups.iter().enumerate() {
            let (group_scale, group_minimum, group_quants) = fit_from_minimum(group, 15.0, 0.0, |s, m| {
                (
                    scale * f32::from(rounded(s * scale_inverse)),
                    -min_scale * f32::from(rounded(-m * min_inverse)),
                )
            });
            group_scales[g] = (rounded(group_scale * scale_inverse), rounded(-group_minimum * min_inverse));
            for (i, quant) in group_quants.iter().enumerate() {
                quants[g / 2 * 32 + i] |= quant << (g % 2 * 4);
            }
        }
        BlockQ4_K {
            scale: HalfBytes::from_f32_finite(scale),
            min_scale: HalfBytes::from_f32_finite(min_scale),
            group_scales: GroupScales::pack(&group_scales),
            quants,
        }
    }
}

/// 5 bits per element, 8 groups of 32 elements:
/// `value = scale × group scale × quant − min scale × group minimum`.
///
/// ```text
/// byte  0       2           4                16            48                       176
///       | scale | min scale | group scales   | fifth bits  | low bits 2 × 4 bit …   |
///       |  f16  |    f16    | 8 × (6+6) bit  | 256 × 1 bit | 128 bytes              |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_K {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The factor of all group minimums.
    pub min_scale: HalfBytes,
    /// Scale and minimum of each group.
    pub group_scales: GroupScales,
    /// The highest bit of each quant: element `i` in byte `i % 32`, bit `i / 32`.
    pub fifth_bits: [u8; 32],
    /// The low bits. Each 32 bytes hold 64 elements: the first 32 in the low nibbles, the next 32 in the high nibbles.
    pub quants: [u8; 128],
}
block_format!(BlockQ5_K, Q5_K, 256 elements in 176 bytes);

impl BlockQ5_K {
    /// The quant of element `i % 256`: 0 to 31.
    #[inline]
    pub fn quant(&self, i: usize) -> u8 {
        let low = self.quants[i / 64 % 4 * 32 + i % 32] >> (i % 64 / 32 * 4) & 0x0f;
        let fifth = self.fifth_bits[i % 32] >> (i / 32 % 8) & 1;
        low | fifth << 4
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let (scale, min_scale) = (self.scale.to_f32(), self.min_scale.to_f32());
        for (group, values) in out.chunks_exact_mut(32).enumerate() {
            let (group_scale, group_minimum) = self.group_scales.get(group);
            let step = scale * f32::from(group_scale);
            let minimum = min_scale * f32::from(group_minimum);
            for (i, value) in values.iter_mut().enumerate() {
                *value = step * f32::from(self.quant(32 * group + i)) - minimum;
            }
        }
    }
}

/// 6 bits per element around zero, 16 groups of 16 elements: `value = scale × group scale × (quant − 32)`.
///
/// ```text
/// byte  0                      128                     192             208     210
///       | low bits 2 × 4 bit … | high bits 4 × 2 bit … | group scales  | scale |
///       | 128 bytes            | 64 bytes              | 16 × i8       |  f16  |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6_K {
    /// The low four bits. Each 64 bytes hold 128 elements: the first 64 in the low nibbles, the next 64 in the high
    /// nibbles.
    pub quants: [u8; 128],
    /// The two high bits. Each 32 bytes hold 128 elements: the first 32 in bits 0–1, the next in bits 2–3, and so on.
    pub high_bits: [u8; 64],
    /// The scale of each group.
    pub group_scales: [i8; 16],
    /// The factor of all group scales.
    pub scale: HalfBytes,
}
block_format!(BlockQ6_K, Q6_K, 256 elements in 210 bytes);

impl BlockQ6_K {
    /// The quant of element `i % 256`, offset removed: −32 to 31.
    #[inline]
    pub fn quant(&self, i: usize) -> i8 {
        let low = self.quants[i / 128 % 2 * 64 + i % 64] >> (i % 128 / 64 * 4) & 0x0f;
        let high = self.high_bits[i / 128 % 2 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        (low | high << 4) as i8 - 32
    }

    /// Dequantizes the 256 elements.
    #[inline]
    pub fn dequantize(&self, out: &mut [f32; 256]) {
        let scale = self.scale.to_f32();
        for (group, values) in out.chunks_exact_mut(16).enumerate() {
            let step = scale * f32::from(self.group_scales[group]);
            for (i, value) in values.iter_mut().enumerate() {
                *value = step * f32::from(self.quant(16 * group + i));
            }
        }
    }
}

impl QuantizeBlock for BlockQ6_K {
    fn quantize(values: &[f32; 256]) -> Self {
        let (groups, _) = values.as_chunks::<16>();
        // The largest magnitude determines the scale of scales.
        let (lowest, highest) = span(values);
        let largest = highest.max(-lowest) / 32.0;
        let scale = as_half(largest / 127.0);
        let scale_inverse = inverse(scale);
        let rounded = |steps: f32| (steps + 0.5f32.copysign(steps)) as i8;

        let mut block = BlockQ6_K { scale: HalfBytes::from_f32_finite(scale), ..Zeroable::zeroed() };
        for (g, group) in groups.iter().enumerate() {
            let (group_scale, group_quants) =
                fit_centred(group, 32.0, |s| scale * f32::from(rounded(s * scale_inverse)));
            block.group_scales[g] = rounded(group_scale * scale_inverse);
            for (i, quant) in group_quants.iter().enumerate() {
                let i = 16 * g + i;
                block.quants[i / 128 * 64 + i % 64] |= (quant & 0x0f) << (i % 128 / 64 * 4);
                block.high_bits[i / 128 * 32 + i % 32] |= (quant >> 4) << (i % 128 / 32 * 2);
            }
        }
        block
    }
}
