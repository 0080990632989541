//! AVX2 kernels, and the loading of packed weights for them: eight rows of a group at a time.
//!
//! Quants of up to 7 bits stay unsigned, as `maddubs` wants one side; wider ones are loaded signed, and the kernel
//! moves their sign to the activations.

pub(super) mod f32;
pub(super) mod int16;
pub(super) mod int8x2;
pub(super) mod prepare;

use std::arch::x86_64::*;

use super::format::PackedFormat;
use super::quants::{QuantLoads, QuantStorage};
use super::scales::{Affine, ScaleLoads, ScaleStorage};

/// A packed format as AVX2 kernels see it.
trait Avx2Format: PackedFormat<Quants: QuantLoads, Scales: ScaleLoads> {
    /// Whether loaded quants are signed: 128 less than packed.
    const SIGNED: bool = Self::Quants::RANGE[1] > 127;
    /// The smallest and the largest loaded quant.
    const RANGE: [i32; 2] = {
        let [least, most] = Self::Quants::RANGE;
        if Self::SIGNED { [least - 128, most - 128] } else { [least, most] }
    };
    /// The loaded quant that stands for 0, unless there are minimums.
    const LOADED_ZERO: i32 = Self::ZERO_POINT - if Self::SIGNED { 128 } else { 0 };
    /// Whether `m` can differ from 0.
    const HAS_M: bool = Self::Scales::HAS_MIN || Self::LOADED_ZERO != 0;
    /// How many results of `maddubs` can be added in 16 bits, each at most 2 × 127 × the largest quant: 1, 2, 4 or 8.
    const MADDUBS_RUN: usize = {
        let [least, most] = Self::RANGE;
        let largest = if -least > most { -least } else { most };
        let count = i16::MAX as i32 / (2 * 127 * largest);
        if count >= 8 { 8 } else { 1 << count.ilog2() }
    };

    /// Rows `8 octet..8 octet + 8` of a block.
    ///
    /// # Safety
    /// The superblock must be readable, `block < BLOCKS`, `octet < 2`, and the CPU must have AVX2, FMA and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn quants(superblock: *const u8, block: usize, octet: usize) -> [__m256i; 8] {
        // SAFETY: the block lies inside the superblock; half of each plane belongs to eight rows.
        unsafe { Self::Quants::load_avx2(superblock.add(block * Self::Quants::BYTES + 32 * octet)) }
    }

    /// `d` and `m` of these rows.
    ///
    /// # Safety
    /// As [`Avx2Format::quants`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(superblock: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: the scales follow the quants of all blocks.
        let affine = unsafe {
            Self::Scales::load_avx2(superblock.add(Self::BLOCKS * Self::Quants::BYTES), block, octet)
        };
        if Self::Scales::HAS_MIN {
            return affine;
        }
        let m =
            affine.m.map(|d| if Self::HAS_M { negative(Self::LOADED_ZERO, d) } else { _mm256_setzero_ps() });
        Affine { d: affine.d, m }
    }
}

impl<F: PackedFormat<Quants: QuantLoads, Scales: ScaleLoads>> Avx2Format for F {}

/// Eight rows of a plane; the address is that of the first of them in plane 0.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn plane(block: *const u8, index: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_loadu_si256(block.add(64 * index).cast()) }
}

/// Shifts each byte right, or left for negative shifts; bits that cross bytes must be masked away.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn shift_bits(a: __m256i, shift: i32) -> __m256i {
    if shift >= 0 {
        _mm256_srl_epi16(a, _mm_cvtsi32_si128(shift))
    } else {
        _mm256_sll_epi16(a, _mm_cvtsi32_si128(-shift))
    }
}

/// `a | (b & mask)`
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn or_masked(a: __m256i, b: __m256i, mask: __m256i) -> __m256i {
    _mm256_or_si256(a, _mm256_and_si256(b, mask))
}

/// Eight `f16` of an array over the rows, as `f32`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn load_f16(array: *const u8, octet: usize) -> __m256 {
    // SAFETY: promised by the caller.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(array.add(16 * octet).cast())) }
}

/// Eight bytes of an array over the rows, as 32-bit integers.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_u8(array: *const u8, octet: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(array.add(8 * octet).cast())) }
}

/// 32-bit word `index` of eight rows, of the words that start at the address.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_word(at: *const u8, index: usize, octet: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_loadu_si256(at.add(64 * index + 32 * octet).cast()) }
}

/// `-factor × d`
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn negative(factor: i32, d: __m256) -> __m256 {
    _mm256_mul_ps(_mm256_set1_ps(-(factor as f32)), d)
}

/// `d × s`
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn scale(d: __m256, s: __m256i) -> __m256 {
    _mm256_mul_ps(d, _mm256_cvtepi32_ps(s))
}

/// Shifts 32-bit lanes right.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn right(a: __m256i, bits: usize) -> __m256i {
    _mm256_srl_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

/// Shifts 32-bit lanes left.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn left(a: __m256i, bits: usize) -> __m256i {
    _mm256_sll_epi32(a, _mm_cvtsi64_si128(bits as i64))
}
