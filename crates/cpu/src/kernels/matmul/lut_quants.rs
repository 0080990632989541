//! Storages of quants that are 4-bit codes of a table of levels: IQ4_NL, IQ4_XS, MXFP4 and NVFP4.
#![expect(clippy::indexing_slicing, reason = "codes have 4 bits and tables 16 levels")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

use quadriga_graph::blocks::{IQ4_LEVELS, MXFP4_LEVELS};

#[cfg(target_arch = "x86_64")]
use super::quants::QuantLoads;
use super::quants::{PlaneQuants, Q4};
#[cfg(target_arch = "x86_64")]
use super::simd::avx512;

/// A lookup table for 4-bit codes.
pub(super) trait Lut {
    const LEVELS: &'static [i8; 16];
    /// Added to the levels, so that loaded quants are unsigned.
    const ZERO_POINT: i32;
}

/// The levels of IQ4_NL and IQ4_XS.
pub(super) struct Iq4Levels;

impl Lut for Iq4Levels {
    const LEVELS: &'static [i8; 16] = &IQ4_LEVELS;
    const ZERO_POINT: i32 = 128;
}

/// Twice the values of FP4 (E2M1).
pub(super) struct Fp4Levels;

impl Lut for Fp4Levels {
    const LEVELS: &'static [i8; 16] = &MXFP4_LEVELS;
    const ZERO_POINT: i32 = 12;
}

/// 4-bit codes that index a table, stored as [`Q4`]. A loaded quant is the level plus the table's zero point.
pub(super) struct Q4Lut<L>(PhantomData<L>);

impl<L: Lut> PlaneQuants for Q4Lut<L> {
    const PLANES: usize = Q4::PLANES;
    const LOADED: [i32; 2] = {
        let (mut range, mut i) = ([i32::MAX, i32::MIN], 0);
        while i < 16 {
            let level = L::LEVELS[i] as i32 + L::ZERO_POINT;
            range = [
                if level < range[0] { level } else { range[0] },
                if level > range[1] { level } else { range[1] },
            ];
            i += 1;
        }
        range
    };

    fn pack_lane(v: usize, quants: u32, or: impl FnMut(usize, u32)) {
        Q4::pack_lane(v, quants, or);
    }

    fn unpack_one(v: usize, byte: impl Fn(usize) -> u8) -> u8 {
        Q4::unpack_one(v, byte)
    }

    fn value(quant: u8, _zero_point: i32) -> i32 {
        i32::from(L::LEVELS[usize::from(quant & 15)])
    }
}

#[cfg(target_arch = "x86_64")]
impl<L: Lut> Q4Lut<L> {
    /// The table plus a number, modulo 256.
    const fn shifted_levels(by: i32) -> [i8; 16] {
        let (mut levels, mut i) = ([0; 16], 0);
        while i < 16 {
            levels[i] = (L::LEVELS[i] as i32 + by) as u8 as i8;
            i += 1;
        }
        levels
    }
}

#[cfg(target_arch = "x86_64")]
impl<L: Lut> QuantLoads for Q4Lut<L> {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(block: *const u8, octet: usize) -> [__m256i; 8] {
        let table =
            const { Self::shifted_levels(L::ZERO_POINT - if Self::LOADED[1] > 127 { 128 } else { 0 }) };
        // SAFETY: promised by the caller; the table is 16 bytes long.
        let (mut q, table) = unsafe { (Q4::load_avx2(block, octet), _mm_loadu_si128(table.as_ptr().cast())) };
        let table = _mm256_broadcastsi128_si256(table);
        for q in &mut q {
            *q = _mm256_shuffle_epi8(table, *q);
        }
        q
    }

    /// Only the low six bits of an index count: four copies of the table let the other nibble of a byte be anything.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn load_avx512(block: *const u8) -> [__m512i; 8] {
        let table = const { Self::shifted_levels(L::ZERO_POINT) };
        // SAFETY: the block has four planes; the table is 16 bytes long.
        let ([a, b, c, d], table): ([__m512i; 4], _) = unsafe {
            (std::array::from_fn(|v| avx512::plane(block, v)), _mm_loadu_si128(table.as_ptr().cast()))
        };
        let table = _mm512_broadcast_i32x4(table);
        let low = |v| _mm512_permutexvar_epi8(v, table);
        let high = |v| _mm512_permutexvar_epi8(_mm512_srli_epi16::<4>(v), table);
        [low(a), low(b), low(c), low(d), high(a), high(b), high(c), high(d)]
    }
}
