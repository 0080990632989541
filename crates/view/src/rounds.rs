//! Repeated measurements of one rate: the peak, how far they spread, and whether something disturbed them.

use serde::{Deserialize, Serialize};

/// How much faster than the median a round may be; beyond that it is an error of the clock.
const MAX_GAIN: f64 = 1.25;
/// The largest spread of undisturbed rounds.
const MAX_SPREAD: f64 = 0.2;
/// The largest share of all CPUs that other processes may use.
const MAX_OTHERS: f64 = 0.1;
/// The largest share of all CPUs that the host of a virtual machine may take.
const MAX_STOLEN: f64 = 0.02;

/// The rates of repeated measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RateSummary {
    /// The fastest credible round.
    pub(crate) peak: f64,
    /// The median's distance to the peak, relative to the peak.
    pub(crate) spread: f64,
    /// Whether a round was faster than the clock can be trusted.
    pub(crate) has_outlier: bool,
}

impl RateSummary {
    /// Summarizes the rates of all rounds.
    pub(crate) fn of(rates: &[f64]) -> RateSummary {
        let mut sorted: Vec<f64> = rates.iter().copied().filter(|rate| rate.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let Some(median) = sorted.get(sorted.len() / 2).copied() else { return RateSummary::default() };
        let credible = |rate: &&f64| **rate <= median * MAX_GAIN;
        let peak = sorted.iter().rev().find(credible).copied().unwrap_or(median);
        let has_outlier = sorted.last().is_some_and(|fastest| *fastest > peak);
        RateSummary { peak, spread: (peak - median) / peak.max(1e-12), has_outlier }
    }
}

/// The conditions under which limits were measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Bytes that were read per round to measure the memory's bandwidth.
    pub working_set: u64,
    /// Bytes of the last-level caches, if known.
    pub cache_bytes: Option<u64>,
    /// The distance of the median round to the peak, relative to the peak: the largest of all rates.
    pub spread: f64,
    /// Whether a round was faster than the clock can be trusted; it was dropped.
    pub has_outlier: bool,
    /// The share of all CPUs that other processes used, 0 to 1.
    pub others: f64,
    /// The share of all CPUs that the host of a virtual machine took for others, 0 to 1.
    pub stolen: f64,
}

impl Conditions {
    /// The reasons why the figures are uncertain; empty for an undisturbed run.
    pub fn disturbances(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let mut reasons = Vec::new();
        if self.others > MAX_OTHERS {
            reasons.push(format!("other processes used {} of the CPUs", percent(self.others)));
        }
        if self.stolen > MAX_STOLEN {
            reasons.push(format!("the host took {} of the CPUs", percent(self.stolen)));
        }
        if self.spread > MAX_SPREAD {
            reasons.push(format!("the rounds spread by {}", percent(self.spread)));
        }
        if self.has_outlier {
            reasons.push("a round was faster than possible".to_owned());
        }
        if self.cache_bytes.is_some_and(|bytes| self.working_set < 2 * bytes) {
            reasons.push("too little free memory to read more than the caches hold".to_owned());
        }
        reasons
    }

    /// Adds the spread of one more rate.
    pub(crate) fn add(&mut self, rates: RateSummary) {
        self.spread = self.spread.max(rates.spread);
        self.has_outlier |= rates.has_outlier;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_fastest_credible_round() {
        let calm = RateSummary::of(&[27.0, 28.0, 27.5, 26.0, 27.8]);
        assert_eq!((calm.peak, calm.has_outlier), (28.0, false));
        assert!((calm.spread - 0.5 / 28.0).abs() < 1e-12, "{calm:?}");
        // 960 GB/s beside 28 is no rate of this memory.
        let disturbed = RateSummary::of(&[28.0, 960.0, 10.0, 27.0, 9.0]);
        assert_eq!((disturbed.peak, disturbed.has_outlier), (28.0, true));
        assert_eq!(RateSummary::of(&[]), RateSummary::default());
        assert_eq!(RateSummary::of(&[f64::NAN, 3.0]).peak, 3.0);
    }

    #[test]
    fn disturbed_runs_have_reasons() {
        let calm = Conditions {
            working_set: 4 << 30,
            cache_bytes: Some(1 << 30),
            spread: 0.05,
            others: 0.01,
            ..Conditions::default()
        };
        assert!(calm.disturbances().is_empty());
        for (conditions, reason) in [
            (Conditions { others: 0.45, ..calm }, "other processes used 45 % of the CPUs"),
            (Conditions { stolen: 0.07, ..calm }, "the host took 7 % of the CPUs"),
            (Conditions { spread: 0.5, ..calm }, "the rounds spread by 50 %"),
            (Conditions { has_outlier: true, ..calm }, "a round was faster than possible"),
            (
                Conditions { working_set: 1 << 30, ..calm },
                "too little free memory to read more than the caches hold",
            ),
        ] {
            assert_eq!(conditions.disturbances(), [reason]);
        }
    }
}
