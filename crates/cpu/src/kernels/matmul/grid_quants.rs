//! Storages of quants that are indices into a code book: IQ1, IQ2 and IQ3.
//!
//! A block has 4 (IQ1, IQ2) or 8 (IQ3) indices for each row, of 8 or 4 columns each. Of every row are stored
//!
//! ```text
//! 1 or 2 planes   the low eight bits of the indices, four to a 32-bit lane
//! 1 plane         the signs of 32 columns; IQ1 has none
//! 0 to 2 bytes    for each index, from the low end: its high bits; in IQ1 also the direction of the shift, above them
//! ```
//!
//! That is the file's size, or little more: a sign that the file omits because it follows from seven others is stored,
//! and the bits of the sub-scales are apart. In [`QuantRow::quants`], a row has in its 32 bytes of a block the low bits
//! from byte 0 on, the signs from byte 8 on, and the high bits from byte 12 on.
//!
//! A load looks the indices of all rows up in a table of nibbles, and adds the signs:
//!
//! ```text
//! table[index], 32 bits   byte i: code of column i × 2, and from bit 4, code of column i + 4 × 2
//! signs, 32 bits          byte i: bit 0 is the sign of column i, bit 4 that of column i + 4
//! levels[nibble]          columns 0..4 of eight are the low nibbles, columns 4..8 the high ones
//! ```
#![expect(
    clippy::indexing_slicing,
    reason = "blocks have BYTES bytes, rows of quants 32, and indices as many bits as their code book needs"
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

use quadriga_graph::blocks::{
    BlockIQ1_M, BlockIQ1_S, BlockIQ2_S, BlockIQ2_XS, BlockIQ2_XXS, BlockIQ3_S, BlockIQ3_XXS, GridBlock,
};

use super::quant_row::{BLOCK, QuantRow};
#[cfg(target_arch = "x86_64")]
use super::quants::QuantLoads;
use super::quants::QuantStorage;
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2, avx512};

/// Where [`QuantRow::quants`] has the signs and the high bits of a block.
const SIGNS_AT: usize = 8;
const HIGH_AT: usize = 12;

/// A type with a code book, and how its indices are packed.
pub(super) trait PackedGrid: GridBlock {
    /// Bits of an index beyond eight; in IQ1 one more.
    const HIGH_BITS: usize;
    /// Whether the sign of an index's columns is the highest of these bits, because they have it in common.
    const COMMON_SIGN: bool;
    /// The code book as nibbles.
    const TABLE: &'static [u32];
}

/// The entries of a code book as nibbles.
const fn nibbles<B: GridBlock, const N: usize>() -> [u32; N] {
    assert!(B::BOOK.len() == N);
    let bits = 16 / B::ENTRY_LEN;
    let (mut table, mut entry) = ([0; N], 0);
    while entry < N {
        let mut column = 0;
        while column < B::ENTRY_LEN {
            let code = B::BOOK[entry] as u32 >> (column * bits) & ((1 << bits) - 1);
            table[entry] |= code << (column % 4 * 8 + column / 4 * 4 + 1);
            column += 1;
        }
        entry += 1;
    }
    table
}

macro_rules! packed_grids {
    ($($block:ident: $length:literal entries, $high_bits:literal high bits, common sign $common:literal;)*) => {
        $(
            impl PackedGrid for $block {
                const HIGH_BITS: usize = $high_bits;
                const COMMON_SIGN: bool = $common;
                const TABLE: &'static [u32] = &nibbles::<$block, $length>();
            }
        )*
    };
}

packed_grids! {
    BlockIQ1_S: 2048 entries, 4 high bits, common sign true;
    BlockIQ1_M: 2048 entries, 4 high bits, common sign true;
    BlockIQ2_XXS: 256 entries, 0 high bits, common sign false;
    BlockIQ2_XS: 512 entries, 2 high bits, common sign false;
    BlockIQ2_S: 1024 entries, 2 high bits, common sign false;
    BlockIQ3_XXS: 256 entries, 0 high bits, common sign false;
    BlockIQ3_S: 512 entries, 1 high bits, common sign false;
}

