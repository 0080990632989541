//! A draft model: a small model that guesses the tokens of a large one.
//!
//! It has a KV cache in pages of its own. Before a step it generates a few tokens for every sequence, which the large model then
//! computes beside the token that is due. The large model's sampler decides on each of them: a guess is kept if it is what the
//! sampler draws.

use std::collections::HashMap;

use quadriga_graph::PAGE_SLOTS;
use quadriga_runtime::{Progress, Scheduler};

use super::page_pool::{PageId, PagePool};
use super::paged_engine::{PagedEngine, StepSequence, StepToken, Wanted};
use super::request::RequestId;
use crate::engine::{EngineOptions, SCRAP_PAGES};
use crate::models::LayerSet;
use crate::sampling::log_probability;
use crate::{Error, Model, Result};

/// A guess that is less probable than this, in the draft model's own opinion, is the last one.
const LEAST_PROBABILITY: f64 = 0.4;

/// Vocabularies of one family may be padded to different sizes.
const MAX_PADDING: usize = 256;

/// A small model with a KV cache for the sequences of a large one.
pub(super) struct Draft {
    engine: PagedEngine,
    pool: PagePool,
    sequences: HashMap<RequestId, DraftSequence>,
    /// The most tokens that are guessed in a step of a sequence.
    most: usize,
    /// Tokens that the large model knows.
    vocabulary: usize,
    /// Tokens of sequences far behind the large model that it computed for the latest guesses.
    prompt_tokens: usize,
    /// Whether it failed at the latest guesses.
    failed: bool,
}

/// What the draft model knows of a sequence.
#[derive(Default)]
struct DraftSequence {
    pages: Vec<PageId>,
    /// Tokens whose keys and values are in its KV cache; the last ones may have been wrong guesses.
    computed: Vec<u32>,
    /// How many of them are known to be right.
    checked: usize,
}

/// A sequence whose next tokens are to be guessed.
pub(super) struct DraftInput<'a> {
    pub(super) id: RequestId,
    pub(super) tokens: &'a [u32],
    /// The most guesses that it has room for.
    pub(super) room: usize,
}

/// A sequence in the course of guessing.
struct Guessing {
    id: RequestId,
    /// Its number among the inputs.
    input: usize,
    guesses: Vec<u32>,
    room: usize,
}

