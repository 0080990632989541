//! The product of one row of activations in two bytes each with quantized weights: AVX-512 with VNNI.
//!
//! The packed weights are read once, front to back, and memory should be all that is waited for: a core has about 45
//! cycles for the 16 × 32 weights of a 4-bit block, 28 for those of a 2-bit block, and starts two vector instructions
//! in each. So scales are applied as late as the types allow:
//!
//! ```text
//! types with 32 columns to a scale    sums += d × (x scale × Σ q x)                                     block by block
//! types with 256 columns to a scale   sums += head × x scale × Σ over blocks of step × Σ q x            superblock by superblock
//! those of 2 and 3 bits               the same in 32-bit integers: quants and steps are so small that the dot products
//!                                     of 16 columns fit 16 bits. Those of two half blocks share a lane,
//!
//!                                     lane r | Σ q x, columns 0..16 | Σ q x, columns 16..32 |   × | step | step |
//!
//!                                     and are multiplied with their steps and added up by one instruction.
//! ```
//!
//! Four chains of dot products (two halves of a block × two bytes of an activation) hide each other's latency.

use std::arch::asm;
use std::arch::x86_64::*;

use super::Avx512Format;
use super::int8x2::{add_block, dots, store};
use crate::isa::Avx512;
use crate::kernels::matmul::activations::{DIGITS, Int8x2Row};
use crate::kernels::matmul::format::{BLOCK, with_format};
use crate::kernels::matmul::scales::{ScaleLoads, ScaleStorage};
use crate::kernels::matmul::{Task, prefetch};

/// One row of activations × groups of weight rows.
pub(super) fn multiply(_token: Avx512, task: &Task<'_>) {
    // SAFETY: the token proves the instructions; the task was checked by `multiply`.
    unsafe { with_format!(task.layout.dtype(), F => one_row::<F>(task), else {}) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn one_row<F: Avx512Format>(task: &Task<'_>) {
    let x = task.activations.int8x2_row(task.first_row);
    let superblocks = task.layout.columns() / (F::BLOCKS * BLOCK);
    for group in task.groups.clone() {
        let mut superblock = task.group(group).as_ptr();
        let mut sums = [_mm512_setzero_ps(); 2];
        for index in 0..superblocks {
            // SAFETY: the group has `superblocks` superblocks, and the row of activations as many blocks.
            unsafe {
                sums = if F::BLOCKS == 1 {
                    prefetch::stream(superblock, F::BYTES);
                    let (quants, affine) = (F::quants(superblock, 0), F::scales(superblock, 0));
                    add_block::<false>(sums, &quants, &affine, &x, index)
                } else if F::Scales::I16_PAIRS {
                    add_pairs::<F>(sums, superblock, &x, index * F::BLOCKS)
                } else {
                    add_cell::<F>(sums, superblock, &x, index * F::BLOCKS)
                };
            }
            superblock = superblock.wrapping_add(F::BYTES);
        }
        // SAFETY: the group is one of the layout's.
        unsafe { store(task, group, 0, _mm512_add_ps(sums[0], sums[1]), false) };
    }
}

/// Calls `$function::<P, block>($sums, $arguments)` for the eight blocks of a superblock, and puts what it returns in
/// `$sums`.
macro_rules! each_block {
    ($sums:ident = $function:ident($superblock:expr, $x:expr, $first:expr)) => {
        each_block!($sums = $function($superblock, $x, $first); 0 1 2 3 4 5 6 7)
    };
    ($sums:ident = $function:ident($superblock:expr, $x:expr, $first:expr); $($block:literal)*) => {
        $($sums = $function::<F, $block>($sums, $superblock, $x, $first);)*
    };
}

/// Asks for as many lines as a block has, its share of a superblock.
#[inline(always)]
fn ask_for<F: Avx512Format>(superblock: *const u8, block: usize) {
    let line = |block: usize| (block * F::BYTES).div_ceil(F::BLOCKS * 64);
    prefetch::stream(superblock.wrapping_add(64 * line(block)), 64 * (line(block + 1) - line(block)));
}

/// Adds a superblock's part to sixteen sums; `first` is the first of its blocks in the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn add_cell<F: Avx512Format>(
    sums: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    let mut parts = [_mm512_setzero_ps(); 2];
    // SAFETY: promised by the caller.
    unsafe {
        each_block!(parts = cell_block(superblock, x, first));
        let [d, m] = F::super_scales(superblock);
        let d = _mm512_mul_ps(d, _mm512_set1_ps(*x.scales.add(first)));
        [_mm512_fmadd_ps(d, parts[0], sums[0]), _mm512_fmadd_ps(m, parts[1], sums[1])]
    }
}

/// Adds the steps of a block times its dot products, and times the sums of the activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn cell_block<F: Avx512Format, const INDEX: usize>(
    parts: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    let [mut main, mut rest] = parts;
    ask_for::<F>(superblock, INDEX);
    // SAFETY: promised by the caller.
    unsafe {
        let block = first + INDEX;
        let [low, high] = dots(&F::quants(superblock, INDEX), x.quants.add(2 * block * BLOCK));
        let steps = F::Scales::sub_scales(F::scales_of(superblock), INDEX);
        if F::Scales::PER_16 {
            main = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), steps.d[0], main);
            main = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), steps.d[1], main);
            rest = _mm512_fmadd_ps(steps.m[0], _mm512_set1_ps(*x.half_sums.add(2 * block)), rest);
            rest = _mm512_fmadd_ps(steps.m[1], _mm512_set1_ps(*x.half_sums.add(2 * block + 1)), rest);
        } else {
            let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(low, high));
            main = _mm512_fmadd_ps(dot, steps.d[0], main);
            rest = _mm512_fmadd_ps(steps.m[0], _mm512_set1_ps(*x.sums.add(block)), rest);
        }
    }
    [main, rest]
}

