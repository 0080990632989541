//! Storages of scales: how the scales of a superblock are packed, and how AVX2 and AVX-512 load them.
//!
//! A superblock is 16 rows × 32 columns (one block), × 64 columns (two) or × 256 columns (eight). Each kind of scale is an array
//! over the sixteen rows; words of bit fields follow each other: word 0 of all rows, word 1 of all rows.
//!
//! ```text
//! F16Scale      d: f16 × 16                                                             32 bytes
//! F16ScaleMin   d: f16 × 16, m: f16 × 16                                                64
//! E8M0Scale     e: u8 × 16                                                              16
//! F16Scale256   d: f16 × 16, for 256 columns                                            32
//! E4M3Scale16   per block, for columns 0..16 and 16..32: u8 × 16                        2 × 32
//! GridScale     d: f16 × 16; a 32-bit word × 16, two for scales of 16 columns           32 + 64 or 128
//!               4 bits per block or half block, from the low end
//! K6ScaleMin    d, dmin: f16 × 16; three 32-bit words × 16                              64 + 192
//!               field i = 0..15 (scale of block i, min of block i - 8): word i / 5, from bit 6 (i mod 5);
//!               field 15: bits 30 and 31 of the three words, the lowest first
//! K6Scale16     d: f16 × 16; three 32-bit words × 16; signed fields                     32 + 192
//!               low half of a word: columns 0..16 of a block, high half: columns 16..32. In each half:
//!               bits 10..16 of word i: block i; bits 4..10 of word i: block 3 + i;
//!               block 6: bits 0..4 of word 0, then bits 0..2 of word 2; block 7: bits 0..4 of word 1, 2..4 of word 2
//! I8Scale16     d: f16 × 16; per block, for columns 0..16 and 16..32: i8 × 16           32 + 8 × 32
//! K4ScaleMin16  d, dmin: f16 × 16; four 32-bit words × 16, 4 bits per half block        64 + 256
//!               words 0 and 1, scales: blocks 0..4 and 4..8, from the low end; columns 0..16 in the low half of the
//!               word, columns 16..32 in the high half
//!               words 2 and 3, mins: half blocks 0..8 and 8..16: i and i + 4 in the two nibbles of byte i
//! K6Scale       d: f16 × 16; a 32-bit word × 16, a 16-bit word × 16; signed fields      32 + 96
//!               field i = 0..5: bits from 2 + 6 i of the first; 5 and 6: bits from 4 and 10 of the second;
//!               7: bits 0..4 of the second, then bits 0..2 of the first
//! ```
//!
//! A field in parts has its high bits in the part named first.
//!
//! Loaded, the scales are [`Affine`]: a weight is `d q + m`. With super-scales (f16, for 256 columns) and sub-scales
//! (integers, for 16 or 32 columns), `d` and `m` are the products of the two.
#![expect(
    clippy::indexing_slicing,
    reason = "scales have BYTES bytes and a group 16 rows, which the callers have checked"
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use bytemuck::pod_read_unaligned;
use half::f16;
use quadriga_graph::blocks::BlockMXFP4;

mod e4m3;
mod grid;
mod k_quants;

pub(super) use e4m3::E4M3Scale16;
pub(super) use grid::GridScale;
pub(super) use k_quants::{I8Scale16, K4ScaleMin16, K6Scale, K6Scale16, K6ScaleMin};

use super::quant_row::QuantRow;
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2, avx512};

/// A storage of scales.
pub(super) trait ScaleStorage {
    /// Bytes of a superblock's scales.
    const BYTES: usize;
    /// Whether 16 columns share a scale, instead of 32.
    const PER_16: bool = false;
    /// Whether minimums are stored. Otherwise `m = -zero point × d`.
    const HAS_MIN: bool = false;

    /// Writes the scales of a row; the row's bits must be 0.
    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>);

    /// Reads the scales of a row.
    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow);

    /// `d` and `m`, or their super-scales, of a row.
    fn decode(row: &QuantRow) -> [f32; 2] {
        [row.scale, row.min].map(|bits| f16::from_bits(bits).to_f32())
    }

    /// The weight of a quant in a column, given what [`decode`](ScaleStorage::decode) returned; rounded as the file
    /// format's dequantizer rounds it.
    fn weight(row: &QuantRow, scales: [f32; 2], column: usize, quant: f32) -> f32;
}

