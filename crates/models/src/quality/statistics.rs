//! Means with confidence intervals, and quantiles.

use serde::Serialize;

/// A mean with half the width of its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// The interval is from `mean − margin` to `mean + margin`.
    pub margin: f64,
}

/// Standard errors in half a 95 % confidence interval.
const Z: f64 = 1.96;

impl Estimate {
    /// The mean of samples.
    pub fn of(samples: &[f64]) -> Estimate {
        let count = samples.len() as f64;
        let mean = samples.iter().sum::<f64>() / count.max(1.0);
        let squares: f64 = samples.iter().map(|sample| (sample - mean) * (sample - mean)).sum();
        let margin = match samples.len() {
            _ if mean.is_infinite() => f64::INFINITY,
            0 | 1 => 0.0,
            _ => Z * (squares / (count - 1.0) / count).sqrt(),
        };
        Estimate { mean, margin }
    }

    /// A function of the mean, whose slope scales the interval.
    pub(super) fn map(self, value: impl Fn(f64) -> f64, slope: impl Fn(f64) -> f64) -> Estimate {
        Estimate { mean: value(self.mean), margin: self.margin * slope(self.mean).abs() }
    }
}

impl std::fmt::Display for Estimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = f.precision().unwrap_or(4);
        write!(f, "{:.digits$} ± {:.digits$}", self.mean, self.margin)
    }
}

/// The value that a part of the samples is below, 0 to 1. Sorts the samples.
pub(super) fn quantile(samples: &mut [f64], part: f64) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let place = part * samples.len().saturating_sub(1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    let at = |index: usize| samples.get(index).copied().unwrap_or_default();
    let (low, high) = (at(low), at(high));
    // Infinite samples have no difference.
    if low == high { low } else { low + (high - low) * (place - place.floor()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_and_quantiles_are_those_of_the_textbook() {
        let estimate = Estimate::of(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(estimate.mean, 2.5);
        // The standard deviation is 1.291, that of the mean half of it.
        assert!((estimate.margin - 1.96 * 0.6455).abs() < 1e-3, "{estimate:?}");
        assert_eq!(quantile(&mut [4.0, 1.0, 3.0, 2.0], 0.5), 2.5);
        assert_eq!(quantile(&mut [4.0, 1.0, 3.0, 2.0], 1.0), 4.0);
        assert_eq!(Estimate::of(&[1.0, f64::INFINITY]).margin, f64::INFINITY);
        assert_eq!(quantile(&mut [f64::INFINITY, 1.0, f64::INFINITY], 0.75), f64::INFINITY);
        assert_eq!(quantile(&mut [f64::INFINITY, 1.0, 1.0], 0.5), 1.0);
        assert_eq!(Estimate::of(&[]), Estimate { mean: 0.0, margin: 0.0 });
    }
}
