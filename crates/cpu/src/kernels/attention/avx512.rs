//! Whole tiles of f16 keys and values for few queries, read where they are: what one token after a long context waits for.
//!
//! Computing must hide behind memory here, so registers and requests are laid out by hand:
//!
//! ```text
//! scores   4 cells × ROWS queries    one vector of 16 elements after the other; every loaded key serves all queries
//!          16 cells                  of each query: 16 vectors of sums become one vector of 16 scores
//! gather   ROWS queries × 4 vectors  sums stay in registers over the tile's cells; a weight is spread over a vector
//! ```
//!
//! With every cell some lines are asked for: two of the next tile into the second-level cache ([`Far`]), and the cell's
//! own row, [`NEAR`] cells on, into the first-level one.

use std::arch::asm;
use std::arch::x86_64::*;

use super::tile::{Cells, TILE};

/// How many cells ahead rows are brought from the second-level to the first-level cache.
const NEAR: usize = 8;

/// Elements of a vector.
const LANES: usize = 16;

/// Two lines that are asked for with every cell and every 64 elements of it, and how far apart they are from cell to
/// cell.
#[derive(Clone, Copy)]
pub(super) struct Far {
    pub(super) at: [*const u8; 2],
    pub(super) step: usize,
}

/// Whether the kernels below can take such a tile: all its cells, and rows of a multiple of 64 elements.
pub(super) fn suits(cells: &Cells) -> bool {
    cells.count == TILE && cells.width.is_multiple_of(4 * LANES)
}

/// Calls `$kernel::<ROWS>(row, far, …)` for strips of up to four of `$rows` rows. What is asked for ahead, the first strip asks
/// for; later ones ask for what is there.
macro_rules! in_strips {
    ($rows:expr, $cells:expr, $far:expr, $kernel:ident($($argument:expr),*)) => {{
        let (mut row, mut far) = (0, $far);
        let mut strips = $rows.div_ceil(4);
        while row < $rows {
            let strip = ($rows - row).div_ceil(strips);
            match strip {
                4 => $kernel::<4>(row, far, $($argument),*),
                3 => $kernel::<3>(row, far, $($argument),*),
                2 => $kernel::<2>(row, far, $($argument),*),
                _ => $kernel::<1>(row, far, $($argument),*),
            }
            far = Far { at: [$cells.first; 2], step: 0 };
            row += strip;
            strips -= 1;
        }
    }};
}

/// Scores of `rows` queries (`pad` floats each) with a tile of keys, into rows of [`TILE`] floats.
///
/// # Safety
/// All of it must be there, the tile must [suit](suits), and the CPU must have AVX-512.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn scores(
    keys: &Cells,
    far: Far,
    queries: *const f32,
    pad: usize,
    rows: usize,
    scores: *mut f32,
) {
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn strip<const ROWS: usize>(
        row: usize,
        far: Far,
        keys: &Cells,
        queries: *const f32,
        pad: usize,
        scores: *mut f32,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let (queries, mut to) = (queries.add(row * pad), scores.add(row * TILE));
            let (mut key, mut far) = (keys.first, far);
            for _ in 0..TILE / LANES {
                let mut folded = [[_mm512_setzero_ps(); 4]; ROWS];
                for four in 0..4 {
                    let sums = four_cells::<ROWS>(key, keys, &mut far, queries, pad);
                    for (place, sum) in folded.iter_mut().filter_map(|row| row.get_mut(four)).zip(sums) {
                        *place = sum;
                    }
                    key = key.wrapping_add(4 * keys.stride);
                }
                for (r, folded) in folded.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add(r * TILE), across(folded));
                }
                to = to.add(LANES);
            }
        }
    }
    // SAFETY: promised by the caller.
    unsafe { in_strips!(rows, keys, far, strip(keys, queries, pad, scores)) }
}

/// For each query the products with four cells, added up to four numbers a cell: number `i` of cell `c` is element `4i + c`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn four_cells<const ROWS: usize>(
    key: *const u8,
    keys: &Cells,
    far: &mut Far,
    queries: *const f32,
    pad: usize,
) -> [__m512; ROWS] {
    // SAFETY: promised by the caller.
    unsafe {
        let stride = keys.stride;
        let mut sums = [[_mm512_setzero_ps(); 4]; ROWS];
        let mut column = 0;
        while column < keys.width {
            let at = key.wrapping_add(2 * column);
            for cell in 0..4 {
                ask(far, column, at.wrapping_add((NEAR + cell) * stride), cell);
            }
            let q = queries.add(column);
            sums = one_vector::<ROWS, 0>(sums, at, stride, q, pad);
            sums = one_vector::<ROWS, 1>(sums, at, stride, q, pad);
            sums = one_vector::<ROWS, 2>(sums, at, stride, q, pad);
            sums = one_vector::<ROWS, 3>(sums, at, stride, q, pad);
            column += 4 * LANES;
        }
        far.at = far.at.map(|at| at.wrapping_add(4 * far.step));
        sums.map(|[a, b, c, d]| {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
        })
    }
}

