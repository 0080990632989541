//! Logits as probabilities, and the argmax.

use super::candidate::TokenCandidate;
use crate::{Error, LogitsError, Result};

/// The probability of a token relative to that of the most probable one.
pub(super) fn weight(logit: f32, best: f32, inverse_temperature: f64) -> f64 {
    exponential((f64::from(logit) - f64::from(best)) * inverse_temperature)
}

/// `exp` of a number that is not positive, with operations that round alike on every machine (a system's `exp` does
/// not).
fn exponential(power: f64) -> f64 {
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    if power < -700.0 {
        return 0.0;
    }
    let twos = (power * std::f64::consts::LOG2_E).round();
    let rest = (power - twos * LN_2_HIGH) - twos * LN_2_LOW;
    // |rest| is at most ln 2 / 2: fourteen terms of the Taylor series are exact to one or two units in the last place.
    let series = (1..=14).rev().fold(1.0, |sum, term| 1.0 + sum * rest / f64::from(term));
    series * f64::from_bits(((1023 + twos as i64) as u64) << 52)
}

pub(super) fn check_logits(logits: &[f32]) -> Result<(), LogitsError> {
    if logits.is_empty() {
        return Err(LogitsError::Empty);
    }
    let mut any = false;
    for (token, &logit) in (0u32..).zip(logits) {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(LogitsError::NotFinite { token, logit });
        }
        any |= logit != f32::NEG_INFINITY;
    }
    if any { Ok(()) } else { Err(LogitsError::AllExcluded) }
}

/// The most probable token, of equals the smallest. `-inf` excludes a token; NaN, `+inf` and
/// logits that exclude every token are errors.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    Ok(find_argmax(logits)?)
}

/// As [`argmax`], with an error that can be stored.
pub(crate) fn find_argmax(logits: &[f32]) -> Result<u32, LogitsError> {
    check_logits(logits)?;
    let first = (0u32..).zip(logits).reduce(|best, next| if next.1 > best.1 { next } else { best });
    first.map(|(token, _)| token).ok_or(LogitsError::Empty)
}

/// log-sum-exp of the logits.
fn log_sum(logits: &[f32]) -> Result<f64> {
    check_logits(logits)?;
    let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - best).exp()).sum();
    Ok(best + sum.ln())
}

/// The log-probability of every token, over the whole vocabulary, without sampling options.
pub fn log_probabilities(logits: &[f32]) -> Result<Vec<f64>> {
    let total = log_sum(logits)?;
    Ok(logits.iter().map(|&logit| f64::from(logit) - total).collect())
}

/// The log-probability of one token.
pub fn log_probability(logits: &[f32], token: u32) -> Result<f64> {
    let total = log_sum(logits)?;
    let logit = logits.get(token as usize).ok_or(Error::Token { token, count: logits.len() })?;
    Ok(f64::from(*logit) - total)
}

/// The `count` most probable tokens with their log-probabilities, most probable first.
pub fn top_log_probabilities(logits: &[f32], count: usize) -> Result<Vec<(u32, f64)>> {
    let total = log_sum(logits)?;
    let mut candidates: Vec<TokenCandidate> =
        (0u32..).zip(logits).map(|(token, &logit)| TokenCandidate { token, logit }).collect();
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, TokenCandidate::order);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(TokenCandidate::order);
    Ok(candidates.iter().map(|best| (best.token, f64::from(best.logit) - total)).collect())
}
