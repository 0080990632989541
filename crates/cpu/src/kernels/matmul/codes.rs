//! The integers behind a row's blocks: taken out of the file's blocks, put into packed cells, and read back.
#![expect(
    clippy::indexing_slicing,
    reason = "offsets come from Format, whose cell length the callers have checked; row < 16, column < 256"
)]

use bytemuck::pod_read_unaligned;
use half::f16;
use quadriga_graph::DType;
use quadriga_graph::blocks as b;

use super::format::{BLOCK, Format, Quants, Scales};

/// One row's part of a cell: its quants and its scales, as integers.
pub(super) struct Codes {
    /// Quants as stored: offset to be unsigned, or indices of levels.
    pub(super) quants: [u8; 256],
    /// Bits of the scale, and of the minimum or the scale of minimums; for MXFP4 the exponent.
    pub(super) scale: u16,
    pub(super) minimum: u16,
    /// Scale and minimum of each sub-block, as stored (6-bit signed scales are offset by 32).
    pub(super) sub_scales: [u8; 16],
    pub(super) sub_minimums: [u8; 16],
}

/// Plane and lowest bit of vector `v` of [`Quants::Three`]; for the last two vectors, of their two low bits.
const fn three(v: usize) -> (usize, usize) {
    (if v < 6 { v % 3 } else { v - 6 }, if v == 5 { 5 } else { v / 3 * 3 })
}

/// Plane and lowest bit of the two high bits of vector `v` of [`Quants::NibbleTwo`].
const fn high_two(v: usize) -> (usize, usize) {
    (4 + v / 2 % 2, 2 * (v % 2) + if v < 4 { 4 } else { 0 })
}

fn half_bits(half: b::HalfBytes) -> u16 {
    u16::from_le_bytes(half.0)
}

impl Codes {
    pub(super) const fn new() -> Codes {
        Codes { quants: [0; 256], scale: 0, minimum: 0, sub_scales: [0; 16], sub_minimums: [0; 16] }
    }

    /// Reads one block as the file stores it; `bytes` is one block of the type.
    pub(super) fn read_file_block(&mut self, dtype: DType, bytes: &[u8]) {
        let q = &mut self.quants;
        let nibbles = |q: &mut [u8], packed: &[u8; 16]| {
            for i in 0..16 {
                q[i] = packed[i] & 15;
                q[i + 16] = packed[i] >> 4;
            }
        };
        match dtype {
            DType::Q4_0 => {
                let block: b::BlockQ4_0 = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                nibbles(q, &block.quants);
            }
            DType::Q4_1 => {
                let block: b::BlockQ4_1 = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                self.minimum = half_bits(block.minimum);
                nibbles(q, &block.quants);
            }
            DType::Q5_0 => {
                let block: b::BlockQ5_0 = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                (0..32).for_each(|i| q[i] = (block.quant(i) + 16) as u8);
            }
            DType::Q5_1 => {
                let block: b::BlockQ5_1 = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                self.minimum = half_bits(block.minimum);
                (0..32).for_each(|i| q[i] = block.quant(i));
            }
            DType::Q8_0 => {
                let block: b::BlockQ8_0 = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                (0..32).for_each(|i| q[i] = block.quants[i] as u8 ^ 0x80);
            }
            DType::Q2_K => {
                let block: b::BlockQ2_K = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                self.minimum = half_bits(block.min_scale);
                (0..256).for_each(|i| q[i] = block.quant(i));
                for i in 0..16 {
                    (self.sub_scales[i], self.sub_minimums[i]) = block.group_scale_and_minimum(i);
                }
            }
            DType::Q3_K => {
                let block: b::BlockQ3_K = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                (0..256).for_each(|i| q[i] = (block.quant(i) + 4) as u8);
                (0..16).for_each(|i| self.sub_scales[i] = (block.group_scale(i) + 32) as u8);
            }
            DType::Q4_K => {
                let block: b::BlockQ4_K = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                self.minimum = half_bits(block.min_scale);
                (0..256).for_each(|i| q[i] = block.quant(i));
                for i in 0..8 {
                    (self.sub_scales[i], self.sub_minimums[i]) = block.group_scales.get(i);
                }
            }
            DType::Q5_K => {
                let block: b::BlockQ5_K = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                self.minimum = half_bits(block.min_scale);
                (0..256).for_each(|i| q[i] = block.quant(i));
                for i in 0..8 {
                    (self.sub_scales[i], self.sub_minimums[i]) = block.group_scales.get(i);
                }
            }
            DType::Q6_K => {
                let block: b::BlockQ6_K = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                (0..256).for_each(|i| q[i] = (block.quant(i) + 32) as u8);
                (0..16).for_each(|i| self.sub_scales[i] = block.group_scales[i] as u8);
            }
            DType::IQ4_NL => {
                let block: b::BlockIQ4_NL = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                nibbles(q, &block.codes);
            }
            DType::IQ4_XS => {
                let block: b::BlockIQ4_XS = pod_read_unaligned(bytes);
                self.scale = half_bits(block.scale);
                for i in 0..8 {
                    nibbles(&mut q[32 * i..], &block.codes[i]);
                    self.sub_scales[i] = (block.group_scale(i) + 32) as u8;
                }
            }
            DType::MXFP4 => {
                let block: b::BlockMXFP4 = pod_read_unaligned(bytes);
                self.scale = u16::from(block.exponent);
                nibbles(q, &block.codes);
            }
            _ => {}
        }
    }

