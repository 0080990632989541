//! GEMV and GEMM of F32, F16 and BF16 weights in f32 arithmetic: AVX-512.
//!
//! GEMV multiplies each column of a group, one vector, with one activation. The GEMM micro-kernel is 12 × 32: panels of
//! up to twelve rows × two groups, 24 accumulators in registers. [`PANEL`] columns are added up at a time: those of two
//! groups (24 KiB) stay in the L1 cache while [`ROWS`] rows pass by, and those of the rows in the L2 cache while the
//! groups of the task do. Sums are kept in scratch memory meanwhile: the row stride of the output may be a power of
//! two, so that few rows fit a set-associative cache. F16 and BF16 columns are converted to f32 in scratch memory
//! first. GEMV adds up several such panels of columns side by side, for as many independent chains of sums, and the panels
//! in the order of GEMM: one row has the same result as among others.

use std::arch::x86_64::*;
use std::ops::Range;

use quadriga_graph::DType;

use crate::isa::Avx512;
use crate::kernels::matmul::activations::SCRATCH;
use crate::kernels::matmul::format::GROUP;
use crate::kernels::matmul::{FLOAT_PANEL as PANEL, PLAIN_GROUPS, Task, prefetch};

/// Panels of columns that GEMV adds up side by side: a multiply-add takes four cycles.
const CHAINS: usize = 4;

/// Rows taken at a time: whole panels.
const ROWS: usize = 252;

#[repr(C, align(64))]
struct F32Scratch {
    wide: [[__m512; PANEL]; 2],
    /// For each pair of groups of a task and each row: sums of both groups.
    sums: [[[__m512; 2]; ROWS]; PLAIN_GROUPS / 2],
}

const _: () = assert!(size_of::<F32Scratch>() <= SCRATCH && ROWS.is_multiple_of(12));

/// Runs a task.
pub(in crate::kernels::matmul) fn multiply(_token: Avx512, task: &Task<'_>) {
    // SAFETY: the token proves the instructions; the task was checked by `multiply`.
    unsafe {
        match (task.layout.dtype(), task.is_single_row_panel()) {
            (DType::F16, true) => gemv::<F16Weights>(task),
            (DType::BF16, true) => gemv::<Bf16Weights>(task),
            (_, true) => gemv::<F32Weights>(task),
            (DType::F16, false) => gemm::<F16Weights>(task),
            (DType::BF16, false) => gemm::<Bf16Weights>(task),
            (_, false) => gemm::<F32Weights>(task),
        }
    }
}

/// An unquantized type of weights.
trait FloatWeights {
    /// Whether packed groups can be used without conversion.
    const IS_F32: bool;
    /// Bytes of two columns of a group.
    const PAIR: usize;
    /// Loads columns 2p and 2p + 1 of a group; the second only if `both`.
    ///
    /// # Safety
    /// The columns must be in the group, and the CPU must have AVX-512.
    unsafe fn pair(group: *const u8, pair: usize, both: bool) -> [__m512; 2];
}

struct F32Weights;
struct F16Weights;
struct Bf16Weights;

impl FloatWeights for F32Weights {
    const IS_F32: bool = true;
    const PAIR: usize = 128;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    unsafe fn pair(group: *const u8, pair: usize, both: bool) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        unsafe {
            let at = group.add(pair * 128).cast::<f32>();
            [_mm512_loadu_ps(at), if both { _mm512_loadu_ps(at.add(16)) } else { _mm512_setzero_ps() }]
        }
    }
}

impl FloatWeights for F16Weights {
    const IS_F32: bool = false;
    const PAIR: usize = 64;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    unsafe fn pair(group: *const u8, pair: usize, both: bool) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        unsafe {
            let at = group.add(pair * 64).cast::<__m256i>();
            let second =
                if both { _mm512_cvtph_ps(_mm256_loadu_si256(at.add(1))) } else { _mm512_setzero_ps() };
            [_mm512_cvtph_ps(_mm256_loadu_si256(at)), second]
        }
    }
}

