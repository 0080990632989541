//! The scale of a group whose values are `scale × level`: the search that Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, IQ4_NL, IQ4_XS
//! and MXFP4 share.

use super::code_book::Levels;
use super::groups::{Groups, inverse};
use super::simd::{Lanes, Simd};

/// Smaller sums of squares count as zero: such a group has no level but zero.
const NONE: f32 = 1e-30;

/// What the levels nearest to the values add up to, with weights: the best scale for them is `product / square`.
pub(super) struct Moments<F> {
    /// Σ weight × value × level.
    pub(super) product: F,
    /// Σ weight × level².
    pub(super) square: F,
}

/// The moments of the levels nearest to `value × inverse`.
#[inline(always)]
pub(super) fn moments<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    levels: impl Levels,
    inverse: S::F,
) -> Moments<S::F> {
    let simd = groups.simd;
    let (mut product, mut square) = (simd.splat(0.0), simd.splat(0.0));
    for (x, w) in groups.x.iter().zip(&groups.w) {
        let level = levels.nearest(simd, *x * inverse);
        let weighted = *w * level;
        product = product + weighted * *x;
        square = square + weighted * level;
    }
    Moments { product, square }
}

/// The squared error, with weights, of the levels nearest to `value / scale`; and their moments.
#[inline(always)]
pub(super) fn error<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    levels: impl Levels,
    scale: S::F,
) -> (S::F, Moments<S::F>) {
    let simd = groups.simd;
    let inverse = inverse(simd, scale);
    let (mut product, mut square) = (simd.splat(0.0), simd.splat(0.0));
    let mut error = simd.splat(0.0);
    for (x, w) in groups.x.iter().zip(&groups.w) {
        let level = levels.nearest(simd, *x * inverse);
        let weighted = *w * level;
        product = product + weighted * *x;
        square = square + weighted * level;
        let miss = *x - scale * level;
        error = error + *w * miss * miss;
    }
    (error, Moments { product, square })
}

/// The scale of each group with the least squared error: for each of `reaches`, the value of largest magnitude is
/// mapped to that level, and the scale is fitted to the levels that result; the best of these is fitted once more.
#[inline(always)]
pub(super) fn best_scale<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    levels: impl Levels,
    reaches: &[f32],
    refinements: usize,
) -> S::F {
    let simd = groups.simd;
    let start = inverse(simd, groups.extreme());
    let (mut most, mut best) = (simd.splat(0.0), simd.splat(0.0));
    for reach in reaches {
        let found = moments(groups, levels, start * simd.splat(*reach));
        keep(simd, &found, &mut most, &mut best);
    }
    for _ in 0..refinements {
        let found = moments(groups, levels, inverse(simd, best));
        keep(simd, &found, &mut most, &mut best);
    }
    best
}

/// Keeps the scale of each group where it lowers the error more than any before it.
#[inline(always)]
fn keep<S: Simd>(simd: S, found: &Moments<S::F>, most: &mut S::F, best: &mut S::F) {
    let scale = found.product / found.square.max(simd.splat(NONE));
    let gain = scale * found.product;
    let better = most.less(gain);
    *most = S::F::select(better, gain, *most);
    *best = S::F::select(better, scale, *best);
}
