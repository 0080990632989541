//! The formats with one scale per block and no minimum: Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4. Eight blocks are searched at
//! once.

use half::f16;
use quadriga_graph::blocks::{
    Block, BlockIQ4_NL, BlockMXFP4, BlockQ4_0, BlockQ5_0, BlockQ8_0, FormatError, HalfBytes, as_blocks_mut,
};

use super::code_book::{E2M1, IQ4, Integers, Levels, e2m1_code};
use super::groups::{Groups, inverse};
use super::kernel::{Kernel, Rows};
use super::packing::{fifth_bits, nibbles};
use super::simd::{Lanes, Simd};
use super::symmetric::{best_scale, error};

/// A format of blocks of 32 elements with one f16 scale.
pub(super) trait OneScale: Block {
    /// The levels of a quant.
    const LEVELS: Self::Levels;
    /// Their type.
    type Levels: Levels;
    /// The levels that the value of largest magnitude is mapped to, one after the other.
    const REACHES: &[f32];
    /// The same where columns have weights.
    const WEIGHTED_REACHES: &[f32];
    /// How often the best scale is fitted again.
    const REFINEMENTS: usize;

    /// The block with this scale and these indices of levels.
    fn block(scale: HalfBytes, codes: &[u8; 32]) -> Self;
}

impl OneScale for BlockQ4_0 {
    const LEVELS: Integers = Integers { low: -8.0, high: 7.0 };
    type Levels = Integers;
    const REACHES: &[f32] = &[-9.2, -8.75, -8.3, -7.85, -7.4, -6.95, 7.5, 7.0, 6.5];
    const WEIGHTED_REACHES: &[f32] = &[
        -5.6, -6.0, -6.4, -6.8, -7.2, -7.6, -8.0, -8.4, -8.8, -9.2, -9.6, -10.0, 5.4, 5.8, 6.2, 6.6, 7.0,
        7.4, 7.8,
    ];
    const REFINEMENTS: usize = 1;

    #[inline(always)]
    fn block(scale: HalfBytes, codes: &[u8; 32]) -> Self {
        BlockQ4_0 { scale, quants: nibbles(codes) }
    }
}

impl OneScale for BlockQ5_0 {
    const LEVELS: Integers = Integers { low: -16.0, high: 15.0 };
    type Levels = Integers;
    const REACHES: &[f32] = &[-14.6, -15.0, -15.4, -15.8, -16.2, -16.6, 14.7, 15.1, 15.5];
    const WEIGHTED_REACHES: &[f32] = &[
        -12.0, -12.6, -13.2, -13.8, -14.4, -15.0, -15.6, -16.2, -16.8, -17.4, -18.0, 12.2, 12.8, 13.4, 14.0,
        14.6, 15.2,
    ];
    const REFINEMENTS: usize = 1;

    #[inline(always)]
    fn block(scale: HalfBytes, codes: &[u8; 32]) -> Self {
        BlockQ5_0 { scale, fifth_bits: fifth_bits(codes), quants: nibbles(codes) }
    }
}

impl OneScale for BlockQ8_0 {
    // −128 is left out: kernels may negate a quant.
    const LEVELS: Integers = Integers { low: -127.0, high: 127.0 };
    type Levels = Integers;
    const REACHES: &[f32] = &[127.2, 126.7, 126.2, 125.7];
    const WEIGHTED_REACHES: &[f32] = &[
        119.5, 120.0, 120.5, 121.0, 121.5, 122.0, 122.5, 123.0, 123.5, 124.0, 124.5, 125.0, 125.5, 126.0,
        126.5, 127.0,
    ];
    const REFINEMENTS: usize = 0;

    #[inline(always)]
    fn block(scale: HalfBytes, codes: &[u8; 32]) -> Self {
        let mut quants = [0; 32];
        for (quant, code) in quants.iter_mut().zip(codes) {
            *quant = code.wrapping_sub(127) as i8;
        }
        BlockQ8_0 { scale, quants }
    }
}

impl OneScale for BlockIQ4_NL {
    const LEVELS: super::code_book::Table<15> = IQ4;
    type Levels = super::code_book::Table<15>;
    const REACHES: &[f32] = &[-140.0, -131.0, -123.0, -115.0, -106.0, 124.0, 115.0, 106.0];
    const WEIGHTED_REACHES: &[f32] = super::group_scales::IQ4_WEIGHTED_REACHES;
    const REFINEMENTS: usize = 2;

