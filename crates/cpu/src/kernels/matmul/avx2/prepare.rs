//! Conversion of activations to `Int8x2` and `Int16`: AVX2.

use std::arch::x86_64::*;

use crate::isa::Avx2;
use crate::kernels::matmul::activations::{Activations, INT8X2_MAX, INT16_MAX, INT16_SPAN, quant_scale};
use crate::kernels::matmul::format::BLOCK;
use crate::kernels::matmul::view::{Input, InputType};

/// Eight elements of a row as `f32`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(element: InputType, row: *const u8, first: usize) -> __m256 {
    // SAFETY: the caller promises that the elements are inside the row.
    unsafe {
        match element {
            InputType::F32 => _mm256_loadu_ps(row.cast::<f32>().add(first)),
            InputType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(row.cast::<i16>().add(first).cast())),
        }
    }
}

/// The largest magnitude; NaN if any value is NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(values: &[__m256]) -> f32 {
    let sign = _mm256_set1_ps(-0.0);
    let (mut most, mut nan) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for value in values {
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, *value));
        nan = _mm256_or_ps(nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(*value, *value));
    }
    let mut lanes = [0.0_f32; 8];
    // SAFETY: an array of eight.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), most) };
    if _mm256_movemask_ps(nan) == 0 { lanes.into_iter().fold(0.0, f32::max) } else { f32::NAN }
}

/// Packs two vectors of i32 into one of i16, in order, with saturation.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pack_i16(a: __m256i, b: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b))
}

/// The sum of sixteen i16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum(values: __m256i) -> i32 {
    let pairs = _mm256_madd_epi16(values, _mm256_set1_epi16(1));
    let four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
    _mm_cvtsi128_si32(two).wrapping_add(_mm_extract_epi32::<1>(two))
}

/// Quantizes one row to `Int8x2` with a scale for 32 columns.
pub(in crate::kernels::matmul) fn int8x2_row(
    _token: Avx2,
    activations: &Activations<'_>,
    input: &Input<'_>,
    row: usize,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { int8x2_row_inner(activations, input, row) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8x2_row_inner(activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    let out = activations.int8x2_row(row);
    let source = input.row(row);
    for block in 0..activations.columns() / BLOCK {
        let mut values = [_mm256_setzero_ps(); 4];
        if let Some(source) = source {
            for (i, value) in values.iter_mut().enumerate() {
                // SAFETY: the row has this block.
                *value = unsafe { load(input.element(), source, block * BLOCK + 8 * i) };
            }
        }
        let (scale, inverse) = quant_scale(largest(&values), INT8X2_MAX);
        let [a, b, c, d] = values.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse))));
        let halves = [pack_i16(a, b), pack_i16(c, d)];
        let high = halves.map(|x| _mm256_srai_epi16::<7>(_mm256_adds_epi16(x, _mm256_set1_epi16(64))));
        let rest = [(halves[0], high[0]), (halves[1], high[1])]
            .map(|(x, high)| _mm256_sub_epi16(x, _mm256_slli_epi16::<7>(high)));
        let sums = halves.map(|x| scale * sum(x) as f32);
        // SAFETY: the row has two bytes for each of its columns, one scale and sum for each block, and two half sums; and
        // sixteen bits for each column.
        unsafe {
            for (i, [x, y]) in [high, rest].into_iter().enumerate() {
                let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(x, y));
                _mm256_storeu_si256(out.quants.add((2 * block + i) * BLOCK).cast(), bytes);
            }
            for (i, x) in halves.into_iter().enumerate() {
                _mm256_storeu_si256(out.words.add(block * BLOCK + 16 * i).cast(), x);
            }
            *out.scales.add(block) = scale;
            *out.sums.add(block) = sums[0] + sums[1];
            *out.half_sums.add(2 * block) = sums[0];
            *out.half_sums.add(2 * block + 1) = sums[1];
        }
    }
}

/// Quantizes one row to `Int16`.
pub(in crate::kernels::matmul) fn int16_row(
    _token: Avx2,
    activations: &Activations<'_>,
    input: &Input<'_>,
    row: usize,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { int16_row_inner(activations, input, row) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int16_row_inner(activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    let source = input.row(row);
    for first in (0..activations.columns()).step_by(INT16_SPAN) {
        let count = INT16_SPAN.min(activations.columns() - first);
        let (place, scale_place) = activations.int16_row(row, first / INT16_SPAN);
        let mut values = [_mm256_setzero_ps(); INT16_SPAN / 8];
        if let Some(source) = source {
            for (i, value) in values.iter_mut().enumerate().take(count / 8) {
                // SAFETY: the row has these columns.
                *value = unsafe { load(input.element(), source, first + 8 * i) };
            }
        }
        let (scale, inverse) = quant_scale(largest(&values), INT16_MAX);
        let inverse = _mm256_set1_ps(inverse);
        for (i, pair) in values.chunks_exact(2).enumerate() {
            let [a, b] = [pair.first(), pair.last()].map(|value| {
                let value = value.copied().unwrap_or(_mm256_setzero_ps());
                _mm256_cvtps_epi32(_mm256_mul_ps(value, inverse))
            });
            // SAFETY: every row has room for a whole span.
            unsafe { _mm256_storeu_si256(place.add(16 * i).cast(), pack_i16(a, b)) };
        }
        // SAFETY: a scale for each row and span.
        unsafe { *scale_place = scale };
    }
}