impl QuantRow {
    /// Takes a block of the file.
    pub(super) fn set_grid<B: PackedGrid>(&mut self, block: &B) {
        let entries = BLOCK / B::ENTRY_LEN;
        self.scale = u16::from_le_bytes(block.scale().0);
        for (b, bytes) in self.quants.chunks_exact_mut(BLOCK).enumerate() {
            let mut high = 0_usize;
            for (e, byte) in bytes.iter_mut().take(entries).enumerate() {
                let index = block.index(b * entries + e);
                let common = usize::from(B::COMMON_SIGN && block.signs(4 * b + e) != 0);
                *byte = index as u8;
                high |= (index >> 8 | common << B::HIGH_BITS.saturating_sub(1)) << (B::HIGH_BITS * e);
            }
            (0..4).for_each(|octet| bytes[SIGNS_AT + octet] = block.signs(4 * b + octet));
            bytes[HIGH_AT..HIGH_AT + 2].copy_from_slice(&(high as u16).to_le_bytes());
        }
        (0..16).for_each(|i| self.sub_scales[i] = block.group_scale(i));
    }
}

/// Indices into the code book of `B`. A loaded quant is the level plus the zero point.
pub(super) struct GridQuants<B>(PhantomData<B>);

impl<B: PackedGrid> GridQuants<B> {
    /// Added to the levels, so that loaded quants are unsigned.
    pub(super) const ZERO_POINT: i32 = {
        let (mut largest, mut i) = (0, 0);
        while i < 16 {
            let level = (B::LEVELS[i] as i32).abs();
            largest = if level > largest { level } else { largest };
            i += 1;
        }
        largest
    };
    /// Indices of a row of a block.
    const ENTRIES: usize = BLOCK / B::ENTRY_LEN;
    /// Planes of low bits.
    const INDEX_PLANES: usize = Self::ENTRIES / 4;
    /// Planes of low bits and of signs.
    const PLANES: usize = Self::INDEX_PLANES + if B::COMMON_SIGN { 0 } else { 1 };
    /// Bytes of a row's high bits.
    const HIGH_BYTES: usize = Self::ENTRIES * B::HIGH_BITS / 8;
    /// The bits of [`PackedGrid::HIGH_BITS`] that belong to the index.
    const HIGH_MASK: usize = (1 << (B::HIGH_BITS - if B::COMMON_SIGN { 1 } else { 0 })) - 1;

    /// The levels plus the zero point.
    const LEVELS: [u8; 16] = {
        let (mut levels, mut i) = ([0; 16], 0);
        while i < 16 {
            levels[i] = (B::LEVELS[i] as i32 + Self::ZERO_POINT) as u8;
            i += 1;
        }
        levels
    };
}

impl<B: PackedGrid> QuantStorage for GridQuants<B> {
    const BYTES: usize = 64 * Self::PLANES + 16 * Self::HIGH_BYTES;
    const RANGE: [i32; 2] = [0, 2 * Self::ZERO_POINT];
    const COSTLY: bool = true;

    fn pack(quants: &[u8], block: &mut [u8], row: usize) {
        let (planes, high) = block.split_at_mut(64 * Self::PLANES);
        for (p, plane) in planes.chunks_exact_mut(64).enumerate() {
            let from = if p < Self::INDEX_PLANES { 4 * p } else { SIGNS_AT };
            plane[4 * row..4 * row + 4].copy_from_slice(&quants[from..from + 4]);
        }
        high[row * Self::HIGH_BYTES..(row + 1) * Self::HIGH_BYTES]
            .copy_from_slice(&quants[HIGH_AT..HIGH_AT + Self::HIGH_BYTES]);
    }

