//! Speeds of repeated measurements.

use serde_json::{Value, json};

/// Tokens per second of all rounds.
pub(super) struct Samples {
    pub(super) tokens: usize,
    pub(super) speeds: Vec<f64>,
}

impl Samples {
    pub(super) fn new(tokens: usize) -> Samples {
        Samples { tokens, speeds: Vec::new() }
    }

    pub(super) fn median(&self) -> f64 {
        let mut sorted = self.speeds.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let upper = sorted.get(middle).copied().unwrap_or(0.0);
        if sorted.len() % 2 == 1 {
            return upper;
        }
        let lower = middle.checked_sub(1).and_then(|at| sorted.get(at)).copied().unwrap_or(0.0);
        (lower + upper) / 2.0
    }

    /// Difference between the fastest and the slowest round, relative to the median; none of a single round.
    pub(super) fn spread(&self) -> Option<f64> {
        if self.speeds.len() < 2 {
            return None;
        }
        let fastest = self.speeds.iter().copied().fold(0.0, f64::max);
        let slowest = self.speeds.iter().copied().fold(f64::INFINITY, f64::min);
        Some((fastest - slowest) / self.median().max(1e-9))
    }

    pub(super) fn json(&self) -> Value {
        json!({ "n": self.tokens, "tok_s": self.median(), "spread": self.spread(), "samples": self.speeds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_between_the_middle_two() {
        let of = |speeds: &[f64]| Samples { tokens: 1, speeds: speeds.to_vec() };
        assert_eq!(of(&[3.0, 1.0]).median(), 2.0);
        assert_eq!(of(&[9.0, 1.0, 4.0, 2.0]).median(), 3.0);
        assert_eq!(of(&[5.0, 1.0, 4.0]).median(), 4.0);
        assert_eq!(of(&[5.0]).median(), 5.0);
        assert_eq!(of(&[]).median(), 0.0);
    }

    #[test]
    fn the_spread_is_relative_to_the_median() {
        let samples = Samples { tokens: 7, speeds: vec![8.0, 10.0, 11.0] };
        assert!((samples.spread().unwrap() - 0.3).abs() < 1e-12);
        let json = samples.json();
        assert_eq!((&json["n"], &json["tok_s"]), (&7.into(), &10.0.into()));
        let once = Samples { tokens: 7, speeds: vec![8.0] };
        assert!(once.spread().is_none() && once.json()["spread"].is_null());
    }
}
