//! GEMM of many rows of `Int16` activations with weights rounded to 11 bits: AVX2.
//!
//! One group of weights × one span of columns is unpacked at a time, into 4 KiB that stay in the L1 cache while all
//! rows of activations pass by, six at a time:
//!
//! ```text
//! panel   pair of columns p (p = 0..64), vector h (h = 0..2), lane r (r = 0..8) = row 8 h + r, columns 2 p and 2 p + 1
//! scales  vector h, lane r = the scale of row 8 h + r
//! sums    for each row of activations: two vectors
//! ```
//!
//! Multiplying pairs and adding to the accumulator are two instructions, or one with AVX-VNNI.

use std::arch::x86_64::*;

use super::Avx2Format;
use crate::isa::{Avx2, AvxVnni};
use crate::kernels::matmul::activations::{INT16_SPAN, SCRATCH, WEIGHT_MAX};
use crate::kernels::matmul::format::{BLOCK, GROUP, with_format};
use crate::kernels::matmul::scales::ScaleStorage;
use crate::kernels::matmul::{Task, prefetch};

/// Pairs of columns of a span.
const PAIRS: usize = INT16_SPAN / 2;

/// Rows of activations that share one unpacking of the weights.
const ROWS: usize = 512;

#[repr(C, align(64))]
struct Int16Scratch {
    panel: [[__m256i; 2]; PAIRS],
    scales: [__m256; 2],
    sums: [[__m256; 2]; ROWS],
}

const _: () = assert!(size_of::<Int16Scratch>() <= SCRATCH);

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(_token: Avx2, vnni: Option<AvxVnni>, task: &Task<'_>) {
    let rows: MicroKernel = if vnni.is_some() { micro_kernel_vnni } else { micro_kernel };
    // SAFETY: the tokens prove the instructions; the task was checked by `multiply`.
    unsafe { with_format!(task.layout.dtype(), F => groups::<F>(task, rows), else {}) }
}

