//! The formats with minimums: Q4_1 and Q5_1, whose blocks have one f16 scale and minimum, and Q2_K, Q4_K and Q5_K, whose
//! groups have integer scales and minimums.

use quadriga_graph::blocks::{
    Block, BlockQ2_K, BlockQ4_1, BlockQ4_K, BlockQ5_1, BlockQ5_K, FormatError, GroupScales, as_blocks_mut,
};

use super::affine::{Line, LineSearch, Totals, best_line, best_minimum, error, totals};
use super::code_book::Integers;
use super::group_scales::{as_half, half_bytes};
use super::groups::{Groups, inverse};
use super::kernel::{Kernel, Rows};
use super::packing::{fifth_bits, nibbles, planes};
use super::simd::{Lanes, Simd};

/// Scale and minimum of a block, and of its groups, eight per vector.
struct Lines<const H: usize> {
    scale: f32,
    minimum: f32,
    scales: [[f32; 8]; H],
    minimums: [[f32; 8]; H],
}

/// Searches the scales and minimums of one block of `H` times eight groups; those of a group are integers up to `largest`.
#[inline(always)]
fn search<S: Simd, const N: usize, const H: usize>(
    simd: S,
    halves: &[Groups<S, N>; H],
    how: &LineSearch<'_>,
    largest: f32,
    rounds: usize,
) -> Lines<H> {
    let zero = simd.splat(0.0);
    let mut ideal = [Line { scale: zero, minimum: zero }; H];
    let mut sums = [const { None }; H];
    let (mut scale, mut minimum) = (0.0f32, 0.0f32);
    for ((ideal, groups), sums) in ideal.iter_mut().zip(halves).zip(&mut sums) {
        let totals = totals(groups);
        *ideal = best_line(groups, &totals, how);
        *sums = Some(totals);
        scale = ideal.scale.store().into_iter().fold(scale, f32::max);
        minimum = ideal.minimum.store().into_iter().fold(minimum, f32::max);
    }
    (scale, minimum) = (as_half(scale / largest), as_half(minimum / largest));
    let mut best = Lines { scale, minimum, scales: [[0.0; 8]; H], minimums: [[0.0; 8]; H] };
    let mut least = f32::INFINITY;
    for _ in 0..=rounds {
        let mut found = Lines { scale, minimum, scales: [[0.0; 8]; H], minimums: [[0.0; 8]; H] };
        let mut fit = Fit::default();
        for (h, (groups, ideal)) in halves.iter().zip(&ideal).enumerate() {
            let (Some(Some(totals)), Some(scales), Some(minimums)) =
                (sums.get(h), found.scales.get_mut(h), found.minimums.get_mut(h))
            else {
                continue;
            };
            let step = Line { scale: simd.splat(scale), minimum: simd.splat(minimum) };
            (*scales, *minimums) = integers(groups, totals, *ideal, step, how.highest, largest, &mut fit);
        }
        if fit.error < least {
            least = fit.error;
            best = found;
        }
        let Some((next_scale, next_minimum)) = fit.solve() else { break };
        if (next_scale, next_minimum) == (scale, minimum) {
            break;
        }
        (scale, minimum) = (next_scale, next_minimum);
    }
    best
}

