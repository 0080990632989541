//! GEMV and GEMM of few rows of `Int8x2` activations with quantized weights: AVX2.
//!
//! `maddubs` multiplies unsigned by signed bytes and adds pairs in 16 bits. As many of these as cannot overflow are
//! added before they are widened to 32 bits: eight for 4-bit quants, one for signed bytes. AVX-VNNI multiplies and adds
//! four bytes in 32 bits with one instruction. The sums are the same integers.
//!
//! All functions are inlined into the entry points, which differ in their target features.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Avx2Format;
use crate::isa::{Avx2, AvxVnni};
use crate::kernels::matmul::activations::{Int8x2Row, PANEL_COLUMNS};
use crate::kernels::matmul::format::{BLOCK, GROUP, with_format};
use crate::kernels::matmul::scales::{Affine, ScaleStorage};
use crate::kernels::matmul::{FEW_ROWS, Task, prefetch};

const PANEL_BLOCKS: usize = PANEL_COLUMNS / BLOCK;

/// Pairs of columns of a block.
const PAIRS: usize = BLOCK / 2;

/// Rows of activations that are multiplied together.
const STRIP: usize = 4;

/// A block of a group in the panel of a GEMM: sixteen rows, in two vectors.
#[repr(C, align(32))]
struct PanelBlock {
    /// Pairs of columns as 16-bit integers.
    pairs: [[__m256i; 2]; PAIRS],
    halves: [Affine<__m256>; 2],
}

/// The scratch memory of a GEMM.
#[repr(C, align(32))]
struct Panel {
    blocks: [PanelBlock; PANEL_BLOCKS],
    /// The sums so far of each row.
    sums: [[__m256; 2]; FEW_ROWS],
}

const _: () = assert!(size_of::<Panel>() <= crate::kernels::matmul::activations::SCRATCH);

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(_token: Avx2, vnni: Option<AvxVnni>, task: &Task<'_>) {
    // SAFETY: the tokens prove the instructions; the task was checked by `multiply`.
    unsafe {
        if vnni.is_some() {
            with_format!(task.layout.dtype(), F => run_vnni::<F>(task), else {});
        } else {
            with_format!(task.layout.dtype(), F => run::<F>(task), else {});
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<F: Avx2Format>(task: &Task<'_>) {
    // SAFETY: promised by the caller.
    unsafe { if task.rows == 1 { gemv::<F, false>(task) } else { gemm::<F, false>(task) } }
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn run_vnni<F: Avx2Format>(task: &Task<'_>) {
    // SAFETY: promised by the caller.
    unsafe { if task.rows == 1 { gemv::<F, true>(task) } else { gemm::<F, true>(task) } }
}

/// Writes eight results of a row, or as many as there are weight rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(task: &Task<'_>, first: usize, row: usize, sums: __m256) {
    let count = 8.min(task.layout.rows().saturating_sub(first));
    let Some(out) = task.output.row(row) else { return };
    let mut lanes = [0.0_f32; 8];
    // SAFETY: an array of eight; columns past the end of the row are left out.
    unsafe {
        if count == 8 {
            return _mm256_storeu_ps(out.add(first), sums);
        }
        _mm256_storeu_ps(lanes.as_mut_ptr(), sums);
        for (i, lane) in lanes.iter().take(count).enumerate() {
            *out.add(first + i) = *lane;
        }
    }
}

/// The dot products of the two half blocks with one byte of each activation; the first is that of the whole block where
/// 32 columns share a scale.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_maddubs<F: Avx2Format>(quants: &[__m256i; 8], x: *const i8) -> [__m256i; 2] {
    let ones = _mm256_set1_epi16(1);
    let [mut low, mut high] = [_mm256_setzero_si256(); 2];
    let mut run = _mm256_setzero_si256();
    for (v, q) in quants.iter().enumerate() {
        // SAFETY: promised by the caller: 32 bytes.
        let four = _mm256_set1_epi32(unsafe { x.cast::<i32>().add(v).read_unaligned() });
        let pairs = if F::SIGNED {
            _mm256_maddubs_epi16(_mm256_abs_epi8(*q), _mm256_sign_epi8(four, *q))
        } else {
            _mm256_maddubs_epi16(*q, four)
        };
        run = if v % F::MADDUBS_RUN == 0 { pairs } else { _mm256_add_epi16(run, pairs) };
        // Widen to 32 bits at the end of a run, and at the end of the half block if it has its own scale.
        if (v + 1) % F::MADDUBS_RUN == 0 || (F::Scales::PER_16 && v == 3) {
            let wide = _mm256_madd_epi16(run, ones);
            if F::Scales::PER_16 && v >= 4 {
                high = _mm256_add_epi32(high, wide);
            } else {
                low = _mm256_add_epi32(low, wide);
            }
            run = _mm256_setzero_si256();
        }
    }
    [low, high]
}

/// As [`dots_maddubs`], with AVX-VNNI.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn dots_vnni<F: Avx2Format>(quants: &[__m256i; 8], x: *const i8) -> [__m256i; 2] {
    // Two sums in any case, so that half as many instructions wait for each other.
    let [mut low, mut high] = [_mm256_setzero_si256(); 2];
    for (v, q) in quants.iter().enumerate() {
        // SAFETY: promised by the caller: 32 bytes.
        let four = _mm256_set1_epi32(unsafe { x.cast::<i32>().add(v).read_unaligned() });
        let (q, four) =
            if F::SIGNED { (_mm256_abs_epi8(*q), _mm256_sign_epi8(four, *q)) } else { (*q, four) };
        let sum = if v < 4 { &mut low } else { &mut high };
        *sum = _mm256_dpbusd_avx_epi32(*sum, q, four);
    }
    if F::Scales::PER_16 { [low, high] } else { [_mm256_add_epi32(low, high), _mm256_setzero_si256()] }
}

/// The dot products of high and low bytes, put together and scaled.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scaled(main: __m256i, rest: __m256i, scale: __m256) -> __m256 {
    let both = _mm256_add_epi32(_mm256_slli_epi32::<7>(main), rest);
    _mm256_mul_ps(_mm256_cvtepi32_ps(both), scale)
}

