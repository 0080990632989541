//! Bringing activations into int8 blocks: AVX2.

use std::arch::x86_64::*;

use super::activations::Activations;
use super::format::BLOCK;
use super::view::{Element, Input};
use crate::isa::Avx2;

/// Quantizes one row to int8 by blocks of 32.
pub(super) fn int8_row(_token: Avx2, activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { int8_row_inner(activations, input, row) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8_row_inner(activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    let out = activations.int8(row);
    let sign = _mm256_set1_ps(-0.0);
    for block in 0..activations.columns() / BLOCK {
        let mut values = [_mm256_setzero_ps(); 4];
        if let Some(source) = input.row(row) {
            for (i, value) in values.iter_mut().enumerate() {
                let first = block * BLOCK + 8 * i;
                // SAFETY: the row has this block.
                *value = unsafe {
                    match input.element() {
                        Element::F32 => _mm256_loadu_ps(source.cast::<f32>().add(first)),
                        Element::F16 => {
                            _mm256_cvtph_ps(_mm_loadu_si128(source.cast::<i16>().add(first).cast()))
                        }
                    }
                };
            }
        }
        let [a, b, c, d] = values;
        let [p, q] = [(a, b), (c, d)]
            .map(|(a, b)| _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b)));
        let mut lanes = [0.0_f32; 8];
        // SAFETY: an array of eight.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_max_ps(p, q)) };
        let largest = lanes.into_iter().fold(0.0_f32, f32::max);
        let scale = largest / 127.0;
        let inverse = _mm256_set1_ps(if largest > 0.0 { 127.0 / largest } else { 0.0 });
        let mut sums = [0_i32; 2];
        for (i, value) in values.into_iter().enumerate() {
            let quants = _mm256_cvtps_epi32(_mm256_mul_ps(value, inverse));
            let words =
                _mm_packs_epi32(_mm256_castsi256_si128(quants), _mm256_extracti128_si256::<1>(quants));
            // SAFETY: the row has a place for each of its columns.
            unsafe {
                _mm_storel_epi64(out.quants.add(block * BLOCK + 8 * i).cast(), _mm_packs_epi16(words, words));
            }
            let pairs = _mm_madd_epi16(words, _mm_set1_epi16(1));
            let pairs = _mm_add_epi32(pairs, _mm_shuffle_epi32::<0b00_00_11_10>(pairs));
            let sum = _mm_cvtsi128_si32(pairs).wrapping_add(_mm_extract_epi32::<1>(pairs));
            if i < 2 {
                sums[0] += sum;
            } else {
                sums[1] += sum;
            }
        }
        // SAFETY: the row has one scale and sum for each block, and two half sums.
        unsafe {
            *out.scales.add(block) = scale;
            *out.sums.add(block) = scale * (sums[0] + sums[1]) as f32;
            *out.half_sums.add(2 * block) = scale * sums[0] as f32;
            *out.half_sums.add(2 * block + 1) = scale * sums[1] as f32;
        }
    }
}
