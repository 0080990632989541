//! An answer that is being generated: streamed text, and how it ended.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::answer_text::{AnswerParts, AnswerText, TextEnd, TextStop};
use crate::engine::Engine;
use crate::sampling::{Sampler, SamplingHook};
use crate::template::ToolCall;
use crate::tools::ToolCallPiece;
use crate::{Model, Result};

/// The reason why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The model generated an end-of-generation token.
    End,
    /// A stop string was found: the one with this number in the request's list.
    Stop(usize),
    /// A [stop token](crate::AnswerRules::stop_tokens) was sampled.
    StopToken(u32),
    /// The answer has [`RequestOptions::max_tokens`](crate::RequestOptions::max_tokens), or ends at one of its
    /// [lines](crate::LineRules).
    Length,
    /// The context is full.
    Context,
    /// It was cancelled by [`Generator::cancel_flag`](crate::Generator::cancel_flag), by the callback of
    /// [`Answer::stream`], or by an error.
    Cancelled,
}

impl Finish {
    /// What it means for the text that is held back.
    pub(crate) fn text_end(self) -> TextEnd {
        match self {
            Finish::End | Finish::StopToken(_) => TextEnd::Whole,
            Finish::Stop(_) => TextEnd::Stopped,
            Finish::Length | Finish::Context | Finish::Cancelled => TextEnd::Cut,
        }
    }
}

impl From<TextStop> for Finish {
    fn from(stop: TextStop) -> Finish {
        match stop {
            TextStop::String(number) => Finish::Stop(number),
            TextStop::Line => Finish::Length,
        }
    }
}

/// A token of an answer and the text that it completes.
#[derive(Clone, PartialEq, Debug)]
pub struct TextPiece {
    /// The token.
    pub token: u32,
    /// Whole characters; often a word, empty while a character, a possible stop string or the reasoning is incomplete.
    pub text: String,
    /// The same of the model's reasoning, which is not part of its answer.
    pub reasoning: String,
    /// Parts of calls of tools, which are not part of its answer's text.
    pub tool_calls: Vec<ToolCallPiece>,
}

impl TextPiece {
    pub(crate) fn new(token: u32, parts: AnswerParts) -> TextPiece {
        let AnswerParts { text, reasoning, tool_calls } = parts;
        TextPiece { token, text, reasoning, tool_calls }
    }
}

/// The tokens of a prompt and its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TokenCounts {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that were in the KV cache already.
    pub cached: usize,
    /// Generated tokens, an end-of-generation token included.
    pub answer: usize,
    /// Of those, the ones of reasoning.
    pub reasoning: usize,
}

/// A finished answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Completion {
    /// The whole text, without the model's reasoning.
    pub text: String,
    /// The model's reasoning; empty if it has none.
    pub reasoning: String,
    /// Calls of tools.
    pub tool_calls: Vec<ToolCall>,
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// The reason why it ended.
    pub finish: Finish,
    /// The tokens of prompt and answer.
    pub counts: TokenCounts,
    /// The time of the prefill.
    pub prompt_time: Duration,
    /// The time from the first generated token to the last one.
    pub decode_time: Duration,
}

/// An answer that is being generated: an iterator over its text.
pub struct Answer<'g> {
    pub(crate) engine: &'g mut Engine,
    pub(crate) cancel: &'g AtomicBool,
    pub(crate) model: Model,
    pub(crate) sampler: &'g mut Sampler,
    pub(crate) hook: Option<Box<dyn SamplingHook>>,
    pub(crate) progress: AnswerProgress,
}

/// The state of an answer.
pub(crate) struct AnswerProgress {
    text: AnswerText,
    max_tokens: usize,
    counts: TokenCounts,
    finish: Option<Finish>,
    prompt_time: Duration,
    started: Instant,
    /// When the first and the latest token were sampled.
    sampled: Option<(Instant, Instant)>,
}

impl AnswerProgress {
    /// An answer without tokens, right after the prefill.
    pub(crate) fn new(
        text: AnswerText,
        max_tokens: Option<usize>,
        counts: TokenCounts,
        prompt_time: Duration,
        finish: Option<Finish>,
    ) -> AnswerProgress {
        AnswerProgress {
            text,
            max_tokens: max_tokens.unwrap_or(usize::MAX),
            counts,
            finish,
            prompt_time,
            started: Instant::now(),
            sampled: None,
        }
    }
}

