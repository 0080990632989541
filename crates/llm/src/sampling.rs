//! Sampling: from logits to the next token.
//!
//! The steps have the order of llama.cpp: repetition penalty, top-k, top-p, min-p, temperature, random draw. A seed
//! gives the same tokens for the same logits on every machine: random numbers and exponential function are implemented
//! here with operations that round alike everywhere.
//!
//! ```
//! use quadriga_llm::sampling::{Sampler, SamplingOptions};
//!
//! let mut greedy = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
//! assert_eq!(greedy.sample(&[0.1, 2.5, 1.0])?, 1);
//!
//! let mut sampler = Sampler::new(SamplingOptions { top_k: 2, seed: 7, ..SamplingOptions::default() })?;
//! let token = sampler.sample(&[0.1, 2.5, 1.0])?;
//! assert!(token == 1 || token == 2);
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

use std::cmp::Ordering;
use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use crate::error::{Error, LogitsError, Result};

/// Sampling options. The defaults are those of llama.cpp, without repetition penalty.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// The sampling temperature: logits are divided by it; 0 always takes the most probable token.
    pub temperature: f32,
    /// Top-k: keep the K most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Top-p: keep the smallest set of most probable tokens whose probabilities sum to at least P; 1 keeps all.
    pub top_p: f32,
    /// Min-p: keep tokens whose probability is at least P times that of the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Repetition penalty: positive logits of recent tokens are divided by it, negative ones multiplied; 1 disables it.
    pub repeat_penalty: f32,
    /// The number of tokens that count as recent for the repetition penalty.
    pub repeat_last_n: usize,
    /// The random seed.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: 0,
        }
    }
}

impl SamplingOptions {
    /// Whether sampling is greedy: the token is always the [`argmax`] of the logits.
    pub fn is_greedy(&self) -> bool {
        (self.temperature == 0.0 || self.top_k == 1) && self.repeat_penalty == 1.0
    }

    /// An error if an option is outside its range.
    pub(crate) fn check(&self) -> Result<()> {
        let wrong =
            |name, value: f32, wanted| Err(Error::SamplingOption { name, value: value.into(), wanted });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature", self.temperature, "0 or more");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top-p", self.top_p, "above 0 and at most 1");
        }
        if !(self.min_p >= 0.0 && self.min_p <= 1.0) {
            return wrong("min-p", self.min_p, "from 0 to 1");
        }
        if !(self.repeat_penalty > 0.0 && self.repeat_penalty.is_finite()) {
            return wrong("repeat-penalty", self.repeat_penalty, "above 0");
        }
        Ok(())
    }
}

/// Samples tokens from logits; keeps the random state, and the recent tokens for the repetition penalty.
///
/// ```
/// use quadriga_llm::sampling::{Sampler, SamplingOptions};
///
/// let options = SamplingOptions { temperature: 0.7, top_k: 20, seed: 1, ..SamplingOptions::default() };
/// let mut sampler = Sampler::new(options)?;
/// let logits = [0.5, 3.0, 2.5, -1.0]; // from `Engine::logits`
/// let token = sampler.sample(&logits)?;
/// sampler.accept(token);
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    random: u64,
    recent: VecDeque<u32>,
    candidates: Vec<TokenCandidate>,
}

#[derive(Clone, Copy, Debug)]
struct TokenCandidate {
    token: u32,
    logit: f32,
}

impl TokenCandidate {
    /// By logit, largest first, then by token (both zeros are equal). There are no ties, so that results do not depend
    /// on the sorting algorithm.
    fn order(&self, other: &TokenCandidate) -> Ordering {
        (other.logit + 0.0).total_cmp(&(self.logit + 0.0)).then(self.token.cmp(&other.token))
    }
}

impl Sampler {
    /// Checks the options and seeds the random state.
    pub fn new(options: SamplingOptions) -> Result<Sampler> {
        options.check()?;
        let random = options.seed;
        Ok(Sampler { options, random, recent: VecDeque::new(), candidates: Vec::new() })
    }

    /// The options in use.
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// Forgets the recent tokens, before another prompt. The random state is kept.
    pub fn clear_recent(&mut self) {
        self.recent.clear();
    }