/// One row's scales among those of sixteen rows.
pub(super) struct ScaleRow<B> {
    pub(super) scales: B,
    pub(super) row: usize,
}

impl<B: AsRef<[u8]>> ScaleRow<B> {
    /// The row's `f16` (or other 16 bits) of the array that starts at byte `at`.
    fn u16(&self, at: usize) -> u16 {
        let at = at + 2 * self.row;
        u16::from_le_bytes([self.scales.as_ref()[at], self.scales.as_ref()[at + 1]])
    }

    /// The row's 32-bit word `index` of those that start at byte `at`.
    fn word(&self, at: usize, index: usize) -> u32 {
        let at = at + 64 * index + 4 * self.row;
        u32::from_le(pod_read_unaligned(&self.scales.as_ref()[at..at + 4]))
    }

    /// The row's byte of the array that starts at byte `at`.
    fn byte(&self, at: usize) -> u8 {
        self.scales.as_ref()[at + self.row]
    }
}

impl ScaleRow<&mut [u8]> {
    fn set_u16(&mut self, at: usize, bits: u16) {
        let at = at + 2 * self.row;
        self.scales[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn set_byte(&mut self, at: usize, byte: u8) {
        self.scales[at + self.row] = byte;
    }

    /// Sets bits of a word.
    fn or_word(&mut self, at: usize, index: usize, bits: u32) {
        let at = at + 64 * index + 4 * self.row;
        let old = u32::from_le(pod_read_unaligned(&self.scales[at..at + 4]));
        self.scales[at..at + 4].copy_from_slice(&(old | bits).to_le_bytes());
    }
}

/// `d` and `m` of some rows, for columns 0..16 and 16..32 of a block; both the same unless [`ScaleStorage::PER_16`].
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Affine<V> {
    pub(super) d: [V; 2],
    pub(super) m: [V; 2],
}

#[cfg(target_arch = "x86_64")]
impl<V: Copy> Affine<V> {
    /// Scales without minimums: `m` stands for `d`, to be multiplied with the zero point.
    #[inline(always)]
    pub(super) fn scales(d: [V; 2]) -> Affine<V> {
        Affine { d, m: d }
    }
}

/// The vector loads of a storage. Without stored minimums ([`ScaleStorage::HAS_MIN`]) they give [`Affine::scales`].
#[cfg(target_arch = "x86_64")]
pub(super) trait ScaleLoads: ScaleStorage {
    /// Whether the sub-scales of two half blocks can be loaded as two 16-bit integers.
    const I16_PAIRS: bool = false;
    /// Whether the sub-scales of minimums can be loaded as bytes.
    const MIN_BYTES: bool = false;

    /// The scales of rows `8 octet..8 octet + 8` of a block.
    ///
    /// # Safety
    /// `BYTES` bytes must be readable, and the CPU must have AVX2, FMA and F16C.
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256>;

    /// The super-scales of `d` and `m`; ones where there are none.
    ///
    /// # Safety
    /// `BYTES` bytes must be readable, and the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(_scales: *const u8) -> [__m512; 2] {
        [_mm512_set1_ps(1.0); 2]
    }

    /// The sub-scales of a block, or its scales where there are no super-scales.
    ///
    /// # Safety
    /// As [`ScaleLoads::super_scales`].
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512>;

    /// The sub-scales of `d` as 16-bit integers: of columns 0..16 in the low half of each lane, of 16..32 in the high
    /// half. Zeros unless there are [`I16_PAIRS`](ScaleLoads::I16_PAIRS).
    ///
    /// # Safety
    /// As [`ScaleLoads::super_scales`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn i16_pairs(_scales: *const u8, _block: usize) -> __m512i {
        _mm512_setzero_si512()
    }

    /// The sub-scales of the minimums of a superblock as bytes: byte i of vector v is that of half block 4 v + i. Zeros
    /// unless there are [`MIN_BYTES`](ScaleLoads::MIN_BYTES).
    ///
    /// # Safety
    /// As [`ScaleLoads::super_scales`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,gfni,f16c")]
    unsafe fn min_bytes(_scales: *const u8) -> [__m512i; 4] {
        [_mm512_setzero_si512(); 4]
    }
}

