//! Judges evaluated cases against exact results.

use std::fmt::Write as _;

use quadriga_llm::evaluate::{Case, Outcome, ResultFields, Scored};
use serde::Deserialize;

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

/// A case with its exact results.
#[derive(Deserialize)]
pub struct Exact {
    #[serde(flatten)]
    pub case: Case,
    #[serde(default)]
    tokens: Vec<u32>,
    #[serde(default)]
    nll: f64,
    #[serde(default)]
    top5: serde_json::Value,
}

/// The cases of a file, one a line.
pub fn cases(lines: &str) -> Vec<Exact> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Everything judged so far.
#[derive(Default, Debug)]
pub struct Verdict {
    drifts: Vec<f64>,
    likelihoods: Vec<f64>,
    /// One line for each case that falls short.
    short: String,
}

impl Verdict {
    pub fn add(&mut self, exact: &Exact, outcome: &Outcome) {
        let name = &exact.case.name;
        assert_eq!(&outcome.name, name);
        match judge(exact, &outcome.result) {
            Ok(Some(Measure::Drift(drift))) => self.drifts.push(drift),
            Ok(Some(Measure::Likelihood(error))) => self.likelihoods.push(error),
            Ok(None) => {}
            Err(why) => writeln!(self.short, "{name}: {why}").unwrap(),
        }
    }

    pub fn mean_drift(&self) -> f64 {
        mean(&self.drifts)
    }

    pub fn mean_likelihood_error(&self) -> f64 {
        mean(&self.likelihoods)
    }

    /// Panics with what falls short, each case and the means. The means want enough cases to be fair.
    pub fn assert_holds(&self, context: &str, means: bool) {
        assert!(self.short.is_empty(), "{context}:\n{}", self.short);
        if means {
            let (drift, error) = (self.mean_drift(), self.mean_likelihood_error());
            assert!(drift <= MEAN_DRIFT, "{context}: mean drift {drift:.4} nats");
            assert!(error <= MEAN_LIKELIHOOD, "{context}: mean likelihood error {:.4} %", error * 100.0);
        }
    }
}

enum Measure {
    Drift(f64),
    Likelihood(f64),
}

fn judge(exact: &Exact, result: &ResultFields) -> Result<Option<Measure>, String> {
    let same_tokens = |tokens: &[u32]| {
        if tokens == exact.tokens { Ok(()) } else { Err(format!("tokens {tokens:?} != {:?}", exact.tokens)) }
    };
    match result {
        ResultFields::Tokenize { tokens } => same_tokens(tokens).map(|()| None),
        ResultFields::Greedy { tokens, top5, .. } => {
            same_tokens(tokens)?;
            drift(&serde_json::from_value::<Vec<Vec<Scored>>>(exact.top5.clone()).unwrap(), top5).map(Some)
        }
        ResultFields::Next { top5 } => {
            let wanted: Vec<Scored> = serde_json::from_value(exact.top5.clone()).unwrap();
            drift(&[wanted], std::slice::from_ref(top5)).map(Some)
        }
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
        let (best, probability) = top[0];
        let tie = probability - top[1].1 < TIE;
        match mine.iter().find(|(token, _)| *token == best) {
            Some((_, mine)) => differences.push((mine - probability).abs()),
            None if tie => {}
            None => return Err(format!("step {step}: best token {best} is not among {mine:?}")),
        }
        if mine[0].0 != best {
            if !tie {
                return Err(format!("step {step}: best token {:?} in place of {:?}", mine[0], top[0]));
            }
            break; // A tie went the other way: later steps have another history.
        }
    }
    let drift = mean(&differences);
    if drift <= DRIFT { Ok(Measure::Drift(drift)) } else { Err(format!("mean drift {drift:.4} nats")) }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
