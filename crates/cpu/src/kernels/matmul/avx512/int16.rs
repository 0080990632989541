//! GEMM of many rows of `Int16` activations with weights rounded to 11 bits: AVX-512 with VNNI.
//!
//! Two groups of weights × one span of columns are unpacked at a time, into 8 KiB that stay in the L1 cache while all
//! rows of activations pass by, eight at a time:
//!
//! ```text
//! panel   for each of two groups: pair of columns p (p = 0..64), lane r (r = 0..16) = row r, columns 2 p and 2 p + 1
//! scales  for each of two groups: lane r = the scale of row r
//! sums    for each row of activations: two vectors, one for each group
//!
//! 16 registers of 32-bit sums (8 rows × 2 groups) += pair of columns of a group × pair of columns of a row
//! ```

use std::arch::x86_64::*;

use super::Avx512Format;
use crate::isa::Avx512;
use crate::kernels::matmul::activations::{INT16_SPAN, SCRATCH, WEIGHT_MAX};
use crate::kernels::matmul::format::{BLOCK, GROUP, with_format};
use crate::kernels::matmul::quants::QuantStorage;
use crate::kernels::matmul::scales::ScaleStorage;
use crate::kernels::matmul::{Task, prefetch};

/// Pairs of columns of a span.
const PAIRS: usize = INT16_SPAN / 2;

/// Rows of activations that share one unpacking of the weights.
const ROWS: usize = 512;

#[repr(C, align(64))]
struct Int16Scratch {
    panel: [[__m512i; PAIRS]; 2],
    scales: [__m512; 2],
    sums: [[__m512; 2]; ROWS],
}

