//! Dot products with rows of weights, and sums of such rows, straight from the types of model files.

use half::{bf16, f16};
use quadriga_graph::DType;
use quadriga_graph::blocks::{BlockQ4_0, BlockQ8_0};

use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Vectors that are summed at a time, in registers.
const TILE: usize = 8;

/// Rows from one that is read to the one that is prefetched.
const AHEAD: usize = 12;

/// Elements of a row.
trait RowElements {
    /// The elements from `at` on, a multiple of `S::N`, as many as a vector has.
    ///
    /// # Safety
    /// They are readable; the CPU has the instruction set of `S`.
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V;

    /// One element.
    ///
    /// # Safety
    /// It is readable.
    unsafe fn one(row: *const u8, at: usize) -> f32;
}

struct F32Row;
struct F16Row;
struct Bf16Row;
struct Q8Row;
struct Q4Row;

impl RowElements for F32Row {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load(row.cast::<f32>().add(at)) }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, at: usize) -> f32 {
        // SAFETY: promised by the caller.
        unsafe { row.cast::<f32>().add(at).read_unaligned() }
    }
}

impl RowElements for F16Row {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load_f16(row.cast::<u16>().add(at)) }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, at: usize) -> f32 {
        // SAFETY: promised by the caller.
        f16::from_bits(unsafe { row.cast::<u16>().add(at).read_unaligned() }).to_f32()
    }
}

impl RowElements for Bf16Row {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load_bf16(row.cast::<u16>().add(at)) }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, at: usize) -> f32 {
        // SAFETY: promised by the caller.
        bf16::from_bits(unsafe { row.cast::<u16>().add(at).read_unaligned() }).to_f32()
    }
}

impl RowElements for Q8Row {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V {
        // SAFETY: promised by the caller; a block consists of bytes, and has 32 elements, a multiple of a vector's.
        unsafe {
            let block = &*row.cast::<BlockQ8_0>().add(at / 32);
            S::mul(S::splat(block.scale.to_f32()), S::load_i8(block.quants.as_ptr().add(at % 32)))
        }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, at: usize) -> f32 {
        // SAFETY: promised by the caller.
        let block = unsafe { &*row.cast::<BlockQ8_0>().add(at / 32) };
        block.scale.to_f32() * f32::from(block.quants.get(at % 32).copied().unwrap_or(0))
    }
}

impl RowElements for Q4Row {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V {
        // SAFETY: promised by the caller; sixteen bytes have the low, then the high four bits of 32 elements.
        unsafe {
            let block = &*row.cast::<BlockQ4_0>().add(at / 32);
            let shift = if at % 32 < 16 { 0 } else { 4 };
            let bytes = block.quants.as_ptr().add(at % 16);
            let mut quants = [0i8; 16];
            for (i, quant) in quants.iter_mut().enumerate().take(S::N) {
                *quant = (bytes.add(i).read() >> shift & 15) as i8 - 8;
            }
            S::mul(S::splat(block.scale.to_f32()), S::load_i8(quants.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn one(row: *const u8, at: usize) -> f32 {
        // SAFETY: promised by the caller.
        let block = unsafe { &*row.cast::<BlockQ4_0>().add(at / 32) };
        let byte = block.quants.get(at % 16).copied().unwrap_or(0);
        let quant = if at % 32 < 16 { byte & 15 } else { byte >> 4 };
        block.scale.to_f32() * (f32::from(quant) - 8.0)
    }
}

/// Whether rows of a type can be read here, so many elements of them.
pub(crate) fn reads_rows_of(dtype: DType, elements: usize) -> bool {
    let known = matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0);
    known && elements.is_multiple_of(dtype.block_len())
}

/// `Σ x[i] · row[i]`, in a fixed order; the type is one that [`reads_rows_of`] accepts.
///
/// # Safety
/// The row has at least as many elements as `x`, readable at any alignment.
pub(crate) unsafe fn dot_row(isa: Isa, dtype: DType, row: *const u8, x: &[f32]) -> f32 {
    #[inline(always)]
    unsafe fn body<S: Simd>(dtype: DType, row: *const u8, x: *const f32, count: usize) -> f32 {
        // SAFETY: promised by the caller.
        unsafe {
            match dtype {
                DType::F16 => dot::<S, F16Row>(row, x, count),
                DType::BF16 => dot::<S, Bf16Row>(row, x, count),
                DType::Q8_0 => dot::<S, Q8Row>(row, x, count),
                DType::Q4_0 => dot::<S, Q4Row>(row, x, count),
                _ => dot::<S, F32Row>(row, x, count),
            }
        }
    }
    let (x, count) = (x.as_ptr(), x.len());
    dispatch!(isa, body(dtype: DType, row: *const u8, x: *const f32, count: usize) -> f32)
}

#[inline(always)]
unsafe fn dot<S: Simd, R: RowElements>(row: *const u8, x: *const f32, count: usize) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        let whole = count - count % (4 * S::N);
        for first in (0..whole).step_by(4 * S::N) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = first + i * S::N;
                *sum = S::fma(R::load::<S>(row, at), S::load(x.add(at)), *sum);
            }
        }
        let mut at = whole;
        while at + S::N <= count {
            sums[0] = S::fma(R::load::<S>(row, at), S::load(x.add(at)), sums[0]);
            at += S::N;
        }
        let rest: f32 = (at..count).map(|i| R::one(row, i) * *x.add(i)).sum();
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]))) + rest
    }
}

