//! The formats of 256 elements whose groups have integer scales and no minimum: Q3_K, Q6_K, IQ4_XS. The groups of a block
//! are searched at once.

use half::f16;
use quadriga_graph::blocks::{BlockIQ4_XS, BlockQ3_K, BlockQ6_K, FormatError, HalfBytes, as_blocks_mut};

use super::code_book::{IQ4, Integers, Levels};
use super::groups::{Groups, inverse};
use super::kernel::{Kernel, Rows};
use super::packing::{nibbles, planes};
use super::simd::{Lanes, Simd};
use super::symmetric::{best_scale, error};

/// How the scales of a format are searched.
struct Search<'a> {
    /// The lowest and highest scale of a group.
    lowest: f32,
    highest: f32,
    /// The levels that the value of largest magnitude is mapped to, one after the other.
    reaches: &'a [f32],
    /// How often the best scale of a group is fitted again.
    refinements: usize,
    /// Integers near a group's scale that are tried, as differences.
    neighbours: &'a [f32],
    /// How often the block's scale is fitted to what was found.
    rounds: usize,
}

/// For the levels of IQ4_NL and IQ4_XS, where columns have weights.
pub(super) const IQ4_WEIGHTED_REACHES: &[f32] = &[
    -152.0, -146.0, -140.0, -133.0, -127.0, -121.0, -114.0, -108.0, -102.0, -95.0, -89.0, 136.0, 124.0,
    113.0, 102.0, 90.0,
];

/// The scale of a block, and the scales of its groups, eight per vector.
struct Scales<const H: usize> {
    block: f32,
    groups: [[f32; 8]; H],
}

/// Searches the scales of one block of `H` times eight groups.
#[inline(always)]
fn search<S: Simd, const N: usize, const H: usize>(
    halves: &[Groups<S, N>; H],
    levels: impl Levels,
    search: &Search<'_>,
    simd: S,
) -> Scales<H> {
    let mut ideal = [simd.splat(0.0); H];
    let mut extreme = 0.0f32;
    for (ideal, groups) in ideal.iter_mut().zip(halves) {
        *ideal = best_scale(groups, levels, search.reaches, search.refinements);
        for scale in ideal.store() {
            if scale.abs() > extreme.abs() {
                extreme = scale;
            }
        }
    }
    let mut best = Scales { block: 0.0, groups: [[0.0; 8]; H] };
    let mut least = f32::INFINITY;
    // There is one more step below zero than above: the scale of largest magnitude uses it.
    let mut scale = as_half(extreme / search.lowest);
    for _ in 0..=search.rounds {
        if scale == 0.0 {
            break;
        }
        let step = simd.splat(scale);
        let to_integer = simd.splat(scale.recip());
        let (lowest, highest) = (simd.splat(search.lowest), simd.splat(search.highest));
        let mut chosen = [[0.0; 8]; H];
        let (mut total, mut product, mut square) = (0.0, 0.0, 0.0);
        for ((groups, ideal), chosen) in halves.iter().zip(&ideal).zip(&mut chosen) {
            let centre = (*ideal * to_integer).round();
            let zero = simd.splat(0.0);
            let (mut best, mut fewest) = (zero, simd.splat(f32::INFINITY));
            let (mut products, mut squares) = (zero, zero);
            for difference in search.neighbours {
                let integer = (centre + simd.splat(*difference)).min(highest).max(lowest);
                let (misses, found) = error(groups, levels, integer * step);
                let better = misses.less(fewest);
                fewest = S::F::select(better, misses, fewest);
                best = S::F::select(better, integer, best);
                products = S::F::select(better, found.product, products);
                squares = S::F::select(better, found.square, squares);
            }
            total += fewest.sum();
            product += (best * products).sum();
            square += (best * best * squares).sum();
            *chosen = best.store();
        }
        if total < least {
            least = total;
            best = Scales { block: scale, groups: chosen };
        }
        if square <= 0.0 {
            break;
        }
        let fitted = as_half(product / square);
        if fitted == scale {
            break;
        }
        scale = fitted;
    }
    best
}

/// The nearest number that a finite f16 can hold.
pub(super) fn as_half(value: f32) -> f32 {
    f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32()
}

/// A number that an f16 can hold, as it is stored.
pub(super) fn half_bytes(value: f32) -> HalfBytes {
    HalfBytes(f16::from_f32(value).to_le_bytes())
}

/// The codes of a block with these scales, in the order of its elements.
#[inline(always)]
fn codes<S: Simd, const N: usize, const H: usize>(
    halves: &[Groups<S, N>; H],
    levels: impl Levels,
    scales: &Scales<H>,
    simd: S,
) -> [u8; 256] {
    let mut codes = [0; 256];
    let mut places = codes.chunks_exact_mut(N);
    for (groups, integers) in halves.iter().zip(&scales.groups) {
        let step = simd.load(integers) * simd.splat(scales.block);
        let found = groups.codes(levels, simd.splat(0.0), inverse(simd, step));
        // In this order: the other one would take a place for nothing when the groups end.
        for (found, place) in found.iter().zip(places.by_ref()) {
            place.copy_from_slice(found);
        }
    }
    codes
}

/// The kernel of Q3_K.
pub(super) struct Q3Kernel;

