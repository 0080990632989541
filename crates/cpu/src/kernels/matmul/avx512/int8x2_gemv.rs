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

use std::arch::asm;
use std::arch::x86_64::*;

use super::Avx512Format;
use super::int8x2_dot::{add_block, dots, store};
use crate::isa::Avx512;
use crate::kernels::matmul::activations::{DIGITS, Int8x2Row};
use crate::kernels::matmul::format::{BLOCK, with_format};
use crate::kernels::matmul::scales::{ScaleLoads, ScaleStorage};
use crate::kernels::matmul::{Task, prefetch};

/// Runs a task of one row.
pub(super) fn multiply(_token: Avx512, task: &Task<'_>) {
    // SAFETY: the token proves the instructions; the task was checked by `multiply`.
    unsafe { with_format!(task.layout.dtype(), F => gemv::<F>(task), else {}) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn gemv<F: Avx512Format>(task: &Task<'_>) {
    let x = task.activations.int8x2_row(task.first_row);
    let superblocks = task.layout.columns() / (F::BLOCKS * BLOCK);
    for group in task.groups.clone() {
        let mut superblock = task.group(group).as_ptr();
        let mut sums = [_mm512_setzero_ps(); 2];
        for index in 0..superblocks {
            // SAFETY: the group has `superblocks` superblocks, and the row of activations as many blocks.
            unsafe {
                sums = if F::BLOCKS < 8 {
                    prefetch::stream(superblock, F::BYTES);
                    add_blocks::<F>(sums, superblock, &x, index * F::BLOCKS)
                } else if F::Scales::I16_PAIRS {
                    add_pairs::<F>(sums, superblock, &x, index * F::BLOCKS)
                } else {
                    add_superblock::<F>(sums, superblock, &x, index * F::BLOCKS)
                };
            }
            superblock = superblock.wrapping_add(F::BYTES);
        }
        // SAFETY: the group is one of the layout's.
        unsafe { store(task, group, 0, _mm512_add_ps(sums[0], sums[1]), false) };
    }
}

/// Adds the contributions of the blocks of a superblock, each with its own scales, to sixteen sums; `first` is the
/// first of them in the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn add_blocks<F: Avx512Format>(
    mut sums: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    for block in 0..F::BLOCKS {
        // SAFETY: promised by the caller.
        unsafe {
            let (quants, affine) = (F::quants(superblock, block), F::scales(superblock, block));
            sums = if F::Scales::PER_16 {
                add_block::<true>(sums, &quants, &affine, x, first + block)
            } else {
                add_block::<false>(sums, &quants, &affine, x, first + block)
            };
        }
    }
    sums
}

/// Calls `$function::<F, block>($sums, $arguments)` for the eight blocks of a superblock, and assigns the result to
/// `$sums`.
macro_rules! each_block {
    ($sums:ident = $function:ident($superblock:expr, $x:expr, $first:expr)) => {
        each_block!($sums = $function($superblock, $x, $first); 0 1 2 3 4 5 6 7)
    };
    ($sums:ident = $function:ident($superblock:expr, $x:expr, $first:expr); $($block:literal)*) => {
        $($sums = $function::<F, $block>($sums, $superblock, $x, $first);)*
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
    sums: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    let mut parts = [_mm512_setzero_ps(); 2];
    // SAFETY: promised by the caller.
    unsafe {
        each_block!(parts = superblock_block(superblock, x, first));
        let [d, m] = F::super_scales(superblock);
        let d = _mm512_mul_ps(d, _mm512_set1_ps(*x.scales.add(first)));
        [_mm512_fmadd_ps(d, parts[0], sums[0]), _mm512_fmadd_ps(m, parts[1], sums[1])]
    }
}

/// Adds the sub-scales of a block times its dot products, and times the sums of the activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn superblock_block<F: Avx512Format, const INDEX: usize>(
    parts: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    let [mut main, mut rest] = parts;
    prefetch_block::<F>(superblock, INDEX);
    // SAFETY: promised by the caller.
    unsafe {
        let block = first + INDEX;
        let [low, high] = dots(&F::quants(superblock, INDEX), x.quants.add(2 * block * BLOCK));
        let sub = F::Scales::sub_scales(F::scales_of(superblock), INDEX);
        if F::Scales::PER_16 {
            main = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), sub.d[0], main);
            main = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), sub.d[1], main);
            rest = _mm512_fmadd_ps(sub.m[0], _mm512_set1_ps(*x.half_sums.add(2 * block)), rest);
            rest = _mm512_fmadd_ps(sub.m[1], _mm512_set1_ps(*x.half_sums.add(2 * block + 1)), rest);
        } else {
            let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(low, high));
            main = _mm512_fmadd_ps(dot, sub.d[0], main);
            rest = _mm512_fmadd_ps(sub.m[0], _mm512_set1_ps(*x.sums.add(block)), rest);
        }
    }
    [main, rest]
}

