//! The options of sampling, and their ranges.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// Sampling options. The defaults are those of llama.cpp.
///
/// ```
/// use quadriga_llm::sampling::{DryOptions, SamplingOptions};
///
/// let options = SamplingOptions {
///     temperature: 0.7,
///     presence_penalty: 0.5,
///     logit_bias: [(15043, -1.5), (2, f32::NEG_INFINITY)].into(), // -inf bans a token
///     dry: DryOptions { multiplier: 0.8, ..DryOptions::default() },
///     ..SamplingOptions::default()
/// };
/// assert!(!options.is_greedy());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// The sampling temperature: logits are divided by it; 0 always takes the most probable token.
    pub temperature: f32,
    /// Top-k: keep the K most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Top-p: keep the smallest set of most probable tokens whose probabilities sum to at least P; 1 keeps all, 0 the most
    /// probable one.
    pub top_p: f32,
    /// Min-p: keep tokens whose probability is at least P times that of the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Typical-p: keep the tokens whose information is closest to the entropy, up to a sum of probabilities of P; 1
    /// keeps all.
    pub typical_p: f32,
    /// Top-n-sigma: keep tokens whose logit is within N standard deviations of the largest; 0 or less keeps all.
    pub top_n_sigma: f32,
    /// XTC: the probability that all but the least probable of the tokens above the threshold are removed; 0 disables
    /// it.
    pub xtc_probability: f32,
    /// XTC: the threshold of a token's probability; above 0.5 it has no effect.
    pub xtc_threshold: f32,
    /// Repetition penalty: positive logits of recent tokens are divided by it, negative ones multiplied; 1 disables it.
    pub repeat_penalty: f32,
    /// The number of tokens that count as recent for the repetition, presence and frequency penalties; 0 disables them.
    pub repeat_last_n: usize,
    /// Presence penalty: subtracted from the logit of every recent token; 0 disables it.
    pub presence_penalty: f32,
    /// Frequency penalty: subtracted from a token's logit once for each time that it is among the recent tokens; 0
    /// disables it.
    pub frequency_penalty: f32,
    /// The DRY penalty: tokens that would continue a repeated sequence.
    pub dry: DryOptions,
    /// Logit bias: added to the logits of these tokens; -inf bans a token, but for an end-of-generation token where a hook leaves no
    /// other.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Whether end-of-generation tokens are banned, but where a hook leaves no others: an answer that a grammar allows to go on
    /// no further ends. Needs a sampler that is made [for a model](super::Sampler::for_model).
    pub ignore_eos: bool,
    /// The random seed.
    pub seed: u64,
}

/// Options of the DRY penalty ("don't repeat yourself"): a token that would continue a sequence that occurred before
/// gets `multiplier · base ^ (length − allowed_length)` subtracted, where `length` is the number of tokens, up to the end
/// of the text, that are the same in both places. Nothing is subtracted below `allowed_length`.
#[derive(Clone, Debug, PartialEq)]
pub struct DryOptions {
    /// The factor of the penalty; 0 disables it.
    pub multiplier: f32,
    /// The base of its growth; below 1 it is disabled.
    pub base: f32,
    /// The longest repetition that is not penalized.
    pub allowed_length: usize,
    /// The number of recent tokens in which repetitions are looked for; 0 disables the penalty.
    pub last_n: usize,
    /// Texts over which no repetition extends. Needs a sampler that is made [for a model](super::Sampler::for_model),
    /// which knows the tokens' texts.
    pub sequence_breakers: Vec<String>,
}

impl Default for DryOptions {
    fn default() -> Self {
        DryOptions {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            last_n: usize::MAX,
            sequence_breakers: ["\n", ":", "\"", "*"].map(String::from).to_vec(),
        }
    }
}

impl DryOptions {
    /// Whether it can change logits.
    pub(super) fn is_active(&self) -> bool {
        self.multiplier != 0.0 && self.base >= 1.0 && self.last_n > 0
    }
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry: DryOptions::default(),
            logit_bias: BTreeMap::new(),
            ignore_eos: false,
            seed: 0,
        }
    }
}

impl SamplingOptions {
    /// Whether sampling is greedy: the token is always the [`argmax`](super::argmax) of the logits, whatever the tokens
    /// before. Then a device can compute it, and no logits are copied to the host.
    pub fn is_greedy(&self) -> bool {
        // With temperature 0 the most probable of the remaining tokens is taken; these two may remove the argmax.
        let removes_best = self.typical_p < 1.0 || self.has_xtc();
        (self.top_k == 1 || self.temperature == 0.0 && !removes_best)
            && self.logit_bias.is_empty()
            && !self.ignore_eos
            && !self.has_penalties()
            && !self.dry.is_active()
    }

    /// Whether the token is the most probable one that is left after every step before the random draw.
    pub(super) fn takes_best(&self) -> bool {
        self.top_k == 1 || self.temperature == 0.0
    }

    /// Whether the recent tokens' logits change.
    pub(super) fn has_penalties(&self) -> bool {
        self.repeat_last_n > 0
            && (self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0)
    }

    pub(super) fn has_xtc(&self) -> bool {
        self.xtc_probability > 0.0 && self.xtc_threshold <= 0.5
    }

    /// An error that names the first option outside its range.
    pub fn check(&self) -> Result<()> {
        let wrong =
            |name, value: f32, wanted| Err(Error::SamplingOption { name, value: value.into(), wanted });
        let share = 0.0..=1.0;
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature", self.temperature, "0 or more");
        }
        for (name, value) in [("top-p", self.top_p), ("min-p", self.min_p)] {
            if !share.contains(&value) {
                return wrong(name, value, "from 0 to 1");
            }
        }
        if !(self.typical_p > 0.0 && self.typical_p <= 1.0) {
            return wrong("typical-p", self.typical_p, "above 0 and at most 1");
        }
        if !self.top_n_sigma.is_finite() {
            return wrong("top-n-sigma", self.top_n_sigma, "a finite number");
        }
        for (name, value) in
            [("xtc-probability", self.xtc_probability), ("xtc-threshold", self.xtc_threshold)]
        {
            if !share.contains(&value) {
                return wrong(name, value, "from 0 to 1");
            }
        }
        if !(self.repeat_penalty > 0.0 && self.repeat_penalty.is_finite()) {
            return wrong("repeat-penalty", self.repeat_penalty, "above 0");
        }
        for (name, value) in [
            ("presence-penalty", self.presence_penalty),
            ("frequency-penalty", self.frequency_penalty),
            ("dry-base", self.dry.base),
        ] {
            if !value.is_finite() {
                return wrong(name, value, "a finite number");
            }
        }
        if !(self.dry.multiplier >= 0.0 && self.dry.multiplier.is_finite()) {
            return wrong("dry-multiplier", self.dry.multiplier, "0 or more");
        }
        match self.logit_bias.values().find(|bias| bias.is_nan() || **bias == f32::INFINITY) {
            Some(bias) => wrong("logit-bias", *bias, "a finite number, or -inf to ban the token"),
            None => Ok(()),
        }
    }
}
