//! What a batcher is doing, and whether its parts agree.

use quadriga_graph::PAGE_SLOTS;

use super::super::page_file::PageFile;
use super::Batcher;
use crate::engine::{EngineOptions, ExpertCacheUse};

/// What a batcher is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatcherState {
    /// Requests that have not been started, or were put back.
    pub waiting: usize,
    /// Sequences that are being computed.
    pub running: usize,
    /// All pages for sequences.
    pub pages: usize,
    /// Pages that sequences use.
    pub used_pages: usize,
    /// Pages that only hold prefixes that may be used again.
    pub cached_pages: usize,
    /// Of layers with a sliding window, all pages for sequences; 0 if they have none of their own.
    pub window_pages: usize,
    /// Of those, the ones that sequences use.
    pub used_window_pages: usize,
    /// Bytes of prefixes in host memory.
    pub host_bytes: u64,
    /// Pages of prefixes in the cache file.
    pub file_pages: usize,
    /// Steps so far.
    pub steps: u64,
    /// Sequences of all steps so far, together.
    pub stepped: u64,
    /// Of the steps, the ones that a device began before the host knew the tokens of the step before.
    pub steps_ahead: u64,
    /// Tokens computed so far.
    pub computed: u64,
    /// Tokens of prompts found in the KV cache so far.
    pub cached: u64,
    /// How often a sequence was put back for want of pages.
    pub preempted: u64,
    /// Tokens guessed by look-up, and those that were right.
    pub guessed: u64,
    /// Of the guesses, those that were right.
    pub guessed_right: u64,
    /// Tokens of prompts that the draft model computed so far.
    pub drafted_prompts: u64,
    /// Steps that failed so far: each was computed again, or its requests failed in the end.
    pub failed_steps: u64,
    /// Pages of the KV cache that could not be copied, moved to or from host memory, or kept in the cache file so far: what they
    /// held was computed again. A cache file that fails is not used any more.
    pub failed_page_moves: u64,
    /// How often the draft model failed so far: the step had fewer guesses.
    pub failed_guesses: u64,
    /// How the expert cache has served; `None` if there is none.
    pub expert_cache: Option<ExpertCacheUse>,
}

impl Batcher {
    /// What it is doing.
    pub fn state(&self) -> BatcherState {
        let EngineOptions { pages, .. } = self.options.engine;
        let window_pages = self.options.engine.window_pages(self.model().hyperparameters()).unwrap_or(0);
        BatcherState {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pages,
            used_pages: pages - self.pool.available(),
            cached_pages: self.pool.cached(),
            window_pages,
            used_window_pages: self.windows.as_ref().map_or(0, |own| window_pages - own.available()),
            host_bytes: self.host.bytes(),
            file_pages: self.file.as_ref().map_or(0, PageFile::pages),
            failed_steps: self.state.failed_steps + self.engine.failed_unneeded(),
            expert_cache: self.engine.expert_cache(),
            ..self.state
        }
    }

    /// An error unless pages, sequences and lanes agree: for tests, after any step.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check(self.running.iter().map(|sequence| sequence.pages.as_slice()))?;
        if let Some(sequence) = self.waiting.iter().find(|sequence| !sequence.pages.is_empty()) {
            return Err(format!("{:?} waits and has pages", sequence.id));
        }
        for sequence in &self.running {
            // What comes next is written to pages that nobody else reads.
            let next = sequence.pages.get(sequence.computed / PAGE_SLOTS..).unwrap_or_default();
            if let Some(page) = next.iter().find(|page| !self.pool.is_writable(**page)) {
                return Err(format!("{:?} would write to page {page}, which is shared", sequence.id));
            }
        }
        if let Some(windows) = &self.windows {
            let running = self.running.iter();
            windows.check(running.map(|sequence| (&sequence.window_pages, sequence.computed)))?;
            if self.waiting.iter().any(|sequence| sequence.window_pages.end() > 0) {
                return Err("a sequence waits and has window pages".to_owned());
            }
        }
        if let Some(draft) = &self.draft {
            draft.check()?;
            if let Some(id) = draft.ids().find(|id| self.index_of(*id).is_none()) {
                return Err(format!("the draft model has pages of {id:?}, which is not running"));
            }
        }
        self.check_micro_batches()?;
        self.engine.check_states()?;
        let mut lanes: Vec<usize> = self.running.iter().map(|sequence| sequence.lane).collect();
        lanes.extend(&self.lanes);
        lanes.sort_unstable();
        if lanes != (0..self.options.engine.sequences).collect::<Vec<_>>() {
            return Err(format!("lanes {lanes:?}"));
        }
        Ok(())
    }
}