/// As [`add_cell`], in integers.
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
            let steps = F::Scales::min_bytes(F::scales_of(superblock));
            steps_times_sums(&steps, x.digits.add(first / F::BLOCKS * DIGITS))
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

/// The steps of sixteen half blocks, as bytes, times the sums of their activations, as three digits each, and added up.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn steps_times_sums(steps: &[__m512i; 4], digits: *const i8) -> __m512i {
    let mut sum = _mm512_setzero_si512();
    for digit in 0..3 {
        sum = _mm512_slli_epi32::<7>(sum);
        for (i, steps) in steps.iter().enumerate() {
            // SAFETY: promised by the caller: three times sixteen digits.
            let four = unsafe { digits.cast::<i32>().add(4 * digit + i).read_unaligned() };
            sum = _mm512_dpbusd_epi32(sum, *steps, _mm512_set1_epi32(four));
        }
    }
    sum
}

/// Adds the steps of a block times its dot products, and times the sums of the activations unless that is done for the
/// whole superblock: for the high and the low byte of the activations each.
///
/// A dot product of 16 columns is at most 16 × 7 × 127 in size. A superblock's sixteen of them with steps of at most 32 are
/// below 2²³, and below 2³⁰ when shifted by the low byte's 7 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
unsafe fn pair_block<F: Avx512Format, const INDEX: usize>(
    parts: [__m512i; 4],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512i; 4] {
    ask_for::<F>(superblock, INDEX);
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
        let steps = F::Scales::i16_pairs(F::scales_of(superblock), INDEX);
        let (main, rest) = (add_products(parts[0], main, steps), add_products(parts[1], rest, steps));
        if F::Scales::MIN_BYTES {
            return [main, rest, parts[2], parts[3]];
        }
        let sums = x.pairs.add(4 * block).cast::<i32>();
        let sum = |i: usize| _mm512_set1_epi32(sums.add(i).read_unaligned());
        [main, rest, add_products(parts[2], steps, sum(0)), add_products(parts[3], steps, sum(1))]
    }
}

/// The low 16 bits of each lane of `low`, and those of `high` above them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pair(low: __m512i, high: __m512i) -> __m512i {
    let places = _mm512_broadcast_i32x4(_mm_set_epi8(13, 12, 0, 0, 9, 8, 0, 0, 5, 4, 0, 0, 1, 0, 0, 0));
    let mut pair = low;
    // SAFETY: works on registers. Written out, because the compiler makes a shuffle of three instructions of it.
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
    // SAFETY: works on registers. Written out, because the compiler takes it apart into two instructions.
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
