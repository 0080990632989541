//! GEMM of few rows of `Int8x2` activations with quantized weights: AVX-512 with VNNI.

use std::arch::x86_64::*;

use super::int8x2_dot::{add_block, dots, store};
use super::{Avx512Format, int8x2_gemv};
use crate::isa::Avx512;
use crate::kernels::matmul::Task;
use crate::kernels::matmul::activations::{Int8x2Row, PANEL_COLUMNS};
use crate::kernels::matmul::format::{BLOCK, with_format};
use crate::kernels::matmul::scales::{Affine, ScaleStorage};

/// Blocks unpacked at a time.
const PANEL_BLOCKS: usize = PANEL_COLUMNS / BLOCK;

/// A block in the panel of a GEMM: quants as bytes, `d` and `m` for each half.
#[repr(C, align(64))]
struct PanelBlock {
    quants: [__m512i; 8],
    d: [__m512; 2],
    m: [__m512; 2],
}

const _: () = assert!(PANEL_BLOCKS * size_of::<PanelBlock>() <= crate::kernels::matmul::activations::SCRATCH);

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(token: Avx512, task: &Task<'_>) {
    if task.rows == 1 {
        int8x2_gemv::multiply(token, task);
    } else {
        // SAFETY: the token proves the instructions; the task was checked by `multiply`.
        unsafe { with_format!(task.layout.dtype(), F => gemm::<F>(task), else {}) }
    }
}

/// GEMM: unpacks a group once, for all rows of activations, eight at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn gemm<F: Avx512Format>(task: &Task<'_>) {
    let panel = task.scratch.cast::<PanelBlock>();
    let blocks = task.layout.columns() / BLOCK;
    for group in task.groups.clone() {
        let packed = task.group(group).as_ptr();
        for first in (0..blocks).step_by(PANEL_BLOCKS) {
            let count = PANEL_BLOCKS.min(blocks - first);
            for i in 0..count {
                let (superblock, block) = ((first + i) / F::BLOCKS, (first + i) % F::BLOCKS);
                // SAFETY: the scratch memory holds PANEL_BLOCKS blocks; the superblock is inside the group.
                unsafe {
                    let superblock = packed.add(superblock * F::BYTES);
                    let affine = F::scales(superblock, block);
                    panel.add(i).write(PanelBlock {
                        quants: F::quants(superblock, block),
                        d: affine.d,
                        m: affine.m,
                    });
                }
            }
            let mut row = 0;
            // SAFETY: rows below `task.rows` exist in activations and output.
            unsafe {
                while row + 8 <= task.rows {
                    micro_kernel::<8, F>(task, panel, group, row, first, count);
                    row += 8;
                }
                match task.rows - row {
                    0 => {}
                    1 => micro_kernel::<1, F>(task, panel, group, row, first, count),
                    2 => micro_kernel::<2, F>(task, panel, group, row, first, count),
                    3 => micro_kernel::<3, F>(task, panel, group, row, first, count),
                    4 => micro_kernel::<4, F>(task, panel, group, row, first, count),
                    5 => micro_kernel::<5, F>(task, panel, group, row, first, count),
                    6 => micro_kernel::<6, F>(task, panel, group, row, first, count),
                    _ => micro_kernel::<7, F>(task, panel, group, row, first, count),
                }
            }
        }
    }
}

/// `ROWS` rows × the blocks of a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn micro_kernel<const ROWS: usize, F: Avx512Format>(
    task: &Task<'_>,
    panel: *const PanelBlock,
    group: usize,
    row: usize,
    first: usize,
    count: usize,
) {
    let x: [Int8x2Row; ROWS] = std::array::from_fn(|r| task.activations.int8x2_row(task.first_row + row + r));
    let mut sums = [_mm512_setzero_ps(); ROWS];
    for i in 0..count {
        // SAFETY: the panel holds `count` blocks.
        let block = unsafe { &*panel.add(i) };
        let affine = Affine { d: block.d, m: block.m };
        for (sum, x) in sums.iter_mut().zip(&x) {
            // SAFETY: the rows have block `first + i`.
            unsafe {
                let both = [*sum, _mm512_setzero_ps()];
                *sum = if F::Scales::PER_16 {
                    let [a, b] = add_block::<true>(both, &block.quants, &affine, x, first + i);
                    _mm512_add_ps(a, b)
                } else {
                    // One dependency chain is enough here: other rows hide its latency.
                    let [low, high] = dots(&block.quants, x.quants.add(2 * (first + i) * BLOCK));
                    let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(low, high));
                    let scaled = _mm512_mul_ps(dot, _mm512_set1_ps(*x.scales.add(first + i)));
                    let sum = _mm512_fmadd_ps(scaled, affine.d[0], *sum);
                    _mm512_fmadd_ps(affine.m[0], _mm512_set1_ps(*x.sums.add(first + i)), sum)
                };
            }
        }
    }
    for (r, sum) in sums.into_iter().enumerate() {
        // SAFETY: the group is one of the layout's.
        unsafe { store(task, group, row + r, sum, first > 0) };
    }
}
