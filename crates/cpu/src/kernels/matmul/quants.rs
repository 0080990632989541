//! Storages of quants: how the 16 × 32 quants of a block are packed, and how AVX2 and AVX-512 load them.
//!
//! The four bytes of one 32-bit lane are four neighbouring columns of one row, and a 512-bit vector holds four columns
//! of all sixteen rows. That is the operand of VNNI's dot product, and a block is half of an AMX int8 tile:
//!
//! ```text
//! vector v (v = 0..8), lane r (r = 0..16), byte i (i = 0..4)  =  row r, column 4 v + i
//!
//!            lane 0          lane 1                lane 15
//! vector 0 | r0: c0 c1 c2 c3 | r1: c0 c1 c2 c3 | … | r15: c0 c1 c2 c3 |
//! vector 1 | r0: c4 c5 c6 c7 | …
//! ```
//!
//! Quants of less than 8 bits are stored as planes of 64-byte vectors:
//!
//! ```text
//! Q8  8 planes: plane v is vector v                                                      512 bytes
//! Q4  4 planes: vector v in the low nibbles, vector v + 4 in the high nibbles            256
//! Q5  Q4, then 1 plane: bit 4 of vector v is bit v + 4 (mod 8) of each byte              320
//! Q6  Q4, then 2 planes: bits 4 and 5 of vectors 0 1 2 3 are in the high nibbles,        384
//!     those of vectors 4 5 6 7 in the low nibbles: two in the first plane, two in the next
//! Q2  2 planes: bits 2 (v mod 4) of plane v / 4 are vector v                             128
//! Q3  3 planes, from bit 7 down:                                                         192
//!     plane 0 | vector 6, bits 1 0 | vector 3 | vector 0 |
//!     plane 1 | vector 7, bits 1 0 | vector 4 | vector 1 |
//!     plane 2 | vector 5 | vector 7, bit 2 | vector 6, bit 2 | vector 2 |
//! ```
//!
//! The high bits of Q5 and Q6 that belong to high nibbles lie in low nibbles, and the other way round: AVX-512 merges
//! the two with one ternary operation, and moves every bit to its place with one more (an affine map of GFNI).
#![expect(
    clippy::indexing_slicing,
    reason = "blocks have BYTES bytes, rows of quants 32, and a group 16 rows, which the callers have checked"
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use bytemuck::pod_read_unaligned;

#[cfg(target_arch = "x86_64")]
use super::simd::{avx2, avx512};

/// A storage of unsigned quants.
pub(super) trait QuantStorage {
    /// Bytes of a block.
    const BYTES: usize;
    /// The smallest and the largest loaded quant.
    const RANGE: [i32; 2];
    /// Whether unpacking takes about as long as multiplying several rows.
    const COSTLY: bool = false;

    /// Writes a row, 32 bytes of [`QuantRow::quants`](super::quant_row::QuantRow); the row's bits in the block must be
    /// 0.
    fn pack(quants: &[u8], block: &mut [u8], row: usize);

    /// Reads the 32 quants of a row.
    fn unpack(block: &[u8], row: usize, quants: &mut [u8]);

    /// The integer that an unpacked quant stands for.
    fn value(quant: u8, zero_point: i32) -> i32;
}

/// A storage of quants in planes of 64-byte vectors.
pub(super) trait PlaneQuants {
    /// The planes of a block.
    const PLANES: usize;
    /// The smallest and the largest loaded quant.
    const LOADED: [i32; 2];

    /// Writes the four quants `4 v..4 v + 4` of a row, one in each byte, with `or(plane, bits)`: it sets bits of the
    /// row's lane of a plane.
    fn pack_lane(v: usize, quants: u32, or: impl FnMut(usize, u32));

    /// Reads quant `4 v + i` of a row; `byte(plane)` is byte `i` of the row's lane.
    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8;

    /// The integer that a packed quant stands for.
    fn value(quant: u8, zero_point: i32) -> i32 {
        i32::from(quant) - zero_point
    }
}

impl<P: PlaneQuants> QuantStorage for P {
    const BYTES: usize = 64 * P::PLANES;
    const RANGE: [i32; 2] = P::LOADED;

    fn pack(quants: &[u8], block: &mut [u8], row: usize) {
        for v in 0..8 {
            let four = pod_read_unaligned(&quants[4 * v..4 * v + 4]);
            P::pack_lane(v, u32::from_le(four), |plane, bits| {
                let at = plane * 64 + row * 4;
                let old: u32 = pod_read_unaligned(&block[at..at + 4]);
                block[at..at + 4].copy_from_slice(&(old | bits.to_le()).to_ne_bytes());
            });
        }
    }

