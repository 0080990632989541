//! Finds scales and quants for a group of values.
//!
//! Each function starts from the scale that just spans the values, and then refines: with the quants held fixed, the
//! best scale is a least-squares fit; with the scale held fixed, the best quants are the nearest ones. All errors are
//! measured with the scale as it will be stored (the `stored` argument rounds it), so a refinement is kept only if it
//! truly helps, and the result is never worse than plain rounding at the starting point.

use super::half_bytes::HalfBytes;

/// How often a starting point is refined.
const ROUNDS: usize = 2;

/// What a number becomes when it is stored as a 16-bit float.
pub(super) fn as_half(value: f32) -> f32 {
    HalfBytes::from_f32_finite(value).to_f32()
}

/// `1 / step`, or 0 where there is no step: then everything is quant 0.
pub(super) fn inverse(step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { step.recip() }
}

/// The values with infinities made the largest finite numbers and NaN made zero.
fn finite<const N: usize>(values: &[f32; N]) -> [f32; N] {
    values.map(|x| if x.is_nan() { 0.0 } else { x.clamp(f32::MIN, f32::MAX) })
}

/// The lowest and the highest of the values, as [`finite`] makes them.
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
    // The range reaches one step further down than up. The extreme value takes the longer side; leaving it just out of
    // reach makes the steps finer for all others.
    for reach in [-offset, 0.5 - offset, 1.0 - offset] {
        let mut scale = stored(extreme / reach);
        for _ in 0..=ROUNDS {
            let inverse = inverse(scale);
            // The cast truncates: half a step more makes that rounding.
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

/// Scale and minimum (as stored) and quants `0..=highest` with `value ≈ scale × quant + minimum`, where the minimum
/// starts no higher than `ceiling`.
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
    // Two quotients, because the difference of the two numbers may be infinite.
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

/// Scale and quants `−127..=127` with `value ≈ scale × quant`: plain rounding, which at 8 bits leaves little to gain.
pub(super) fn fit_signed_bytes(values: &[f32; 32]) -> (f32, [i8; 32]) {
    let values = finite(values);
    let extreme = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = as_half(extreme / 127.0);
    let inverse = inverse(scale);
    let quants = values.map(|x| {
        let steps = (x * inverse).clamp(-127.0, 127.0);
        // The cast truncates: half a step away from zero makes that rounding.
        (steps + 0.5f32.copysign(steps)) as i8
    });
    (scale, quants)
}