const _: () = assert!(size_of::<Int16Scratch>() <= SCRATCH);

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(_token: Avx512, task: &Task<'_>) {
    // SAFETY: the token proves the instructions; the task was checked by `multiply`.
    unsafe { with_format!(task.layout.dtype(), F => groups::<F>(task), else {}) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn groups<F: Avx512Format>(task: &Task<'_>) {
    let columns = task.layout.columns();
    let scratch = task.scratch.cast::<Int16Scratch>();
    for group in task.groups.clone().step_by(2) {
        let pair = group + 1 < task.groups.end;
        for first_row in (0..task.rows).step_by(ROWS) {
            let rows = ROWS.min(task.rows - first_row);
            // SAFETY: the scratch memory is aligned, long enough and this thread's alone; the groups are the
            // layout's, and the rows are there.
            unsafe {
                for first in (0..columns).step_by(INT16_SPAN) {
                    let blocks = INT16_SPAN.min(columns - first) / BLOCK;
                    for (i, group) in (group..group + 1 + usize::from(pair)).enumerate() {
                        unpack_span::<F>(task.group(group).as_ptr(), first / BLOCK, blocks, scratch, i);
                    }
                    let last = first + INT16_SPAN >= columns;
                    for row in (0..rows).step_by(8) {
                        let count = 8.min(rows - row);
                        if last {
                            prefetch::output(task, group, first_row + row..first_row + row + count);
                        }
                        if pair {
                            micro_kernel::<2>(task, scratch, first, first_row, row, count, blocks);
                        } else {
                            micro_kernel::<1>(task, scratch, first, first_row, row, count, blocks);
                        }
                        if last {
                            // Now, while the sums and the output are in the L1 cache.
                            for row in row..row + count {
                                let sums = (&raw const (*scratch).sums).cast::<[__m512; 2]>().add(row);
                                let [low, high] = sums.read();
                                store(task, group, first_row + row, low);
                                if pair {
                                    store(task, group + 1, first_row + row, high);
                                }
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
#[target_feature(enable = "avx512f")]
unsafe fn store(task: &Task<'_>, group: usize, row: usize, sums: __m512) {
    let first = group * GROUP;
    let count = GROUP.min(task.layout.rows() - first);
    if let Some(out) = task.output.row(row) {
        // SAFETY: the mask leaves out columns past the end of the row.
        unsafe { _mm512_mask_storeu_ps(out.add(first), ((1_u32 << count) - 1) as __mmask16, sums) };
    }
}

/// Rounds `blocks` blocks of a group, from block `first`, to int16 with one scale for each row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,f16c")]
unsafe fn unpack_span<F: Avx512Format>(
    packed: *const u8,
    first: usize,
    blocks: usize,
    scratch: *mut Int16Scratch,
    index: usize,
) {
    let superblock = |block: usize| packed.wrapping_add((first + block) / F::BLOCKS * F::BYTES);
    let within = |block: usize| (first + block) % F::BLOCKS;
    let [least, most] = F::Quants::RANGE.map(|q| _mm512_set1_ps(q as f32));
    // As bits, which order like magnitudes, with NaN above all: one of them must not be lost.
    let mut largest = _mm512_setzero_si512();
    for block in 0..blocks {
        // SAFETY: the block is inside the group.
        let affine = unsafe { F::scales(superblock(block), within(block)) };
        for half in 0..1 + usize::from(F::Scales::PER_16) {
            let (d, m) = if half == 0 { (affine.d[0], affine.m[0]) } else { (affine.d[1], affine.m[1]) };
            for q in [least, most] {
                let magnitude = _mm512_abs_ps(_mm512_fmadd_ps(q, d, m));
                largest = _mm512_max_epi32(largest, _mm512_castps_si512(magnitude));
            }
        }
    }
    let largest = _mm512_castsi512_ps(largest);
    let steps = _mm512_set1_ps(WEIGHT_MAX);
    let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(largest, _mm512_set1_ps(1e-30));
    let inverse = _mm512_maskz_div_ps(some, steps, largest);
    let byte = _mm512_set1_epi32(255);
    // SAFETY: the panel has room for the blocks, which are inside the group.
    unsafe {
        let scales = (&raw mut (*scratch).scales).cast::<__m512>();
        scales.add(index).write(_mm512_maskz_div_ps(some, largest, steps));
        let panel = (&raw mut (*scratch).panel).cast::<__m512i>().add(index * PAIRS);
        for block in 0..blocks {
            let (quants, affine) =
                (F::quants(superblock(block), within(block)), F::scales(superblock(block), within(block)));
            let d = affine.d.map(|d| _mm512_mul_ps(d, inverse));
            let m = affine.m.map(|m| _mm512_mul_ps(m, inverse));
            for (v, q) in quants.into_iter().enumerate() {
                let (d, m) = if v < 4 { (d[0], m[0]) } else { (d[1], m[1]) };
                let rounded = |q| _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_cvtepi32_ps(q), d, m));
                let c0 = rounded(_mm512_and_si512(q, byte));
                let c1 = rounded(_mm512_and_si512(_mm512_srli_epi32::<8>(q), byte));
                let c2 = rounded(_mm512_and_si512(_mm512_srli_epi32::<16>(q), byte));
                let c3 = rounded(_mm512_srli_epi32::<24>(q));
                let pair = |a, b| _mm512_mask_blend_epi16(0xaaaa_aaaa, a, _mm512_slli_epi32::<16>(b));
                let place = panel.add(block * BLOCK / 2 + 2 * v);
                place.write(pair(c0, c1));
                place.add(1).write(pair(c2, c3));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn micro_kernel<const GROUPS: usize>(
    task: &Task<'_>,
    scratch: *mut Int16Scratch,
    first: usize,
    first_row: usize,
    row: usize,
    count: usize,
    blocks: usize,
) {
    let (x, scales) = task.activations.int16_row(task.first_row + first_row + row, first / INT16_SPAN);
    let add = first > 0;
    macro_rules! counted {
        ($($rows:literal)*) => {
            // SAFETY: the activations have this many rows from here on, the scratch memory as many sums.
            unsafe {
                match count {
                    $($rows => rows_of::<$rows, GROUPS>(x, scales, scratch, row, blocks, add),)*
                    _ => {}
                }
            }
        };
    }
    counted!(1 2 3 4 5 6 7 8);
}

/// `ROWS` rows of activations × one or two groups × one span.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn rows_of<const ROWS: usize, const GROUPS: usize>(
    x: *const i16,
    x_scales: *const f32,
    scratch: *mut Int16Scratch,
    row: usize,
    blocks: usize,
    add: bool,
) {
    let mut dots = [[_mm512_setzero_si512(); GROUPS]; ROWS];
    // SAFETY: a row of activations is INT16_SPAN words; the panels hold as many pairs of columns as the blocks have.
    unsafe {
        let x = x.cast::<i32>();
        let panel = (&raw const (*scratch).panel).cast::<__m512i>();
        for pair in 0..blocks * BLOCK / 2 {
            let weights: [__m512i; GROUPS] = std::array::from_fn(|g| panel.add(g * PAIRS + pair).read());
            for (r, dots) in dots.iter_mut().enumerate() {
                let x = _mm512_set1_epi32(x.add(r * PAIRS + pair).read());
                for (dot, weights) in dots.iter_mut().zip(&weights) {
                    *dot = _mm512_dpwssd_epi32(*dot, *weights, x);
                }
            }
        }
        let scales = (&raw const (*scratch).scales).cast::<__m512>();
        for (r, dots) in dots.into_iter().enumerate() {
            let x_scale = _mm512_set1_ps(*x_scales.add(r));
            let sums = (&raw mut (*scratch).sums).cast::<[__m512; 2]>().add(row + r).cast::<__m512>();
            for (g, dot) in dots.into_iter().enumerate() {
                let scale = _mm512_mul_ps(scales.add(g).read(), x_scale);
                let place = sums.add(g);
                let sum = if add { place.read() } else { _mm512_setzero_ps() };
                place.write(_mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum));
            }
        }
    }
}