impl FloatWeights for Bf16Weights {
    const IS_F32: bool = false;
    const PAIR: usize = 64;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    unsafe fn pair(group: *const u8, pair: usize, _both: bool) -> [__m512; 2] {
        // SAFETY: promised by the caller; columns are stored in pairs, filled up with zeros.
        let both = unsafe { _mm512_loadu_si512(group.add(pair * 64).cast()) };
        let odd = _mm512_and_si512(both, _mm512_set1_epi32(!0xffff));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(task: &Task<'_>, group: usize, row: usize, sums: __m512) {
    let first = group * GROUP;
    let count = GROUP.min(task.layout.rows().saturating_sub(first));
    let mask = ((1_u32 << count) - 1) as __mmask16;
    if let Some(out) = task.output.row(row) {
        // SAFETY: the mask leaves out columns past the end of the row.
        unsafe { _mm512_mask_storeu_ps(out.add(first.min(task.layout.rows())), mask, sums) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn gemv<W: FloatWeights>(task: &Task<'_>) {
    let columns = task.layout.columns();
    let (x, _) = task.activations.f32_panel(task.first_row);
    for group in task.groups.clone() {
        let packed = task.group(group).as_ptr();
        let mut total = _mm512_setzero_ps();
        for first in (0..columns).step_by(CHAINS * PANEL) {
            let count = (columns - first).min(CHAINS * PANEL);
            // SAFETY: the columns are inside the group and the row; `first` is even.
            let sums = unsafe { chains_of::<W>(packed.add(first / 2 * W::PAIR), x.add(first), count) };
            for (i, sum) in sums.into_iter().enumerate().take(count.div_ceil(PANEL)) {
                total = if first + i == 0 { sum } else { _mm512_add_ps(total, sum) };
            }
        }
        // SAFETY: the group is one of the task's.
        unsafe { store(task, group, 0, total) };
    }
}

/// The sums of up to [`CHAINS`] panels of columns, of which the last may have fewer columns.
///
/// # Safety
/// The group and the row have `count` columns from here on, and the CPU has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn chains_of<W: FloatWeights>(group: *const u8, x: *const f32, count: usize) -> [__m512; CHAINS] {
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    let (whole, rest) = (count / PANEL, count % PANEL);
    // SAFETY: promised by the caller; whole panels have all columns of one, the one after them `rest`.
    unsafe {
        match whole {
            0 => chains::<W, 1>(group, x, 0..rest / 2, &mut sums),
            1 => {
                chains::<W, 2>(group, x, 0..rest / 2, &mut sums);
                chains::<W, 1>(group, x, rest / 2..PANEL / 2, &mut sums);
            }
            2 => {
                chains::<W, 3>(group, x, 0..rest / 2, &mut sums);
                chains::<W, 2>(group, x, rest / 2..PANEL / 2, &mut sums);
            }
            3 => {
                chains::<W, 4>(group, x, 0..rest / 2, &mut sums);
                chains::<W, 3>(group, x, rest / 2..PANEL / 2, &mut sums);
            }
            _ => chains::<W, 4>(group, x, 0..PANEL / 2, &mut sums),
        }
        if let Some(sum) = sums.get_mut(whole).filter(|_| rest % 2 == 1) {
            let [last, _] = W::pair(group, (count - 1) / 2, false);
            *sum = _mm512_fmadd_ps(last, _mm512_set1_ps(*x.add(count - 1)), *sum);
        }
    }
    sums
}

/// Adds some pairs of columns of each of `N` panels to their sums.
///
/// # Safety
/// The panels have these pairs, and the CPU has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn chains<W: FloatWeights, const N: usize>(
    group: *const u8,
    x: *const f32,
    pairs: Range<usize>,
    sums: &mut [__m512; CHAINS],
) {
    for pair in pairs {
        // The columns after all of these panels, in their order: one thread reads one group after the other.
        prefetch::ahead(group.wrapping_add((N * PANEL / 2 + N * pair) * W::PAIR), N * W::PAIR);
        for (panel, sum) in sums.iter_mut().enumerate().take(N) {
            let pair = panel * (PANEL / 2) + pair;
            // SAFETY: promised by the caller.
            unsafe {
                let [a, b] = W::pair(group, pair, true);
                *sum = _mm512_fmadd_ps(a, _mm512_set1_ps(*x.add(2 * pair)), *sum);
                *sum = _mm512_fmadd_ps(b, _mm512_set1_ps(*x.add(2 * pair + 1)), *sum);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn gemm<W: FloatWeights>(task: &Task<'_>) {
    let columns = task.layout.columns();
    let scratch = task.scratch.cast::<F32Scratch>();
    for first_group in task.groups.clone().step_by(PLAIN_GROUPS) {
        let groups = first_group..(first_group + PLAIN_GROUPS).min(task.groups.end);
        for first_row in (0..task.rows).step_by(ROWS) {
            let rows = first_row..(first_row + ROWS).min(task.rows);
            // SAFETY: the scratch memory is this thread's alone, and long enough; a group holds all columns, the
            // activations all rows.
            unsafe {
                for first in (0..columns).step_by(PANEL) {
                    let count = PANEL.min(columns - first);
                    let last = first + count == columns;
                    for (i, group) in groups.clone().step_by(2).enumerate() {
                        let w = columns_of::<W>(task, scratch, group, first, count);
                        let sums = (&raw mut (*scratch).sums).cast::<[__m512; 2]>().add(i * ROWS);
                        for row in rows.clone().step_by(12) {
                            // The next panel; after the last, the first again, for the next groups.
                            let next = if row + 12 < rows.end { row + 12 } else { first_row };
                            let sums = sums.add(row - first_row);
                            let done = row..(row + 12).min(rows.end);
                            if last {
                                prefetch::output(task, group, done.clone());
                            }
                            panel(task, group, [row, next], w, sums, first, count);
                            if last {
                                for (r, row) in done.enumerate() {
                                    let [low, high] = sums.add(r).read();
                                    store(task, group, row, low);
                                    if group + 1 < groups.end {
                                        store(task, group + 1, row, high);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Some columns of two groups as `f32`: in place, or converted into scratch memory.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn columns_of<W: FloatWeights>(
    task: &Task<'_>,
    scratch: *mut F32Scratch,
    group: usize,
    first: usize,
    count: usize,
) -> [*const f32; 2] {
    if W::IS_F32 {
        return [group, group + 1].map(|g| task.group(g).as_ptr().cast::<f32>().wrapping_add(first * GROUP));
    }
    let wide = scratch.cast::<f32>();
    let wide = [wide, wide.wrapping_add(PANEL * GROUP)];
    for (g, wide) in (group..(group + 2).min(task.groups.end)).zip(wide) {
        let packed = task.group(g).as_ptr();
        for column in (0..count).step_by(2) {
            let both = column + 1 < count;
            // SAFETY: the column is inside the group; the scratch memory holds PANEL columns of two groups.
            unsafe {
                let [a, b] = W::pair(packed, (first + column) / 2, both);
                _mm512_storeu_ps(wide.add(column * GROUP), a);
                if both {
                    _mm512_storeu_ps(wide.add((column + 1) * GROUP), b);
                }
            }
        }
    }
    wide.map(<*mut f32>::cast_const)
}

/// One panel of rows × one or two groups; prefetches the next panel of rows into the L1 cache.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn panel(
    task: &Task<'_>,
    group: usize,
    [row, next]: [usize; 2],
    w: [*const f32; 2],
    sums: *mut [__m512; 2],
    first: usize,
    count: usize,
) {
    let (x, rows) = task.activations.f32_panel(task.first_row + row);
    let x = x.wrapping_add(first * rows).cast_const();
    let (next, next_rows) = task.activations.f32_panel(task.first_row + next);
    let next = next.wrapping_add(first * next_rows).cast_const();
    macro_rules! sized {
        ($($rows:literal)*) => {
            // SAFETY: promised by the caller; the panel has this many rows.
            unsafe {
                match (rows, group + 1 < task.groups.end) {
                    $(($rows, true) => micro_kernel::<$rows, 2>(x, w, sums, count, first > 0, next),
                      ($rows, false) => micro_kernel::<$rows, 1>(x, w, sums, count, first > 0, next),)*
                    _ => {}
                }
            }
        };
    }
    sized!(1 2 3 4 5 6 7 8 9 10 11 12);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn micro_kernel<const ROWS: usize, const GROUPS: usize>(
    x: *const f32,
    w: [*const f32; 2],
    sums: *mut [__m512; 2],
    count: usize,
    add: bool,
    next: *const f32,
) {
    let mut own = [[_mm512_setzero_ps(); GROUPS]; ROWS];
    for row in 0..ROWS {
        for group in 0..GROUPS {
            let place = sums.wrapping_add(row).cast::<__m512>().wrapping_add(group);
            _mm_prefetch::<_MM_HINT_T0>(place.cast());
        }
    }
    let mut column = |k: usize| {
        // SAFETY: the panel holds ROWS values for each column, the groups one vector.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(k * ROWS).cast());
            let mut weights = [_mm512_loadu_ps(w[0].add(k * GROUP)); GROUPS];
            if GROUPS == 2
                && let Some(second) = weights.last_mut()
            {
                *second = _mm512_loadu_ps(w[1].add(k * GROUP));
            }
            for (r, sums) in own.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*x.add(k * ROWS + r));
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = _mm512_fmadd_ps(*weights, x, *sum);
                }
            }
        }
    };
    for pair in 0..count / 2 {
        column(2 * pair);
        column(2 * pair + 1);
    }
    if count % 2 == 1 {
        column(count - 1);
    }
    // SAFETY: there are sums for each row.
    unsafe {
        for (r, own) in own.into_iter().enumerate() {
            for (g, sum) in own.into_iter().enumerate() {
                let place = sums.add(r).cast::<__m512>().add(g);
                place.write(if add { _mm512_add_ps(place.read(), sum) } else { sum });
            }
        }
    }
}