/// Adds a block's contribution to eight sums.
///
/// # Safety
/// The row of activations has this block; the CPU has AVX2, FMA and F16C, and AVX-VNNI for `VNNI`.
#[inline(always)]
unsafe fn add_block<F: Avx2Format, const VNNI: bool>(
    sum: __m256,
    quants: &[__m256i; 8],
    affine: &Affine<__m256>,
    x: &Int8x2Row,
    block: usize,
) -> __m256 {
    let mut sum = sum;
    // SAFETY: the row of activations has this block.
    unsafe {
        let at = x.quants.add(2 * block * BLOCK);
        let (main, rest) = if VNNI {
            (dots_vnni::<F>(quants, at), dots_vnni::<F>(quants, at.add(BLOCK)))
        } else {
            (dots_maddubs::<F>(quants, at), dots_maddubs::<F>(quants, at.add(BLOCK)))
        };
        let scale = _mm256_set1_ps(*x.scales.add(block));
        sum = _mm256_fmadd_ps(scaled(main[0], rest[0], scale), affine.d[0], sum);
        if F::Scales::PER_16 {
            sum = _mm256_fmadd_ps(scaled(main[1], rest[1], scale), affine.d[1], sum);
        }
        if F::HAS_M && F::Scales::PER_16 {
            sum = _mm256_fmadd_ps(affine.m[0], _mm256_set1_ps(*x.half_sums.add(2 * block)), sum);
            sum = _mm256_fmadd_ps(affine.m[1], _mm256_set1_ps(*x.half_sums.add(2 * block + 1)), sum);
        } else if F::HAS_M {
            sum = _mm256_fmadd_ps(affine.m[0], _mm256_set1_ps(*x.sums.add(block)), sum);
        }
    }
    sum
}

/// GEMV: streams the packed weights once.
///
/// # Safety
/// The task was checked; the CPU has AVX2, FMA and F16C, and AVX-VNNI for `VNNI`.
#[inline(always)]
unsafe fn gemv<F: Avx2Format, const VNNI: bool>(task: &Task<'_>) {
    let x = task.activations.int8x2_row(task.first_row);
    let superblocks = task.layout.columns() / (F::BLOCKS * BLOCK);
    for group in task.groups.clone() {
        let mut superblock = task.group(group).as_ptr();
        // SAFETY: promised by the caller.
        let mut sums = unsafe { [_mm256_setzero_ps(); 2] };
        for index in 0..superblocks {
            for block in 0..F::BLOCKS {
                prefetch::stream(superblock.wrapping_add(block * F::BYTES / F::BLOCKS), F::BYTES / F::BLOCKS);
                for (half, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: the group has `superblocks` superblocks, and the row of activations as many blocks.
                    unsafe {
                        let quants = F::quants(superblock, block, half);
                        let affine = F::scales(superblock, block, half);
                        *sum = add_block::<F, VNNI>(*sum, &quants, &affine, &x, index * F::BLOCKS + block);
                    }
                }
            }
            superblock = superblock.wrapping_add(F::BYTES);
        }
        for (half, sum) in sums.into_iter().enumerate() {
            // SAFETY: the group is one of the layout's.
            unsafe { store(task, group * GROUP + 8 * half, 0, sum) };
        }
    }
}

