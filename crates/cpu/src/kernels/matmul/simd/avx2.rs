//! AVX2: loads and bit operations on the rows of a packed block.

use std::arch::x86_64::*;

/// Shifts each byte right, or left for negative shifts; bits that cross bytes must be masked away.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels::matmul) fn shift_bits(a: __m256i, shift: i32) -> __m256i {
    if shift >= 0 {
        _mm256_srl_epi16(a, _mm_cvtsi32_si128(shift))
    } else {
        _mm256_sll_epi16(a, _mm_cvtsi32_si128(-shift))
    }
}

/// `a | (b & mask)`
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels::matmul) fn or_masked(a: __m256i, b: __m256i, mask: __m256i) -> __m256i {
    _mm256_or_si256(a, _mm256_and_si256(b, mask))
}

/// Eight `f16` of an array over the rows, as `f32`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(in crate::kernels::matmul) unsafe fn load_f16(array: *const u8, octet: usize) -> __m256 {
    // SAFETY: promised by the caller.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(array.add(16 * octet).cast())) }
}

/// Eight bytes of an array over the rows, as 32-bit integers.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels::matmul) unsafe fn load_u8(array: *const u8, octet: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(array.add(8 * octet).cast())) }
}

/// Eight rows of plane `index`, or of a 32-bit word of every row, of those that start at the address.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels::matmul) unsafe fn load_word(at: *const u8, index: usize, octet: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_loadu_si256(at.add(64 * index + 32 * octet).cast()) }
}

/// `-factor × d`
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels::matmul) fn negative(factor: i32, d: __m256) -> __m256 {
    _mm256_mul_ps(_mm256_set1_ps(-(factor as f32)), d)
}

/// `d × s`
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels::matmul) fn scale(d: __m256, s: __m256i) -> __m256 {
    _mm256_mul_ps(d, _mm256_cvtepi32_ps(s))
}

/// Shifts 32-bit lanes right.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels::matmul) fn right(a: __m256i, bits: usize) -> __m256i {
    _mm256_srl_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

/// Shifts 32-bit lanes left.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::kernels::matmul) fn left(a: __m256i, bits: usize) -> __m256i {
    _mm256_sll_epi32(a, _mm_cvtsi64_si128(bits as i64))
}
