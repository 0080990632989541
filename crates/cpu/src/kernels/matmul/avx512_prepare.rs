//! Bringing activations into int8 blocks and bf16 tiles: AVX-512.

use std::arch::x86_64::*;
use std::ops::Range;

use super::activations::Activations;
use super::format::{BLOCK, GROUP};
use super::view::{Element, Input};
use crate::isa::Avx512;

/// Sixteen elements of a row as `f32`, those at `mask`; the others are 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load(element: Element, row: *const u8, first: usize, mask: __mmask16) -> __m512 {
    // SAFETY: the caller promises that the elements at the mask are inside the row.
    unsafe {
        match element {
            Element::F32 => _mm512_maskz_loadu_ps(mask, row.cast::<f32>().add(first)),
            Element::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row.cast::<i16>().add(first))),
        }
    }
}

/// Quantizes one row to int8 by blocks of 32.
pub(super) fn int8_row(_token: Avx512, activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { int8_row_inner(activations, input, row) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn int8_row_inner(activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    let out = activations.int8(row);
    let source = input.row(row);
    for block in 0..activations.columns() / BLOCK {
        // SAFETY: the row has this block in the input, and places for it in the activations.
        unsafe {
            let [low, high] = match source {
                Some(source) => [0, 16].map(|i| load(input.element(), source, block * BLOCK + i, !0)),
                None => [_mm512_setzero_ps(); 2],
            };
            let largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
            let scale = largest / 127.0;
            let inverse = _mm512_set1_ps(if largest > 0.0 { 127.0 / largest } else { 0.0 });
            let [low, high] = [low, high].map(|v| _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)));
            let place = out.quants.add(block * BLOCK);
            _mm_storeu_si128(place.cast(), _mm512_cvtsepi32_epi8(low));
            _mm_storeu_si128(place.add(16).cast(), _mm512_cvtsepi32_epi8(high));
            let sums = [low, high].map(|v| scale * _mm512_reduce_add_epi32(v) as f32);
            *out.scales.add(block) = scale;
            *out.sums.add(block) = scale * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high)) as f32;
            *out.half_sums.add(2 * block) = sums[0];
            *out.half_sums.add(2 * block + 1) = sums[1];
        }
    }
}

/// Writes the bf16 tiles of up to sixteen rows; `rows` starts at a multiple of 16.
pub(super) fn tile_rows(
    _token: Avx512,
    activations: &Activations<'_>,
    input: &Input<'_>,
    rows: Range<usize>,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { tile_rows_inner(activations, input, rows) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile_rows_inner(activations: &Activations<'_>, input: &Input<'_>, rows: Range<usize>) {
    let tiles = activations.tiles(rows.start / GROUP);
    let columns = activations.columns();
    for lane in 0..GROUP {
        let source = if lane < rows.len() { input.row(rows.start + lane) } else { None };
        for tile in 0..columns.div_ceil(BLOCK) {
            let first = tile * BLOCK;
            let left = columns - first;
            let mask = |left: usize| if left >= 16 { !0 } else { ((1_u32 << left) - 1) as __mmask16 };
            // SAFETY: the masks leave out elements past the end of the row; the tile is inside the activations.
            unsafe {
                let [low, high] = match source {
                    Some(source) => [
                        load(input.element(), source, first, mask(left)),
                        load(input.element(), source, first + 16, mask(left.saturating_sub(16))),
                    ],
                    None => [_mm512_setzero_ps(); 2],
                };
                let pair = _mm512_cvtne2ps_pbh(high, low);
                let place = tiles.add(tile * 1024 + lane * 64).cast::<__m512bh>();
                place.write_unaligned(pair);
            }
        }
    }
}
