//! GEMV and GEMM of F32, F16 and BF16 weights in f32 arithmetic: AVX2.
//!
//! A group of sixteen weight rows is two vectors wide. The GEMM micro-kernel is 6 × 16: panels of up to six rows × one
//! group, twelve accumulators in registers. GEMM converts F16 and BF16 columns to f32 in scratch memory first. GEMV adds up
//! two panels of columns side by side, and the panels in the order of GEMM: one row has the same result as among others.

use std::arch::x86_64::*;

use quadriga_graph::DType;

use crate::isa::Avx2;
use crate::kernels::matmul::activations::SCRATCH;
use crate::kernels::matmul::format::GROUP;
use crate::kernels::matmul::{FLOAT_PANEL as PANEL, Task};

const _: () = assert!(PANEL * GROUP * size_of::<f32>() <= SCRATCH);

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(_token: Avx2, task: &Task<'_>) {
    // SAFETY: the token proves the instructions; the task was checked by `multiply`.
    unsafe {
        match task.layout.dtype() {
            DType::F16 => rows::<F16Weights>(task),
            DType::BF16 => rows::<Bf16Weights>(task),
            _ => rows::<F32Weights>(task),
        }
    }
}

/// An unquantized type of weights.
trait FloatWeights {
    /// Whether packed groups can be used without conversion.
    const IS_F32: bool;
    /// Loads one column of a group.
    ///
    /// # Safety
    /// The column must be in the group, and the CPU must have AVX2 and F16C.
    unsafe fn column(group: *const u8, column: usize) -> [__m256; 2];
}

struct F32Weights;
struct F16Weights;
struct Bf16Weights;

impl FloatWeights for F32Weights {
    const IS_F32: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn column(group: *const u8, column: usize) -> [__m256; 2] {
        // SAFETY: promised by the caller.
        unsafe {
            let at = group.add(column * 64).cast::<f32>();
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))]
        }
    }
}

impl FloatWeights for F16Weights {
    const IS_F32: bool = false;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn column(group: *const u8, column: usize) -> [__m256; 2] {
        // SAFETY: promised by the caller.
        unsafe {
            let at = group.add(column * 32).cast::<__m128i>();
            [_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))]
        }
    }
}

