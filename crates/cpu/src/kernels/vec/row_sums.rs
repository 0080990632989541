//! Dot products with rows of weights, and sums of such rows, straight from the types of model files.

use half::{bf16, f16};
use quadriga_graph::DType;
use quadriga_graph::blocks::{BlockQ4_0, BlockQ8_0};

use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Rows from one that is read to the one that is prefetched.
const AHEAD: usize = 12;

/// Elements of a row.
trait RowElements {
    /// The elements from `at` on, a multiple of `S::N`, as many as a vector has.
    ///
    /// # Safety
    /// They are readable; the CPU has the instruction set of `S`.
    unsafe fn load<S: Simd>(row: *const u8, at: usize) -> S::V;

    /// Two such vectors, from `at` on, a multiple of `2 S::N`: blocks are unpacked once for both.
    ///
    /// # Safety
    /// As [`load`](RowElements::load), for twice as many elements.
    #[inline(always)]
    unsafe fn load_two<S: Simd>(row: *const u8, at: usize) -> [S::V; 2] {
        // SAFETY: promised by the caller.
        unsafe { [Self::load::<S>(row, at), Self::load::<S>(row, at + S::N)] }
    }

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
            let block = row.cast::<BlockQ8_0>().add(at / 32);
            let scale = S::splat_f16((&raw const (*block).scale).cast());
            S::mul(scale, S::load_i8((&raw const (*block).quants).cast::<i8>().add(at % 32)))
        }
    }
    #[inline(always)]
    unsafe fn load_two<S: Simd>(row: *const u8, at: usize) -> [S::V; 2] {
        // SAFETY: promised by the caller; both are of one block.
        unsafe {
            let block = row.cast::<BlockQ8_0>().add(at / 32);
            let scale = S::splat_f16((&raw const (*block).scale).cast());
            let quants = (&raw const (*block).quants).cast::<i8>().add(at % 32);
            [S::mul(scale, S::load_i8(quants)), S::mul(scale, S::load_i8(quants.add(S::N)))]
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
        // SAFETY: promised by the caller; the rest of both vectors is of the same block.
        unsafe {
            let [first, second] = Self::load_two::<S>(row, at - at % (2 * S::N));
            if at.is_multiple_of(2 * S::N) { first } else { second }
        }
    }
    #[inline(always)]
    unsafe fn load_two<S: Simd>(row: *const u8, at: usize) -> [S::V; 2] {
        // SAFETY: promised by the caller; a block consists of bytes.
        unsafe {
            let block = row.cast::<BlockQ4_0>().add(at / 32);
            let scale = S::splat_f16((&raw const (*block).scale).cast());
            S::load_q4_0(scale, (&raw const (*block).quants).cast(), at % 32)
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
            let (pairs, _) = sums.as_chunks_mut::<2>();
            for (pair, [even, odd]) in pairs.iter_mut().enumerate() {
                let at = first + 2 * pair * S::N;
                let [a, b] = R::load_two::<S>(row, at);
                *even = S::fma(a, S::load(x.add(at)), *even);
                *odd = S::fma(b, S::load(x.add(at + S::N)), *odd);
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
    let prefetch = |row: u32| {
        let from = at(row).wrapping_add(start);
        for line in 0..(from.addr() % 64 + bytes).div_ceil(64) {
            // SAFETY: a hint, which never faults.
            unsafe { S::prefetch(from.wrapping_add(64 * line)) };
        }
    };
    rows.iter().take(AHEAD).for_each(|row| prefetch(*row));
    let (count, out) = (sums.len(), sums.as_mut_ptr());
    // SAFETY: promised by the caller; sums are written inside the slice.
    unsafe {
        let mut done = 0;
        while done + S::N <= count {
            // The columns of the first tile prefetch those of all.
            let ahead = |i: usize| {
                if done == 0
                    && let Some(next) = rows.get(i + AHEAD)
                {
                    prefetch(*next);
                }
            };
            let list = RowList { matrix, rows, factors };
            let (column, to) = (first + done, out.add(done));
            done += S::N
                * match (count - done) / S::N {
                    16.. if S::REGISTERS >= 32 => list.add_tile::<S, R, 16>(column, to, ahead),
                    8.. => list.add_tile::<S, R, 8>(column, to, ahead),
                    4.. => list.add_tile::<S, R, 4>(column, to, ahead),
                    2.. => list.add_tile::<S, R, 2>(column, to, ahead),
                    _ => list.add_tile::<S, R, 1>(column, to, ahead),
                };
        }
        for i in done..count {
            for (row, factor) in rows.iter().zip(factors) {
                *out.add(i) = factor.mul_add(R::one(at(*row), first + i), *out.add(i));
            }
        }
    }
}

/// Some rows of a matrix, and their factors.
#[derive(Clone, Copy)]
struct RowList<'a> {
    matrix: RowMatrix,
    rows: &'a [u32],
    factors: &'a [f32],
}

impl RowList<'_> {
    /// Adds `T` vectors of each row, from a column on, to `to`: their sums stay in registers. Calls `ahead` with the number of
    /// each row in the list. Returns `T`.
    ///
    /// # Safety
    /// As [`axpy_rows`]; so many sums are writable.
    #[inline(always)]
    unsafe fn add_tile<S: Simd, R: RowElements, const T: usize>(
        self,
        column: usize,
        to: *mut f32,
        ahead: impl Fn(usize),
    ) -> usize {
        // SAFETY: promised by the caller.
        unsafe {
            let mut sums = [S::splat(0.0); T];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(to.add(i * S::N));
            }
            for (i, (row, factor)) in self.rows.iter().zip(self.factors).enumerate() {
                ahead(i);
                let row = self.matrix.base.wrapping_add(*row as usize * self.matrix.stride);
                let factor = S::splat(*factor);
                let (pairs, last) = sums.as_chunks_mut::<2>();
                for (i, [first, second]) in pairs.iter_mut().enumerate() {
                    let [a, b] = R::load_two::<S>(row, column + 2 * i * S::N);
                    (*first, *second) = (S::fma(factor, a, *first), S::fma(factor, b, *second));
                }
                for sum in last {
                    *sum = S::fma(factor, R::load::<S>(row, column + (T - 1) * S::N), *sum);
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                S::store(to.add(i * S::N), *sum);
            }
        }
        T
    }
}

/// Writes the positions of the elements that are not 0 to `list`, in order, and returns how many there are; `list` has room
/// for all of them.
pub(crate) fn list_active(isa: Isa, values: &[f32], list: &mut [u32]) -> usize {
    #[inline(always)]
    unsafe fn body<S: Simd>(values: &[f32], list: &mut [u32]) -> usize {
        let mut len = 0;
        for (chunk, values) in values.chunks(S::N).enumerate() {
            // SAFETY: promised by the caller.
            let mut active = unsafe { active_of::<S>(values) };
            while active != 0 {
                if let Some(to) = list.get_mut(len) {
                    *to = (S::N * chunk) as u32 + active.trailing_zeros();
                    len += 1;
                }
                active &= active - 1;
            }
        }
        len
    }
    // SAFETY: the CPU has the instruction set.
    dispatch!(isa, body(values: &[f32], list: &mut [u32]) -> usize)
}

/// How many elements are not 0.
pub(crate) fn count_active(isa: Isa, values: &[f32]) -> usize {
    #[inline(always)]
    unsafe fn body<S: Simd>(values: &[f32]) -> usize {
        // SAFETY: promised by the caller.
        values.chunks(S::N).map(|values| unsafe { active_of::<S>(values) }.count_ones() as usize).sum()
    }
    // SAFETY: the CPU has the instruction set.
    dispatch!(isa, body(values: &[f32]) -> usize)
}

/// A bit for each of at most `S::N` elements: whether it is not 0.
///
/// # Safety
/// The CPU has the instruction set of `S`.
#[inline(always)]
unsafe fn active_of<S: Simd>(values: &[f32]) -> u32 {
    if values.len() == S::N {
        // SAFETY: so many elements; the rest is promised by the caller.
        return unsafe { S::not_zero(S::load(values.as_ptr())) };
    }
    let bits = values.iter().enumerate();
    bits.fold(0, |bits, (i, value)| bits | u32::from(*value != 0.0) << i)
}
