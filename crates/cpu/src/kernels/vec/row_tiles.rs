//! Products and sums of rows of a tile: a piece of a matrix, dequantized, that several tokens are multiplied with, each with rows
//! of its own.

use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Elements from one row of a tile to the next: rows begin at cache lines if the tile does, and not all in the same set of a
/// cache.
pub(crate) const fn tile_stride(columns: usize) -> usize {
    columns.next_multiple_of(16) + 16
}

/// Adds to `out[i]`, for each `i` of the list, the product of `x` and row `i` of the tile. A row's product depends on neither the
/// list nor the other rows.
pub(crate) fn add_tile_products(isa: Isa, tile: &[f32], x: &[f32], list: &[u32], out: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<S: Simd>(tile: &[f32], x: &[f32], list: &[u32], out: &mut [f32]) {
        let stride = tile_stride(x.len());
        let row = |i: u32| tile.get(i as usize * stride..).and_then(|row| row.get(..x.len()));
        let (fours, rest) = list.as_chunks::<4>();
        for four in fours {
            if let [Some(a), Some(b), Some(c), Some(d)] = four.map(row) {
                // SAFETY: rows as long as `x`; the rest is promised by the caller.
                let products = unsafe { products::<S, 4>([a, b, c, d].map(<[f32]>::as_ptr), x) };
                four.iter().zip(products).for_each(|(i, product)| add(out, *i, product));
            }
        }
        for i in rest {
            if let Some(a) = row(*i) {
                // SAFETY: as above.
                let [product] = unsafe { products::<S, 1>([a.as_ptr()], x) };
                add(out, *i, product);
            }
        }
    }
    // SAFETY: the CPU has the instruction set.
    dispatch!(isa, body(tile: &[f32], x: &[f32], list: &[u32], out: &mut [f32]) -> ())
}

#[inline(always)]
fn add(out: &mut [f32], i: u32, product: f32) {
    if let Some(out) = out.get_mut(i as usize) {
        *out += product;
    }
}

/// The products of `x` and some rows.
///
/// # Safety
/// Each row has as many elements as `x`; the CPU has the instruction set of `S`.
#[inline(always)]
unsafe fn products<S: Simd, const R: usize>(rows: [*const f32; R], x: &[f32]) -> [f32; R] {
    let (count, x) = (x.len(), x.as_ptr());
    // SAFETY: promised by the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; R];
        let whole = count - count % (2 * S::N);
        for at in (0..whole).step_by(2 * S::N) {
            let (even, odd) = (S::load(x.add(at)), S::load(x.add(at + S::N)));
            for (row, [a, b]) in rows.iter().zip(&mut sums) {
                *a = S::fma(S::load(row.add(at)), even, *a);
                *b = S::fma(S::load(row.add(at + S::N)), odd, *b);
            }
        }
        let mut results = [0.0; R];
        for ((result, row), [a, b]) in results.iter_mut().zip(rows).zip(sums) {
            let rest: f32 = (whole..count).map(|i| *row.add(i) * *x.add(i)).sum();
            *result = S::sum(S::add(a, b)) + rest;
        }
        results
    }
}

/// Adds rows of the tile to `sums`, each times its factor, in the order of the list.
pub(crate) fn add_tile_rows(isa: Isa, tile: &[f32], list: &[u32], factors: &[f32], sums: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<S: Simd>(tile: &[f32], list: &[u32], factors: &[f32], sums: &mut [f32]) {
        let (stride, count) = (tile_stride(sums.len()), sums.len());
        let fits = |i: &u32| (*i as usize + 1) * stride <= tile.len() && (*i as usize) < factors.len();
        if !list.iter().all(fits) {
            return;
        }
        let (rows, to) =
            (TileRows { tile: tile.as_ptr(), stride, list, factors: factors.as_ptr() }, sums.as_mut_ptr());
        let mut done = 0;
        // SAFETY: rows of the tile with their factors, as has been checked; sums are written inside the slice.
        unsafe {
            while done + S::N <= count {
                done += S::N
                    * match (count - done) / S::N {
                        8.. => rows.add_to::<S, 8>(done, to.add(done)),
                        4.. => rows.add_to::<S, 4>(done, to.add(done)),
                        2.. => rows.add_to::<S, 2>(done, to.add(done)),
                        _ => rows.add_to::<S, 1>(done, to.add(done)),
                    };
            }
            for column in done..count {
                for i in list {
                    let element = *rows.tile.add(*i as usize * stride + column);
                    *to.add(column) = (*rows.factors.add(*i as usize)).mul_add(element, *to.add(column));
                }
            }
        }
    }
    // SAFETY: the CPU has the instruction set.
    dispatch!(isa, body(tile: &[f32], list: &[u32], factors: &[f32], sums: &mut [f32]) -> ())
}

/// Rows of a tile with factors.
#[derive(Clone, Copy)]
struct TileRows<'a> {
    tile: *const f32,
    stride: usize,
    list: &'a [u32],
    factors: *const f32,
}

impl TileRows<'_> {
    /// Adds `T` vectors of each row, from a column on, to `to`, with their sums in registers. Returns `T`.
    ///
    /// # Safety
    /// The tile has these rows and columns, and so many sums are writable; the CPU has the instruction set of `S`.
    #[inline(always)]
    unsafe fn add_to<S: Simd, const T: usize>(self, column: usize, to: *mut f32) -> usize {
        // SAFETY: promised by the caller.
        unsafe {
            let mut sums = [S::splat(0.0); T];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(to.add(i * S::N));
            }
            for i in self.list {
                let row = self.tile.add(*i as usize * self.stride + column);
                let factor = S::splat(*self.factors.add(*i as usize));
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(factor, S::load(row.add(i * S::N)), *sum);
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                S::store(to.add(i * S::N), *sum);
            }
        }
        T
    }
}