/// An f16 scale for 32 columns.
pub(super) struct F16Scale;

impl ScaleStorage for F16Scale {
    const BYTES: usize = 32;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        scales.set_u16(0, row.scale);
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        row.scale = scales.u16(0);
    }

    fn weight(_row: &QuantRow, [d, _]: [f32; 2], _column: usize, quant: f32) -> f32 {
        d * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for F16Scale {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, _block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller.
        Affine::scales([unsafe { avx2::load_f16(scales, octet) }; 2])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, _block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller.
        Affine::scales([unsafe { avx512::load_f16(scales) }; 2])
    }
}

/// An f16 scale for 256 columns: TQ1_0 and TQ2_0.
pub(super) struct F16Scale256;

impl ScaleStorage for F16Scale256 {
    const BYTES: usize = F16Scale::BYTES;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16Scale::pack(row, scales);
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16Scale::unpack(scales, row);
    }

    fn weight(row: &QuantRow, scales: [f32; 2], column: usize, quant: f32) -> f32 {
        F16Scale::weight(row, scales, column, quant)
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for F16Scale256 {
    const I16_PAIRS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller.
        unsafe { F16Scale::load_avx2(scales, block, octet) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        [unsafe { avx512::load_f16(scales) }; 2]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(_scales: *const u8, _block: usize) -> Affine<__m512> {
        Affine::scales([_mm512_set1_ps(1.0); 2])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn i16_pairs(_scales: *const u8, _block: usize) -> __m512i {
        _mm512_set1_epi16(1)
    }
}

/// An f16 scale and an f16 minimum for 32 columns.
pub(super) struct F16ScaleMin;

impl ScaleStorage for F16ScaleMin {
    const BYTES: usize = 64;
    const HAS_MIN: bool = true;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        scales.set_u16(0, row.scale);
        scales.set_u16(32, row.min);
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        (row.scale, row.min) = (scales.u16(0), scales.u16(32));
    }

    fn weight(_row: &QuantRow, [d, m]: [f32; 2], _column: usize, quant: f32) -> f32 {
        d * quant + m
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for F16ScaleMin {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, _block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller.
        unsafe {
            Affine { d: [avx2::load_f16(scales, octet); 2], m: [avx2::load_f16(scales.add(32), octet); 2] }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, _block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller.
        unsafe { Affine { d: [avx512::load_f16(scales); 2], m: [avx512::load_f16(scales.add(32)); 2] } }
    }
}

/// A power of two for 32 columns, halved because the levels of FP4 are doubled; `QuantRow::scale` is the exponent.
pub(super) struct E8M0Scale;

impl ScaleStorage for E8M0Scale {
    const BYTES: usize = 16;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        scales.set_byte(0, row.scale as u8);
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        row.scale = u16::from(scales.byte(0));
    }

    fn decode(row: &QuantRow) -> [f32; 2] {
        [BlockMXFP4 { exponent: row.scale as u8, codes: [0; 16] }.scale(), 0.0]
    }

    fn weight(_row: &QuantRow, [d, _]: [f32; 2], _column: usize, quant: f32) -> f32 {
        d * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for E8M0Scale {
    /// The two smallest scales, which f32 holds as subnormals, become 0.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, _block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller.
        let exponent = unsafe { avx2::load_u8(scales, octet) };
        let one = _mm256_set1_epi32(1);
        let bits = _mm256_slli_epi32::<23>(_mm256_sub_epi32(_mm256_max_epi32(exponent, one), one));
        Affine::scales([_mm256_castsi256_ps(bits); 2])
    }

    /// The two smallest scales, which f32 holds as subnormals, become 0.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, _block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller.
        let exponent = unsafe { _mm_loadu_si128(scales.cast()) };
        let exponent = _mm512_cvtepu8_epi32(_mm_subs_epu8(exponent, _mm_set1_epi8(1)));
        Affine::scales([_mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)); 2])
    }
}
