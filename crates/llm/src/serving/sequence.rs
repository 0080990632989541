//! A request that is being answered: its tokens, its pages, its sampler and its text.

use std::ops::Range;
use std::time::{Duration, Instant};

use quadriga_graph::PAGE_SLOTS;

use super::lookup::Lookup;
use super::page_pool::{PageId, PrefixId};
use super::paged_engine::PagedEngine;
use super::request::{Event, Finished, Request, RequestId, TokenLogprobs};
use super::state_rows::KeptState;
use super::window_pages::WindowPages;
use crate::answer::{Finish, TextPiece, TokenCounts};
use crate::answer_text::{AnswerParts, AnswerText};
use crate::embedder::pooled_embedding;
use crate::hyperparameters::Pooling;
use crate::sampling::{Sampler, SamplingHook, log_probability, top_log_probabilities};
use crate::{Error, Model, Result};

/// A request between submission and end.
pub(super) struct Sequence {
    pub(super) id: RequestId,
    pub(super) priority: i32,
    pub(super) client: u64,
    pub(super) salt: u64,
    /// The prompt, and what was generated.
    pub(super) tokens: Vec<u32>,
    prompt: usize,
    /// Tokens whose keys and values are in the KV cache.
    pub(super) computed: usize,
    /// The tokens after them that steps in flight on a pipeline compute.
    pub(super) in_flight: usize,
    /// How often it lost its pages: results of steps from before are not its own.
    pub(super) restarts: u64,
    /// The number of the latest step on a pipeline that computed a part of it.
    pub(super) latest_step: u64,
    pub(super) pages: Vec<PageId>,
    /// Its pages in layers with a window, where those have some of their own.
    pub(super) window_pages: WindowPages,
    /// Pages that are published, and the place of their end in the tree of prefixes. `None` before the sequence is admitted.
    pub(super) published: usize,
    pub(super) prefix: Option<PrefixId>,
    /// Tokens that another sequence began with, too: of models with recurrent layers, a state is kept after them.
    pub(super) shared: usize,
    /// The prefix after which the lane's recurrent state is yet to be taken.
    pub(super) starts_from: Option<PrefixId>,
    /// The prefix after which a recurrent state of the answer is kept.
    kept: Option<PrefixId>,
    /// Tokens that were found in the KV cache, and are not counted yet.
    pub(super) found: usize,
    /// The number of the step of its latest token, or at which it was submitted.
    pub(super) waiting_since: u64,
    /// The request whose prompt is the same, and is computed first.
    pub(super) leader: Option<RequestId>,
    /// Where its recurrent state is, while it is running.
    pub(super) lane: usize,
    sampler: Sampler,
    hook: Option<Box<dyn SamplingHook>>,
    text: AnswerText,
    max_tokens: usize,
    past_end: bool,
    /// Tokens that end the answer, beside those of the model, and whether the last one is a part of its text.
    stop_tokens: Vec<u32>,
    keep_stop: bool,
    /// Whether parts of the prompt are reported as they are computed.
    progress: bool,
    logprobs: Option<usize>,
    /// How the prompt is embedded, if it is, and the vectors of its tokens so far.
    embedding: Option<(Pooling, Vec<f32>)>,
    /// Whether the embedding is not divided by its length.
    keeps_length: bool,
    /// Those of the prompt so far, if they are wanted, and how many most probable tokens each has.
    prompt_logprobs: Option<(usize, Vec<TokenLogprobs>)>,
    /// Guesses at the tokens after the last one; computed in the same step.
    pub(super) draft: Vec<u32>,
    pub(super) lookup: Option<Lookup>,
    counts: TokenCounts,
    /// Guesses that were checked, and those of them that were right.
    guesses: (usize, usize),
    submitted: Instant,
    started: Option<Instant>,
    sampled: Option<(Instant, Instant)>,
    /// How often its latest step failed.
    pub(super) failures: usize,
}

/// What a step did to a sequence.
pub(super) enum Outcome {
    /// It goes on.
    Running,
    /// It ended.
    Ended,
}

/// Parts of prompts are cut at multiples of so many tokens, and have at least as many on both sides: then neither the chunks of a delta
/// rule nor the kernel that attention uses depend on where it is.
const PART_UNIT: usize = 16;

/// How many of `tokens` from position `first` on are computed next, of at most `most`.
fn cut_part(first: usize, tokens: usize, most: usize) -> Option<usize> {
    if tokens <= most {
        return Some(tokens);
    }
    let last = (first + most).min((first + tokens).saturating_sub(PART_UNIT));
    let end = last / PART_UNIT * PART_UNIT;
    end.checked_sub(first).filter(|part| *part >= PART_UNIT)
}