    #[inline(always)]
    fn block(scale: HalfBytes, codes: &[u8; 32]) -> Self {
        BlockIQ4_NL { scale, codes: nibbles(codes) }
    }
}

/// The kernel of a format with one f16 scale.
pub(super) struct OneScaleKernel<B>(B);

impl<B: OneScale> Kernel for OneScaleKernel<B> {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let (eights, rest) = as_blocks_mut::<B>(out)?.as_chunks_mut::<8>();
        let whole = eights.len();
        let reaches = if rows.is_weighted() { B::WEIGHTED_REACHES } else { B::REACHES };
        for (i, blocks) in eights.iter_mut().enumerate() {
            eight(&rows.groups::<S, 32>(simd, 8 * i), reaches, blocks);
        }
        if !rest.is_empty() {
            eight(&rows.groups::<S, 32>(simd, 8 * whole), reaches, rest);
        }
        Ok(())
    }
}

/// Quantizes eight blocks, and stores those that exist.
#[inline(always)]
fn eight<S: Simd, B: OneScale>(groups: &Groups<S, 32>, reaches: &[f32], blocks: &mut [B]) {
    let simd = groups.simd;
    let scales = best_scale(groups, B::LEVELS, reaches, B::REFINEMENTS).store();
    // The quants belong to the scale as it is stored.
    let (mut stored, mut rounded) = ([HalfBytes([0; 2]); 8], [0.0; 8]);
    for ((stored, rounded), scale) in stored.iter_mut().zip(&mut rounded).zip(scales) {
        *stored = HalfBytes(f16::from_f32(scale.clamp(-65504.0, 65504.0)).to_le_bytes());
        *rounded = stored.to_f32();
    }
    let inverse = inverse(simd, simd.load(&rounded));
    let codes = groups.codes(B::LEVELS, simd.splat(0.0), inverse);
    for ((block, codes), scale) in blocks.iter_mut().zip(&codes).zip(stored) {
        *block = B::block(scale, codes);
    }
}

/// The kernel of MXFP4: the scale is a power of two, and the best of three is taken.
pub(super) struct Mxfp4Kernel;

impl Kernel for Mxfp4Kernel {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        for (i, blocks) in as_blocks_mut::<BlockMXFP4>(out)?.chunks_mut(8).enumerate() {
            let groups = rows.groups::<S, 32>(simd, 8 * i);
            let extremes = groups.extreme().store();
            let (mut least, mut best) = (simd.splat(f32::MAX), simd.splat(0.0));
            for offset in [-1, 0, 1] {
                let mut exponents = [0.0; 8];
                let mut scales = [0.0; 8];
                for ((exponent, scale), extreme) in exponents.iter_mut().zip(&mut scales).zip(extremes) {
                    let block = BlockMXFP4 { exponent: exponent_of(extreme, offset), codes: [0; 16] };
                    (*exponent, *scale) = (f32::from(block.exponent), block.scale());
                }
                let (error, _) = error(&groups, E2M1, simd.load(&scales));
                let better = error.less(least);
                least = S::F::select(better, error, least);
                best = S::F::select(better, simd.load(&exponents), best);
            }
            let mut scales = [0.0; 8];
            let exponents = best.store();
            for (scale, exponent) in scales.iter_mut().zip(exponents) {
                *scale = BlockMXFP4 { exponent: exponent as u8, codes: [0; 16] }.scale();
            }
            let codes = groups.codes(E2M1, simd.splat(0.0), inverse(simd, simd.load(&scales)));
            for ((block, codes), exponent) in blocks.iter_mut().zip(codes).zip(exponents) {
                *block = BlockMXFP4 { exponent: exponent as u8, codes: nibbles(&codes.map(e2m1_code)) };
            }
        }
        Ok(())
    }
}

/// The exponent with which the value of largest magnitude is at most the largest level, plus an offset.
fn exponent_of(extreme: f32, offset: i32) -> u8 {
    if extreme == 0.0 {
        return 0;
    }
    // The largest level is 12, of 2^(exponent − 128).
    let exponent = (extreme.abs() / 12.0).log2().ceil() as i32 + 128 + offset;
    exponent.clamp(0, 254) as u8
}