    /// Adds a token to the recent ones: the tokens of the prompt, and each sampled token.
    pub fn accept(&mut self, token: u32) {
        self.recent.push_back(token);
        while self.recent.len() > self.options.repeat_last_n {
            self.recent.pop_front();
        }
    }

    /// Samples a token; the caller [accepts](Self::accept) it if it is used. `-inf` excludes a token; NaN, `+inf` and
    /// logits that exclude every token are errors.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if self.options.is_greedy() {
            return argmax(logits);
        }
        check_logits(logits)?;
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(logits).map(|(token, &logit)| TokenCandidate { token, logit }));
        self.penalize();
        if self.options.temperature == 0.0 || self.options.top_k == 1 {
            let best = self.candidates.iter().min_by(|one, other| one.order(other));
            return best.map(|best| best.token).ok_or_else(|| LogitsError::Empty.into());
        }
        self.candidates.retain(|candidate| candidate.logit != f32::NEG_INFINITY);
        let top_k = self.options.top_k;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k, TokenCandidate::order);
            self.candidates.truncate(top_k);
        }
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    fn penalize(&mut self) {
        let penalty = self.options.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        let recent: FxHashSet<u32> = self.recent.iter().copied().collect();
        for token in recent {
            if let Some(candidate) = self.candidates.get_mut(token as usize) {
                let logit = candidate.logit;
                let penalized = if logit > 0.0 { logit / penalty } else { logit * penalty };
                // A tiny penalty could overflow; clamping keeps the order of finite logits.
                candidate.logit = if logit.is_finite() { penalized.clamp(f32::MIN, f32::MAX) } else { logit };
            }
        }
    }

    /// Keeps the smallest set of most probable tokens that reaches `top_p`. Sorts only as many candidates as needed.
    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.options.top_p);
        if top_p >= 1.0 || self.candidates.len() < 2 {
            return;
        }
        let best = self.best_logit();
        // Sum in order of tokens, so that rounding does not depend on the order that the selection left.
        self.candidates.sort_unstable_by_key(|candidate| candidate.token);
        let total: f64 = self.candidates.iter().map(|candidate| weight(candidate.logit, best, 1.0)).sum();
        let (mut sorted, mut reached) = (0, 0.0);
        let mut step = 128;
        while let Some(rest) = self.candidates.get_mut(sorted..).filter(|rest| !rest.is_empty()) {
            let size = step.min(rest.len());
            if size < rest.len() {
                rest.select_nth_unstable_by(size, TokenCandidate::order);
            }
            let Some(block) = rest.get_mut(..size) else { return };
            block.sort_unstable_by(TokenCandidate::order);
            for (index, candidate) in block.iter().enumerate() {
                reached += weight(candidate.logit, best, 1.0);
                if reached >= top_p * total {
                    self.candidates.truncate(sorted + index + 1);
                    return;
                }
            }
            sorted += size;
            step *= 2;
        }
    }

    fn keep_min_p(&mut self) {
        let min_p = f64::from(self.options.min_p);
        if min_p > 0.0 {
            let best = self.best_logit();
            self.candidates.retain(|candidate| weight(candidate.logit, best, 1.0) >= min_p);
        }
    }

    /// Draws a token from the remaining candidates, with the temperature applied.
    fn draw(&mut self) -> Result<u32> {
        let best = self.best_logit();
        let inverse_temperature = 1.0 / f64::from(self.options.temperature);
        self.candidates.sort_unstable_by_key(|candidate| candidate.token);
        let total: f64 =
            self.candidates.iter().map(|candidate| weight(candidate.logit, best, inverse_temperature)).sum();
        let mut left = self.unit() * total;
        for candidate in &self.candidates {
            left -= weight(candidate.logit, best, inverse_temperature);
            if left < 0.0 {
                return Ok(candidate.token);
            }
        }
        // Rounding can leave a remainder; then it is the most probable token.
        let best = self.candidates.iter().min_by(|one, other| one.order(other));
        best.map(|best| best.token).ok_or_else(|| LogitsError::Empty.into())
    }

    fn best_logit(&self) -> f32 {
        self.candidates.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    /// A random number in `[0, 1)`, by SplitMix64, for which every seed is equally good.
    fn unit(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The probability of a token relative to that of the most probable one.
fn weight(logit: f32, best: f32, inverse_temperature: f64) -> f64 {
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

fn check_logits(logits: &[f32]) -> Result<(), LogitsError> {
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