/// Rows of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct RowMatrix {
    pub(crate) dtype: DType,
    /// The first row.
    pub(crate) base: *const u8,
    /// Bytes from one row to the next.
    pub(crate) stride: usize,
}

/// Adds to `sums` the columns from `first` on of some rows, each times its factor, in the order of the list; the type is one
/// that [`reads_rows_of`] accepts, and `first` is a multiple of 32.
///
/// # Safety
/// The matrix has these rows and columns, readable at any alignment.
pub(crate) unsafe fn axpy_rows(
    isa: Isa,
    matrix: RowMatrix,
    rows: &[u32],
    factors: &[f32],
    first: usize,
    sums: &mut [f32],
) {
    #[inline(always)]
    unsafe fn body<S: Simd>(
        matrix: RowMatrix,
        rows: &[u32],
        factors: &[f32],
        first: usize,
        sums: &mut [f32],
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            match matrix.dtype {
                DType::F16 => axpy::<S, F16Row>(matrix, rows, factors, first, sums),
                DType::BF16 => axpy::<S, Bf16Row>(matrix, rows, factors, first, sums),
                DType::Q8_0 => axpy::<S, Q8Row>(matrix, rows, factors, first, sums),
                DType::Q4_0 => axpy::<S, Q4Row>(matrix, rows, factors, first, sums),
                _ => axpy::<S, F32Row>(matrix, rows, factors, first, sums),
            }
        }
    }
    dispatch!(isa, body(matrix: RowMatrix, rows: &[u32], factors: &[f32], first: usize, sums: &mut [f32]) -> ())
}

#[inline(always)]
unsafe fn axpy<S: Simd, R: RowElements>(
    matrix: RowMatrix,
    rows: &[u32],
    factors: &[f32],
    first: usize,
    sums: &mut [f32],
) {
    let at = |row: u32| matrix.base.wrapping_add(row as usize * matrix.stride);
    let (start, bytes) = (matrix.dtype.row_bytes(first), matrix.dtype.row_bytes(sums.len()));
    let (start, bytes) = (start.unwrap_or(0), bytes.unwrap_or(0));
    let (count, out) = (sums.len(), sums.as_mut_ptr());
    // SAFETY: promised by the caller; sums are written inside the slice.
    unsafe {
        let tiles = count / (TILE * S::N);
        for tile in 0..tiles {
            let to = out.add(tile * TILE * S::N);
            let mut acc = [S::splat(0.0); TILE];
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(to.add(i * S::N));
            }
            for (i, (row, factor)) in rows.iter().zip(factors).enumerate() {
                if tile == 0
                    && let Some(next) = rows.get(i + AHEAD)
                {
                    let from = at(*next).wrapping_add(start);
                    for line in 0..(from.addr() % 64 + bytes).div_ceil(64) {
                        S::prefetch(from.wrapping_add(64 * line));
                    }
                }
                let (row, factor) = (at(*row), S::splat(*factor));
                for (i, acc) in acc.iter_mut().enumerate() {
                    let column = first + (tile * TILE + i) * S::N;
                    *acc = S::fma(factor, R::load::<S>(row, column), *acc);
                }
            }
            for (i, acc) in acc.iter().enumerate() {
                S::store(to.add(i * S::N), *acc);
            }
        }
        let mut done = tiles * TILE * S::N;
        while done + S::N <= count {
            let mut acc = S::load(out.add(done));
            for (row, factor) in rows.iter().zip(factors) {
                acc = S::fma(S::splat(*factor), R::load::<S>(at(*row), first + done), acc);
            }
            S::store(out.add(done), acc);
            done += S::N;
        }
        for i in done..count {
            for (row, factor) in rows.iter().zip(factors) {
                *out.add(i) = factor.mul_add(R::one(at(*row), first + i), *out.add(i));
            }
        }
    }
}