impl FloatWeights for Bf16Weights {
    const IS_F32: bool = false;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn column(group: *const u8, column: usize) -> [__m256; 2] {
        // SAFETY: promised by the caller; columns are stored in pairs.
        let [a, b] = unsafe {
            let at = group.add(column / 2 * 64).cast::<__m256i>();
            [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))]
        };
        if column.is_multiple_of(2) {
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b))]
        } else {
            let mask = _mm256_set1_epi32(!0xffff);
            [_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))]
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<W: FloatWeights>(task: &Task<'_>) {
    let columns = task.layout.columns();
    let single = task.is_single_row_panel();
    for group in task.groups.clone() {
        let packed = task.group(group).as_ptr();
        if single {
            // SAFETY: promised by the caller.
            unsafe { gemv::<W>(task, group, packed) };
            continue;
        }
        for first in (0..columns).step_by(PANEL) {
            let count = PANEL.min(columns - first);
            let mut wide = packed.cast::<f32>().wrapping_add(first * GROUP);
            if !W::IS_F32 {
                let scratch = task.scratch.cast::<f32>();
                for column in 0..count {
                    // SAFETY: the column is inside the group; the scratch memory holds PANEL columns.
                    unsafe {
                        let [a, b] = W::column(packed, first + column);
                        _mm256_storeu_ps(scratch.add(column * GROUP), a);
                        _mm256_storeu_ps(scratch.add(column * GROUP + 8), b);
                    }
                }
                wide = scratch.cast_const();
            }
            for row in (0..task.rows).step_by(6) {
                // SAFETY: the panel has `count` columns.
                unsafe {
                    match task.activations.f32_panel(task.first_row + row).1 {
                        1 => panel::<1>(task, group, row, wide, first, count),
                        2 => panel::<2>(task, group, row, wide, first, count),
                        3 => panel::<3>(task, group, row, wide, first, count),
                        4 => panel::<4>(task, group, row, wide, first, count),
                        5 => panel::<5>(task, group, row, wide, first, count),
                        _ => panel::<6>(task, group, row, wide, first, count),
                    }
                }
            }
        }
        if columns == 0 {
            for row in 0..task.rows {
                // SAFETY: the group is one of the layout's.
                unsafe { store(task, group, row, [_mm256_setzero_ps(); 2], false) };
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemv<W: FloatWeights>(task: &Task<'_>, group: usize, packed: *const u8) {
    let columns = task.layout.columns();
    let (x, _) = task.activations.f32_panel(task.first_row);
    let mut total = [_mm256_setzero_ps(); 2];
    // SAFETY: columns below the last are inside the group and the row.
    unsafe {
        for first in (0..columns).step_by(2 * PANEL) {
            let second = (first + PANEL).min(columns);
            let both = (columns - second).min(PANEL);
            let mut sums = [[_mm256_setzero_ps(); 2]; 2];
            for column in 0..both {
                for (sums, at) in sums.iter_mut().zip([first + column, second + column]) {
                    *sums = add_column::<W>(packed, x, at, *sums);
                }
            }
            for column in first + both..second {
                sums[0] = add_column::<W>(packed, x, column, sums[0]);
            }
            let add = |a: [__m256; 2], b: [__m256; 2]| [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])];
            total = if first == 0 { sums[0] } else { add(total, sums[0]) };
            if both > 0 {
                total = add(total, sums[1]);
            }
        }
        store(task, group, 0, total, false);
    }
}

/// Adds the product of a column and its activation to the sums of a group.
///
/// # Safety
/// The column is in the group and in the row, and the CPU has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_column<W: FloatWeights>(
    packed: *const u8,
    x: *const f32,
    column: usize,
    [low, high]: [__m256; 2],
) -> [__m256; 2] {
    // SAFETY: promised by the caller.
    unsafe {
        let [a, b] = W::column(packed, column);
        let x = _mm256_set1_ps(*x.add(column));
        [_mm256_fmadd_ps(a, x, low), _mm256_fmadd_ps(b, x, high)]
    }
}

/// `ROWS` rows × one group × `count` columns.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel<const ROWS: usize>(
    task: &Task<'_>,
    group: usize,
    row: usize,
    w: *const f32,
    first: usize,
    count: usize,
) {
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    // SAFETY: the panel of activations holds ROWS values for each column, the group sixteen.
    unsafe {
        let x = task.activations.f32_panel(task.first_row + row).0.add(first * ROWS).cast_const();
        for column in 0..count {
            let low = _mm256_loadu_ps(w.add(column * GROUP));
            let high = _mm256_loadu_ps(w.add(column * GROUP + 8));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*x.add(column * ROWS + r));
                sums[0] = _mm256_fmadd_ps(low, x, sums[0]);
                sums[1] = _mm256_fmadd_ps(high, x, sums[1]);
            }
        }
        for (r, sums) in sums.into_iter().enumerate().take(task.rows - row) {
            store(task, group, row + r, sums, first > 0);
        }
    }
}

/// Writes sixteen results of a row, or as many as there are weight rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(task: &Task<'_>, group: usize, row: usize, sums: [__m256; 2], add: bool) {
    let first = group * GROUP;
    let count = GROUP.min(task.layout.rows() - first);
    let Some(out) = task.output.row(row) else { return };
    if count == GROUP {
        for (half, sum) in sums.into_iter().enumerate() {
            // SAFETY: the row has all columns of the group.
            unsafe {
                let place = out.add(first + 8 * half);
                let sum = if add { _mm256_add_ps(_mm256_loadu_ps(place), sum) } else { sum };
                _mm256_storeu_ps(place, sum);
            }
        }
        return;
    }
    let mut lanes = [0.0_f32; GROUP];
    // SAFETY: an array of sixteen; columns past the end of the row are left out.
    unsafe {
        _mm256_storeu_ps(lanes.as_mut_ptr(), sums[0]);
        _mm256_storeu_ps(lanes.as_mut_ptr().add(8), sums[1]);
        for (i, lane) in lanes.iter().take(count).enumerate() {
            let place = out.add(first + i);
            *place = if add { *place + lane } else { *lane };
        }
    }
}