/// As [`add_superblock`], in integers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn add_pairs<F: Avx512Format>(
    sums: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    let mut parts = [_mm512_setzero_si512(); 4];
    // SAFETY: promised by the caller.
    unsafe {
        each_block!(parts = pair_block(superblock, x, first));
        let [d, m] = F::super_scales(superblock);
        let scale = _mm512_set1_ps(*x.scales.add(first));
        let [main, main_low, rest, rest_low] = parts;
        let whole = |high, low| _mm512_add_epi32(_mm512_slli_epi32::<7>(high), low);
        let rest = if F::Scales::MIN_BYTES {
            let sub_mins = F::Scales::min_bytes(F::scales_of(superblock));
            dot_digits(&sub_mins, x.digits.add(first / F::BLOCKS * DIGITS))
        } else {
            whole(rest, rest_low)
        };
        let (main, rest) = (_mm512_cvtepi32_ps(whole(main, main_low)), _mm512_cvtepi32_ps(rest));
        [
            _mm512_fmadd_ps(_mm512_mul_ps(d, scale), main, sums[0]),
            _mm512_fmadd_ps(_mm512_mul_ps(m, scale), rest, sums[1]),
        ]
    }
}

/// The dot product of the minimums' sub-scales of sixteen half blocks, as bytes, with the sums of their activations, as
/// three digits each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot_digits(sub_mins: &[__m512i; 4], digits: *const i8) -> __m512i {
    let mut sum = _mm512_setzero_si512();
    for digit in 0..3 {
        sum = _mm512_slli_epi32::<7>(sum);
        for (i, sub_mins) in sub_mins.iter().enumerate() {
            // SAFETY: promised by the caller: three times sixteen digits.
            let four = unsafe { digits.cast::<i32>().add(4 * digit + i).read_unaligned() };
            sum = _mm512_dpbusd_epi32(sum, *sub_mins, _mm512_set1_epi32(four));
        }
    }
    sum
}

/// Adds the sub-scales of a block times its dot products, and times the sums of the activations unless
/// [`dot_digits`] does that for the superblock: for the high and the low byte of the activations each.
///
/// A dot product of 16 columns is at most 16 × 7 × 127 in size. A superblock's sixteen of them with sub-scales of at
/// most 32 are below 2²³, and below 2³⁰ when shifted by the low byte's 7 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn pair_block<F: Avx512Format, const INDEX: usize>(
    parts: [__m512i; 4],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512i; 4] {
    prefetch_block::<F>(superblock, INDEX);
    // SAFETY: promised by the caller.
    unsafe {
        let block = first + INDEX;
        let [a, b, c, d, e, f, g, h] = F::quants(superblock, INDEX);
        let x_quants = x.quants.add(2 * block * BLOCK).cast::<i32>();
        let four = |i: usize| _mm512_set1_epi32(x_quants.add(i).read_unaligned());
        let dot = |q: [__m512i; 4], first: usize| {
            let sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[0], four(first));
            let sum = _mm512_dpbusd_epi32(sum, q[1], four(first + 1));
            let sum = _mm512_dpbusd_epi32(sum, q[2], four(first + 2));
            _mm512_dpbusd_epi32(sum, q[3], four(first + 3))
        };
        let main = pair(dot([a, b, c, d], 0), dot([e, f, g, h], 4));
        let rest = pair(dot([a, b, c, d], 8), dot([e, f, g, h], 12));
        let sub = F::Scales::i16_pairs(F::scales_of(superblock), INDEX);
        let (main, rest) = (add_products(parts[0], main, sub), add_products(parts[1], rest, sub));
        if F::Scales::MIN_BYTES {
            return [main, rest, parts[2], parts[3]];
        }
        let sums = x.byte_sums.add(4 * block).cast::<i32>();
        let sum = |i: usize| _mm512_set1_epi32(sums.add(i).read_unaligned());
        [main, rest, add_products(parts[2], sub, sum(0)), add_products(parts[3], sub, sum(1))]
    }
}

/// The low 16 bits of each lane of `low`, and those of `high` above them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pair(low: __m512i, high: __m512i) -> __m512i {
    let places = _mm512_broadcast_i32x4(_mm_set_epi8(13, 12, 0, 0, 9, 8, 0, 0, 5, 4, 0, 0, 1, 0, 0, 0));
    let mut pair = low;
    // SAFETY: works on registers. In assembly, because the compiler emits three instructions for it.
    unsafe {
        asm!(
            "vpshufb {pair}{{{mask}}}, {high}, {places}",
            pair = inout(zmm_reg) pair,
            mask = in(kreg) 0xcccc_cccc_cccc_cccc_u64,
            high = in(zmm_reg) high,
            places = in(zmm_reg) places,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    pair
}

/// Adds the products of the two 16-bit numbers of each lane to 32-bit sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_products(mut sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: works on registers. In assembly, because the compiler splits it into two instructions.
    unsafe {
        asm!(
            "vpdpwssd {sums}, {a}, {b}",
            sums = inout(zmm_reg) sums,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
