//! Quantization of rows to the types of a KV cache that are expensive to fit: Q4_0 and Q5_1.
//!
//! The search for a scale is that of [`blocks::quantize`], with sums in f32 instead of f64: results are the same up to near
//! ties between two scales.

use quadriga_graph::DType;
use quadriga_graph::blocks::{self, BlockQ4_0, BlockQ5_1, HalfBytes};

use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Refinements of an initial scale.
const ROUNDS: usize = 2;

/// Blocks whose largest number is in this range are fitted here: squares neither overflow nor vanish.
const USUAL: std::ops::Range<f32> = 1e-12..1e12;

/// Quantizes whole blocks; false for other types than Q4_0 and Q5_1, and if the lengths do not fit.
pub fn quantize_row(isa: Isa, dtype: DType, values: &[f32], out: &mut [u8]) -> bool {
    let (values, []) = values.as_chunks::<32>() else { return false };
    match dtype {
        DType::Q4_0 => match blocks::as_blocks_mut::<BlockQ4_0>(out) {
            Ok(out) if out.len() == values.len() => {
                dispatch!(isa, q4_0(values: &[[f32; 32]], out: &mut [BlockQ4_0]) -> ());
            }
            _ => return false,
        },
        DType::Q5_1 => match blocks::as_blocks_mut::<BlockQ5_1>(out) {
            Ok(out) if out.len() == values.len() => {
                dispatch!(isa, q5_1(values: &[[f32; 32]], out: &mut [BlockQ5_1]) -> ());
            }
            _ => return false,
        },
        _ => return false,
    }
    true
}

/// The largest magnitude of a block, unless it needs more care than this file takes.
#[inline(always)]
unsafe fn usual_magnitude<S: Simd>(values: &[f32; 32]) -> Option<f32> {
    // A NaN or an infinity is in no range; the sum finds a NaN, which a maximum may hide.
    let (mut most, mut sum) = (0.0_f32, 0.0_f32);
    for value in values {
        most = most.max(value.abs());
        sum += value * 0.0;
    }
    (USUAL.contains(&most) && sum == 0.0).then_some(most)
}

#[inline(always)]
unsafe fn q4_0<S: Simd>(values: &[[f32; 32]], out: &mut [BlockQ4_0]) {
    for (values, out) in values.iter().zip(out) {
        // SAFETY: promised by the caller.
        unsafe {
            let Some(most) = usual_magnitude::<S>(values) else {
                *out = blocks::QuantizeBlock::quantize(values);
                continue;
            };
            let scale = centred_scale::<S>(values, most);
            let quants = quants::<S>(values, 0.0, inverse(scale.to_f32()), 8.5, 15.0);
            *out = BlockQ4_0 { scale, quants: pack_nibbles(&quants) };
        }
    }
}

#[inline(always)]
unsafe fn q5_1<S: Simd>(values: &[[f32; 32]], out: &mut [BlockQ5_1]) {
    for (values, out) in values.iter().zip(out) {
        // SAFETY: promised by the caller.
        unsafe {
            if usual_magnitude::<S>(values).is_none() {
                *out = blocks::QuantizeBlock::quantize(values);
                continue;
            }
            let [scale, minimum] = scale_and_minimum::<S>(values, 31.0);
            let quants = quants::<S>(values, minimum.to_f32(), inverse(scale.to_f32()), 0.5, 31.0);
            let bits = quants.iter().enumerate().fold(0, |bits, (i, q)| bits | (u32::from(q >> 4 & 1) << i));
            *out =
                BlockQ5_1 { scale, minimum, fifth_bits: bits.to_le_bytes(), quants: pack_nibbles(&quants) };
        }
    }
}

/// `1 / step`, or 0 for a step of 0.
#[inline(always)]
fn inverse(step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { step.recip() }
}

/// The low four bits of 32 numbers: those of the first sixteen in the low nibbles.
#[inline(always)]
fn pack_nibbles(quants: &[u8; 32]) -> [u8; 16] {
    let mut packed = [0; 16];
    let (low, high) = quants.split_at(16);
    for ((packed, low), high) in packed.iter_mut().zip(low).zip(high) {
        *packed = (low & 0x0f) | (high << 4);
    }
    packed
}

/// Quants as numbers: `(x − minimum) · inverse + rounded`, cut to `0..=highest` and to whole numbers.
#[inline(always)]
unsafe fn quant<S: Simd>(x: S::V, minimum: S::V, inverse: S::V, rounded: S::V, highest: S::V) -> S::V {
    // SAFETY: promised by the caller.
    unsafe {
        let steps = S::add(S::mul(S::sub(x, minimum), inverse), rounded);
        S::floor(S::max(S::min(steps, highest), S::splat(0.0)))
    }
}