    /// Writes the codes as row `row` of a cell; the row's places in the cell must hold zeros.
    pub(super) fn write(&self, format: &Format, cell: &mut [u8], row: usize) {
        let (quant_bytes, scales) = cell.split_at_mut(format.blocks * format.quants.bytes());
        for (block, quants) in quant_bytes.chunks_exact_mut(format.quants.bytes()).enumerate() {
            let mut word = |plane: usize, bits: u32| {
                let at = plane * 64 + row * 4;
                let old: u32 = pod_read_unaligned(&quants[at..at + 4]);
                quants[at..at + 4].copy_from_slice(&(old | bits).to_le_bytes());
            };
            for v in 0..8 {
                let at = block * BLOCK + v * 4;
                let q = u32::from_le_bytes([
                    self.quants[at],
                    self.quants[at + 1],
                    self.quants[at + 2],
                    self.quants[at + 3],
                ]);
                let low_two = (q & 0x0303_0303) << (2 * (v % 4));
                let low_four = (q & 0x0f0f_0f0f) << (4 * (v / 4));
                match format.quants {
                    Quants::Two => word(v / 4, low_two),
                    Quants::Three => {
                        let (plane, shift) = three(v);
                        word(plane, if v < 6 { q << shift } else { (q & 0x0303_0303) << shift });
                        if v >= 6 {
                            word(2, ((q >> 2) & 0x0101_0101) << (v - 3));
                        }
                    }
                    Quants::Nibble => word(v % 4, low_four),
                    Quants::NibbleOne => {
                        word(v % 4, low_four);
                        word(4, ((q >> 4) & 0x0101_0101) << (v ^ 4));
                    }
                    Quants::NibbleTwo => {
                        word(v % 4, low_four);
                        let (plane, shift) = high_two(v);
                        word(plane, ((q >> 4) & 0x0303_0303) << shift);
                    }
                    Quants::Byte => word(v, q),
                }
            }
        }
        let half = |scales: &mut [u8], at: usize, bits: u16| {
            scales[at + 2 * row..at + 2 * row + 2].copy_from_slice(&bits.to_le_bytes());
        };
        // Adds bits to word `index` of the row, of those that start at `at`.
        let word = |scales: &mut [u8], at: usize, index: usize, bits: u32| {
            let at = at + 64 * index + 4 * row;
            let old: u32 = pod_read_unaligned(&scales[at..at + 4]);
            scales[at..at + 4].copy_from_slice(&(old | bits).to_le_bytes());
        };
        let (s, t) = (&self.sub_scales, &self.sub_minimums);
        match format.scales {
            Scales::Half => half(scales, 0, self.scale),
            Scales::Exponent => scales[row] = self.scale as u8,
            Scales::HalfMinimum => {
                half(scales, 0, self.scale);
                half(scales, 32, self.minimum);
            }
            Scales::SixPair => {
                half(scales, 0, self.scale);
                half(scales, 32, self.minimum);
                for (i, number) in s.iter().take(8).chain(t.iter().take(8)).map(|n| u32::from(*n)).enumerate()
                {
                    if i < 15 {
                        word(scales, 64, i / 5, number << (6 * (i % 5)));
                    } else {
                        (0..3).for_each(|w| word(scales, 64, w, ((number >> (2 * w)) & 3) << 30));
                    }
                }
            }
            Scales::SixTwice => {
                half(scales, 0, self.scale);
                for (i, s) in s.iter().enumerate() {
                    let (block, column, number) = (i / 2, 16 * (i % 2), u32::from(s ^ 32));
                    if block < 6 {
                        word(scales, 32, block % 3, number << (column + 10 - 6 * (block / 3)));
                    } else {
                        word(scales, 32, block - 6, (number >> 2) << column);
                        word(scales, 32, 2, (number & 3) << (column + 2 * (block - 6)));
                    }
                }
            }
            Scales::ByteTwice => {
                half(scales, 0, self.scale);
                (0..16).for_each(|i| scales[32 + 16 * i + row] = s[i]);
            }
            Scales::NibbleTwice => {
                half(scales, 0, self.scale);
                half(scales, 32, self.minimum);
                for i in 0..16 {
                    let shift = 16 * (i % 2) + 4 * (i / 2 % 4);
                    word(scales, 64, i / 8, u32::from(s[i]) << shift);
                    word(scales, 64, 2 + i / 8, u32::from(t[i]) << (8 * (i % 4) + 4 * (i / 4 % 2)));
                }
            }
            Scales::Six => {
                half(scales, 0, self.scale);
                let number = |i: usize| u32::from(s[i] ^ 32);
                (0..5).for_each(|i| word(scales, 32, 0, number(i) << (2 + 6 * i)));
                word(scales, 32, 0, number(7) & 3);
                half(scales, 96, (number(7) >> 2 | number(5) << 4 | number(6) << 10) as u16);
            }
        }
    }

