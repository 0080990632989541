//! Options of commands that compute several requests at once.

use std::time::Duration;

use quadriga_graph::PAGE_SLOTS;
use quadriga_llm::serving::BatcherOptions;
use quadriga_llm::{EngineOptions, Model};

use crate::failure::Outcome;
use crate::{size, values};

/// Heading of the help text.
const SERVING: &str = "Batching options";

/// Tokens of the KV cache, all sequences together, unless `--kv-tokens` says otherwise.
const DEFAULT_TOKENS: usize = 16_384;

/// Sequences, memory and speculation.
#[derive(Clone, clap::Args)]
pub(crate) struct ServingOptions {
    /// Most requests that are computed at once, also -np
    #[arg(
        long,
        value_name = "N",
        default_value_t = 32,
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        help_heading = SERVING
    )]
    pub(crate) parallel: usize,
    /// KV cache in tokens, all requests together [default: 16384, or what all of them need if that is less]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        help_heading = SERVING
    )]
    kv_tokens: Option<usize>,
    /// Host memory for prefixes whose place in the KV cache was needed for others, such as 4G
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "0",
        allow_negative_numbers = true,
        value_parser = size::parse,
        help_heading = SERVING
    )]
    cache_ram: u64,
    /// Prompt look-up: guess up to N tokens of text that repeats, 0 for none. Tokens are sampled as without it
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = values::whole,
        help_heading = SERVING
    )]
    lookup: usize,
}

impl ServingOptions {
    /// The batcher's options for a model.
    pub(crate) fn batcher(&self, model: &Model, engine: EngineOptions) -> Outcome<BatcherOptions> {
        let one = EngineOptions { sequences: 1, pages: 0, ..engine.clone() }.resolve(model)?;
        let all = one.context.saturating_mul(self.parallel);
        let tokens = self.kv_tokens.unwrap_or_else(|| all.min(DEFAULT_TOKENS.max(one.context)));
        let engine = EngineOptions {
            sequences: self.parallel,
            pages: tokens.div_ceil(PAGE_SLOTS),
            context: one.context,
            ..engine
        };
        let options = BatcherOptions {
            engine,
            cache_ram: self.cache_ram,
            lookup: self.lookup,
            // Whoever submits decides how many wait.
            queue: usize::MAX,
            token_time: Some(Duration::from_millis(100)),
            ..BatcherOptions::default()
        };
        Ok(options.for_model(model)?)
    }
}