    fn unpack(block: &[u8], row: usize, quants: &mut [u8]) {
        for (k, quant) in quants.iter_mut().enumerate() {
            *quant = P::unpack_one(k / 4, |plane| block[plane * 64 + row * 4 + k % 4]);
        }
    }

    fn value(quant: u8, zero_point: i32) -> i32 {
        P::value(quant, zero_point)
    }
}

/// The vector loads of a storage.
#[cfg(target_arch = "x86_64")]
pub(super) trait QuantLoads: QuantStorage {
    /// Loads rows `8 octet..8 octet + 8` of a block. Quants above 127 would overflow the 16-bit pair sums of `maddubs`:
    /// a storage that has such quants subtracts 128 from all of them.
    ///
    /// # Safety
    /// The block must be readable, and the CPU must have AVX2.
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8];

    /// Loads a block as unsigned bytes.
    ///
    /// # Safety
    /// The block must be readable, and the CPU must have AVX-512 with VBMI and GFNI.
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8];
}

/// 8-bit quants.
pub(super) struct Q8;

impl PlaneQuants for Q8 {
    const PLANES: usize = 8;
    const LOADED: [i32; 2] = [0, 255];

    fn pack_lane(v: usize, quants: u32, mut or: impl FnMut(usize, u32)) {
        or(v, quants);
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        byte(v)
    }
}

#[cfg(target_arch = "x86_64")]
impl QuantLoads for Q8 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        let mut q = [_mm256_setzero_si256(); 8];
        for (v, q) in q.iter_mut().enumerate() {
            // SAFETY: the block has eight planes.
            *q = _mm256_xor_si256(unsafe { avx2::load_word(block, v, octet) }, _mm256_set1_epi8(-128));
        }
        q
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the block has eight planes.
        std::array::from_fn(|v| unsafe { avx512::plane(block, v) })
    }
}

/// 4-bit quants.
pub(super) struct Q4;

impl PlaneQuants for Q4 {
    const PLANES: usize = 4;
    const LOADED: [i32; 2] = [0, 15];

    fn pack_lane(v: usize, quants: u32, mut or: impl FnMut(usize, u32)) {
        or(v % 4, (quants & 0x0f0f_0f0f) << (4 * (v / 4)));
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        (byte(v % 4) >> (4 * (v / 4))) & 15
    }
}

#[cfg(target_arch = "x86_64")]
impl QuantLoads for Q4 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        let mask = _mm256_set1_epi8(15);
        let mut q = [_mm256_setzero_si256(); 8];
        let (low, high) = q.split_at_mut(4);
        for (v, (low, high)) in low.iter_mut().zip(high).enumerate() {
            // SAFETY: the block has four planes.
            let both = unsafe { avx2::load_word(block, v, octet) };
            *low = _mm256_and_si256(both, mask);
            *high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
        }
        q
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        let mask = _mm512_set1_epi8(15);
        // SAFETY: the block has four planes.
        let [a, b, c, d]: [__m512i; 4] = std::array::from_fn(|v| unsafe { avx512::plane(block, v) });
        let low = |v| _mm512_and_si512(v, mask);
        let high = |v| avx512::move_bits!(v, (4, 0, 4), (0, 0, 0));
        [low(a), low(b), low(c), low(d), high(a), high(b), high(c), high(d)]
    }
}

/// 5-bit quants: planes of 4 bits, and one of bit 4.
pub(super) struct Q5;

impl PlaneQuants for Q5 {
    const PLANES: usize = 5;
    const LOADED: [i32; 2] = [0, 31];

    fn pack_lane(v: usize, quants: u32, mut or: impl FnMut(usize, u32)) {
        Q4::pack_lane(v, quants, &mut or);
        or(4, ((quants >> 4) & 0x0101_0101) << (v ^ 4));
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        Q4::unpack_one(v, &byte) | ((byte(4) >> (v ^ 4)) & 1) << 4
    }
}