#[inline(always)]
unsafe fn quants<S: Simd>(
    values: &[f32; 32],
    minimum: f32,
    inverse: f32,
    rounded: f32,
    highest: f32,
) -> [u8; 32] {
    let mut numbers = [0.0_f32; 32];
    // SAFETY: promised by the caller; both have 32 elements.
    unsafe {
        for i in (0..32).step_by(S::N) {
            let [minimum, inverse, rounded, highest] =
                [minimum, inverse, rounded, highest].map(|number| S::splat(number));
            let q = quant::<S>(S::load(values.as_ptr().add(i)), minimum, inverse, rounded, highest);
            S::store(numbers.as_mut_ptr().add(i), q);
        }
    }
    numbers.map(|number| number as u8)
}

/// The scale of `value ≈ scale × (quant − 8)`: of the block's largest number to the lower end of the range or slightly
/// beyond, and least-squares fits to the quants that follow from those.
#[inline(always)]
unsafe fn centred_scale<S: Simd>(values: &[f32; 32], most: f32) -> HalfBytes {
    let extreme = values.iter().find(|value| value.abs() == most).copied().unwrap_or(most);
    let mut best = (f32::INFINITY, HalfBytes::from_f32_finite(0.0));
    for reach in [-8.0, -7.5, -7.0] {
        let mut stored = HalfBytes::from_f32_finite(extreme / reach);
        for _ in 0..=ROUNDS {
            let scale = stored.to_f32();
            // SAFETY: promised by the caller; a block has 32 elements.
            let [error, product, square] = unsafe {
                let [mut error, mut product, mut square] = [S::splat(0.0); 3];
                let (inverse, rounded) = (S::splat(inverse(scale)), S::splat(8.5));
                for i in (0..32).step_by(S::N) {
                    let x = S::load(values.as_ptr().add(i));
                    let q = quant::<S>(x, S::splat(0.0), inverse, rounded, S::splat(15.0));
                    let q = S::sub(q, S::splat(8.0));
                    let miss = S::sub(x, S::mul(S::splat(scale), q));
                    error = S::fma(miss, miss, error);
                    product = S::fma(x, q, product);
                    square = S::fma(q, q, square);
                }
                [S::sum(error), S::sum(product), S::sum(square)]
            };
            if error < best.0 {
                best = (error, stored);
            }
            if square == 0.0 {
                break;
            }
            stored = HalfBytes::from_f32_finite(product / square);
        }
    }
    best.1
}

/// Scale and minimum of `value ≈ scale × quant + minimum`: those of the block's range, and least-squares fits to the
/// quants that follow from those.
#[inline(always)]
unsafe fn scale_and_minimum<S: Simd>(values: &[f32; 32], highest: f32) -> [HalfBytes; 2] {
    let lowest = values.iter().copied().fold(f32::MAX, f32::min);
    let largest = values.iter().copied().fold(f32::MIN, f32::max);
    let stored = |pair: [f32; 2]| pair.map(HalfBytes::from_f32_finite);
    let mut now = stored([largest / highest - lowest / highest, lowest]);
    let mut best = (f32::INFINITY, now);
    for _ in 0..=ROUNDS {
        let [scale, minimum] = now.map(HalfBytes::to_f32);
        // Offsets from the minimum: their squares lose no digits that matter where the minimum is large.
        // SAFETY: promised by the caller; a block has 32 elements.
        let [error, sum_x, sum_q, product, square] = unsafe {
            let mut sums = [S::splat(0.0); 5];
            let (from, inverse, rounded) = (S::splat(minimum), S::splat(inverse(scale)), S::splat(0.5));
            for i in (0..32).step_by(S::N) {
                let x = S::load(values.as_ptr().add(i));
                let q = quant::<S>(x, from, inverse, rounded, S::splat(highest));
                let x = S::sub(x, from);
                let miss = S::sub(x, S::mul(S::splat(scale), q));
                let [error, sum_x, sum_q, product, square] = sums;
                sums = [
                    S::fma(miss, miss, error),
                    S::add(sum_x, x),
                    S::add(sum_q, q),
                    S::fma(x, q, product),
                    S::fma(q, q, square),
                ];
            }
            sums.map(|sum| S::sum(sum))
        };
        if error < best.0 {
            best = (error, now);
        }
        let spread = 32.0 * square - sum_q * sum_q;
        if spread == 0.0 {
            break;
        }
        let slope = (32.0 * product - sum_x * sum_q) / spread;
        now = stored([slope, minimum + (sum_x - slope * sum_q) / 32.0]);
    }
    best.1
}