impl Sequence {
    pub(super) fn new(
        id: RequestId,
        mut request: Request,
        model: &Model,
        lookup: Option<Lookup>,
    ) -> Result<Sequence> {
        if let Some(rules) = request.rules.hook(model) {
            request.add_hook(Box::new(rules));
        }
        let mut sampler = Sampler::for_model(request.sampling, model)?;
        request.prompt.iter().for_each(|token| sampler.accept(*token));
        let prompt = request.prompt.len();
        // Without a vocabulary there is no text in which a stop string could be found.
        if !request.stops.is_empty() {
            model.tokenizer()?;
        }
        Ok(Sequence {
            id,
            priority: request.priority,
            client: request.client,
            salt: request.salt,
            tokens: request.prompt,
            prompt,
            computed: 0,
            in_flight: 0,
            restarts: 0,
            latest_step: 0,
            pages: Vec::new(),
            window_pages: WindowPages::default(),
            published: 0,
            prefix: None,
            shared: 0,
            starts_from: None,
            kept: None,
            found: 0,
            waiting_since: 0,
            leader: None,
            lane: 0,
            sampler,
            hook: request.hook,
            text: AnswerText::new(request.stops, request.reasoning, request.tool_calls)
                .with_rules(&request.rules),
            max_tokens: request.max_tokens.unwrap_or(usize::MAX),
            past_end: request.past_end,
            stop_tokens: request.rules.stop_tokens,
            keep_stop: request.rules.keep_stop,
            progress: request.progress,
            logprobs: request.logprobs,
            embedding: request.embedding.map(|pooling| (pooling, Vec::new())),
            keeps_length: request.keeps_length,
            prompt_logprobs: request.prompt_logprobs.map(|top| (top, Vec::new())),
            draft: Vec::new(),
            lookup,
            counts: TokenCounts { prompt, ..TokenCounts::default() },
            guesses: (0, 0),
            submitted: Instant::now(),
            started: None,
            sampled: None,
            failures: 0,
        })
    }

    /// The position of the first token that neither is computed nor in flight.
    pub(super) fn next_position(&self) -> usize {
        self.computed + self.in_flight
    }