/// The best integers for the scales and minimums of eight groups, given those of the block.
#[inline(always)]
fn integers<S: Simd, const N: usize>(
    groups: &Groups<S, N>,
    totals: &Totals<S::F>,
    ideal: Line<S::F>,
    step: Line<S::F>,
    highest: f32,
    largest: f32,
    fit: &mut Fit,
) -> ([f32; 8], [f32; 8]) {
    let simd = groups.simd;
    let (zero, largest) = (simd.splat(0.0), simd.splat(largest));
    let (to_scale, to_minimum) = (inverse(simd, step.scale), inverse(simd, step.minimum));
    let centre = (ideal.scale * to_scale).round();
    let (mut fewest, mut best) = (simd.splat(f32::INFINITY), Line { scale: zero, minimum: zero });
    let (mut quant, mut square, mut product) = (zero, zero, zero);
    for difference in [0.0, -1.0, 1.0] {
        let scale = (centre + simd.splat(difference)).min(largest).max(zero);
        let trial = Line { scale: scale * step.scale, minimum: ideal.minimum };
        let minimum = best_minimum(groups, totals, highest, trial);
        let minimum = (minimum * to_minimum).round().min(largest).max(zero);
        let line = Line { scale: trial.scale, minimum: minimum * step.minimum };
        let (misses, sums) = error(groups, highest, line);
        let better = misses.less(fewest);
        fewest = S::F::select(better, misses, fewest);
        best.scale = S::F::select(better, scale, best.scale);
        best.minimum = S::F::select(better, minimum, best.minimum);
        quant = S::F::select(better, sums.quant, quant);
        square = S::F::select(better, sums.square, square);
        product = S::F::select(better, sums.product, product);
    }
    fit.error += fewest.sum();
    fit.scales += (best.scale * best.scale * square).sum();
    fit.both += (best.scale * best.minimum * quant).sum();
    fit.minimums += (best.minimum * best.minimum * totals.weight).sum();
    fit.scale_product += (best.scale * product).sum();
    fit.minimum_product += (best.minimum * totals.value).sum();
    (best.scale.store(), best.minimum.store())
}

/// The normal equations of a block's scale and minimum, given integers and quants.
#[derive(Default)]
struct Fit {
    error: f32,
    scales: f32,
    both: f32,
    minimums: f32,
    scale_product: f32,
    minimum_product: f32,
}

impl Fit {
    /// Scale and minimum with the least squared error, as they are stored; `None` if they are not determined.
    fn solve(&self) -> Option<(f32, f32)> {
        let (a, b, c) = (f64::from(self.scales), f64::from(self.both), f64::from(self.minimums));
        let (p, r) = (f64::from(self.scale_product), f64::from(self.minimum_product));
        let determinant = a * c - b * b;
        let (scale, minimum) = if determinant > 1e-9 * a * c {
            ((p * c - b * r) / determinant, (b * p - a * r) / determinant)
        } else if a > 0.0 {
            (p / a, 0.0)
        } else {
            return None;
        };
        (scale > 0.0 && minimum >= 0.0).then(|| (as_half(scale as f32), as_half(minimum as f32)))
    }
}

/// The codes of a block with these lines, in the order of its elements.
#[inline(always)]
fn codes<S: Simd, const N: usize, const H: usize>(
    simd: S,
    halves: &[Groups<S, N>; H],
    highest: f32,
    lines: &Lines<H>,
) -> [u8; 256] {
    let mut codes = [0; 256];
    let mut places = codes.chunks_exact_mut(N);
    for ((groups, scales), minimums) in halves.iter().zip(&lines.scales).zip(&lines.minimums) {
        let scale = simd.load(scales) * simd.splat(lines.scale);
        let minimum = simd.load(minimums) * simd.splat(lines.minimum);
        let found = groups.codes(Integers { low: 0.0, high: highest }, minimum, inverse(simd, scale));
        // In this order: the other one would take a place for nothing when the groups end.
        for (found, place) in found.iter().zip(places.by_ref()) {
            place.copy_from_slice(found);
        }
    }
    codes
}

/// Scales and minimums of eight groups with 6 bits each, packed.
#[inline(always)]
fn packed_scales(lines: &Lines<1>) -> GroupScales {
    let mut pairs = [(0, 0); 8];
    let both = lines.scales.as_flattened().iter().zip(lines.minimums.as_flattened());
    for (pair, (scale, minimum)) in pairs.iter_mut().zip(both) {
        *pair = (*scale as u8, *minimum as u8);
    }
    GroupScales::pack(&pairs)
}

/// Starts of four bits where columns have weights.
const WEIGHTED_STARTS_4: &[(f32, f32)] = &[
    (14.4, 1.0),
    (14.4, 0.93),
    (14.4, 0.86),
    (14.4, 0.78),
    (15.15, 1.0),
    (15.15, 0.93),
    (15.15, 0.86),
    (15.15, 0.78),
    (15.9, 1.0),
    (15.9, 0.93),
    (15.9, 0.86),
    (15.9, 0.78),
    (16.65, 1.0),
    (16.65, 0.93),
    (16.65, 0.86),
    (16.65, 0.78),
    (17.55, 1.0),
    (17.55, 0.93),
    (17.55, 0.86),
    (17.55, 0.78),
    (18.6, 1.0),
    (18.6, 0.93),
    (18.6, 0.86),
    (18.6, 0.78),
];

