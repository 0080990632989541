//! Scale and minimum of a group whose values are `scale × quant − minimum`: the search that Q4_1, Q5_1, Q2_K, Q4_K and
//! Q5_K share.

use super::groups::{Groups, inverse};
use super::simd::{Lanes, Simd};

/// Smaller determinants count as zero.
const NONE: f32 = 1e-30;

/// Scale and minimum of eight groups; the minimum is what is subtracted.
#[derive(Clone, Copy)]
pub(super) struct Line<F> {
    pub(super) scale: F,
    pub(super) minimum: F,
}

/// Sums, with weights, over the quants of each group.
pub(super) struct Sums<F> {
    /// Σ weight × quant.
    pub(super) quant: F,
    /// Σ weight × quant².
    pub(super) square: F,
    /// Σ weight × quant × value.
    pub(super) product: F,
}

/// Sums, with weights, over the values of each group: they do not depend on the quants.
pub(super) struct Totals<F> {
    /// Σ weight.
    pub(super) weight: F,
    /// Σ weight × value.
    pub(super) value: F,
    /// The smallest and the largest value.
    smallest: F,
    largest: F,
}

/// What the search of a group tries.
pub(super) struct LineSearch<'a> {
    /// The highest quant; the lowest is 0.
    pub(super) highest: f32,
    /// Quants that the largest value is mapped to, one after the other, each with a part of the smallest value that
    /// quant 0 stands for.
    pub(super) starts: &'a [(f32, f32)],
    /// How often the best line is fitted to its own quants.
    pub(super) refinements: usize,
    /// Whether the minimum may be negative: all values of a group above zero.
    pub(super) any_minimum: bool,
}

/// Σ over the values of each group.
#[inline(always)]
pub(super) fn totals<S: Simd, const N: usize>(groups: &Groups<S, N>) -> Totals<S::F> {
    let simd = groups.simd;
    let (mut weight, mut value) = (simd.splat(0.0), simd.splat(0.0));
    let (mut smallest, mut largest) = (simd.splat(f32::MAX), simd.splat(f32::MIN));
    for (x, w) in groups.x.iter().zip(&groups.w) {
        weight = weight + *w;
        value = value + *w * *x;
        smallest = smallest.min(*x);
        largest = largest.max(*x);
    }
    Totals { weight, value, smallest, largest }
}

/// The quants of a line, `0..=highest`, and their sums.
#[inline(always)]
fn sums<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    highest: f32,
    inverse: S::F,
    minimum: S::F,
) -> Sums<S::F> {
    let simd = groups.simd;
    let (zero, highest) = (simd.splat(0.0), simd.splat(highest));
    let (mut quant, mut square, mut product) = (zero, zero, zero);
    for (x, w) in groups.x.iter().zip(&groups.w) {
        let q = ((*x + minimum) * inverse).round().min(highest).max(zero);
        let weighted = *w * q;
        quant = quant + weighted;
        square = square + weighted * q;
        product = product + weighted * *x;
    }
    Sums { quant, square, product }
}

/// The squared error, with weights, of the quants of a line; and their sums.
#[inline(always)]
pub(super) fn error<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    highest: f32,
    line: Line<S::F>,
) -> (S::F, Sums<S::F>) {
    let simd = groups.simd;
    let inverse = inverse(simd, line.scale);
    let (zero, highest) = (simd.splat(0.0), simd.splat(highest));
    let (mut quant, mut square, mut product, mut error) = (zero, zero, zero, zero);
    for (x, w) in groups.x.iter().zip(&groups.w) {
        let shifted = *x + line.minimum;
        let q = (shifted * inverse).round().min(highest).max(zero);
        let weighted = *w * q;
        quant = quant + weighted;
        square = square + weighted * q;
        product = product + weighted * *x;
        let miss = shifted - line.scale * q;
        error = error + *w * miss * miss;
    }
    (error, Sums { quant, square, product })
}

/// The minimum that fits best to quants, given the scale.
#[inline(always)]
pub(super) fn best_minimum<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    totals: &Totals<S::F>,
    highest: f32,
    line: Line<S::F>,
) -> S::F {
    let simd = groups.simd;
    let found = sums(groups, highest, inverse(simd, line.scale), line.minimum);
    (line.scale * found.quant - totals.value) / totals.weight.max(simd.splat(NONE))
}

/// The line of each group with the least squared error among those tried.
#[inline(always)]
pub(super) fn best_line<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    totals: &Totals<S::F>,
    search: &LineSearch<'_>,
) -> Line<S::F> {
    let simd = groups.simd;
    let zero = simd.splat(0.0);
    let lowest = match search.any_minimum {
        true => zero - totals.smallest,
        false => (zero - totals.smallest).max(zero),
    };
    let mut most = simd.splat(f32::MIN);
    let mut best = Line { scale: zero, minimum: lowest };
    for (reach, part) in search.starts {
        let minimum = lowest * simd.splat(*part);
        let start = inverse(simd, totals.largest + minimum) * simd.splat(*reach);
        let found = sums(groups, search.highest, start, minimum);
        keep(simd, totals, &found, search.any_minimum, &mut most, &mut best);
    }
    for _ in 0..search.refinements {
        let found = sums(groups, search.highest, inverse(simd, best.scale), best.minimum);
        keep(simd, totals, &found, search.any_minimum, &mut most, &mut best);
    }
    best
}

/// Fits a line to quants, and keeps it where it lowers the error more than any before it.
#[inline(always)]
fn keep<S: Simd>(
    simd: S,
    totals: &Totals<S::F>,
    found: &Sums<S::F>,
    any_minimum: bool,
    most: &mut S::F,
    best: &mut Line<S::F>,
) {
    let (zero, none) = (simd.splat(0.0), simd.splat(NONE));
    let determinant = totals.weight * found.square - found.quant * found.quant;
    let divisor = determinant.max(none);
    let mut scale = (totals.weight * found.product - totals.value * found.quant) / divisor;
    let mut minimum = (found.quant * found.product - found.square * totals.value) / divisor;
    // Quants that are all the same leave the scale open: one line through zero.
    let through_zero = found.product / found.square.max(none);
    let flat = determinant.less(simd.splat(1e-12) * found.square * totals.weight + none);
    scale = S::F::select(flat, through_zero, scale);
    minimum = S::F::select(flat, zero, minimum);
    if !any_minimum {
        let below = minimum.less(zero);
        scale = S::F::select(below, through_zero, scale);
        minimum = S::F::select(below, zero, minimum);
    }
    // What the line takes away from the sum of squares of the values.
    let two = simd.splat(2.0);
    let gain = scale * (two * found.product - scale * found.square)
        + minimum * (two * (scale * found.quant - totals.value) - minimum * totals.weight);
    let better = most.less(gain);
    let better = better.and(zero.less(scale));
    *most = S::F::select(better, gain, *most);
    best.scale = S::F::select(better, scale, best.scale);
    best.minimum = S::F::select(better, minimum, best.minimum);
}