    fn unpack(block: &[u8], row: usize, quants: &mut [u8]) {
        let byte = |plane: usize, i: usize| block[64 * plane + 4 * row + i];
        let mut high = [0; 2];
        let at = 64 * Self::PLANES + row * Self::HIGH_BYTES;
        high[..Self::HIGH_BYTES].copy_from_slice(&block[at..at + Self::HIGH_BYTES]);
        for (k, quant) in quants.iter_mut().enumerate() {
            let (e, column) = (k / B::ENTRY_LEN, k % B::ENTRY_LEN);
            let high = usize::from(u16::from_le_bytes(high)) >> (B::HIGH_BITS * e);
            let index = usize::from(byte(e / 4, e % 4)) | (high & Self::HIGH_MASK) << 8;
            let code = B::TABLE[index] >> (column % 4 * 8 + column / 4 * 4) & 14;
            let sign = if B::COMMON_SIGN {
                high >> (B::HIGH_BITS - 1) & 1
            } else {
                usize::from(byte(Self::INDEX_PLANES, k / 8) >> (k % 8) & 1)
            };
            *quant = Self::LEVELS[code as usize | sign];
        }
    }

    fn value(quant: u8, zero_point: i32) -> i32 {
        i32::from(quant) - zero_point
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: PackedGrid> GridQuants<B> {
    /// The high bits of eight rows, one row to a lane.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn high_avx2(block: *const u8, octet: usize) -> __m256i {
        let at = block.wrapping_add(64 * Self::PLANES);
        // SAFETY: promised by the caller: sixteen rows of these bytes.
        unsafe {
            match Self::HIGH_BYTES {
                0 => _mm256_setzero_si256(),
                1 => avx2::load_u8(at, octet),
                _ => _mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(16 * octet).cast())),
            }
        }
    }

    /// The nibbles of entry `e` of eight rows.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn entry_avx2(low: __m256i, high: __m256i, e: usize) -> __m256i {
        let mut index = _mm256_and_si256(avx2::right(low, e % 4 * 8), _mm256_set1_epi32(255));
        if Self::HIGH_MASK > 0 {
            let high = avx2::right(avx2::left(high, 8), B::HIGH_BITS * e);
            index = avx2::or_masked(index, high, _mm256_set1_epi32((Self::HIGH_MASK << 8) as i32));
        }
        // SAFETY: the index has as many bits as the table needs.
        unsafe { _mm256_i32gather_epi32::<4>(B::TABLE.as_ptr().cast(), index) }
    }

    /// The signs of columns `8 j..8 j + 8` of eight rows, in bits 0 and 4 of each byte.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn signs_avx2(block: *const u8, octet: usize, high: __m256i, j: usize) -> __m256i {
        let is_set = |a: __m256i, mask: __m256i| _mm256_cmpeq_epi8(_mm256_and_si256(a, mask), mask);
        if B::COMMON_SIGN {
            let mask = _mm256_set1_epi32(1 << (B::HIGH_BITS * (j + 1) - 1));
            let set = _mm256_cmpeq_epi32(_mm256_and_si256(high, mask), mask);
            return _mm256_and_si256(set, _mm256_set1_epi8(0x11));
        }
        // SAFETY: promised by the caller: the plane of signs follows those of indices.
        let signs = unsafe { avx2::load_word(block, Self::INDEX_PLANES, octet) };
        // Byte j of each row, four times: for bits 0 to 3 and 4 to 7.
        let places = _mm256_setr_epi32(
            0,
            0x0404_0404,
            0x0808_0808,
            0x0c0c_0c0c,
            0,
            0x0404_0404,
            0x0808_0808,
            0x0c0c_0c0c,
        );
        let signs = _mm256_shuffle_epi8(signs, _mm256_add_epi8(places, _mm256_set1_epi8(j as i8)));
        let first = is_set(signs, _mm256_set1_epi32(0x0804_0201));
        let second = is_set(signs, _mm256_set1_epi32(0x8040_2010_u32.cast_signed()));
        avx2::or_masked(_mm256_and_si256(first, _mm256_set1_epi8(1)), second, _mm256_set1_epi8(16))
    }

    /// The nibbles of entry `e` of sixteen rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn entry_avx512(low: __m512i, high: __m512i, e: usize) -> __m512i {
        let mut index = _mm512_and_si512(avx512::right(low, e % 4 * 8), _mm512_set1_epi32(255));
        if Self::HIGH_MASK > 0 {
            let high = avx512::right(avx512::left(high, 8), B::HIGH_BITS * e);
            index = avx512::or_masked(index, high, _mm512_set1_epi32((Self::HIGH_MASK << 8) as i32));
        }
        // SAFETY: the index has as many bits as the table needs.
        unsafe { _mm512_i32gather_epi32::<4>(index, B::TABLE.as_ptr().cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: PackedGrid> QuantLoads for GridQuants<B> {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        let mut q = [_mm256_setzero_si256(); 8];
        // SAFETY: promised by the caller; the levels are 16 bytes long.
        unsafe {
            let levels = _mm_loadu_si128(const { &Self::LEVELS }.as_ptr().cast());
            let levels = _mm256_broadcastsi128_si256(levels);
            let high = Self::high_avx2(block, octet);
            let entry = |e: usize| Self::entry_avx2(avx2::load_word(block, e / 4, octet), high, e);
            for (j, pair) in q.chunks_exact_mut(2).enumerate() {
                let codes = match B::ENTRY_LEN {
                    8 => entry(j),
                    _ => _mm256_or_si256(entry(2 * j), avx2::left(entry(2 * j + 1), 4)),
                };
                let nibbles = _mm256_or_si256(codes, Self::signs_avx2(block, octet, high, j));
                let level = |a| _mm256_shuffle_epi8(levels, _mm256_and_si256(a, _mm256_set1_epi8(15)));
                pair[0] = level(nibbles);
                pair[1] = level(_mm256_srli_epi16::<4>(nibbles));
            }
        }
        q
    }

    /// Only the low six bits of an index into the levels count: four copies let the other nibble of a byte be anything.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        let mut q = [_mm512_setzero_si512(); 8];
        // SAFETY: promised by the caller; the levels are 16 bytes long.
        unsafe {
            let levels = _mm_loadu_si128(const { &Self::LEVELS }.as_ptr().cast());
            let levels = _mm512_broadcast_i32x4(levels);
            let at = block.wrapping_add(64 * Self::PLANES);
            let high = match Self::HIGH_BYTES {
                0 => _mm512_setzero_si512(),
                1 => _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())),
                _ => _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast())),
            };
            let entry = |e: usize| Self::entry_avx512(avx512::plane(block, e / 4), high, e);
            for (j, pair) in q.chunks_exact_mut(2).enumerate() {
                let codes = match B::ENTRY_LEN {
                    8 => entry(j),
                    _ => _mm512_or_si512(entry(2 * j), avx512::left(entry(2 * j + 1), 4)),
                };
                let bits = _mm512_set1_epi8(0x11);
                let nibbles = if B::COMMON_SIGN {
                    let mask = _mm512_set1_epi32(1 << (B::HIGH_BITS * (j + 1) - 1));
                    _mm512_mask_or_epi32(codes, _mm512_test_epi32_mask(high, mask), codes, bits)
                } else {
                    // Byte i of a row is the signs from bit 8 j + i on; two rows share 64 bits.
                    let places = _mm512_set1_epi64(0x2322_2120_0302_0100 + 0x0808_0808_0808_0808 * j as i64);
                    let signs = avx512::plane(block, Self::INDEX_PLANES);
                    avx512::or_masked(codes, _mm512_multishift_epi64_epi8(places, signs), bits)
                };
                pair[0] = _mm512_permutexvar_epi8(nibbles, levels);
                pair[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16::<4>(nibbles), levels);
            }
        }
        q
    }
}