/// The same of five bits.
const WEIGHTED_STARTS_5: &[(f32, f32)] = &[
    (30.0, 1.0),
    (30.0, 0.96),
    (30.0, 0.92),
    (30.0, 0.87),
    (30.7, 1.0),
    (30.7, 0.96),
    (30.7, 0.92),
    (30.7, 0.87),
    (31.4, 1.0),
    (31.4, 0.96),
    (31.4, 0.92),
    (31.4, 0.87),
    (32.1, 1.0),
    (32.1, 0.96),
    (32.1, 0.92),
    (32.1, 0.87),
    (33.0, 1.0),
    (33.0, 0.96),
    (33.0, 0.92),
    (33.0, 0.87),
    (34.0, 1.0),
    (34.0, 0.96),
    (34.0, 0.92),
    (34.0, 0.87),
    (36.0, 1.0),
    (36.0, 0.96),
    (36.0, 0.92),
    (36.0, 0.87),
];

/// The kernel of Q4_K.
pub(super) struct Q4Kernel;

impl Kernel for Q4Kernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let how = LineSearch {
            highest: 15.0,
            starts: if rows.is_weighted() {
                WEIGHTED_STARTS_4
            } else {
                &[
                    (14.2, 1.0),
                    (14.6, 1.0),
                    (15.0, 1.0),
                    (15.4, 1.0),
                    (15.8, 1.0),
                    (16.3, 1.0),
                    (15.0, 0.95),
                    (15.5, 0.93),
                    (16.0, 0.95),
                ]
            },
            refinements: 3,
            any_minimum: false,
        };
        for (i, block) in as_blocks_mut::<BlockQ4_K>(out)?.iter_mut().enumerate() {
            let groups = [rows.groups::<S, 32>(simd, 8 * i)];
            let lines = search(simd, &groups, &how, 63.0, 1);
            let codes = codes(simd, &groups, how.highest, &lines);
            *block = BlockQ4_K {
                scale: half_bytes(lines.scale),
                min_scale: half_bytes(lines.minimum),
                group_scales: packed_scales(&lines),
                quants: planes::<4, 0, 32, 128>(&codes),
            };
        }
        Ok(())
    }
}

/// The kernel of Q5_K.
pub(super) struct Q5Kernel;

impl Kernel for Q5Kernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let how = LineSearch {
            highest: 31.0,
            starts: if rows.is_weighted() {
                WEIGHTED_STARTS_5
            } else {
                &[(30.2, 1.0), (30.6, 1.0), (31.0, 1.0), (31.4, 1.0), (31.8, 1.0), (31.0, 0.98), (31.5, 0.97)]
            },
            refinements: 2,
            any_minimum: false,
        };
        for (i, block) in as_blocks_mut::<BlockQ5_K>(out)?.iter_mut().enumerate() {
            let groups = [rows.groups::<S, 32>(simd, 8 * i)];
            let lines = search(simd, &groups, &how, 63.0, 1);
            let codes = codes(simd, &groups, how.highest, &lines);
            *block = BlockQ5_K {
                scale: half_bytes(lines.scale),
                min_scale: half_bytes(lines.minimum),
                group_scales: packed_scales(&lines),
                fifth_bits: planes::<1, 4, 32, 32>(&codes),
                quants: planes::<4, 0, 32, 128>(&codes),
            };
        }
        Ok(())
    }
}

/// The kernel of Q2_K.
pub(super) struct Q2Kernel;

