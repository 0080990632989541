//! Sampling options beyond temperature, top-k, top-p and min-p: penalties, logit bias and rarer filters, with the names
//! of llama.cpp.

use std::collections::BTreeMap;

use quadriga_llm::sampling::{DryOptions, SamplingOptions};

use crate::values;

/// Options that change logits, or filter tokens in other ways.
#[derive(Clone, clap::Args)]
pub(crate) struct PenaltyOptions {
    /// Keep the most typical tokens up to a cumulative probability of P, 1 for all
    #[arg(
        long = "typical",
        alias = "typical-p",
        value_name = "P",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        value_parser = values::positive_probability,
        help_heading = SAMPLING
    )]
    typical_p: f32,
    /// Keep tokens within N standard deviations of the largest logit, -1 for all
    #[arg(
        long,
        alias = "top-nsigma",
        value_name = "N",
        default_value_t = -1.0,
        allow_negative_numbers = true,
        value_parser = values::finite,
        help_heading = SAMPLING
    )]
    top_n_sigma: f32,
    /// Probability of removing all but the least probable of the top choices (XTC), 0 for never
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_parser = values::probability,
        help_heading = SAMPLING
    )]
    xtc_probability: f32,
    /// Probability that makes a token a top choice of XTC
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.1,
        allow_negative_numbers = true,
        value_parser = values::probability,
        help_heading = SAMPLING
    )]
    xtc_threshold: f32,
    /// Number of recent tokens for repeat, presence and frequency penalties, 0 for none, -1 for all
    #[arg(
        long,
        value_name = "N",
        default_value = "64",
        allow_negative_numbers = true,
        value_parser = values::last_n,
        help_heading = SAMPLING
    )]
    repeat_last_n: usize,
    /// Penalty for every token that was used recently, 0 for none
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_parser = values::finite,
        help_heading = SAMPLING
    )]
    presence_penalty: f32,
    /// Penalty for each recent use of a token, 0 for none
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_parser = values::finite,
        help_heading = SAMPLING
    )]
    frequency_penalty: f32,
    /// DRY: factor of the penalty for continuing a repeated sequence, 0 for none
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_parser = values::not_negative,
        help_heading = SAMPLING
    )]
    dry_multiplier: f32,
    /// DRY: growth of the penalty with each repeated token
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1.75,
        allow_negative_numbers = true,
        value_parser = values::finite,
        help_heading = SAMPLING
    )]
    dry_base: f32,
    /// DRY: length of repetitions that are not penalized
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        allow_negative_numbers = true,
        value_parser = values::whole,
        help_heading = SAMPLING
    )]
    dry_allowed_length: usize,
    /// DRY: number of recent tokens to look for repetitions in, 0 for none, -1 for all
    #[arg(
        long,
        value_name = "N",
        default_value = "-1",
        allow_negative_numbers = true,
        value_parser = values::last_n,
        help_heading = SAMPLING
    )]
    dry_penalty_last_n: usize,
    /// DRY: text over which no repetition extends; may be repeated, "none" for none [default: newline, ':', '"', '*']
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        value_parser = values::not_empty,
        help_heading = SAMPLING
    )]
    dry_sequence_breaker: Vec<String>,
    /// Add BIAS to the logit of a token, as in 15043-1.5 or 15043+1; -inf bans it; may be repeated
    #[arg(
        short = 'l',
        long,
        value_name = "TOKEN(+/-)BIAS",
        value_parser = values::logit_bias,
        help_heading = SAMPLING
    )]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Ignore end-of-generation tokens: the answer goes on until its length or the context ends it
    #[arg(long, help_heading = SAMPLING)]
    pub(crate) ignore_eos: bool,
}

/// Heading of the help text.
const SAMPLING: &str = "Sampling options";

impl PenaltyOptions {
    /// The options by name, with their values.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        let last_n = |count: usize| if count == usize::MAX { "-1".to_owned() } else { count.to_string() };
        let bias = self.logit_bias.iter().map(|(token, bias)| format!("{token}{bias:+}"));
        vec![
            ("typical", self.typical_p.to_string()),
            ("top-n-sigma", self.top_n_sigma.to_string()),
            ("xtc-probability", self.xtc_probability.to_string()),
            ("xtc-threshold", self.xtc_threshold.to_string()),
            ("repeat-last-n", last_n(self.repeat_last_n)),
            ("presence-penalty", self.presence_penalty.to_string()),
            ("frequency-penalty", self.frequency_penalty.to_string()),
            ("dry-multiplier", self.dry_multiplier.to_string()),
            ("dry-base", self.dry_base.to_string()),
            ("dry-allowed-length", self.dry_allowed_length.to_string()),
            ("dry-penalty-last-n", last_n(self.dry_penalty_last_n)),
            ("dry-sequence-breaker", listed(self.breakers().iter().map(|text| format!("{text:?}")))),
            ("logit-bias", listed(bias)),
            ("ignore-eos", if self.ignore_eos { "on" } else { "off" }.to_owned()),
        ]
    }

    fn breakers(&self) -> Vec<String> {
        match self.dry_sequence_breaker.as_slice() {
            [] => DryOptions::default().sequence_breakers,
            given => given.iter().filter(|text| *text != "none").cloned().collect(),
        }
    }

    /// Adds these options to the others.
    pub(crate) fn add_to(&self, options: SamplingOptions) -> SamplingOptions {
        let mut logit_bias = BTreeMap::new();
        for (token, bias) in &self.logit_bias {
            *logit_bias.entry(*token).or_insert(0.0) += bias;
        }
        SamplingOptions {
            typical_p: self.typical_p,
            top_n_sigma: self.top_n_sigma,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            repeat_last_n: self.repeat_last_n,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            dry: DryOptions {
                multiplier: self.dry_multiplier,
                base: self.dry_base,
                allowed_length: self.dry_allowed_length,
                last_n: self.dry_penalty_last_n,
                sequence_breakers: self.breakers(),
            },
            logit_bias,
            ignore_eos: self.ignore_eos,
            ..options
        }
    }
}

/// Values of an option that may be repeated, as text.
pub(crate) fn listed(values: impl Iterator<Item = String>) -> String {
    let values: Vec<String> = values.collect();
    if values.is_empty() { "none".to_owned() } else { values.join(", ") }
}
