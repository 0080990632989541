//! Finds scales and quants for a group of values.
//!
//! Each function starts from the scale that just covers the range of the values, and refines it: for fixed quants, the
//! best scale is a least-squares fit; for a fixed scale, the best quants are the nearest ones. Errors are measured with
//! the scale as it will be stored (the `stored` argument rounds it), and a refinement is kept only if it lowers the
//! error, so the result is never worse than plain rounding with the initial scale.

use super::half_bytes::HalfBytes;

/// The number of refinements of an initial scale.
const ROUNDS: usize = 2;

/// A number rounded to a finite `f16`.
pub(super) fn as_half(value: f32) -> f32 {
    HalfBytes::from_f32_finite(value).to_f32()
}

/// `1 / step`, or 0 for a step of 0, so that every quant is 0.
pub(super) fn inverse(step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { step.recip() }
}

/// The values with infinities replaced by the largest finite numbers, and NaN by zero.
fn finite<const N: usize>(values: &[f32; N]) -> [f32; N] {
    values.map(|x| if x.is_nan() { 0.0 } else { x.clamp(f32::MIN, f32::MAX) })
}

/// The minimum and maximum of the values after [`finite`].
pub(super) fn span<const N: usize>(values: &[f32; N]) -> (f32, f32) {
    let values = finite(values);
    (values.iter().copied().fold(f32::MAX, f32::min), values.iter().copied().fold(f32::MIN, f32::max))
}

/// Scale (as stored) and quants `0..=2 × offset − 1` with `value ≈ scale × (quant − offset)`.
pub(super) fn fit_centred<const N: usize>(
    values: &[f32; N],
    offset: f32,
    stored: impl Fn(f32) -> f32,
) -> (f32, [u8; N]) {
    let values = finite(values);
    let extreme = values.iter().fold(0.0f32, |best, x| if x.abs() > best.abs() { *x } else { best });

    let mut best = (f64::INFINITY, 0.0, [offset as u8; N]);
    // The range has one more step below zero than above. The value with the largest magnitude uses that side; leaving
    // it slightly out of range makes the steps finer for all others.
    for reach in [-offset, 0.5 - offset, 1.0 - offset] {
        let mut scale = stored(extreme / reach);
        for _ in 0..=ROUNDS {
            let inverse = inverse(scale);
            // The cast truncates; adding 0.5 makes it round.
            let quants = values.map(|x| (x * inverse + (offset + 0.5)).clamp(0.0, 2.0 * offset - 1.0) as u8);
            let (mut error, mut product, mut square) = (0.0f64, 0.0f64, 0.0f64);
            for (x, quant) in values.iter().zip(&quants) {
                let (x, quant) = (f64::from(*x), f64::from(*quant) - f64::from(offset));
                let miss = x - f64::from(scale) * quant;
                error += miss * miss;
                product += x * quant;
                square += quant * quant;
            }
            if error < best.0 {
                best = (error, scale, quants);
            }
            if square == 0.0 {
                break;
            }
            scale = stored((product / square) as f32);
        }
    }
    (best.1, best.2)
}

/// Scale and minimum (as stored) and quants `0..=highest` with `value ≈ scale × quant + minimum`; the initial minimum
/// is at most `ceiling`.
pub(super) fn fit_from_minimum<const N: usize>(
    values: &[f32; N],
    highest: f32,
    ceiling: f32,
    stored: impl Fn(f32, f32) -> (f32, f32),
) -> (f32, f32, [u8; N]) {
    let values = finite(values);
    let (lowest, largest) = span(&values);
    let smallest = lowest.min(ceiling);
    let count = N as f64;

    let mut best = (f64::INFINITY, 0.0, 0.0, [0; N]);
    // Divided before subtracting: the difference itself may overflow.
    let (mut scale, mut minimum) = stored(largest / highest - smallest / highest, smallest);
    for _ in 0..=ROUNDS {
        let inverse = inverse(scale);
        let quants = values.map(|x| ((x - minimum) * inverse + 0.5).clamp(0.0, highest) as u8);
        let (mut error, mut sum_x, mut sum_quant) = (0.0f64, 0.0f64, 0.0f64);
        let (mut product, mut square) = (0.0f64, 0.0f64);
        for (x, quant) in values.iter().zip(&quants) {
            let (x, quant) = (f64::from(*x), f64::from(*quant));
            let miss = x - (f64::from(scale) * quant + f64::from(minimum));
            error += miss * miss;
            sum_x += x;
            sum_quant += quant;
            product += x * quant;
            square += quant * quant;
        }
        if error < best.0 {
            best = (error, scale, minimum, quants);
        }
        let spread = count * square - sum_quant * sum_quant;
        if spread == 0.0 {
            break;
        }
        let slope = (count * product - sum_x * sum_quant) / spread;
        (scale, minimum) = stored(slope as f32, ((sum_x - slope * sum_quant) / count) as f32);
    }
    (best.1, best.2, best.3)
}

/// Scale and quants `−127..=127` with `value ≈ scale × quant`, by plain rounding: at 8 bits refinement gains little.
pub(super) fn fit_signed_bytes(values: &[f32; 32]) -> (f32, [i8; 32]) {
    let values = finite(values);
    let extreme = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = as_half(extreme / 127.0);
    let inverse = inverse(scale);
    let quants = values.map(|x| {
        let steps = (x * inverse).clamp(-127.0, 127.0);
        // The cast truncates; adding 0.5 away from zero makes it round.
        (steps + 0.5f32.copysign(steps)) as i8
    });
    (scale, quants)
}

/// Scale and quants 0 to 2 with `value ≈ scale × (quant − 1)`.
///
/// If the `k` largest magnitudes become the scale and all others zero, the best scale is the mean of the `k`, and the
/// squared error falls by the square of their sum over `k`: the best `k` is found by trying them all.
pub(super) fn fit_ternary<const N: usize>(values: &[f32; N]) -> (f32, [u8; N]) {
    let values = finite(values);
    let mut magnitudes = values.map(f32::abs);
    magnitudes.sort_unstable_by(|a, b| b.total_cmp(a));
    let (mut sum, mut most, mut scale) = (0.0f64, 0.0f64, 0.0f64);
    for (i, magnitude) in magnitudes.iter().enumerate() {
        sum += f64::from(*magnitude);
        let count = (i + 1) as f64;
        if sum * sum / count > most {
            (most, scale) = (sum * sum / count, sum / count);
        }
    }
    let scale = as_half(scale as f32);
    let quants = values.map(|x| 1 + u8::from(x > scale / 2.0) - u8::from(x < -scale / 2.0));
    (scale, quants)
}

/// Index and quants 0 to `L − 1` with `value ≈ scale(index) × levels[quant]`: the best of some candidates for the
/// index.
pub(super) fn fit_levels<const N: usize, const L: usize>(
    values: &[f32; N],
    levels: &[i8; L],
    candidates: impl Iterator<Item = u8>,
    scale: impl Fn(u8) -> f32,
) -> (u8, [u8; N]) {
    let values = finite(values);
    let mut best = (f64::INFINITY, 0, [0; N]);
    for candidate in candidates {
        let step = f64::from(scale(candidate));
        let mut error = 0.0;
        let quants = values.map(|x| {
            let miss = |level: &i8| (f64::from(x) - step * f64::from(*level)).abs();
            let nearest = levels.iter().map(miss).enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
            let (quant, miss) = nearest.unwrap_or_default();
            error += miss * miss;
            quant as u8
        });
        if error < best.0 {
            best = (error, candidate, quants);
        }
    }
    (best.1, best.2)
}