impl Kernel for Q2Kernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let how = LineSearch {
            highest: 3.0,
            starts: &[
                (2.6, 1.0),
                (3.0, 1.0),
                (3.4, 1.0),
                (3.8, 1.0),
                (2.6, 0.8),
                (3.0, 0.8),
                (3.4, 0.8),
                (3.8, 0.8),
                (2.6, 0.6),
                (3.0, 0.6),
                (3.4, 0.6),
                (3.0, 0.3),
                (3.4, 0.3),
            ],
            refinements: 3,
            any_minimum: false,
        };
        for (i, block) in as_blocks_mut::<BlockQ2_K>(out)?.iter_mut().enumerate() {
            let halves = [rows.groups::<S, 16>(simd, 16 * i), rows.groups::<S, 16>(simd, 16 * i + 8)];
            let lines = search(simd, &halves, &how, 15.0, 2);
            let codes = codes(simd, &halves, how.highest, &lines);
            let mut group_scales = [0; 16];
            let both = lines.scales.as_flattened().iter().zip(lines.minimums.as_flattened());
            for (byte, (scale, minimum)) in group_scales.iter_mut().zip(both) {
                *byte = *scale as u8 | (*minimum as u8) << 4;
            }
            *block = BlockQ2_K {
                group_scales,
                quants: planes::<2, 0, 32, 64>(&codes),
                scale: half_bytes(lines.scale),
                min_scale: half_bytes(lines.minimum),
            };
        }
        Ok(())
    }
}

/// A format of blocks of 32 elements with an f16 scale and minimum.
pub(super) trait OneLine: Block {
    /// What the search tries.
    const SEARCH: LineSearch<'static>;
    /// Its starts where columns have weights.
    const WEIGHTED_STARTS: &'static [(f32, f32)];
    /// The block with this scale and minimum, which is added, and these quants.
    fn block(scale: f32, minimum: f32, codes: &[u8; 32]) -> Self;
}

impl OneLine for BlockQ4_1 {
    const SEARCH: LineSearch<'static> = LineSearch {
        highest: 15.0,
        starts: &[(14.2, 1.0), (14.6, 1.0), (15.0, 1.0), (15.4, 1.0), (15.8, 1.0), (16.3, 1.0), (15.0, 0.95)],
        refinements: 2,
        any_minimum: true,
    };
    const WEIGHTED_STARTS: &'static [(f32, f32)] = WEIGHTED_STARTS_4;

    #[inline(always)]
    fn block(scale: f32, minimum: f32, codes: &[u8; 32]) -> Self {
        BlockQ4_1 { scale: half_bytes(scale), minimum: half_bytes(minimum), quants: nibbles(codes) }
    }
}

impl OneLine for BlockQ5_1 {
    const SEARCH: LineSearch<'static> = LineSearch {
        highest: 31.0,
        starts: &[(30.2, 1.0), (30.6, 1.0), (31.0, 1.0), (31.4, 1.0), (31.8, 1.0), (31.0, 0.98)],
        refinements: 2,
        any_minimum: true,
    };
    const WEIGHTED_STARTS: &'static [(f32, f32)] = WEIGHTED_STARTS_5;

    #[inline(always)]
    fn block(scale: f32, minimum: f32, codes: &[u8; 32]) -> Self {
        BlockQ5_1 {
            scale: half_bytes(scale),
            minimum: half_bytes(minimum),
            fifth_bits: fifth_bits(codes),
            quants: nibbles(codes),
        }
    }
}

/// The kernel of a format with one f16 scale and minimum.
pub(super) struct OneLineKernel<B>(B);

impl<B: OneLine> Kernel for OneLineKernel<B> {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let starts = if rows.is_weighted() { B::WEIGHTED_STARTS } else { B::SEARCH.starts };
        let how = LineSearch { starts, ..B::SEARCH };
        for (i, blocks) in as_blocks_mut::<B>(out)?.chunks_mut(8).enumerate() {
            let groups = rows.groups::<S, 32>(simd, 8 * i);
            let line = best_line(&groups, &totals(&groups), &how);
            let (mut scales, mut minimums) = (line.scale.store(), line.minimum.store());
            for (scale, minimum) in scales.iter_mut().zip(&mut minimums) {
                (*scale, *minimum) = (as_half(*scale), as_half(*minimum));
            }
            let levels = Integers { low: 0.0, high: B::SEARCH.highest };
            let inverse = inverse(simd, simd.load(&scales));
            let codes = groups.codes(levels, simd.load(&minimums), inverse);
            for ((block, codes), (scale, minimum)) in
                blocks.iter_mut().zip(&codes).zip(scales.iter().zip(minimums))
            {
                *block = B::block(*scale, -minimum, codes);
            }
        }
        Ok(())
    }
}
