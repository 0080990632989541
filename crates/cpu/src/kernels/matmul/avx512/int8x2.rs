//! GEMM of few rows of `Int8x2` activations with quantized weights: AVX-512 with VNNI.
//!
//! Up to [`STRIP`] rows take each block of weights straight from the packed weights into registers, as a GEMV does, so
//! that few rows cost hardly more than one while memory is the bottleneck. More rows do so strip by strip, with a group's
//! weights in the L1 cache. Only quants that are costly to unpack are unpacked once for all strips, into a panel of bytes
//! in scratch memory.
//!
//! Every row's result is the same bits as that of a GEMV with the row: dot products are exact integers, and the sums over
//! blocks are formed in the same order, by the same functions.

use std::arch::x86_64::*;
use std::ops::Range;

use super::int8x2_dot::{add_block, add_pairs_block, finish_pairs, finish_superblock, store};
use super::{Avx512Format, int8x2_gemv};
use crate::isa::Avx512;
use crate::kernels::matmul::activations::{Int8x2Row, PANEL_COLUMNS};
use crate::kernels::matmul::format::{BLOCK, with_format};
use crate::kernels::matmul::quants::QuantStorage;
use crate::kernels::matmul::scales::ScaleLoads;
use crate::kernels::matmul::{FEW_ROWS, Task, prefetch};

/// Rows of activations that are multiplied together: as many as the registers hold sums and dot products of.
const STRIP: usize = 6;

/// Blocks unpacked at a time; a multiple of every superblock's.
const PANEL_BLOCKS: usize = PANEL_COLUMNS / BLOCK;

/// The scratch memory of a task with a panel.
#[repr(C, align(64))]
struct Panel {
    quants: [[__m512i; 8]; PANEL_BLOCKS],
    /// The sums so far of each row.
    sums: [[__m512; 2]; FEW_ROWS],
}

