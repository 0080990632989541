//! Judging evaluated cases by exact results: what holds, and how far off it is.
//!
//! A best token may give way only to one that is nearly as likely; log-probabilities and likelihoods may drift as far as
//! quantized activations make them.

use serde::Deserialize;

use crate::evaluate::{Case, Outcome, ResultFields, Scored};

/// Nats between the best two tokens under which either may win.
const TIE: f64 = 0.80;
/// Nats: the mean difference of the best token's log-probability within one case.
const DRIFT: f64 = 0.12;
/// Nats: the same over all cases.
const MEAN_DRIFT: f64 = 0.045;
/// The relative difference of one case's mean negative log-likelihood.
const LIKELIHOOD: f64 = 0.003;
/// The same, the mean over all cases.
const MEAN_LIKELIHOOD: f64 = 0.0015;

/// Cases for the default model with exact results, one JSON object a line.
pub const DEFAULT_MODEL_CASES: &str = include_str!("../tests/data/smollm2.exact.jsonl");

/// Reads cases, one JSON object a line.
///
/// # Errors
/// A line is no case.
pub fn read_cases(text: &str) -> serde_json::Result<Vec<Exact>> {
    text.lines().filter(|line| !line.trim().is_empty()).map(serde_json::from_str).collect()
}

/// A case with its exact results.
#[derive(Clone, Debug, Deserialize)]
pub struct Exact {
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    #[serde(default)]
    tokens: Vec<u32>,
    #[serde(default)]
    nll: f64,
    #[serde(default)]
    top5: Option<Top>,
}

/// The best tokens of each step, or of the only one.
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

/// Everything judged so far.
#[derive(Clone, Default, Debug)]
pub struct Verdict {
    drifts: Vec<f64>,
    likelihoods: Vec<f64>,
    /// One line for each case that falls short.
    short: Vec<String>,
    count: usize,
}

impl Verdict {
    /// Judges one more case.
    pub fn add(&mut self, exact: &Exact, outcome: &Outcome) {
        self.count += 1;
        match judge(exact, &outcome.result) {
            Ok(Some(Measure::Drift(drift))) => self.drifts.push(drift),
            Ok(Some(Measure::Likelihood(error))) => self.likelihoods.push(error),
            Ok(None) => {}
            Err(why) => self.short.push(format!("{}: {why}", outcome.name)),
        }
    }

    /// Nats that the best tokens' log-probabilities are off, in the mean.
    pub fn mean_drift(&self) -> f64 {
        mean(&self.drifts)
    }

    /// How far mean negative log-likelihoods are off, relative and in the mean.
    pub fn mean_likelihood_error(&self) -> f64 {
        mean(&self.likelihoods)
    }

    /// A line that says how it stands; as an error, what falls short. The means want enough cases to be fair: `means`
    /// says whether they are judged.
    pub fn holds(&self, means: bool) -> Result<String, String> {
        let (drift, error) = (self.mean_drift(), self.mean_likelihood_error());
        let held = self.count - self.short.len();
        let line = format!(
            "{held} of {} cases hold; mean drift {drift:.4} nats, mean likelihood error {:.4} %",
            self.count,
            error * 100.0
        );
        if !self.short.is_empty() {
            return Err(format!("{line}\n{}", self.short.join("\n")));
        }
        let wide = means && (drift > MEAN_DRIFT || error > MEAN_LIKELIHOOD);
        if wide { Err(format!("{line}: the means are too far off")) } else { Ok(line) }
    }
}

enum Measure {
    Drift(f64),
    Likelihood(f64),
}

fn judge(exact: &Exact, result: &ResultFields) -> Result<Option<Measure>, String> {
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
            break; // A tie went the other way: later steps have another history.
        }
    }
    let drift = mean(&differences);
    if drift <= DRIFT { Ok(Measure::Drift(drift)) } else { Err(format!("mean drift {drift:.4} nats")) }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |sum, value| sum + value) / values.len().max(1) as f64
}