    /// Reads row `row` of a cell.
    pub(super) fn read(&mut self, format: &Format, cell: &[u8], row: usize) {
        let (quant_bytes, scales) = cell.split_at(format.blocks * format.quants.bytes());
        for (block, quants) in quant_bytes.chunks_exact(format.quants.bytes()).enumerate() {
            for v in 0..8 {
                for i in 0..4 {
                    let byte = |plane: usize| quants[plane * 64 + row * 4 + i];
                    let low_two = |plane: usize| (byte(plane + v / 4) >> (2 * (v % 4))) & 3;
                    let low_four = || (byte(v % 4) >> (4 * (v / 4))) & 15;
                    self.quants[block * BLOCK + v * 4 + i] = match format.quants {
                        Quants::Two => low_two(0),
                        Quants::Three => {
                            let (plane, shift) = three(v);
                            let low = byte(plane) >> shift;
                            if v < 6 { low & 7 } else { low & 3 | ((byte(2) >> (v - 3)) & 1) << 2 }
                        }
                        Quants::Nibble => low_four(),
                        Quants::NibbleOne => low_four() | ((byte(4) >> (v ^ 4)) & 1) << 4,
                        Quants::NibbleTwo => {
                            let (plane, shift) = high_two(v);
                            low_four() | ((byte(plane) >> shift) & 3) << 4
                        }
                        Quants::Byte => byte(v),
                    };
                }
            }
        }
        let half = |at: usize| u16::from_le_bytes([scales[at + 2 * row], scales[at + 2 * row + 1]]);
        let word = |at: usize, index: usize| -> u32 {
            let at = at + 64 * index + 4 * row;
            pod_read_unaligned(&scales[at..at + 4])
        };
        let (s, t) = (&mut self.sub_scales, &mut self.sub_minimums);
        self.scale = if format.scales == Scales::Exponent { u16::from(scales[row]) } else { half(0) };
        match format.scales {
            Scales::Half | Scales::Exponent => {}
            Scales::HalfMinimum => self.minimum = half(32),
            Scales::SixPair => {
                self.minimum = half(32);
                let number = |i: usize| match i {
                    0..15 => (word(64, i / 5) >> (6 * (i % 5))) & 63,
                    _ => word(64, 0) >> 30 | (word(64, 1) >> 30) << 2 | (word(64, 2) >> 30) << 4,
                };
                (0..8).for_each(|i| (s[i], t[i]) = (number(i) as u8, number(8 + i) as u8));
            }
            Scales::SixTwice => {
                for (i, s) in s.iter_mut().enumerate() {
                    let (block, column) = (i / 2, 16 * (i % 2));
                    let number = if block < 6 {
                        word(32, block % 3) >> (column + 10 - 6 * (block / 3))
                    } else {
                        let low = (word(32, 2) >> (column + 2 * (block - 6))) & 3;
                        (word(32, block - 6) >> column & 15) << 2 | low
                    };
                    *s = (number & 63) as u8 ^ 32;
                }
            }
            Scales::ByteTwice => (0..16).for_each(|i| s[i] = scales[32 + 16 * i + row]),
            Scales::NibbleTwice => {
                self.minimum = half(32);
                for i in 0..16 {
                    let shift = 16 * (i % 2) + 4 * (i / 2 % 4);
                    s[i] = (word(64, i / 8) >> shift) as u8 & 15;
                    t[i] = (word(64, 2 + i / 8) >> (8 * (i % 4) + 4 * (i / 4 % 2))) as u8 & 15;
                }
            }
            Scales::Six => {
                let (low, high) = (word(32, 0), u32::from(half(96)));
                (0..5).for_each(|i| s[i] = (low >> (2 + 6 * i) & 63) as u8 ^ 32);
                s[5] = (high >> 4 & 63) as u8 ^ 32;
                s[6] = (high >> 10) as u8 ^ 32;
                s[7] = ((high & 15) << 2 | low & 3) as u8 ^ 32;
            }
        }
    }

