//! From logits to the next token.
//!
//! The steps come in the order that users of llama.cpp know: repetition penalty, top-k, top-p, min-p, temperature,
//! choice. A seed gives the same tokens for the same logits on every machine: the random numbers and the exponential
//! function are made here from operations that are exact everywhere.
//!
//! ```
//! use quadriga_llm::sampling::{Sampler, SamplingOptions};
//!
//! let mut greedy = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
//! assert_eq!(greedy.sample(&[0.1, 2.5, 1.0])?, 1);
//!
//! let mut lively = Sampler::new(SamplingOptions { top_k: 2, seed: 7, ..SamplingOptions::default() })?;
//! let token = lively.sample(&[0.1, 2.5, 1.0])?;
//! assert!(token == 1 || token == 2);
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

use std::cmp::Ordering;
use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use crate::error::{Error, LogitsError, Result};

/// How tokens are chosen. The defaults are llama.cpp's, with no repetition penalty.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// How flat the distribution is made; 0 always takes the most probable token.
    pub temperature: f32,
    /// Only this many of the most probable tokens remain; 0 keeps all.
    pub top_k: usize,
    /// Only the most probable tokens remain that together reach this probability; 1 keeps all.
    pub top_p: f32,
    /// Only tokens remain that are at least this probable relative to the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Logits of recent tokens are divided by this when positive and multiplied when negative; 1 changes nothing.
    pub repeat_penalty: f32,
    /// How many tokens count as recent.
    pub repeat_last_n: usize,
    /// Where the random numbers start.
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
    /// Whether the token is always the most probable one by the logits as they are: [`argmax`].
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

/// Chooses tokens, and remembers recent ones for the repetition penalty.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    random: u64,
    recent: VecDeque<u32>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
}

impl Candidate {
    /// The more probable first, of equals (both zeros are) the smaller token: an order without ties, so results never
    /// depend on the way of sorting.
    fn order(&self, other: &Candidate) -> Ordering {
        (other.logit + 0.0).total_cmp(&(self.logit + 0.0)).then(self.token.cmp(&other.token))
    }
}

impl Sampler {
    /// Checks the options and starts the random numbers at the seed.
    pub fn new(options: SamplingOptions) -> Result<Sampler> {
        options.check()?;
        let random = options.seed;
        Ok(Sampler { options, random, recent: VecDeque::new(), candidates: Vec::new() })
    }

    /// The options in use.
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// Forgets the recent tokens, before another prompt. The random state goes on.
    pub fn clear_recent(&mut self) {
        self.recent.clear();
    }

    /// Counts a token as recent: call it for each token of the prompt that the penalty is to see, and for each chosen
    /// token.
    pub fn accept(&mut self, token: u32) {
        self.recent.push_back(token);
        while self.recent.len() > self.options.repeat_last_n {
            self.recent.pop_front();
        }
    }