impl Answer<'_> {
    /// The reason why it ended; `None` before that.
    pub fn finish(&self) -> Option<Finish> {
        self.progress.finish
    }

    /// The tokens of the prompt, and those generated so far.
    pub fn counts(&self) -> TokenCounts {
        self.progress.counts
    }

    /// The number of prompt tokens that were computed (the others were in the KV cache), and the time of the prefill.
    pub fn prompt_speed(&self) -> (usize, Duration) {
        let TokenCounts { prompt, cached, .. } = self.progress.counts;
        (prompt - cached, self.progress.prompt_time)
    }

    /// The number of tokens generated so far, and the time since the prefill.
    pub fn answer_speed(&self) -> (usize, Duration) {
        (self.progress.counts.answer, self.progress.started.elapsed())
    }

    /// The decode steps so far and their time: from the first generated token, which the prefill gave, to the latest
    /// one. No steps and no time for an answer of one token.
    pub fn decode_speed(&self) -> (usize, Duration) {
        let time = self.progress.sampled.map_or(Duration::ZERO, |(first, last)| last - first);
        (self.progress.counts.answer.saturating_sub(1), time)
    }

    /// Generates the whole answer and returns its text, without the model's reasoning.
    pub fn text(self) -> Result<String> {
        self.map(|piece| piece.map(|p| p.text)).collect()
    }

    /// Generates the whole answer.
    pub fn complete(self) -> Result<Completion> {
        self.stream(|_| ControlFlow::Continue(()))
    }

    /// Generates the answer and gives each piece to a callback, which may [stop](ControlFlow::Break) it.
    ///
    /// ```no_run
    /// use std::ops::ControlFlow;
    ///
    /// # fn example(generator: &mut quadriga_llm::Generator) -> Result<(), quadriga_llm::Error> {
    /// let answer = generator.answer("Count to ten.")?.stream(|piece| {
    ///     print!("{}", piece.text);
    ///     if piece.text.contains('7') { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    /// })?;
    /// println!("\n{:?} after {} tokens", answer.finish, answer.counts.answer);
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream(mut self, mut callback: impl FnMut(&TextPiece) -> ControlFlow<()>) -> Result<Completion> {
        let (mut text, mut reasoning, mut tokens) = (String::new(), String::new(), Vec::new());
        let mut calls = Vec::new();
        while let Some(piece) = self.next() {
            let piece = piece?;
            text.push_str(&piece.text);
            reasoning.push_str(&piece.reasoning);
            calls.extend(piece.tool_calls.iter().cloned());
            tokens.push(piece.token);
            if callback(&piece).is_break() {
                self.progress.finish.get_or_insert(Finish::Cancelled);
            }
        }
        Ok(Completion {
            text,
            reasoning,
            tool_calls: ToolCallPiece::join(&calls),
            tokens,
            finish: self.progress.finish.unwrap_or(Finish::Cancelled),
            counts: self.progress.counts,
            prompt_time: self.progress.prompt_time,
            decode_time: self.decode_speed().1,
        })
    }

    fn step(&mut self) -> Result<TextPiece> {
        let token = self.sample()?;
        let now = Instant::now();
        let (first, _) = self.progress.sampled.unwrap_or((now, now));
        self.progress.sampled = Some((first, now));
        self.sampler.accept(token);
        self.progress.counts.answer += 1;
        let tokenizer = self.model.tokenizer()?;
        if tokenizer.is_end(token) {
            return Ok(TextPiece::new(token, self.close(Finish::End)));
        }
        let was_reasoning = self.progress.text.is_reasoning();
        let (mut parts, stopped_by) = self.progress.text.push(tokenizer, token, now - first)?;
        self.progress.counts.reasoning += usize::from(was_reasoning || self.progress.text.is_reasoning());
        let finish = if let Some(stop) = stopped_by {
            stop.into()
        } else if self.progress.counts.answer >= self.progress.max_tokens {
            Finish::Length
        } else if self.engine.len(0) >= self.engine.options().context {
            Finish::Context
        } else {
            if let Some(hook) = &mut self.hook {
                hook.accepted(self.sampler.tokens());
            }
            self.engine.feed(&[token])?;
            return Ok(TextPiece::new(token, parts));
        };
        parts.extend(self.close(finish));
        Ok(TextPiece::new(token, parts))
    }

    /// The next token. Where nobody needs the logits, a device may have computed it, and may start the next step.
    fn sample(&mut self) -> Result<u32> {
        if let Some(hook) = &mut self.hook {
            return self.sampler.sample_with(self.engine.logits(0), &mut **hook);
        }
        if !self.sampler.options().is_greedy() {
            return self.sampler.sample(self.engine.logits(0));
        }
        if self.progress.counts.answer + 1 < self.progress.max_tokens {
            self.engine.run_ahead()?
        } else {
            self.engine.wait()?
        }
        self.engine.argmax(0)
    }

    /// The end, with the text that was held back: nothing of it after a stop string.
    fn close(&mut self, finish: Finish) -> AnswerParts {
        self.progress.finish = Some(finish);
        self.progress.text.finish(finish.text_end())
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<TextPiece>;

    fn next(&mut self) -> Option<Result<TextPiece>> {
        if self.progress.finish.is_some() {
            return None;
        }
        if self.progress.max_tokens == 0 {
            self.progress.finish = Some(Finish::Length);
            return None;
        }
        if self.cancel.load(Ordering::Acquire) {
            self.progress.finish = Some(Finish::Cancelled);
            return None;
        }
        let step = self.step();
        if step.is_err() {
            self.progress.finish = Some(Finish::Cancelled);
        }
        Some(step)
    }
}
