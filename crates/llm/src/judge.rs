//! Comparison of evaluated cases with exact results, within tolerances.
//!
//! The most probable token may differ only where the exact results have a near tie; log-probabilities and likelihoods
//! may differ by the error that quantized activations cause.

use serde::Deserialize;

use crate::evaluate::{CaseResult, EvalCase, ResultFields, Scored};

/// A tie: the two most probable tokens differ by less than this, in nats.
const TIE: f64 = 0.80;
/// The tolerance for the mean difference of the most probable token's log-probability within one case, in nats.
const DRIFT: f64 = 0.12;
/// The same tolerance for the mean over all cases.
const MEAN_DRIFT: f64 = 0.045;
/// The tolerance for the relative difference of one case's mean negative log-likelihood.
const LIKELIHOOD: f64 = 0.003;
/// The same tolerance for the mean over all cases.
const MEAN_LIKELIHOOD: f64 = 0.0015;

/// Cases for the default model with exact results, one JSON object per line.
pub const DEFAULT_MODEL_CASES: &str = include_str!("../tests/data/smollm2.exact.jsonl");

/// Reads cases, one JSON object per line.
///
/// # Errors
/// A line is not a case.
pub fn read_cases(text: &str) -> serde_json::Result<Vec<ExactCase>> {
    text.lines().filter(|line| !line.trim().is_empty()).map(serde_json::from_str).collect()
}

/// A case with its exact results.
#[derive(Clone, Debug, Deserialize)]
pub struct ExactCase {
    /// The case.
    #[serde(flatten)]
    pub case: EvalCase,
    #[serde(default)]
    tokens: Vec<u32>,
    #[serde(default)]
    nll: f64,
    #[serde(default)]
    top5: Option<Top>,
}

/// The most probable tokens of each step, or of a single one.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Top {
    Steps(Vec<Vec<Scored>>),
    One(Vec<Scored>),
}

impl Top {
    fn steps(&self) -> &[Vec<Scored>] {
        match self {
            Top::Steps(steps) => steps,
            Top::One(step) => std::slice::from_ref(step),
        }
    }
}

/// The comparison of all cases so far.
#[derive(Clone, Default, Debug)]
pub struct Judgement {
    drifts: Vec<f64>,
    likelihoods: Vec<f64>,
    /// One line for each case that is out of tolerance.
    failures: Vec<String>,
    count: usize,
}

impl Judgement {
    /// Compares the result of one more case.
    pub fn add(&mut self, exact: &ExactCase, outcome: &CaseResult) {
        self.count += 1;
        match judge(exact, &outcome.result) {
            Ok(Some(Measure::Drift(drift))) => self.drifts.push(drift),
            Ok(Some(Measure::Likelihood(error))) => self.likelihoods.push(error),
            Ok(None) => {}
            Err(why) => self.failures.push(format!("{}: {why}", outcome.name)),
        }
    }

    /// The mean difference of the most probable tokens' log-probabilities, in nats.
    pub fn mean_drift(&self) -> f64 {
        mean(&self.drifts)
    }

    /// The mean relative difference of the negative log-likelihoods.
    pub fn mean_likelihood_error(&self) -> f64 {
        mean(&self.likelihoods)
    }

    /// A summary in one line; as an error, with the cases that are out of tolerance. The means are compared only if
    /// `means` is set, which takes enough cases to be meaningful.
    pub fn holds(&self, means: bool) -> Result<String, String> {
        let (drift, error) = (self.mean_drift(), self.mean_likelihood_error());
        let held = self.count - self.failures.len();
        let line = format!(
            "{held} of {} cases hold; mean drift {drift:.4} nats, mean likelihood error {:.4} %",
            self.count,
            error * 100.0
        );
        if !self.failures.is_empty() {
            return Err(format!("{line}\n{}", self.failures.join("\n")));
        }
        let wide = means && (drift > MEAN_DRIFT || error > MEAN_LIKELIHOOD);
        if wide { Err(format!("{line}: the means are too far off")) } else { Ok(line) }
    }
}

enum Measure {
    Drift(f64),
    Likelihood(f64),
}

fn judge(exact: &ExactCase, result: &ResultFields) -> Result<Option<Measure>, String> {
    let wanted = exact.top5.as_ref().map_or(&[][..], Top::steps);
    let same_tokens = |tokens: &[u32]| {
        if tokens == exact.tokens { Ok(()) } else { Err(format!("tokens {tokens:?} != {:?}", exact.tokens)) }
    };
    match result {
        ResultFields::Tokenize { tokens } => same_tokens(tokens).map(|()| None),
        ResultFields::Greedy { tokens, top5, .. } => {
            same_tokens(tokens)?;
            drift(wanted, top5).map(Some)
        }
        ResultFields::Next { top5 } => drift(wanted, std::slice::from_ref(top5)).map(Some),
        ResultFields::Nll { nll, .. } => {
            let error = (nll - exact.nll).abs() / exact.nll;
            if error <= LIKELIHOOD {
                Ok(Some(Measure::Likelihood(error)))
            } else {
                Err(format!("nll {nll:.5} != {:.5}", exact.nll))
            }
        }
    }
}

fn drift(wanted: &[Vec<Scored>], found: &[Vec<Scored>]) -> Result<Measure, String> {
    let mut differences = Vec::new();
    for (step, top) in wanted.iter().enumerate() {
        let mine = found.get(step).ok_or(format!("stopped at step {step}"))?;
        let [(best, probability), (_, second), ..] = *top.as_slice() else {
            return Err(format!("step {step}: the exact results name fewer than two tokens"));
        };
        let tie = probability - second < TIE;
        match mine.iter().find(|(token, _)| *token == best) {
            Some((_, mine)) => differences.push((mine - probability).abs()),
            None if tie => {}
            None => return Err(format!("step {step}: best token {best} is not among {mine:?}")),
        }
        if mine.first().is_none_or(|(token, _)| *token != best) {
            if !tie {
                return Err(format!("step {step}: best token {:?} in place of {best}", mine.first()));
            }
            break; // A tie was decided differently: later steps have another prefix.
        }
    }
    let drift = mean(&differences);
    if drift <= DRIFT { Ok(Measure::Drift(drift)) } else { Err(format!("mean drift {drift:.4} nats")) }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |sum, value| sum + value) / values.len().max(1) as f64
}