    /// The numbers the codes stand for, with the same roundings as the file format's own dequantizer.
    pub(super) fn values(&self, format: &Format, out: &mut [f32]) {
        let (d, m) = (f16::from_bits(self.scale).to_f32(), f16::from_bits(self.minimum).to_f32());
        let (s, t) = (&self.sub_scales, &self.sub_minimums);
        for (i, value) in out.iter_mut().take(format.columns()).enumerate() {
            let q = self.quants[i];
            let signed = match format.levels {
                Some(levels) => f32::from(levels[usize::from(q & 15)]),
                None => f32::from(i16::from(q) - i16::from(format.offset)),
            };
            *value = match format.scales {
                Scales::Half => d * signed,
                Scales::HalfMinimum => d * signed + m,
                Scales::Exponent => {
                    b::BlockMXFP4 { exponent: self.scale as u8, codes: [0; 16] }.scale() * signed
                }
                Scales::SixPair => d * f32::from(s[i / 32]) * signed - m * f32::from(t[i / 32]),
                Scales::SixTwice => d * (f32::from(s[i / 16]) - 32.0) * signed,
                Scales::ByteTwice => d * f32::from(s[i / 16] as i8) * signed,
                Scales::NibbleTwice => d * f32::from(s[i / 16]) * signed - m * f32::from(t[i / 16]),
                Scales::Six => d * (f32::from(s[i / 32]) - 32.0) * signed,
            };
        }
    }
}