/// GEMM: unpacks the sixteen weight rows of a group once, for all rows of activations, four at a time. A product of 16-bit integers
/// takes no more instructions than those of both bytes, and the weights of a group share the loads of activations. Every row's result
/// is the same bits as that of a GEMV with the row: the integers are the same, and what is added up in floating point is in the same
/// order.
///
/// # Safety
/// As for [`gemv`].
#[inline(always)]
unsafe fn gemm<F: Avx2Format, const VNNI: bool>(task: &Task<'_>) {
    let panel = task.scratch.cast::<Panel>();
    let blocks = task.layout.columns() / BLOCK;
    for first_row in (0..task.rows).step_by(FEW_ROWS) {
        let rows = first_row..(first_row + FEW_ROWS).min(task.rows);
        for group in task.groups.clone() {
            for first in (0..blocks).step_by(PANEL_BLOCKS) {
                let blocks = first..(first + PANEL_BLOCKS).min(blocks);
                // SAFETY: the scratch memory is this thread's; rows below `task.rows` exist in activations and output.
                unsafe {
                    unpack::<F>(task, group, &blocks, panel);
                    for row in rows.clone().step_by(STRIP) {
                        let part = Part { column: group * GROUP, row, blocks: blocks.clone(), panel };
                        match rows.end - row {
                            1 => micro_kernel::<1, F, VNNI>(task, &part),
                            2 => micro_kernel::<2, F, VNNI>(task, &part),
                            3 => micro_kernel::<3, F, VNNI>(task, &part),
                            _ => micro_kernel::<4, F, VNNI>(task, &part),
                        }
                    }
                }
            }
        }
    }
}

/// The two pairs of columns in each four bytes, as 16-bit integers.
#[inline]
#[target_feature(enable = "avx2")]
fn widened<F: Avx2Format>(quants: __m256i) -> [__m256i; 2] {
    // The bytes of a pair are the upper ones of their 16 bits, from where the sign is drawn down; or the lower ones, above zeros.
    let masks = if F::SIGNED { [0x01ff_00ff, 0x03ff_02ff] } else { [0xff01_ff00_u32, 0xff03_ff02] };
    masks.map(|mask| {
        let lanes = _mm256_setr_epi32(
            0,
            0x0404_0404,
            0x0808_0808,
            0x0c0c_0c0c,
            0,
            0x0404_0404,
            0x0808_0808,
            0x0c0c_0c0c,
        );
        // The lane's offset leaves the top bit of those that become zero.
        let mask = _mm256_or_si256(_mm256_set1_epi32(mask as i32), lanes);
        let wide = _mm256_shuffle_epi8(quants, mask);
        if F::SIGNED { _mm256_srai_epi16::<8>(wide) } else { wide }
    })
}

/// Unpacks some blocks of a group.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<F: Avx2Format>(task: &Task<'_>, group: usize, blocks: &Range<usize>, panel: *mut Panel) {
    let packed = task.group(group).as_ptr();
    // SAFETY: the panel has room for PANEL_BLOCKS blocks; the superblocks are inside the group.
    unsafe {
        let places = (&raw mut (*panel).blocks).cast::<PanelBlock>();
        for (i, block) in blocks.clone().enumerate() {
            let (superblock, block) = (packed.add(block / F::BLOCKS * F::BYTES), block % F::BLOCKS);
            prefetch::stream(superblock.wrapping_add(block * F::BYTES / F::BLOCKS), F::BYTES / F::BLOCKS);
            let place = places.add(i);
            for half in 0..2 {
                let pairs = (&raw mut (*place).pairs).cast::<__m256i>().add(half);
                for (v, quants) in F::quants(superblock, block, half).into_iter().enumerate() {
                    let [first, second] = widened::<F>(quants);
                    pairs.add(4 * v).write(first);
                    pairs.add(4 * v + 2).write(second);
                }
                let affine = F::scales(superblock, block, half);
                (&raw mut (*place).halves).cast::<Affine<__m256>>().add(half).write(affine);
            }
        }
    }
}