#[cfg(target_arch = "x86_64")]
impl QuantLoads for Q5 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        // SAFETY: the block has four planes of nibbles, and one of high bits.
        let (mut q, bits) = unsafe { (Q4::load_avx2(block, octet), avx2::load_word(block, 4, octet)) };
        for (v, q) in q.iter_mut().enumerate() {
            *q = avx2::or_masked(*q, avx2::shift_bits(bits, (v as i32 ^ 4) - 4), _mm256_set1_epi8(16));
        }
        q
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the block has four planes of nibbles, and one of high bits.
        let ([a, b, c, d], bits): ([__m512i; 4], _) =
            unsafe { (std::array::from_fn(|v| avx512::plane(block, v)), avx512::plane(block, 4)) };
        let low = |v| avx512::select_bits(v, bits, 0x0f);
        let high = |v| avx512::select_bits(v, bits, 0xf0);
        [
            avx512::move_bits!(low(a), (0, 0, 4), (4, 4, 1)),
            avx512::move_bits!(low(b), (0, 0, 4), (5, 4, 1)),
            avx512::move_bits!(low(c), (0, 0, 4), (6, 4, 1)),
            avx512::move_bits!(low(d), (0, 0, 4), (7, 4, 1)),
            avx512::move_bits!(high(a), (4, 0, 4), (0, 4, 1)),
            avx512::move_bits!(high(b), (4, 0, 4), (1, 4, 1)),
            avx512::move_bits!(high(c), (4, 0, 4), (2, 4, 1)),
            avx512::move_bits!(high(d), (4, 0, 4), (3, 4, 1)),
        ]
    }
}

/// 6-bit quants: planes of 4 bits, and of bits 4 and 5.
pub(super) struct Q6;

impl Q6 {
    /// Plane and shift of bits 4 and 5 of vector `v`.
    const fn high_bits(v: usize) -> (usize, usize) {
        (4 + v / 2 % 2, 2 * (v % 2) + if v < 4 { 4 } else { 0 })
    }
}

impl PlaneQuants for Q6 {
    const PLANES: usize = 6;
    const LOADED: [i32; 2] = [0, 63];

    fn pack_lane(v: usize, quants: u32, mut or: impl FnMut(usize, u32)) {
        Q4::pack_lane(v, quants, &mut or);
        let (plane, shift) = Q6::high_bits(v);
        or(plane, ((quants >> 4) & 0x0303_0303) << shift);
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        let (plane, shift) = Q6::high_bits(v);
        Q4::unpack_one(v, &byte) | ((byte(plane) >> shift) & 3) << 4
    }
}

#[cfg(target_arch = "x86_64")]
impl QuantLoads for Q6 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        // SAFETY: the block has four planes of nibbles, and two of high bits.
        let (mut q, bits) = unsafe {
            (
                Q4::load_avx2(block, octet),
                [avx2::load_word(block, 4, octet), avx2::load_word(block, 5, octet)],
            )
        };
        for (v, q) in q.iter_mut().enumerate() {
            let bits = if v / 2 % 2 == 0 { bits[0] } else { bits[1] };
            let from = 2 * (v as i32 % 2) + if v < 4 { 4 } else { 0 };
            *q = avx2::or_masked(*q, avx2::shift_bits(bits, from - 4), _mm256_set1_epi8(0x30));
        }
        q
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the block has four planes of nibbles, and two of high bits.
        let [a, b, c, d, first, second]: [__m512i; 6] =
            std::array::from_fn(|v| unsafe { avx512::plane(block, v) });
        let low = |v, bits| avx512::select_bits(v, bits, 0x0f);
        let high = |v, bits| avx512::select_bits(v, bits, 0xf0);
        [
            avx512::move_bits!(low(a, first), (0, 0, 4), (4, 4, 2)),
            avx512::move_bits!(low(b, first), (0, 0, 4), (6, 4, 2)),
            avx512::move_bits!(low(c, second), (0, 0, 4), (4, 4, 2)),
            avx512::move_bits!(low(d, second), (0, 0, 4), (6, 4, 2)),
            avx512::move_bits!(high(a, first), (4, 0, 4), (0, 4, 2)),
            avx512::move_bits!(high(b, first), (4, 0, 4), (2, 4, 2)),
            avx512::move_bits!(high(c, second), (4, 0, 4), (0, 4, 2)),
            avx512::move_bits!(high(d, second), (4, 0, 4), (2, 4, 2)),
        ]
    }
}

/// 2-bit quants.
pub(super) struct Q2;

impl PlaneQuants for Q2 {
    const PLANES: usize = 2;
    const LOADED: [i32; 2] = [0, 3];

