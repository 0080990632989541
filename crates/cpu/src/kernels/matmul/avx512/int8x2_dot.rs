//! Dot products of one block of weights with `Int8x2` activations, for GEMV and GEMM.

use std::arch::x86_64::*;

use crate::kernels::matmul::Task;
use crate::kernels::matmul::activations::Int8x2Row;
use crate::kernels::matmul::format::{BLOCK, GROUP};
use crate::kernels::matmul::scales::Affine;

/// Writes sixteen results of a row, or as many as there are weight rows.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(task: &Task<'_>, group: usize, row: usize, sums: __m512, add: bool) {
    let first = group * GROUP;
    let count = GROUP.min(task.layout.rows() - first);
    let mask = ((1_u32 << count) - 1) as __mmask16;
    if let Some(out) = task.output.row(row) {
        // SAFETY: the mask leaves out columns past the end of the row.
        unsafe {
            let out = out.add(first);
            let sums = if add { _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, out)) } else { sums };
            _mm512_mask_storeu_ps(out, mask, sums);
        }
    }
}

/// The integer dot products of the two half blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn dots(quants: &[__m512i; 8], x: *const i8) -> [__m512i; 2] {
    let [a, b, c, d, e, f, g, h] = *quants;
    let zero = _mm512_setzero_si512();
    // SAFETY: a block of activations is 64 bytes.
    let four = |i: usize| _mm512_set1_epi32(unsafe { x.cast::<i32>().add(i).read_unaligned() });
    let dot = |q: [__m512i; 4], first: usize| {
        let sum = _mm512_dpbusd_epi32(zero, q[0], four(first));
        let sum = _mm512_dpbusd_epi32(sum, q[1], four(first + 1));
        let sum = _mm512_dpbusd_epi32(sum, q[2], four(first + 2));
        _mm512_dpbusd_epi32(sum, q[3], four(first + 3))
    };
    let both = |q: [__m512i; 4], first: usize| {
        _mm512_add_epi32(_mm512_slli_epi32::<7>(dot(q, first)), dot(q, first + 8))
    };
    [both([a, b, c, d], 0), both([e, f, g, h], 4)]
}

/// Adds a block's contribution to sixteen sums, those of `d` and those of `m`.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn add_block<const HALVES: bool>(
    sums: [__m512; 2],
    quants: &[__m512i; 8],
    affine: &Affine<__m512>,
    x: &Int8x2Row,
    block: usize,
) -> [__m512; 2] {
    let [mut main, mut rest] = sums;
    // SAFETY: the row has this block.
    unsafe {
        let [low, high] = dots(quants, x.quants.add(2 * block * BLOCK));
        let scale = _mm512_set1_ps(*x.scales.add(block));
        if HALVES {
            let low = _mm512_mul_ps(_mm512_cvtepi32_ps(low), scale);
            let high = _mm512_mul_ps(_mm512_cvtepi32_ps(high), scale);
            main = _mm512_fmadd_ps(low, affine.d[0], main);
            main = _mm512_fmadd_ps(high, affine.d[1], main);
            rest = _mm512_fmadd_ps(affine.m[0], _mm512_set1_ps(*x.half_sums.add(2 * block)), rest);
            rest = _mm512_fmadd_ps(affine.m[1], _mm512_set1_ps(*x.half_sums.add(2 * block + 1)), rest);
        } else {
            let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(low, high));
            main = _mm512_fmadd_ps(_mm512_mul_ps(dot, scale), affine.d[0], main);
            rest = _mm512_fmadd_ps(affine.m[0], _mm512_set1_ps(*x.sums.add(block)), rest);
        }
    }
    [main, rest]
}