/// Some rows × some blocks of a group.
struct Part {
    /// The first of the weight rows.
    column: usize,
    row: usize,
    blocks: Range<usize>,
    panel: *mut Panel,
}

/// The dot products of some pairs of columns of a block with rows of activations.
///
/// # Safety
/// The rows have the pairs; the CPU has AVX2, and AVX-VNNI for `VNNI`.
#[inline(always)]
unsafe fn dots_of_pairs<const ROWS: usize, const VNNI: bool>(
    pairs: &[[__m256i; 2]],
    x: [*const i32; ROWS],
) -> [[__m256i; 2]; ROWS] {
    // SAFETY: promised by the caller.
    unsafe {
        let mut dots = [[_mm256_setzero_si256(); 2]; ROWS];
        for (i, [low, high]) in pairs.iter().enumerate() {
            for (dots, x) in dots.iter_mut().zip(&x) {
                let x = _mm256_set1_epi32(x.add(i).read_unaligned());
                dots[0] = add_pairs::<VNNI>(dots[0], *low, x);
                dots[1] = add_pairs::<VNNI>(dots[1], *high, x);
            }
        }
        dots
    }
}

/// Adds the products of pairs to sums.
#[inline(always)]
unsafe fn add_pairs<const VNNI: bool>(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2, and AVX-VNNI for `VNNI`.
    unsafe {
        if VNNI {
            _mm256_dpwssd_avx_epi32(sums, a, b)
        } else {
            _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
        }
    }
}

/// `ROWS` rows × the blocks of a part.
///
/// # Safety
/// As for [`gemv`]; the panel has the blocks, and activations and output have the rows.
#[inline(always)]
unsafe fn micro_kernel<const ROWS: usize, F: Avx2Format, const VNNI: bool>(task: &Task<'_>, part: &Part) {
    let first_row = task.first_row + part.row;
    let x: [Int8x2Row; ROWS] = std::array::from_fn(|r| task.activations.int8x2_row(first_row + r));
    // Columns that share a scale: all of a block, or half of them.
    let parts = if F::Scales::PER_16 { 2 } else { 1 };
    // SAFETY: the panel holds the blocks, and sums for each row; the rows have the blocks; the columns are those of a
    // group of the layout.
    unsafe {
        let panel = (&raw const (*part.panel).blocks).cast::<PanelBlock>();
        let state = (&raw mut (*part.panel).sums).cast::<[__m256; 2]>().add(part.row % FEW_ROWS);
        let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
        if part.blocks.start > 0 {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = state.add(r).read();
            }
        }
        for (i, index) in part.blocks.clone().enumerate() {
            let block = &*panel.add(i);
            for of_block in 0..parts {
                let pairs =
                    std::slice::from_raw_parts(block.pairs.as_ptr().add(of_block * PAIRS / 2), PAIRS / parts);
                let words =
                    x.map(|x| x.words.add(index * BLOCK + of_block * BLOCK / 2).cast::<i32>().cast_const());
                let dots = dots_of_pairs::<ROWS, VNNI>(pairs, words);
                for ((sums, dots), x) in sums.iter_mut().zip(dots).zip(&x) {
                    let scale = _mm256_set1_ps(*x.scales.add(index));
                    for ((sum, dot), affine) in sums.iter_mut().zip(dots).zip(&block.halves) {
                        let d = if of_block == 0 { affine.d[0] } else { affine.d[1] };
                        *sum = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale), d, *sum);
                    }
                }
            }
            if F::HAS_M {
                for (sums, x) in sums.iter_mut().zip(&x) {
                    for (sum, affine) in sums.iter_mut().zip(&block.halves) {
                        if F::Scales::PER_16 {
                            let [first, second] =
                                [0, 1].map(|half| _mm256_set1_ps(*x.half_sums.add(2 * index + half)));
                            *sum = _mm256_fmadd_ps(affine.m[0], first, *sum);
                            *sum = _mm256_fmadd_ps(affine.m[1], second, *sum);
                        } else {
                            *sum = _mm256_fmadd_ps(affine.m[0], _mm256_set1_ps(*x.sums.add(index)), *sum);
                        }
                    }
                }
            }
        }
        let last = part.blocks.end * BLOCK == task.layout.columns();
        for (r, sums) in sums.into_iter().enumerate() {
            if last {
                for (half, sums) in sums.into_iter().enumerate() {
                    store(task, part.column + 8 * half, part.row + r, sums);
                }
            } else {
                state.add(r).write(sums);
            }
        }
    }
}
