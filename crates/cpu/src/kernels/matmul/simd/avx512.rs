//! AVX-512: loads and bit operations on the rows of a packed block.

use std::arch::x86_64::*;

/// 64 bytes: a plane of quants, or a 32-bit word of every row.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) unsafe fn plane(at: *const u8, index: usize) -> __m512i {
    // SAFETY: promised by the caller.
    unsafe { _mm512_loadu_si512(at.add(64 * index).cast()) }
}

/// The matrix of the affine map of a byte's bits that moves `count` bits from bit `from` to bit `to`, for two triples
/// `(from, to, count)`.
pub(in crate::kernels::matmul) const fn bit_matrix(moves: [(usize, usize, usize); 2]) -> i64 {
    let mut rows = [0_u8; 8];
    let mut index = 0;
    while index < 2 {
        #[expect(clippy::indexing_slicing, reason = "index < 2; bits of a byte are below 8")]
        {
            let (from, to, count) = moves[index];
            let mut i = 0;
            while i < count {
                // The row for bit 0 is the last.
                rows[7 - (to + i)] = 1 << (from + i);
                i += 1;
            }
        }
        index += 1;
    }
    i64::from_le_bytes(rows)
}

/// Moves bits of each byte as [`bit_matrix`] says; all others become 0.
macro_rules! move_bits {
    ($a:expr, $first:expr, $second:expr) => {
        _mm512_gf2p8affine_epi64_epi8::<0>(
            $a,
            _mm512_set1_epi64(const { $crate::kernels::matmul::simd::avx512::bit_matrix([$first, $second]) }),
        )
    };
}
pub(in crate::kernels::matmul) use move_bits;

/// `(a & mask) | (b & !mask)`
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) fn select_bits(a: __m512i, b: __m512i, mask: u8) -> __m512i {
    _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(mask.cast_signed()), a, b)
}

/// `a | (b & mask)` in one instruction.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) fn or_masked(a: __m512i, b: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1111_1000>(a, b, mask)
}

/// Sixteen `f16` as `f32`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) unsafe fn load_f16(at: *const u8) -> __m512 {
    // SAFETY: promised by the caller.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// `-factor × d`
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) fn negative(factor: i32, d: __m512) -> __m512 {
    _mm512_mul_ps(_mm512_set1_ps(-(factor as f32)), d)
}

/// Shifts 32-bit lanes right.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) fn right(a: __m512i, bits: usize) -> __m512i {
    _mm512_srl_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

/// Shifts 32-bit lanes left.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) fn left(a: __m512i, bits: usize) -> __m512i {
    _mm512_sll_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

/// The signed 16-bit integers in the low and in the high half of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::kernels::matmul) fn widen_pairs(pairs: __m512i) -> [__m512; 2] {
    let low = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
    [_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(pairs))]
}