    /// Chooses a token; the caller reports it with [`accept`](Self::accept) if it is used. `-inf` excludes a token;
    /// NaN, `+inf` and a row in which everything is excluded are errors.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if self.options.is_greedy() {
            return argmax(logits);
        }
        check_logits(logits)?;
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(logits).map(|(token, &logit)| Candidate { token, logit }));
        self.penalize();
        if self.options.temperature == 0.0 || self.options.top_k == 1 {
            let best = self.candidates.iter().min_by(|one, other| one.order(other));
            return best.map(|best| best.token).ok_or_else(|| LogitsError::Empty.into());
        }
        self.candidates.retain(|candidate| candidate.logit != f32::NEG_INFINITY);
        let top_k = self.options.top_k;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k, Candidate::order);
            self.candidates.truncate(top_k);
        }
        self.keep_top_p();
        self.keep_min_p();
        self.choose()
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
                // A tiny penalty could overflow: stay finite, so that the order stays meaningful.
                candidate.logit = if logit.is_finite() { penalized.clamp(f32::MIN, f32::MAX) } else { logit };
            }
        }
    }

    /// Keeps the smallest set of most probable tokens that reaches `top_p`. Sorts only as far as it has to.
    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.options.top_p);
        if top_p >= 1.0 || self.candidates.len() < 2 {
            return;
        }
        let best = self.best_logit();
        // In order of tokens, so that rounding does not depend on how the selection shuffled them.
        self.candidates.sort_unstable_by_key(|candidate| candidate.token);
        let total: f64 = self.candidates.iter().map(|candidate| weight(candidate.logit, best, 1.0)).sum();
        let (mut sorted, mut reached) = (0, 0.0);
        let mut step = 128;
        while let Some(rest) = self.candidates.get_mut(sorted..).filter(|rest| !rest.is_empty()) {
            let size = step.min(rest.len());
            if size < rest.len() {
                rest.select_nth_unstable_by(size, Candidate::order);
            }
            let Some(block) = rest.get_mut(..size) else { return };
            block.sort_unstable_by(Candidate::order);
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

    fn choose(&mut self) -> Result<u32> {
        let best = self.best_logit();
        let sharpness = 1.0 / f64::from(self.options.temperature);
        self.candidates.sort_unstable_by_key(|candidate| candidate.token);
        let total: f64 =
            self.candidates.iter().map(|candidate| weight(candidate.logit, best, sharpness)).sum();
        let mut left = self.unit() * total;
        for candidate in &self.candidates {
            left -= weight(candidate.logit, best, sharpness);
            if left < 0.0 {
                return Ok(candidate.token);
            }
        }
        // Rounding can leave a crumb; then it is the most probable one.
        let best = self.candidates.iter().min_by(|one, other| one.order(other));
        best.map(|best| best.token).ok_or_else(|| LogitsError::Empty.into())
    }

    fn best_logit(&self) -> f32 {
        self.candidates.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    /// A random number in `[0, 1)`: splitmix64, for which every seed is a good one.
    fn unit(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The probability of a logit relative to that of the best one.
fn weight(logit: f32, best: f32, sharpness: f64) -> f64 {
    exponential((f64::from(logit) - f64::from(best)) * sharpness)
}

/// e to a power of 0 or less, by operations that round the same on every machine (a system's `exp` does not).
fn exponential(power: f64) -> f64 {
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    if power < -700.0 {
        return 0.0;
    }
    let twos = (power * std::f64::consts::LOG2_E).round();
    let rest = (power - twos * LN_2_HIGH) - twos * LN_2_LOW;
    // |rest| is at most half of ln 2: fourteen terms of the series are exact to the last bit or two.
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

/// The most probable token, of equals the smallest. `-inf` excludes a token; NaN, `+inf` and a row in which every token
/// is excluded are errors.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    Ok(find_argmax(logits)?)
}

/// As [`argmax`], with an error that can be stored.
pub(crate) fn find_argmax(logits: &[f32]) -> Result<u32, LogitsError> {
    check_logits(logits)?;
    let first = (0u32..).zip(logits).reduce(|best, next| if next.1 > best.1 { next } else { best });
    first.map(|(token, _)| token).ok_or(LogitsError::Empty)
}

/// The natural logarithm of the sum of all e^logit.
fn log_sum(logits: &[f32]) -> Result<f64> {
    check_logits(logits)?;
    let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - best).exp()).sum();
    Ok(best + sum.ln())
}

/// The natural logarithm of every token's probability, over the whole vocabulary and before any sampling option.
pub fn log_probabilities(logits: &[f32]) -> Result<Vec<f64>> {
    let total = log_sum(logits)?;
    Ok(logits.iter().map(|&logit| f64::from(logit) - total).collect())
}

/// The natural logarithm of one token's probability.
pub fn log_probability(logits: &[f32], token: u32) -> Result<f64> {
    let total = log_sum(logits)?;
    let logit = logits.get(token as usize).ok_or(Error::Token { token, count: logits.len() })?;
    Ok(f64::from(*logit) - total)
}

/// The `count` most probable tokens with the natural logarithms of their probabilities, best first.
pub fn top_log_probabilities(logits: &[f32], count: usize) -> Result<Vec<(u32, f64)>> {
    let total = log_sum(logits)?;
    let mut candidates: Vec<Candidate> =
        (0u32..).zip(logits).map(|(token, &logit)| Candidate { token, logit }).collect();
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, Candidate::order);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(Candidate::order);
    Ok(candidates.iter().map(|best| (best.token, f64::from(best.logit) - total)).collect())
}