/// `(activations, their scales, scratch memory, row, rows, blocks, whether to add)`: up to six rows × one group × one
/// span. The rows are there, and the scratch memory holds the blocks.
type MicroKernel = unsafe fn(*const i16, *const f32, *mut Int16Scratch, usize, usize, usize, bool);

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn groups<F: Avx2Format>(task: &Task<'_>, micro_kernel: MicroKernel) {
    let columns = task.layout.columns();
    let scratch = task.scratch.cast::<Int16Scratch>();
    for group in task.groups.clone() {
        let packed = task.group(group).as_ptr();
        for first_row in (0..task.rows).step_by(ROWS) {
            let rows = ROWS.min(task.rows - first_row);
            // SAFETY: the scratch memory is aligned, long enough and this thread's alone; the group is one of the
            // layout's, and the rows are there.
            unsafe {
                for first in (0..columns).step_by(INT16_SPAN) {
                    let blocks = INT16_SPAN.min(columns - first) / BLOCK;
                    for half in 0..2 {
                        unpack_span::<F>(packed, first / BLOCK, blocks, scratch, half);
                    }
                    let last = first + INT16_SPAN >= columns;
                    for row in (0..rows).step_by(6) {
                        let count = 6.min(rows - row);
                        if last {
                            prefetch::output(task, group, first_row + row..first_row + row + count);
                        }
                        let (x, scales) =
                            task.activations.int16_row(task.first_row + first_row + row, first / INT16_SPAN);
                        micro_kernel(x, scales, scratch, row, count, blocks, first > 0);
                        if last {
                            // Now, while the sums and the output are in the L1 cache.
                            for row in row..row + count {
                                let sums = (&raw const (*scratch).sums).cast::<[__m256; 2]>().add(row);
                                store(task, group, first_row + row, sums.read());
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes sixteen results of a row, or as many as there are weight rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(task: &Task<'_>, group: usize, row: usize, sums: [__m256; 2]) {
    let first = group * GROUP;
    let count = GROUP.min(task.layout.rows() - first);
    let Some(out) = task.output.row(row) else { return };
    // SAFETY: columns past the end of the row are left out.
    unsafe {
        let out = out.add(first);
        if count == GROUP {
            _mm256_storeu_ps(out, sums[0]);
            _mm256_storeu_ps(out.add(8), sums[1]);
        } else {
            std::ptr::copy_nonoverlapping(sums.as_ptr().cast::<f32>(), out, count);
        }
    }
}

/// Rounds `blocks` blocks of half a group, from block `first`, to int16 with one scale for each row.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_span<F: Avx2Format>(
    packed: *const u8,
    first: usize,
    blocks: usize,
    scratch: *mut Int16Scratch,
    half: usize,
) {
    let superblock = |block: usize| packed.wrapping_add((first + block) / F::BLOCKS * F::BYTES);
    let within = |block: usize| (first + block) % F::BLOCKS;
    let sign = _mm256_set1_ps(-0.0);
    let [least, most] = F::RANGE.map(|q| _mm256_set1_ps(q as f32));
    // As bits, which order like magnitudes, with NaN above all: one of them must not be lost.
    let mut largest = _mm256_setzero_si256();
    for block in 0..blocks {
        // SAFETY: the block is inside the group.
        let affine = unsafe { F::scales(superblock(block), within(block), half) };
        for i in 0..1 + usize::from(F::Scales::PER_16) {
            let (d, m) = if i == 0 { (affine.d[0], affine.m[0]) } else { (affine.d[1], affine.m[1]) };
            for q in [least, most] {
                let magnitude = _mm256_andnot_ps(sign, _mm256_fmadd_ps(q, d, m));
                largest = _mm256_max_epi32(largest, _mm256_castps_si256(magnitude));
            }
        }
    }
    let largest = _mm256_castsi256_ps(largest);
    let steps = _mm256_set1_ps(WEIGHT_MAX);
    let some = _mm256_cmp_ps::<_CMP_NLT_UQ>(largest, _mm256_set1_ps(1e-30));
    let inverse = _mm256_and_ps(some, _mm256_div_ps(steps, largest));
    let byte = _mm256_set1_epi32(255);
    // SAFETY: the panel has room for the blocks, which are inside the group.
    unsafe {
        let scales = (&raw mut (*scratch).scales).cast::<__m256>();
        scales.add(half).write(_mm256_and_ps(some, _mm256_div_ps(largest, steps)));
        let panel = (&raw mut (*scratch).panel).cast::<__m256i>().add(half);
        for block in 0..blocks {
            let quants = F::quants(superblock(block), within(block), half);
            let affine = F::scales(superblock(block), within(block), half);
            let d = affine.d.map(|d| _mm256_mul_ps(d, inverse));
            let m = affine.m.map(|m| _mm256_mul_ps(m, inverse));
            for (v, q) in quants.into_iter().enumerate() {
                let (d, m) = if v < 4 { (d[0], m[0]) } else { (d[1], m[1]) };
                let rounded = |q| _mm256_cvtps_epi32(_mm256_fmadd_ps(_mm256_cvtepi32_ps(q), d, m));
                let lower = |q| {
                    if F::SIGNED {
                        _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(q))
                    } else {
                        _mm256_and_si256(q, byte)
                    }
                };
                let upper = |q| {
                    if F::SIGNED { _mm256_srai_epi32::<24>(q) } else { _mm256_srli_epi32::<24>(q) }
                };
                let c0 = rounded(lower(q));
                let c1 = rounded(lower(_mm256_srli_epi32::<8>(q)));
                let c2 = rounded(lower(_mm256_srli_epi32::<16>(q)));
                let c3 = rounded(upper(q));
                let pair = |a, b| _mm256_blend_epi16::<0b1010_1010>(a, _mm256_slli_epi32::<16>(b));
                let place = panel.add(2 * (block * BLOCK / 2 + 2 * v));
                place.write(pair(c0, c1));
                place.add(2).write(pair(c2, c3));
            }
        }
    }
}

/// See [`MicroKernel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn micro_kernel(
    x: *const i16,
    x_scales: *const f32,
    scratch: *mut Int16Scratch,
    row: usize,
    rows: usize,
    blocks: usize,
    add: bool,
) {
    let step = |sum, w, x| _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
    // SAFETY: promised by the caller.
    unsafe { micro_kernel_with(x, x_scales, scratch, row, rows, blocks, add, step) }
}

/// See [`MicroKernel`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn micro_kernel_vnni(
    x: *const i16,
    x_scales: *const f32,
    scratch: *mut Int16Scratch,
    row: usize,
    rows: usize,
    blocks: usize,
    add: bool,
) {
    let step = |sum, w, x| _mm256_dpwssd_avx_epi32(sum, w, x);
    // SAFETY: promised by the caller.
    unsafe { micro_kernel_with(x, x_scales, scratch, row, rows, blocks, add, step) }
}

/// See [`MicroKernel`]; `step` adds the products of pairs to a sum.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "those of `MicroKernel`, and the step")]
unsafe fn micro_kernel_with(
    x: *const i16,
    x_scales: *const f32,
    scratch: *mut Int16Scratch,
    row: usize,
    rows: usize,
    blocks: usize,
    add: bool,
    step: impl Fn(__m256i, __m256i, __m256i) -> __m256i,
) {
    // SAFETY: promised by the caller.
    unsafe {
        match rows {
            1 => rows_of::<1>(x, x_scales, scratch, row, blocks, add, step),
            2 => rows_of::<2>(x, x_scales, scratch, row, blocks, add, step),
            3 => rows_of::<3>(x, x_scales, scratch, row, blocks, add, step),
            4 => rows_of::<4>(x, x_scales, scratch, row, blocks, add, step),
            5 => rows_of::<5>(x, x_scales, scratch, row, blocks, add, step),
            _ => rows_of::<6>(x, x_scales, scratch, row, blocks, add, step),
        }
    }
}

/// `ROWS` rows of activations × one group × one span; `step` adds the products of pairs to a sum.
#[inline(always)]
unsafe fn rows_of<const ROWS: usize>(
    x: *const i16,
    x_scales: *const f32,
    scratch: *mut Int16Scratch,
    row: usize,
    blocks: usize,
    add: bool,
    step: impl Fn(__m256i, __m256i, __m256i) -> __m256i,
) {
    // SAFETY: the callers have AVX2 and FMA. A row of activations is INT16_SPAN integers; the panel holds as many
    // pairs of columns as the blocks have.
    unsafe {
        let mut dots = [[_mm256_setzero_si256(); 2]; ROWS];
        let x = x.cast::<i32>();
        let panel = (&raw const (*scratch).panel).cast::<__m256i>();
        for pair in 0..blocks * BLOCK / 2 {
            let (low, high) = (panel.add(2 * pair).read(), panel.add(2 * pair + 1).read());
            for (r, dots) in dots.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(x.add(r * PAIRS + pair).read());
                dots[0] = step(dots[0], low, x);
                dots[1] = step(dots[1], high, x);
            }
        }
        let scales = (&raw const (*scratch).scales).cast::<__m256>();
        for (r, dots) in dots.into_iter().enumerate() {
            let x_scale = _mm256_set1_ps(*x_scales.add(r));
            let sums = (&raw mut (*scratch).sums).cast::<[__m256; 2]>().add(row + r).cast::<__m256>();
            for (half, dot) in dots.into_iter().enumerate() {
                let scale = _mm256_mul_ps(scales.add(half).read(), x_scale);
                let place = sums.add(half);
                let sum = if add { place.read() } else { _mm256_setzero_ps() };
                place.write(_mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vnni_and_plain_micro_kernels_agree() {
        if !is_x86_feature_detected!("avxvnni") || Avx2::detect().is_none() {
            return;
        }
        let integers = |seed: usize, range: usize| move |i: usize| ((i * 7919 + seed) % range) as i16;
        let x: Vec<i16> = (0..6 * INT16_SPAN).map(integers(5, 32767)).map(|x| x - 16383).collect();
        let scales = [1.0, 0.5, 2.0, 3.0, 0.25, 7.0];
        let run = |micro_kernel: MicroKernel| {
            let mut scratch = Box::new(std::mem::MaybeUninit::<Int16Scratch>::zeroed());
            let scratch = scratch.as_mut_ptr();
            // SAFETY: the scratch memory is one of its own, in which zeros are values; the features were detected.
            unsafe {
                let panel = (&raw mut (*scratch).panel).cast::<i16>();
                (0..PAIRS * 2 * 16).for_each(|i| *panel.add(i) = integers(3, 2047)(i) - 1023);
                (&raw mut (*scratch).scales).cast::<f32>().write_bytes(0x3f, 16);
                for rows in [1, 6, 2, 5, 3, 4] {
                    micro_kernel(
                        x.as_ptr(),
                        scales.as_ptr(),
                        scratch,
                        rows,
                        rows,
                        INT16_SPAN / BLOCK,
                        rows > 1,
                    );
                }
                std::slice::from_raw_parts((&raw const (*scratch).sums).cast::<u32>(), 16 * 16).to_vec()
            }
        };
        assert_eq!(run(micro_kernel), run(micro_kernel_vnni));
    }
}
