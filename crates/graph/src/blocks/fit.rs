//! Finds scales and quants for the formats of 32 elements.
//!
//! Each function starts from the scale that just spans the values, and then refines: with the quants held fixed, the
//! best scale is a least-squares fit; with the scale held fixed, the best quants are the nearest ones. All errors are
//! measured with the scale as it is stored, in 16 bits, so a refinement is kept only if it truly helps, and the result
//! is never worse than the plain rounding of the starting point.

use super::HalfBytes;

/// How often a starting point is refined; more than this gains less than a thousandth.
const ROUNDS: usize = 2;

/// The values with infinities made the largest finite numbers and NaN made zero.
fn finite(values: &[f32; 32]) -> [f32; 32] {
    values.map(|x| if x.is_nan() { 0.0 } else { x.clamp(f32::MIN, f32::MAX) })
}

/// Scale and quants `0..=2 × offset − 1` with `value ≈ scale × (quant − offset)`.
pub(super) fn fit_centred(values: &[f32; 32], offset: f32) -> (HalfBytes, [u8; 32]) {
    let values = finite(values);
    let extreme = values.iter().fold(0.0f32, |best, x| if x.abs() > best.abs() { *x } else { best });
    let quants_for = |scale: f32| -> [u8; 32] {
        let inverse = if scale == 0.0 { 0.0 } else { scale.recip() };
        values.map(|x| (x * inverse + (offset + 0.5)).clamp(0.0, 2.0 * offset - 1.0) as u8)
    };

    let mut best: Option<(f64, HalfBytes, [u8; 32])> = None;
    // The range reaches one step further down than up. The extreme value takes the longer side; leaving it just out of
    // reach makes the steps finer for all others.
    for reach in [-offset, 0.5 - offset, 1.0 - offset] {
        let mut scale = HalfBytes::from_f32_finite(extreme / reach);
        for _ in 0..=ROUNDS {
            let step = scale.to_f32();
            let quants = quants_for(step);
            let (mut error, mut product, mut square) = (0.0f64, 0.0f64, 0.0f64);
            for (x, quant) in values.iter().zip(&quants) {
                let (x, quant) = (f64::from(*x), f64::from(*quant) - f64::from(offset));
                let miss = x - f64::from(step) * quant;
                error += miss * miss;
                product += x * quant;
                square += quant * quant;
            }
            if best.as_ref().is_none_or(|(least, ..)| error < *least) {
                best = Some((error, scale, quants));
            }
            if square == 0.0 {
                break;
            }
            scale = HalfBytes::from_f32_finite((product / square) as f32);
        }
    }
    best.map_or((HalfBytes([0; 2]), [offset as u8; 32]), |(_, scale, quants)| (scale, quants))
}

/// Scale, minimum and quants `0..=highest` with `value ≈ scale × quant + minimum`.
pub(super) fn fit_from_minimum(values: &[f32; 32], highest: f32) -> (HalfBytes, HalfBytes, [u8; 32]) {
    let values = finite(values);
    let smallest = values.iter().copied().fold(f32::MAX, f32::min);
    let largest = values.iter().copied().fold(f32::MIN, f32::max);

    let mut scale = HalfBytes::from_f32_finite(largest / highest - smallest / highest);
    let mut minimum = HalfBytes::from_f32_finite(smallest);
    let mut best: Option<(f64, HalfBytes, HalfBytes, [u8; 32])> = None;
    for _ in 0..=ROUNDS {
        let (step, base) = (scale.to_f32(), minimum.to_f32());
        let inverse = if step == 0.0 { 0.0 } else { step.recip() };
        let quants = values.map(|x| ((x - base) * inverse + 0.5).clamp(0.0, highest) as u8);
        let (mut error, mut sum_x, mut sum_q, mut product, mut square) =
            (0.0f64, 0.0f64, 0.0f64, 0.0f64, 0.0f64);
        for (x, quant) in values.iter().zip(&quants) {
            let (x, quant) = (f64::from(*x), f64::from(*quant));
            let miss = x - (f64::from(step) * quant + f64::from(base));
            error += miss * miss;
            sum_x += x;
            sum_q += quant;
            product += x * quant;
            square += quant * quant;
        }
        if best.as_ref().is_none_or(|(least, ..)| error < *least) {
            best = Some((error, scale, minimum, quants));
        }
        let spread = 32.0 * square - sum_q * sum_q;
        if spread == 0.0 {
            break;
        }
        let slope = (32.0 * product - sum_x * sum_q) / spread;
        scale = HalfBytes::from_f32_finite(slope as f32);
        minimum = HalfBytes::from_f32_finite(((sum_x - slope * sum_q) / 32.0) as f32);
    }
    best.map_or((HalfBytes([0; 2]), HalfBytes([0; 2]), [0; 32]), |(_, scale, minimum, quants)| {
        (scale, minimum, quants)
    })
}

/// Scale and quants `−127..=127` with `value ≈ scale × quant`: plain rounding, which at 8 bits leaves nothing to gain
/// worth its time.
pub(super) fn fit_signed_bytes(values: &[f32; 32]) -> (HalfBytes, [i8; 32]) {
    let values = finite(values);
    let extreme = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = HalfBytes::from_f32_finite(extreme / 127.0);
    let step = scale.to_f32();
    let inverse = if step == 0.0 { 0.0 } else { step.recip() };
    let quants = values.map(|x| {
        let steps = (x * inverse).clamp(-127.0, 127.0);
        // The cast truncates: half a step away from zero makes that rounding.
        (steps + 0.5f32.copysign(steps)) as i8
    });
    (scale, quants)
}
