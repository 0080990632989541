//! GEMV of one row of `Int8x2` activations with quantized weights: AVX-512 with VNNI.
//!
//! The kernel streams the packed weights once, and should be bound by memory: a core has about 45 cycles for the 16 ×
//! 32 weights of a 4-bit block, 28 for those of a 2-bit block, and issues two vector instructions in each. So scales
//! are applied as late as the types allow:
//!
//! ```text
//! fewer blocks to a superblock    sums += d × (x scale × Σ q x)                            per block
//! eight blocks to a superblock    sums += super-scale × x scale × Σ sub-scale × Σ q x      per superblock
//! ```
//!
//! For 2-bit and 3-bit quants the sum over a superblock is in integers: quants and sub-scales are so small that the dot
//! products of 16 columns fit 16 bits. Those of two half blocks share a lane, and one instruction multiplies them with
//! their sub-scales and adds them up:
//!
//! ```text
//! lane r | Σ q x, columns 0..16 | Σ q x, columns 16..32 |   × | sub-scale | sub-scale |
//! ```
//!
//! Four dependency chains of dot products (two halves of a block × two bytes of an activation) hide each other's
//! latency.

use std::arch::x86_64::*;

use super::Avx512Format;
use super::int8x2_dot::{add_block, add_pairs_block, finish_pairs, finish_superblock, store};
use crate::isa::Avx512;
use crate::kernels::matmul::activations::Int8x2Row;
use crate::kernels::matmul::format::{BLOCK, with_format};
use crate::kernels::matmul::scales::ScaleLoads;
use crate::kernels::matmul::{Task, prefetch};

/// Runs a task of one row.
pub(super) fn multiply(_token: Avx512, task: &Task<'_>) {
    // SAFETY: the token proves the instructions; the task was checked by `multiply`.
    unsafe { with_format!(task.layout.dtype(), F => gemv::<F>(task), else {}) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn gemv<F: Avx512Format>(task: &Task<'_>) {
    let x = [task.activations.int8x2_row(task.first_row)];
    let superblocks = task.layout.columns() / (F::BLOCKS * BLOCK);
    for group in task.groups.clone() {
        let mut superblock = task.group(group).as_ptr();
        let mut sums = [[_mm512_setzero_ps(); 2]];
        for index in 0..superblocks {
            // SAFETY: the group has `superblocks` superblocks, and the row of activations as many blocks.
            unsafe {
                if F::BLOCKS < 8 {
                    prefetch::stream(superblock, F::BYTES);
                    add_blocks::<F>(&mut sums, superblock, &x, index * F::BLOCKS);
                } else if F::Scales::I16_PAIRS {
                    add_pairs::<F>(&mut sums, superblock, &x, index * F::BLOCKS);
                } else {
                    add_superblock::<F>(&mut sums, superblock, &x, index * F::BLOCKS);
                }
            }
            superblock = superblock.wrapping_add(F::BYTES);
        }
        // SAFETY: the group is one of the layout's.
        unsafe { store(task, group, 0, _mm512_add_ps(sums[0][0], sums[0][1])) };
    }
}

/// Adds the contributions of the blocks of a superblock, each with its own scales, to sixteen sums; `first` is the
/// first of them in the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn add_blocks<F: Avx512Format>(
    sums: &mut [[__m512; 2]; 1],
    superblock: *const u8,
    x: &[Int8x2Row; 1],
    first: usize,
) {
    for block in 0..F::BLOCKS {
        // SAFETY: promised by the caller.
        unsafe {
            let (quants, affine) = (F::quants(superblock, block), F::scales(superblock, block));
            add_block::<F, 1, true>(sums, &quants, &affine, x, first + block);
        }
    }
}

/// Calls `$function::<F, block>($arguments)` for the eight blocks of a superblock.
macro_rules! each_block {
    ($function:ident($($argument:expr),*)) => {
        each_block!($function [$($argument),*]; 0 1 2 3 4 5 6 7)
    };
    ($function:ident $arguments:tt; $($block:literal)*) => {
        $(each_block!(@ $function, $block, $arguments);)*
    };
    (@ $function:ident, $block:literal, [$($argument:expr),*]) => {
        $function::<F, $block>($($argument),*)
    };
}

/// Prefetches as many cache lines as a block's share of a superblock has.
#[inline(always)]
fn prefetch_block<F: Avx512Format>(superblock: *const u8, block: usize) {
    let line = |block: usize| (block * F::BYTES).div_ceil(F::BLOCKS * 64);
    prefetch::stream(superblock.wrapping_add(64 * line(block)), 64 * (line(block + 1) - line(block)));
}

/// Adds a superblock's contribution to sixteen sums; `first` is the first of its blocks in the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn add_superblock<F: Avx512Format>(
    sums: &mut [[__m512; 2]; 1],
    superblock: *const u8,
    x: &[Int8x2Row; 1],
    first: usize,
) {
    let mut parts = [[_mm512_setzero_ps(); 2]];
    // SAFETY: promised by the caller.
    unsafe {
        each_block!(superblock_block(&mut parts, superblock, x, first));
        sums[0] = finish_superblock::<F>(sums[0], parts[0], superblock, &x[0], first);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn superblock_block<F: Avx512Format, const INDEX: usize>(
    parts: &mut [[__m512; 2]; 1],
    superblock: *const u8,
    x: &[Int8x2Row; 1],
    first: usize,
) {
    prefetch_block::<F>(superblock, INDEX);
    // SAFETY: promised by the caller.
    unsafe {
        let sub = F::Scales::sub_scales(F::scales_of(superblock), INDEX);
        add_block::<F, 1, false>(parts, &F::quants(superblock, INDEX), &sub, x, first + INDEX);
    }
}

/// As [`add_superblock`], in integers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn add_pairs<F: Avx512Format>(
    sums: &mut [[__m512; 2]; 1],
    superblock: *const u8,
    x: &[Int8x2Row; 1],
    first: usize,
) {
    let mut parts = [[_mm512_setzero_si512(); 4]];
    // SAFETY: promised by the caller.
    unsafe {
        each_block!(pair_block(&mut parts, superblock, x, first));
        sums[0] = finish_pairs::<F>(sums[0], parts[0], superblock, &x[0], first);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn pair_block<F: Avx512Format, const INDEX: usize>(
    parts: &mut [[__m512i; 4]; 1],
    superblock: *const u8,
    x: &[Int8x2Row; 1],
    first: usize,
) {
    prefetch_block::<F>(superblock, INDEX);
    // SAFETY: promised by the caller.
    unsafe {
        let sub = F::Scales::i16_pairs(F::scales_of(superblock), INDEX);
        add_pairs_block::<F, 1>(parts, &F::quants(superblock, INDEX), sub, x, first + INDEX);
    }
}