const _: () = assert!(size_of::<Panel>() <= crate::kernels::matmul::activations::SCRATCH);
const _: () = assert!(PANEL_BLOCKS.is_multiple_of(8));

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(token: Avx512, task: &Task<'_>) {
    if task.rows == 1 {
        int8x2_gemv::multiply(token, task);
    } else {
        // SAFETY: the token proves the instructions; the task was checked by `multiply`.
        unsafe { with_format!(task.layout.dtype(), F => gemm::<F>(task), else {}) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn gemm<F: Avx512Format>(task: &Task<'_>) {
    let blocks = task.layout.columns() / BLOCK;
    // SAFETY: promised by the caller; rows below `task.rows` exist in activations and output.
    unsafe {
        if !F::Quants::COSTLY || task.rows <= STRIP {
            for group in task.groups.clone() {
                for rows in strips(0..task.rows) {
                    let part = Part { group, rows, blocks: 0..blocks, panel: std::ptr::null_mut() };
                    strip::<F, false>(task, &part);
                }
            }
            return;
        }
        let panel = task.scratch.cast::<Panel>();
        for first_row in (0..task.rows).step_by(FEW_ROWS) {
            let rows = first_row..(first_row + FEW_ROWS).min(task.rows);
            for group in task.groups.clone() {
                let packed = task.group(group).as_ptr();
                for first in (0..blocks).step_by(PANEL_BLOCKS) {
                    let blocks = first..(first + PANEL_BLOCKS).min(blocks);
                    unpack::<F>(packed, &blocks, panel);
                    for rows in strips(rows.clone()) {
                        strip::<F, true>(task, &Part { group, rows, blocks: blocks.clone(), panel });
                    }
                }
            }
        }
    }
}

/// Divides rows into strips of at most [`STRIP`]: whole ones, and at the end two that are nearly equal, since short ones
/// keep the CPU less busy.
fn strips(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut first = rows.start;
    std::iter::from_fn(move || {
        let left = rows.end - first;
        let count = if (STRIP + 1..10).contains(&left) { left.div_ceil(2) } else { left.min(STRIP) };
        let strip = first..first + count;
        first = strip.end;
        (count > 0).then_some(strip)
    })
}

/// Unpacks the quants of some blocks of a group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn unpack<F: Avx512Format>(packed: *const u8, blocks: &Range<usize>, panel: *mut Panel) {
    // SAFETY: the panel has room for the blocks, which are inside the group.
    unsafe {
        let quants = (&raw mut (*panel).quants).cast::<[__m512i; 8]>();
        for (i, block) in blocks.clone().enumerate() {
            let superblock = packed.add(block / F::BLOCKS * F::BYTES);
            quants.add(i).write(F::quants(superblock, block % F::BLOCKS));
        }
    }
}

/// Some rows × some blocks of one group.
struct Part {
    group: usize,
    /// At most [`STRIP`].
    rows: Range<usize>,
    blocks: Range<usize>,
    /// Where the quants of the blocks are unpacked; null if they are not.
    panel: *mut Panel,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn strip<F: Avx512Format, const PANEL: bool>(task: &Task<'_>, part: &Part) {
    // SAFETY: promised by the caller.
    unsafe {
        match part.rows.len() {
            1 => micro_kernel::<1, F, PANEL>(task, part),
            2 => micro_kernel::<2, F, PANEL>(task, part),
            3 => micro_kernel::<3, F, PANEL>(task, part),
            4 => micro_kernel::<4, F, PANEL>(task, part),
            5 => micro_kernel::<5, F, PANEL>(task, part),

            _ => micro_kernel::<6, F, PANEL>(task, part),
        }
    }
}

/// `ROWS` rows × the blocks of a part.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn micro_kernel<const ROWS: usize, F: Avx512Format, const PANEL: bool>(task: &Task<'_>, part: &Part) {
    let first_row = task.first_row + part.rows.start;
    let x: [Int8x2Row; ROWS] = std::array::from_fn(|r| task.activations.int8x2_row(first_row + r));
    let packed = task.group(part.group).as_ptr();
    // SAFETY: the group has these blocks, and so have the rows of activations; the panel has the quants of the part's
    // blocks, and sums for each row.
    unsafe {
        let panel = part.panel.cast::<u8>();
        let quants = panel.wrapping_add(std::mem::offset_of!(Panel, quants)).cast::<[__m512i; 8]>();
        let state = panel.wrapping_add(std::mem::offset_of!(Panel, sums)).cast::<[__m512; 2]>();
        let state = state.wrapping_add(part.rows.start % FEW_ROWS);
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        if PANEL && part.blocks.start > 0 {
            sums = std::array::from_fn(|r| state.add(r).read());
        }
        for first in part.blocks.clone().step_by(F::BLOCKS) {
            let superblock = packed.add(first / F::BLOCKS * F::BYTES);
            let quants = |block: usize| {
                if PANEL {
                    quants.add(first - part.blocks.start + block).read()
                } else {
                    F::quants(superblock, block)
                }
            };
            if !PANEL {
                prefetch::stream(superblock, F::BYTES);
            }
            let scales = F::scales_of(superblock);
            if F::BLOCKS < 8 {
                for block in 0..F::BLOCKS {
                    let (quants, affine) = (quants(block), F::scales(superblock, block));
                    add_block::<F, ROWS, true>(&mut sums, &quants, &affine, &x, first + block);
                }
            } else if F::Scales::I16_PAIRS {
                let mut parts = [[_mm512_setzero_si512(); 4]; ROWS];
                for block in 0..F::BLOCKS {
                    let (quants, sub) = (quants(block), F::Scales::i16_pairs(scales, block));
                    add_pairs_block::<F, ROWS>(&mut parts, &quants, sub, &x, first + block);
                }
                for ((sums, parts), x) in sums.iter_mut().zip(parts).zip(&x) {
                    *sums = finish_pairs::<F>(*sums, parts, superblock, x, first);
                }
            } else {
                let mut parts = [[_mm512_setzero_ps(); 2]; ROWS];
                for block in 0..F::BLOCKS {
                    let (quants, sub) = (quants(block), F::Scales::sub_scales(scales, block));
                    add_block::<F, ROWS, false>(&mut parts, &quants, &sub, &x, first + block);
                }
                for ((sums, parts), x) in sums.iter_mut().zip(parts).zip(&x) {
                    *sums = finish_superblock::<F>(*sums, parts, superblock, x, first);
                }
            }
        }
        let last = part.blocks.end * BLOCK == task.layout.columns();
        for (r, sums) in sums.into_iter().enumerate() {
            if PANEL && !last {
                state.add(r).write(sums);
            } else {
                store(task, part.group, part.rows.start + r, _mm512_add_ps(sums[0], sums[1]));
            }
        }
    }
}