/// Adds the products of vector `VECTOR` of each query and of four cells, a stride apart, to their sums.
///
/// In assembly, so that a key is converted from memory (between registers it takes one more operation) right before its use;
/// the compiler would convert all keys first and run out of registers.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn one_vector<const ROWS: usize, const VECTOR: usize>(
    mut sums: [[__m512; 4]; ROWS],
    key: *const u8,
    stride: usize,
    queries: *const f32,
    pad: usize,
) -> [[__m512; 4]; ROWS] {
    // SAFETY: promised by the caller: 32 bytes of each key and 64 of each query are read.
    unsafe {
        let (k0, k1, k2, k3): (__m512, __m512, __m512, __m512);
        asm!(
            "vcvtph2ps {k0}, ymmword ptr [{key} + 32 * {vector}]",
            "vcvtph2ps {k1}, ymmword ptr [{key} + {stride} + 32 * {vector}]",
            "vcvtph2ps {k2}, ymmword ptr [{key} + 2 * {stride} + 32 * {vector}]",
            "vcvtph2ps {k3}, ymmword ptr [{key} + {three} + 32 * {vector}]",
            k0 = lateout(zmm_reg) k0,
            k1 = lateout(zmm_reg) k1,
            k2 = lateout(zmm_reg) k2,
            k3 = lateout(zmm_reg) k3,
            key = in(reg) key,
            stride = in(reg) stride,
            three = in(reg) 3 * stride,
            vector = const VECTOR,
            options(readonly, nostack, preserves_flags)
        );
        for (r, [a, b, c, d]) in sums.iter_mut().enumerate() {
            let q: __m512;
            asm!(
                "vmovups {q}, zmmword ptr [{row} + 64 * {vector}]",
                "vfmadd231ps {a}, {q}, {k0}",
                "vfmadd231ps {b}, {q}, {k1}",
                "vfmadd231ps {c}, {q}, {k2}",
                "vfmadd231ps {d}, {q}, {k3}",
                q = out(zmm_reg) q,
                a = inout(zmm_reg) *a,
                b = inout(zmm_reg) *b,
                c = inout(zmm_reg) *c,
                d = inout(zmm_reg) *d,
                k0 = in(zmm_reg) k0,
                k1 = in(zmm_reg) k1,
                k2 = in(zmm_reg) k2,
                k3 = in(zmm_reg) k3,
                row = in(reg) queries.add(r * pad),
                vector = const VECTOR,
                options(readonly, nostack, preserves_flags)
            );
            let _ = q;
        }
        sums
    }
}

/// Sixteen scores of what [`four_cells`] gave for sixteen cells.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn across([a, b, c, d]: [__m512; 4]) -> __m512 {
    // Keeps the order of cells: quarters 0 and 2, then 1 and 3 of two vectors, added.
    let halves = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    halves(halves(a, b), halves(c, d))
}

/// Adds weighted values of a tile to the sums of `rows` rows (`pad` floats each); weights are rows of [`TILE`] floats.
///
/// # Safety
/// All of it must be there, the tile must [suit](suits), and the CPU must have AVX-512.
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn gather(
    values: &Cells,
    far: Far,
    weights: *const f32,
    rows: usize,
    sums: *mut f32,
    pad: usize,
) {
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn strip<const ROWS: usize>(
        row: usize,
        far: Far,
        values: &Cells,
        weights: *const f32,
        sums: *mut f32,
        pad: usize,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let (weights, sums) = (weights.add(row * TILE), sums.add(row * pad));
            let mut column = 0;
            while column < values.width {
                let mut sum = [[_mm512_setzero_ps(); 4]; ROWS];
                for (r, sum) in sum.iter_mut().enumerate() {
                    for (v, sum) in sum.iter_mut().enumerate() {
                        *sum = _mm512_loadu_ps(sums.add(r * pad + column + v * LANES));
                    }
                }
                let (mut value, mut far) = (values.first.wrapping_add(2 * column), far);
                for cell in 0..TILE {
                    ask(&far, column, value.wrapping_add(NEAR * values.stride), 0);
                    far.at = far.at.map(|at| at.wrapping_add(far.step));
                    let v =
                        [widened::<0>(value), widened::<1>(value), widened::<2>(value), widened::<3>(value)];
                    for (r, sum) in sum.iter_mut().enumerate() {
                        let weight = _mm512_set1_ps(*weights.add(r * TILE + cell));
                        for (sum, v) in sum.iter_mut().zip(v) {
                            *sum = _mm512_fmadd_ps(weight, v, *sum);
                        }
                    }
                    value = value.wrapping_add(values.stride);
                }
                for (r, sum) in sum.into_iter().enumerate() {
                    for (v, sum) in sum.into_iter().enumerate() {
                        _mm512_storeu_ps(sums.add(r * pad + column + v * LANES), sum);
                    }
                }
                column += 4 * LANES;
            }
        }
    }
    // SAFETY: promised by the caller.
    unsafe { in_strips!(rows, values, far, strip(values, weights, sums, pad)) }
}

/// Vector `VECTOR` of a row of f16 elements, as f32: from memory, as above.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widened<const VECTOR: usize>(row: *const u8) -> __m512 {
    let out: __m512;
    // SAFETY: reads 32 bytes, which the caller promised.
    unsafe {
        asm!(
            "vcvtph2ps {out}, ymmword ptr [{row} + 32 * {vector}]",
            out = lateout(zmm_reg) out,
            row = in(reg) row,
            vector = const VECTOR,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    out
}

/// Asks for the two far lines of a cell's columns `column..column + 64`, and for those columns of a row near by.
#[inline]
#[target_feature(enable = "avx512f")]
fn ask(far: &Far, column: usize, near: *const u8, cell: usize) {
    let step = cell * far.step + column;
    for at in far.at {
        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(step).cast());
    }
    _mm_prefetch::<_MM_HINT_T0>(near.cast());
    _mm_prefetch::<_MM_HINT_T0>(near.wrapping_add(64).cast());
}