    fn pack_lane(v: usize, quants: u32, mut or: impl FnMut(usize, u32)) {
        or(v / 4, (quants & 0x0303_0303) << (2 * (v % 4)));
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        (byte(v / 4) >> (2 * (v % 4))) & 3
    }
}

#[cfg(target_arch = "x86_64")]
impl QuantLoads for Q2 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        // SAFETY: the block has two planes.
        let bits = unsafe { [avx2::load_word(block, 0, octet), avx2::load_word(block, 1, octet)] };
        let mut q = [_mm256_setzero_si256(); 8];
        for (v, q) in q.iter_mut().enumerate() {
            let bits = if v < 4 { bits[0] } else { bits[1] };
            *q = _mm256_and_si256(avx2::shift_bits(bits, 2 * (v as i32 % 4)), _mm256_set1_epi8(3));
        }
        q
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the block has two planes.
        let (a, b) = unsafe { (avx512::plane(block, 0), avx512::plane(block, 1)) };
        let mask = _mm512_set1_epi8(3);
        [
            _mm512_and_si512(a, mask),
            avx512::move_bits!(a, (2, 0, 2), (0, 0, 0)),
            avx512::move_bits!(a, (4, 0, 2), (0, 0, 0)),
            avx512::move_bits!(a, (6, 0, 2), (0, 0, 0)),
            _mm512_and_si512(b, mask),
            avx512::move_bits!(b, (2, 0, 2), (0, 0, 0)),
            avx512::move_bits!(b, (4, 0, 2), (0, 0, 0)),
            avx512::move_bits!(b, (6, 0, 2), (0, 0, 0)),
        ]
    }
}

/// 3-bit quants.
pub(super) struct Q3;

impl Q3 {
    /// Plane and shift of vector `v`; for the last two vectors, of their two low bits.
    const fn low_bits(v: usize) -> (usize, usize) {
        (if v < 6 { v % 3 } else { v - 6 }, if v == 5 { 5 } else { v / 3 * 3 })
    }
}

impl PlaneQuants for Q3 {
    const PLANES: usize = 3;
    const LOADED: [i32; 2] = [0, 7];

    fn pack_lane(v: usize, quants: u32, mut or: impl FnMut(usize, u32)) {
        let (plane, shift) = Q3::low_bits(v);
        or(plane, if v < 6 { quants << shift } else { (quants & 0x0303_0303) << shift });
        if v >= 6 {
            or(2, ((quants >> 2) & 0x0101_0101) << (v - 3));
        }
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        let (plane, shift) = Q3::low_bits(v);
        let low = byte(plane) >> shift;
        if v < 6 { low & 7 } else { low & 3 | ((byte(2) >> (v - 3)) & 1) << 2 }
    }
}

#[cfg(target_arch = "x86_64")]
impl QuantLoads for Q3 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        // SAFETY: the block has three planes.
        let (a, b, c) = unsafe {
            (
                avx2::load_word(block, 0, octet),
                avx2::load_word(block, 1, octet),
                avx2::load_word(block, 2, octet),
            )
        };
        let three = |v, shift| _mm256_and_si256(avx2::shift_bits(v, shift), _mm256_set1_epi8(7));
        let two = |v| _mm256_and_si256(avx2::shift_bits(v, 6), _mm256_set1_epi8(3));
        let third = |shift| _mm256_and_si256(avx2::shift_bits(c, shift), _mm256_set1_epi8(4));
        [
            three(a, 0),
            three(b, 0),
            three(c, 0),
            three(a, 3),
            three(b, 3),
            three(c, 5),
            _mm256_or_si256(two(a), third(1)),
            _mm256_or_si256(two(b), third(2)),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the block has three planes.
        let (a, b, c) =
            unsafe { (avx512::plane(block, 0), avx512::plane(block, 1), avx512::plane(block, 2)) };
        let mask = _mm512_set1_epi8(7);
        [
            _mm512_and_si512(a, mask),
            _mm512_and_si512(b, mask),
            _mm512_and_si512(c, mask),
            avx512::move_bits!(a, (3, 0, 3), (0, 0, 0)),
            avx512::move_bits!(b, (3, 0, 3), (0, 0, 0)),
            avx512::move_bits!(c, (5, 0, 3), (0, 0, 0)),
            avx512::move_bits!(avx512::select_bits(a, c, 0xc0), (6, 0, 2), (3, 2, 1)),
            avx512::move_bits!(avx512::select_bits(b, c, 0xc0), (6, 0, 2), (4, 2, 1)),
        ]
    }
}
