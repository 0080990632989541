//! Options of a batcher.

use std::path::PathBuf;
use std::time::Duration;

use quadriga_graph::PAGE_SLOTS;

use super::super::pace::LEAST as LEAST_PROMPT;
use crate::engine::EngineOptions;
use crate::{Model, Result};

/// Options of a [`Batcher`](super::Batcher).
#[derive(Clone, Debug, PartialEq)]
pub struct BatcherOptions {
    /// Context of one sequence, the most sequences of a step, the most tokens of a step (the batch size), the pages of the KV
    /// cache and its types. With 0 pages there are enough for all sequences of full length.
    pub engine: EngineOptions,
    /// The most requests that wait beyond those for which there is room in the next step; another one is refused.
    pub queue: usize,
    /// The time between two tokens of a sequence that is aimed at while prompts are computed beside it: they are computed in
    /// parts that are small enough. `None`: parts are as large as the batch size.
    pub token_time: Option<Duration>,
    /// Bytes of host memory for prefixes whose pages were needed for others; they are brought back when a request begins with
    /// them.
    pub cache_ram: u64,
    /// A file for prefixes for which there is no room in host memory either. It outlasts the process: conversations that go on
    /// after a restart are not computed again.
    pub cache_file: Option<CacheFile>,
    /// Prompt look-up: the most tokens that are guessed in a step of a sequence; 0 for none. Tokens are sampled as without it;
    /// their logits may be rounded differently, as with any other number of rows in a step.
    pub lookup: usize,
    /// The most tokens that a [draft model](super::Batcher::set_draft) guesses in a step of a sequence; 0 without one.
    pub draft: usize,
    /// After so many steps without a token, a request is the next one, whatever its priority and its client, and keeps its pages until
    /// it ends; of several such requests the one that has waited longest.
    pub patience: u64,
}

impl Default for BatcherOptions {
    fn default() -> Self {
        BatcherOptions {
            engine: EngineOptions { sequences: 64, ..EngineOptions::default() },
            queue: 1024,
            token_time: Some(Duration::from_millis(100)),
            cache_ram: 0,
            cache_file: None,
            lookup: 0,
            draft: 0,
            patience: 2000,
        }
    }
}

/// A file for prefixes of the KV cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheFile {
    /// Where it is; it is created if there is none. One process at a time uses it, with one model and type of the KV cache.
    pub path: PathBuf,
    /// The most bytes that it takes. Room is used as it is needed.
    pub bytes: u64,
}

impl BatcherOptions {
    /// These options with everything filled in for a model: a placement needs the number of pages. Options that are filled in
    /// already stay as they are.
    pub fn for_model(mut self, model: &Model) -> Result<BatcherOptions> {
        if self.cache_ram > 0 || self.cache_file.is_some() {
            // What is kept elsewhere has all layers in its pages.
            self.engine.window_slots = usize::MAX;
        }
        let without = self.engine.clone().without_pages().resolve(model)?;
        if self.engine.pages == 0 {
            self.engine.pages = without.context.div_ceil(PAGE_SLOTS).saturating_mul(without.sequences);
        }
        self.engine.context = without.context;
        // A step has room for a token of every sequence, and for a part of a prompt.
        self.engine.batch = self.engine.batch.max(self.engine.sequences.saturating_add(LEAST_PROMPT));
        self.engine = self.engine.resolve(model)?;
        // Every sequence of a step has an output, and so has every guess. The others are for prompts of which every token has one.
        let guesses = self.lookup.max(self.draft);
        let outputs = self.engine.sequences.saturating_mul(guesses.saturating_add(1));
        self.engine.output_rows = outputs.saturating_add(LEAST_PROMPT).min(self.engine.batch);
        Ok(self)
    }
}