impl Kernel for Q3Kernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        const LEVELS: Integers = Integers { low: -4.0, high: 3.0 };
        let how = Search {
            lowest: -32.0,
            highest: 31.0,
            reaches: match rows.is_weighted() {
                false => &[-4.6, -4.3, -4.0, -3.7, -3.4, -3.1, -2.8, 3.6, 3.3, 3.0, 2.7],
                true => &[
                    -5.0, -4.82, -4.63, -4.45, -4.27, -4.08, -3.9, -3.72, -3.53, -3.35, -3.17, -2.98, -2.8,
                    3.84, 3.52, 3.2, 2.98, 2.75, 2.53, 2.3,
                ],
            },
            refinements: 2,
            neighbours: &[0.0, -1.0, 1.0],
            rounds: 2,
        };
        for (i, block) in as_blocks_mut::<BlockQ3_K>(out)?.iter_mut().enumerate() {
            let halves = [rows.groups::<S, 16>(simd, 16 * i), rows.groups::<S, 16>(simd, 16 * i + 8)];
            let scales = search(&halves, LEVELS, &how, simd);
            let codes = codes(&halves, LEVELS, &scales, simd);
            let mut group_scales = [0; 12];
            for (g, scale) in scales.groups.as_flattened().iter().enumerate() {
                let scale = (*scale + 32.0) as u8;
                if let Some(byte) = group_scales.get_mut(g % 8) {
                    *byte |= (scale & 15) << (g / 8 * 4);
                }
                if let Some(byte) = group_scales.get_mut(8 + g % 4) {
                    *byte |= scale >> 4 << (g / 4 * 2);
                }
            }
            *block = BlockQ3_K {
                third_bits: planes::<1, 2, 32, 32>(&codes),
                quants: planes::<2, 0, 32, 64>(&codes),
                group_scales,
                scale: half_bytes(scales.block),
            };
        }
        Ok(())
    }
}

/// The kernel of Q6_K.
pub(super) struct Q6Kernel;

impl Kernel for Q6Kernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        const LEVELS: Integers = Integers { low: -32.0, high: 31.0 };
        let how = Search {
            lowest: -128.0,
            highest: 127.0,
            reaches: match rows.is_weighted() {
                false => &[-30.0, -30.4, -30.8, -31.2, -31.6, -32.0, -32.4, -32.8, 30.2, 30.6, 31.0, 31.4],
                true => &[
                    -22.0, -22.7, -23.4, -24.1, -24.8, -25.5, -26.2, -26.9, -27.6, -28.3, -29.0, -29.7,
                    -30.4, -31.1, -31.8, -32.5, -33.2, -33.9, -34.6, -35.3, -36.0, 27.0, 27.7, 28.4, 29.1,
                    29.8, 30.5, 31.2, 31.9,
                ],
            },
            refinements: 1,
            neighbours: &[0.0, -1.0, 1.0],
            rounds: 1,
        };
        for (i, block) in as_blocks_mut::<BlockQ6_K>(out)?.iter_mut().enumerate() {
            let halves = [rows.groups::<S, 16>(simd, 16 * i), rows.groups::<S, 16>(simd, 16 * i + 8)];
            let scales = search(&halves, LEVELS, &how, simd);
            let codes = codes(&halves, LEVELS, &scales, simd);
            let mut group_scales = [0; 16];
            for (place, scale) in group_scales.iter_mut().zip(scales.groups.as_flattened()) {
                *place = *scale as i8;
            }
            *block = BlockQ6_K {
                quants: planes::<4, 0, 64, 128>(&codes),
                high_bits: planes::<2, 4, 32, 64>(&codes),
                group_scales,
                scale: half_bytes(scales.block),
            };
        }
        Ok(())
    }
}

/// The kernel of IQ4_XS.
pub(super) struct Iq4XsKernel;

impl Kernel for Iq4XsKernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let how = Search {
            lowest: -32.0,
            highest: 31.0,
            reaches: match rows.is_weighted() {
                false => &[-140.0, -131.0, -123.0, -115.0, -106.0, 124.0, 115.0, 106.0],
                true => IQ4_WEIGHTED_REACHES,
            },
            refinements: 1,
            neighbours: &[0.0, -1.0, 1.0],
            rounds: 1,
        };
        for (i, block) in as_blocks_mut::<BlockIQ4_XS>(out)?.iter_mut().enumerate() {
            let groups = [rows.groups::<S, 32>(simd, 8 * i)];
            let scales = search(&groups, IQ4, &how, simd);
            let codes = codes(&groups, IQ4, &scales, simd);
            let (mut high, mut low) = (0u16, [0; 4]);
            for (g, scale) in scales.groups.as_flattened().iter().enumerate() {
                let scale = (*scale + 32.0) as u8;
                high |= u16::from(scale >> 4) << (2 * g);
                if let Some(byte) = low.get_mut(g / 2) {
                    *byte |= (scale & 15) << (g % 2 * 4);
                }
            }
            let mut packed = [[0; 16]; 8];
            for (packed, codes) in packed.iter_mut().zip(codes.as_chunks::<32>().0) {
                *packed = nibbles(codes);
            }
            *block = BlockIQ4_XS {
                scale: half_bytes(scales.block),
                scales_high: high.to_le_bytes(),
                scales_low: low,
                codes: packed,
            };
        }
        Ok(())
    }
}