    /// Tokens that are known and neither computed nor in flight.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.next_position()
    }

    /// Whether only the latest token is left to compute.
    pub(super) fn is_decoding(&self) -> bool {
        self.in_flight == 0 && self.remaining() == 1 && self.tokens.len() > self.prompt
    }

    /// Whether all of its prompt but the last token, and more, is in the KV cache.
    pub(super) fn has_prompt(&self) -> bool {
        self.computed + 1 >= self.prompt
    }

    /// Tokens of the prompt.
    pub(super) fn prompt(&self) -> usize {
        self.prompt
    }

    /// Whether prefixes in the KV cache may be used: not if the logits of all tokens are wanted.
    pub(super) fn may_share(&self) -> bool {
        let embeds_all = self.embedding.as_ref().is_some_and(|(pooling, _)| *pooling != Pooling::Last);
        self.prompt_logprobs.is_none() && !embeds_all
    }

    /// Whether the prompt is embedded, and nothing is generated.
    pub(super) fn is_embedded(&self) -> bool {
        self.embedding.is_some()
    }

    /// Whether nothing but the most probable token of each output is needed.
    pub(super) fn is_greedy(&self) -> bool {
        let is_greedy = self.sampler.options().is_greedy()
            && self.hook.is_none()
            && self.logprobs.is_none()
            && self.prompt_logprobs.is_none();
        is_greedy || self.is_embedded()
    }

    /// Whether all logits of its outputs are needed, not only the largest.
    pub(super) fn needs_logits(&self) -> bool {
        self.hook.is_some()
            || self.logprobs.is_some()
            || self.prompt_logprobs.is_some()
            || self.sampler.options().needs_all_logits()
    }

    /// Whether the token that is sampled next is the last one, whatever it is.
    pub(super) fn ends_with_next(&self, context: usize) -> bool {
        self.counts.answer + 1 >= self.max_tokens || self.tokens.len() + 1 >= context
    }

    /// Pages that positions up to `len` need.
    pub(super) fn missing_pages(&self, len: usize) -> usize {
        len.div_ceil(PAGE_SLOTS).saturating_sub(self.pages.len())
    }

    /// Counts the tokens of its prompt that were found in the KV cache, and returns their number. Those of a sequence that was put
    /// back while it was being generated do not count.
    pub(super) fn count_found(&mut self) -> usize {
        let found = std::mem::take(&mut self.found);
        if self.counts.answer == 0 {
            self.counts.cached = (self.counts.cached + found).min(self.prompt);
        }
        found
    }

    /// Notes that nothing of it is in the KV cache any more.
    pub(super) fn lose_pages(&mut self) {
        (self.computed, self.published, self.prefix, self.found) = (0, 0, None, 0);
        (self.in_flight, self.restarts) = (0, self.restarts + 1);
        (self.shared, self.starts_from, self.kept) = (0, None, None);
        if self.counts.answer == 0 {
            self.counts.cached = 0;
        }
        if let Some((_, vectors)) = &mut self.embedding {
            vectors.clear();
        }
        self.draft.clear();
    }

    /// How many of the tokens that are left are computed next, of at most `most`. Where recurrent states are kept, a part of a
    /// prompt ends where one is. Otherwise it is cut so that kernels round as without the cut, which depends on what else the step
    /// computes. If so few tokens cannot be, it is `None` for one that `waits`, and cut anywhere for another.
    pub(super) fn next_part(&self, most: usize, keeps_states: bool, waits: bool) -> Option<usize> {
        let (first, tokens) = (self.next_position(), self.remaining());
        let inside = |end: &usize| (first + 1..first + tokens).contains(end);
        let end = self.ends_of_states().into_iter().filter(inside).min();
        let whole = end.filter(|_| keeps_states).map_or(tokens, |end| end - first);
        cut_part(first, whole, most).or((!waits).then_some(whole.min(most)))
    }

    /// Where a prompt's recurrent states are kept: after whole pages that others began with, too, and after its last whole page.
    fn ends_of_states(&self) -> [usize; 2] {
        [self.shared, self.tokens.len().saturating_sub(1) / PAGE_SLOTS * PAGE_SLOTS]
    }

    /// Whether the recurrent state after the next tokens is kept for others.
    pub(super) fn keeps_state_after(&self, tokens: usize) -> Option<KeptState> {
        let end = self.computed + tokens;
        let kind = match self.is_decoding() {
            true => KeptState::Answer,
            false => KeptState::Prompt,
        };
        let is_end = kind == KeptState::Answer || self.ends_of_states().contains(&end);
        (self.may_share() && is_end && end.is_multiple_of(PAGE_SLOTS)).then_some(kind)
    }

    /// The end of the prompt's last whole page that a sequence with the same prompt can go on after.
    pub(super) fn end_of_prompt_pages(&self) -> usize {
        self.prompt.saturating_sub(1) / PAGE_SLOTS * PAGE_SLOTS
    }

    /// Notes that a recurrent state after a prefix is kept; returns the earlier prefix of the answer whose state need not be.
    pub(super) fn note_kept(&mut self, prefix: PrefixId) -> Option<PrefixId> {
        if self.computed > self.prompt { self.kept.replace(prefix) } else { None }
    }

    /// Notes that a part of it is computed from now on.
    pub(super) fn note_start(&mut self) {
        self.started.get_or_insert_with(Instant::now);
    }

    /// Whether the output after the token at this position is wanted.
    pub(super) fn wants_output(&self, position: usize) -> bool {
        match self.embedding {
            Some((Pooling::Last, _)) => return position + 1 == self.prompt,
            Some((Pooling::Cls, _)) => return position == 0,
            Some(_) => return true,
            None => {}
        }
        position + 1 >= self.tokens.len() || self.prompt_logprobs.is_some() && position + 1 < self.prompt
    }

    /// The outputs of the next `tokens` tokens.
    pub(super) fn outputs_of(&self, tokens: usize) -> usize {
        let first = self.next_position();
        (first..first + tokens).filter(|position| self.wants_output(*position)).count()
    }

    /// Adds to `missing` the outputs of a step, of those from `output` on, whose logits the sampler needs and the host does not have:
    /// of the last of `count` known tokens, and of the guesses after it.
    pub(super) fn add_missing_logits(
        &mut self,
        engine: &PagedEngine,
        count: usize,
        output: usize,
        missing: &mut Vec<usize>,
    ) {
        let is_sampled = self.computed + count >= self.tokens.len() && self.max_tokens > 0;
        // Those that need all logits whatever they are have asked for them.
        if !is_sampled || self.is_embedded() || self.needs_logits() {
            return;
        }
        let is_greedy = self.sampler.options().is_greedy();
        // Where penalties depend on the tokens, each output is sampled from as if the guesses before it were right.
        let mut ahead =
            (!self.draft.is_empty() && self.sampler.has_penalties()).then(|| self.sampler.clone());
        for number in 0..=self.draft.len() {
            let sampler = ahead.as_mut().unwrap_or(&mut self.sampler);
            let top = engine.top_logits(output + number);
            if !top.is_some_and(|top| is_greedy || sampler.is_top_enough(&top)) {
                missing.push(output + number);
            }
            if let (Some(ahead), Some(guess)) = (&mut ahead, self.draft.get(number)) {
                ahead.accept(*guess);
            }
        }
    }

    /// Takes in `count` computed tokens, whose outputs are those of the engine from `output` on.
    pub(super) fn advance(
        &mut self,
        engine: &mut PagedEngine,
        count: usize,
        output: usize,
        context: usize,
        events: &mut Vec<(RequestId, Event)>,
    ) -> Result<Outcome> {
        let mut output = output;
        self.in_flight = self.in_flight.saturating_sub(count);
        let first = self.computed;
        let known = count.min(self.remaining());
        self.failures = 0;
        if self.embedding.is_some() {
            return self.embed(engine, first..first + known, output, events);
        }
        if let Some((top, logprobs)) = &mut self.prompt_logprobs {
            // A sequence that was put back computes its prompt again.
            logprobs.truncate(first);
            for position in first..first + known {
                let Some(next) = self.tokens.get(position + 1).filter(|_| position + 1 < self.prompt) else {
                    break;
                };
                logprobs.push(logprobs_of(engine.logits(output)?, *next, *top)?);
                output += 1;
            }
        }
        self.computed += known;
        if self.progress && self.counts.answer == 0 {
            let (cached, computed) = (self.counts.cached, self.computed.min(self.prompt));
            events.push((self.id, Event::Progress { cached, computed, prefill: self.prefill() }));
        }
        if self.computed < self.tokens.len() {
            return Ok(Outcome::Running);
        }
        if let Some((_, logprobs)) = self.prompt_logprobs.take() {
            events.push((self.id, Event::Prompt { logprobs }));
        }
        if self.max_tokens == 0 {
            return Ok(self.end(Finish::Length, events));
        }
        // The last known token, and each guess that turned out right, has an output to sample from.
        let draft = std::mem::take(&mut self.draft);
        self.guesses.0 += draft.len();
        let mut guesses = draft.iter();
        let mut right = 0;
        loop {
            let outcome = self.sample(engine, output, context, events)?;
            if let Some(lookup) = &mut self.lookup {
                lookup.accept(&self.tokens);
            }
            let guessed = guesses.next();
            let is_right = guessed.is_some() && guessed == self.tokens.last();
            self.guesses.1 += usize::from(is_right);
            if matches!(outcome, Outcome::Ended) || !is_right {
                if let Some(lookup) = &mut self.lookup {
                    lookup.note(draft.len(), right);
                }
                return Ok(outcome);
            }
            // Its keys and values were computed in this step.
            self.computed += 1;
            output += 1;
            right += 1;
        }
    }

    /// Takes in the vectors of computed tokens, from output `output` on; at the end of the prompt they become one.
    fn embed(
        &mut self,
        engine: &PagedEngine,
        computed: Range<usize>,
        output: usize,
        events: &mut Vec<(RequestId, Event)>,
    ) -> Result<Outcome> {
        self.computed = computed.end;
        let outputs = computed.filter(|position| self.wants_output(*position)).count();
        let complete = self.computed >= self.prompt;
        let prefill = self.prefill();
        let Some((pooling, vectors)) = &mut self.embedding else { return Ok(Outcome::Running) };
        for output in output..output + outputs {
            vectors.extend_from_slice(engine.hidden(output));
        }
        if self.progress {
            let (cached, computed) = (self.counts.cached, self.computed);
            events.push((self.id, Event::Progress { cached, computed, prefill }));
        }
        if !complete {
            return Ok(Outcome::Running);
        }
        let width = engine.model().hyperparameters().width;
        let vector = pooled_embedding(vectors, width, *pooling, !self.keeps_length)?;
        events.push((self.id, Event::Embedding { vector }));
        Ok(self.end(Finish::Length, events))
    }

    /// Samples the next token and adds its text.
    fn sample(
        &mut self,
        engine: &mut PagedEngine,
        output: usize,
        context: usize,
        events: &mut Vec<(RequestId, Event)>,
    ) -> Result<Outcome> {
        let token = match &mut self.hook {
            Some(hook) => {
                let (sampler, logits) = (&mut self.sampler, engine.logits(output)?);
                let sample = || sampler.sample_with(logits, &mut **hook);
                // Neither is used again after a panic: the request ends. Others go on.
                let sampled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(sample));
                sampled.map_err(|_| Error::HookPanicked)??
            }
            None if self.sampler.options().is_greedy() => engine.argmax(output)?,
            None => {
                let top = engine.top_logits(output);
                match top.and_then(|top| self.sampler.sample_top(&top)) {
                    Some(token) => token,
                    None => self.sampler.sample(engine.logits(output)?)?,
                }
            }
        };
        let logprobs = match self.logprobs {
            Some(top) => Some(logprobs_of(engine.logits(output)?, token, top)?),
            None => None,
        };
        let now = Instant::now();
        let (first, _) = self.sampled.unwrap_or((now, now));
        self.sampled = Some((first, now));
        self.sampler.accept(token);
        self.tokens.push(token);
        self.counts.answer += 1;
        let tokenizer = engine.model().tokenizer().ok();
        let mut parts = AnswerParts::default();
        let mut finish = None;
        if !self.past_end && tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token)) {
            finish = Some(Finish::End);
        } else {
            let is_stop = self.stop_tokens.contains(&token);
            let mut stopped_by = None;
            if let Some(tokenizer) = tokenizer.filter(|_| !is_stop || self.keep_stop) {
                let was_reasoning = self.text.is_reasoning();
                (parts, stopped_by) = self.text.push(tokenizer, token, now - first)?;
                self.counts.reasoning += usize::from(was_reasoning || self.text.is_reasoning());
            }
            if let Some(stop) = stopped_by {
                finish = Some(stop.into());
            } else if is_stop {
                finish = Some(Finish::StopToken(token));
            } else if self.counts.answer >= self.max_tokens {
                finish = Some(Finish::Length);
            } else if self.tokens.len() >= context {
                finish = Some(Finish::Context);
            }
        }
        if let Some(finish) = finish {
            parts.extend(self.text.finish(finish.text_end()));
        }
        let piece = TextPiece::new(token, parts);
        events.push((self.id, Event::Token { piece, logprobs }));
        if let Some(finish) = finish {
            return Ok(self.end(finish, events));
        }
        if let Some(hook) = &mut self.hook {
            let sampler = &self.sampler;
            let accepted = || hook.accepted(sampler.tokens());
            // As above.
            let accepted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(accepted));
            accepted.map_err(|_| Error::HookPanicked)?;
        }
        Ok(Outcome::Running)
    }

    fn end(&self, finish: Finish, events: &mut Vec<(RequestId, Event)>) -> Outcome {
        events.push((self.id, Event::Finished(self.finished(finish))));
        Outcome::Ended
    }

    /// The time since the first step that computed a part of it began.
    fn prefill(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// How it ended.
    pub(super) fn finished(&self, finish: Finish) -> Finished {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        // Without a token, the prompt took until now.
        let (first, last) = self.sampled.unwrap_or((now, now));
        Finished {
            finish,
            counts: self.counts,
            queued: started - self.submitted,
            first_token: first - self.submitted,
            decode: last - first,
            guessed: self.guesses.0,
            guessed_right: self.guesses.1,
        }
    }
}

fn logprobs_of(logits: &[f32], token: u32, top: usize) -> Result<TokenLogprobs> {
    let logprob = log_probability(logits, token)?;
    let top = if top == 0 { Vec::new() } else { top_log_probabilities(logits, top)? };
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let rank = 1 + logits.iter().filter(|logit| **logit > own).count();
    Ok(TokenLogprobs { logprob, rank, top })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_cut_between_whole_units_and_waits_only_for_little_room() {
        for first in (0..100).step_by(PART_UNIT) {
            for tokens in 1..100 {
                for most in 0..120 {
                    let Some(part) = cut_part(first, tokens, most) else {
                        assert!(most < tokens.min(2 * PART_UNIT), "{first} {tokens} {most}");
                        continue;
                    };
                    assert!(part <= most, "{first} {tokens} {most}");
                    let rest = tokens - part;
                    let is_cut_well =
                        part >= PART_UNIT && rest >= PART_UNIT && part.is_multiple_of(PART_UNIT);
                    assert!(rest == 0 || is_cut_well, "{first} {tokens} {most}");
                }
            }
        }
    }
}