impl Draft {
    /// Loads a model that guesses for `target`, whose engine has these options.
    pub(super) fn new(
        model: Model,
        target: &Model,
        scheduler: &Scheduler,
        options: &EngineOptions,
        most: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Draft> {
        check_vocabularies(&model, target)?;
        if model.hyperparameters().recurrent.is_some() {
            let (name, value) = ("the draft model", model.hyperparameters().architecture.to_string());
            return Err(Error::Option { name, value, wanted: "a model without recurrent layers" });
        }
        // Its windows keep the whole context, and its experts stay where they are: the slots are those of the large model.
        let (expert_slots, resident_experts) = (0, LayerSet::EMPTY);
        let options = EngineOptions {
            window_slots: usize::MAX,
            // One token of a sequence at a time is guessed.
            output_rows: options.sequences,
            expert_slots,
            resident_experts,
            ..options.clone()
        };
        let engine = PagedEngine::new(model, scheduler, options, progress)?;
        Ok(Draft {
            pool: PagePool::new(SCRAP_PAGES, engine.options().pages),
            sequences: HashMap::new(),
            vocabulary: target.hyperparameters().vocabulary,
            engine,
            most,
            prompt_tokens: 0,
            failed: false,
        })
    }

    /// Guesses at the tokens that follow those of each input: none where the draft model is not that far, or failed.
    /// Of those that it is far behind, it computes up to `prompt_tokens` tokens more.
    pub(super) fn guess(&mut self, inputs: &[DraftInput<'_>], prompt_tokens: usize) -> Vec<Vec<u32>> {
        let mut guesses = vec![Vec::new(); inputs.len()];
        self.failed = self.guess_into(&mut guesses, inputs, prompt_tokens).is_err();
        guesses
    }

    /// Whether it failed at the latest guesses: there are fewer of them then.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Adds guesses to those of each input, up to an error.
    fn guess_into(
        &mut self,
        guesses: &mut [Vec<u32>],
        inputs: &[DraftInput<'_>],
        prompt_tokens: usize,
    ) -> Result<()> {
        let mut guessing = self.catch_up(inputs, prompt_tokens)?;
        loop {
            for sequence in &guessing {
                if let Some(into) = guesses.get_mut(sequence.input) {
                    into.clone_from(&sequence.guesses);
                }
            }
            guessing.retain(|sequence| sequence.guesses.len() < sequence.room);
            if guessing.is_empty() {
                return Ok(());
            }
            self.go_on(&mut guessing)?;
        }
    }

    /// Tokens of prompts that it computed for the latest guesses.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// As [`PagedEngine::release_memory`].
    pub(super) fn release_memory(&mut self) -> Result<()> {
        self.engine.release_memory()
    }

    /// Gives back the pages of a sequence.
    pub(super) fn forget(&mut self, id: RequestId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            sequence.pages.into_iter().rev().for_each(|page| self.pool.release(page));
        }
    }

    /// Computes the tokens of the inputs that are new, as many as a batch takes; of those that are far behind, up to `prompt_tokens`.
    /// Returns the sequences that are complete, with a first guess each.
    fn catch_up(&mut self, inputs: &[DraftInput<'_>], prompt_tokens: usize) -> Result<Vec<Guessing>> {
        let mut left = self.engine.options().batch;
        let mut prompts_left = prompt_tokens;
        self.prompt_tokens = 0;
        let mut parts: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
        for (input, DraftInput { id, tokens, room }) in inputs.iter().enumerate() {
            if *room == 0 || left == 0 || tokens.len() >= self.engine.options().context {
                continue;
            }
            let sequence = self.sequences.entry(*id).or_default();
            sequence.drop_wrong(tokens);
            let first = sequence.computed.len();
            // After a step, a sequence has a few tokens more than before.
            let is_prompt = tokens.len() - first > self.most + 1;
            let last = tokens.len().min(first + if is_prompt { left.min(prompts_left) } else { left });
            // Room for the guesses, too.
            if last > first && self.ensure_pages(*id, (tokens.len() + room).min(last + self.most)) {
                left -= last - first;
                if is_prompt {
                    prompts_left -= last - first;
                    self.prompt_tokens += last - first;
                }
                parts.push((input, first..last));
            }
        }
        let mut step = Vec::new();
        for (number, (input, range)) in parts.iter().enumerate() {
            let Some(DraftInput { tokens, .. }) = inputs.get(*input) else { continue };
            let known = tokens.get(range.clone()).unwrap_or_default().iter().zip(range.clone());
            step.extend(known.map(|(token, position)| StepToken {
                token: *token,
                position,
                sequence: number,
                output: position + 1 == tokens.len(),
                hidden: false,
                logits: false,
            }));
        }
        let ids: Vec<RequestId> =
            parts.iter().filter_map(|(input, _)| Some(inputs.get(*input)?.id)).collect();
        self.run(&step, &ids)?;
        let mut guessing = Vec::new();
        for (input, range) in parts {
            let Some(DraftInput { id, tokens, room }) = inputs.get(input) else { continue };
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            sequence.computed.extend_from_slice(tokens.get(range.clone()).unwrap_or_default());
            sequence.checked = sequence.computed.len();
            if range.end == tokens.len() {
                let room = (*room).min(self.most);
                guessing.push(Guessing { id: *id, input, guesses: Vec::new(), room });
            }
        }
        self.add_guesses(guessing)
    }

    /// Adds to each sequence the guess of its output. Those whose guess is too uncertain are left out.
    fn add_guesses(&mut self, guessing: Vec<Guessing>) -> Result<Vec<Guessing>> {
        let mut certain = Vec::new();
        for (output, mut sequence) in guessing.into_iter().enumerate() {
            if let Some((token, probability)) = self.best(output)?
                && probability >= LEAST_PROBABILITY
            {
                sequence.guesses.push(token);
                certain.push(sequence);
            }
        }
        Ok(certain)
    }

    /// Computes the latest guess of each sequence, and guesses one token more. Sequences whose next guess is too uncertain are
    /// left out.
    fn go_on(&mut self, guessing: &mut Vec<Guessing>) -> Result<()> {
        let mut step = Vec::new();
        for (number, Guessing { id, guesses, .. }) in guessing.iter().enumerate() {
            let position = self.sequences.get(id).map_or(0, |sequence| sequence.computed.len());
            if let Some(token) = guesses.last() {
                step.push(StepToken {
                    token: *token,
                    position,
                    sequence: number,
                    output: true,
                    hidden: false,
                    logits: false,
                });
            }
        }
        let ids: Vec<RequestId> = guessing.iter().map(|sequence| sequence.id).collect();
        self.run(&step, &ids)?;
        for (token, id) in step.iter().zip(&ids) {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.computed.push(token.token);
            }
        }
        *guessing = self.add_guesses(std::mem::take(guessing))?;
        Ok(())
    }

    fn run(&mut self, step: &[StepToken], ids: &[RequestId]) -> Result<()> {
        if step.is_empty() {
            return Ok(());
        }
        let tables: Vec<StepSequence<'_>> = ids
            .iter()
            .map(|id| StepSequence {
                pages: self.sequences.get(id).map_or(&[][..], |sequence| sequence.pages.as_slice()),
                window_pages: None,
                lane: 0,
                checkpoint: None,
            })
            .collect();
        self.engine.run(step, &tables, Wanted::Argmax)
    }

    /// The most probable token of an output that the large model knows, with its probability: 1 where only the argmax was computed.
    fn best(&mut self, output: usize) -> Result<Option<(u32, f64)>> {
        let token = self.engine.argmax(output)?;
        if token as usize >= self.vocabulary {
            return Ok(None);
        }
        let logits = self.engine.logits(output)?;
        let probability = if logits.is_empty() { 1.0 } else { log_probability(logits, token)?.exp() };
        Ok(Some((token, probability)))
    }

    /// Takes pages for so many tokens of a sequence; false if there are not enough.
    fn ensure_pages(&mut self, id: RequestId, tokens: usize) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let missing = tokens.div_ceil(PAGE_SLOTS).saturating_sub(sequence.pages.len());
        if missing > self.pool.available() {
            return false;
        }
        sequence.pages.extend((0..missing).map_while(|_| self.pool.take()).map(|taken| taken.page));
        true
    }

    /// An error unless every page belongs to one sequence or to none.
    pub(super) fn check(&self) -> Result<(), String> {
        self.pool.check(self.sequences.values().map(|sequence| sequence.pages.as_slice()))
    }

    /// The requests that it has pages for.
    pub(super) fn ids(&self) -> impl Iterator<Item = RequestId> {
        self.sequences.keys().copied()
    }
}

impl DraftSequence {
    /// Drops computed guesses that the sampler decided against, and the last known token: its logits are needed again.
    fn drop_wrong(&mut self, tokens: &[u32]) {
        let same = self.computed.iter().zip(tokens).skip(self.checked).take_while(|(a, b)| a == b).count();
        self.computed.truncate((self.checked + same).min(tokens.len().saturating_sub(1)));
        self.checked = self.computed.len();
    }
}

/// An error unless the tokens of both models are the same.
fn check_vocabularies(draft: &Model, target: &Model) -> Result<()> {
    let wrong = |value: String| {
        let (name, wanted) = ("the vocabulary of the draft model", "that of the model it guesses for");
        Err(Error::Option { name, value, wanted })
    };
    let sizes = [draft, target].map(|model| model.hyperparameters().vocabulary);
    let [first, second] = sizes;
    if first.abs_diff(second) > MAX_PADDING {
        return wrong(format!("one of {first} tokens, not {second}"));
    }
    // Without vocabularies, as in benchmarks, numbers are all that there is.
    let (Ok(a), Ok(b)) = (draft.tokenizer(), target.tokenizer()) else { return Ok(()) };
    let (a, b) = (&a.vocabulary().tokens, &b.vocabulary().tokens);
    match a.iter().zip(b).position(|(a, b)| a != b) {
        Some(at) => wrong(format!("different at token {at}")),
        None => Ok(()),
    }
}
