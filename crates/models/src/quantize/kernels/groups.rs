//! Eight groups of values, one group per SIMD lane.

use super::code_book::Levels;
use super::simd::{Lanes, Simd};

/// Values of larger magnitude are clamped: no format can hold them, and their squares would overflow.
const LARGEST: f32 = 1e9;

/// Eight groups of `N` values with the weight of each value's squared error: element `i` of all groups is one vector.
pub(super) struct Groups<S: Simd, const N: usize> {
    pub(super) simd: S,
    pub(super) x: [S::F; N],
    pub(super) w: [S::F; N],
}

impl<S: Simd, const N: usize> Groups<S, N> {
    /// Eight groups from eight slices of values, and of weights.
    #[inline(always)]
    pub(super) fn load(simd: S, x: [&[f32; N]; 8], w: [&[f32; N]; 8]) -> Groups<S, N> {
        let (most, least) = (simd.splat(LARGEST), simd.splat(-LARGEST));
        let mut x = transposed(simd, x);
        for x in &mut x {
            *x = x.min(most).max(least);
        }
        Groups { simd, x, w: transposed(simd, w) }
    }

    /// The value of largest magnitude of each group, with its sign.
    #[inline(always)]
    pub(super) fn extreme(&self) -> S::F {
        let mut extreme = self.simd.splat(0.0);
        for x in &self.x {
            extreme = S::F::select(extreme.abs().less(x.abs()), *x, extreme);
        }
        extreme
    }

    /// The quants of each group as bytes: the indices of the levels nearest to `(x + shift) × inverse`.
    #[inline(always)]
    pub(super) fn codes(&self, levels: impl Levels, shift: S::F, inverse: S::F) -> [[u8; N]; 8] {
        let simd = self.simd;
        let mut codes = [[0; N]; 8];
        let (fours, _) = self.x.as_chunks::<4>();
        for (i, [a, b, c, d]) in fours.iter().enumerate() {
            let bytes = S::F::bytes([
                levels.index(simd, (*a + shift) * inverse),
                levels.index(simd, (*b + shift) * inverse),
                levels.index(simd, (*c + shift) * inverse),
                levels.index(simd, (*d + shift) * inverse),
            ]);
            for (codes, bytes) in codes.iter_mut().zip(bytes) {
                if let Some(place) = codes.as_chunks_mut::<4>().0.get_mut(i) {
                    *place = bytes;
                }
            }
        }
        codes
    }
}

/// `1 / value`, or 0 for 0.
#[inline(always)]
pub(super) fn inverse<S: Simd>(simd: S, value: S::F) -> S::F {
    let zero = simd.splat(0.0);
    S::F::select(zero.less(value.abs()), simd.splat(1.0) / value, zero)
}

#[inline(always)]
fn transposed<S: Simd, const N: usize>(simd: S, rows: [&[f32; N]; 8]) -> [S::F; N] {
    let mut columns = [simd.splat(0.0); N];
    let none = [0.0; 8];
    let (eights, _) = columns.as_chunks_mut::<8>();
    for (i, eight) in eights.iter_mut().enumerate() {
        let mut chunks = [&none; 8];
        for (chunk, row) in chunks.iter_mut().zip(rows) {
            if let Some(found) = row.as_chunks::<8>().0.get(i) {
                *chunk = found;
            }
        }
        *eight = simd.transpose(chunks);
    }
    columns
}
