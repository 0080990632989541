//! From prompts to text.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use quadriga_runtime::{Detail, Progress, Scheduler};

use crate::engine::{BatchObserver, BatchToken, Engine, EngineOptions};
use crate::placement::Placement;
use crate::sampling::{Sampler, SamplingOptions};
use crate::stop::StopMatcher;
use crate::template::Message;
use crate::tokenizer::Pending;
use crate::{Error, Model, Result};

/// How a generator answers.
#[derive(Clone, Debug, Default)]
pub struct GeneratorOptions {
    /// Devices, layers on accelerators and memory budgets, for [`Generator::new`].
    pub placement: Placement,
    /// Room for the cache.
    pub engine: EngineOptions,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// The most tokens of an answer; as many as the context holds if `None`.
    pub most_tokens: Option<usize>,
    /// Texts that end an answer; they are not part of it.
    pub stops: Vec<String>,
    /// Whether prompts go to the model as they are, without its chat template.
    pub raw: bool,
    /// What the model is told first, where its template has room for it.
    pub system: Option<String>,
}

/// Answers prompts, one after another, with one model.
pub struct Generator {
    engine: Engine,
    options: GeneratorOptions,
    /// Its random state goes on from answer to answer.
    sampler: Sampler,
    /// The tokens in the KV cache of sequence 0: a prompt that begins with them need not compute them again.
    cached: Vec<u32>,
    cancel: Arc<AtomicBool>,
}

/// Why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The model said so.
    End,
    /// A stop text came.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// Somebody asked it to stop.
    Cancelled,
}

/// A token and what it adds to the text.
#[derive(Clone, PartialEq, Debug)]
pub struct Piece {
    /// The token.
    pub token: u32,
    /// Whole characters that are certain now; often one word, sometimes nothing.
    pub text: String,
}

impl Generator {
    /// A generator on the devices of [`GeneratorOptions::placement`]: by default the first GPU, for as many layers as
    /// fit, and the CPU.
    pub fn new(model: Model, mut options: GeneratorOptions) -> Result<Generator> {
        options.sampling.check()?;
        options.engine.greedy = options.sampling.is_greedy();
        let devices = options.placement.open_devices()?;
        let placed = options.placement.plan(&model, &devices, &options.engine)?;
        Generator::on(model, &placed.scheduler, options, &mut |_| {})
    }

    /// A generator on a scheduler's backends, telling of the weights that are loaded.
    pub fn on(
        model: Model,
        scheduler: &Scheduler,
        mut options: GeneratorOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Generator> {
        let sampler = Sampler::new(options.sampling.clone())?;
        options.engine.greedy = options.sampling.is_greedy();
        let engine = Engine::new(model, scheduler, options.engine.clone(), progress)?;
        Ok(Generator { engine, options, sampler, cached: Vec::new(), cancel: Arc::default() })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, with sequence 0 emptied: the generator cannot know what becomes of it.
    pub fn engine_mut(&mut self) -> &mut Engine {
        self.cached.clear();
        self.engine.truncate(0, 0);
        &mut self.engine
    }

    /// Sets the observer of all batches from now on; `None` removes it. See [`Engine::observe`].
    pub fn observe(&mut self, observer: Option<(Detail, BatchObserver)>) {
        self.engine.observe(observer);
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.engine.model()
    }

    /// A flag that, when set, ends a prompt after the batch under way and an answer after the token under way; the next
    /// prompt clears it.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancel)
    }

    /// The tokens that a conversation becomes: by the model's chat template, or as it is if that is switched off or the
    /// file has none.
    pub fn tokenize(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let model = self.engine.model();
        let tokenizer = model.tokenizer()?;
        match model.template().filter(|_| !self.options.raw) {
            Some(template) => {
                let system = self.options.system.as_ref().map(|text| Message::new("system", text.clone()));
                let all: Vec<Message> = system.into_iter().chain(messages.iter().cloned()).collect();
                Ok(tokenizer.encode_prompt(&template.render(&all, true)?, true))
            }
            None => {
                let text: String = messages.iter().map(|m| m.content.as_str()).collect();
                Ok(tokenizer.encode_prompt(&text, true))
            }
        }
    }

    /// Answers one prompt.
    pub fn answer(&mut self, prompt: &str) -> Result<Answer<'_>> {
        self.chat(&[Message::new("user", prompt)])
    }

    /// Answers the last message of a conversation.
    pub fn chat(&mut self, messages: &[Message]) -> Result<Answer<'_>> {
        let tokens = self.tokenize(messages)?;
        self.continue_tokens(&tokens)
    }

    /// Goes on from tokens. What the cache holds of them already is not computed again. If the prompt is cancelled, the
    /// answer has ended; what was computed of the prompt stays in the cache.
    pub fn continue_tokens(&mut self, tokens: &[u32]) -> Result<Answer<'_>> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let context = self.engine.options().context;
        if tokens.len() >= context {
            return Err(Error::ContextFull { wanted: tokens.len() + 1, used: 0, context });
        }
        self.cancel.store(false, Ordering::Release);
        let common = self.cached.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // The last token's logits are needed, so it is computed in any case.
        let kept = common.min(tokens.len() - 1);
        self.cached.truncate(kept);
        self.engine.truncate(0, kept);
        let started = Instant::now();
        let whole = self.compute(tokens.get(kept..).unwrap_or_default())?;
        if let Err(error) = self.engine.wait() {
            self.cached.truncate(self.engine.len(0));
            return Err(error);
        }
        let prompt_time = started.elapsed();
        self.sampler.clear_recent();
        tokens.iter().for_each(|token| self.sampler.accept(*token));
        let most = self.options.most_tokens.unwrap_or(usize::MAX);
        let prompt_tokens = self.cached.len() - kept;
        let Generator { engine, options, sampler, cached, cancel } = self;
        let model = engine.model().clone();
        Ok(Answer {
            engine,
            cached,
            cancel,
            model,
            sampler,
            pending: Pending::default(),
            stops: StopMatcher::new(options.stops.iter().cloned()),
            most,
            count: 0,
            finish: (!whole).then_some(Finish::Cancelled),
            prompt_tokens,
            prompt_time,
            started: Instant::now(),
        })
    }
}

impl Generator {
    /// Appends a prompt batch by batch; false if it was cancelled between two of them.
    fn compute(&mut self, tokens: &[u32]) -> Result<bool> {
        let batch = self.engine.options().batch.max(1);
        let batches = tokens.len().div_ceil(batch);
        for (i, tokens) in tokens.chunks(batch).enumerate() {
            if self.cancel.load(Ordering::Acquire) {
                return Ok(false);
            }
            // Only what follows the last token of all is asked for.
            let last = if i + 1 == batches { tokens.len() } else { 0 };
            let entries = tokens.iter().zip(1..);
            let entries: Vec<BatchToken> = entries
                .map(|(token, count)| BatchToken { sequence: 0, token: *token, output: count == last })
                .collect();
            self.engine.extend(&entries)?;
            self.cached.extend_from_slice(tokens);
        }
        Ok(true)
    }
}

/// An answer as it comes: an iterator of pieces.
pub struct Answer<'g> {
    engine: &'g mut Engine,
    cached: &'g mut Vec<u32>,
    cancel: &'g AtomicBool,
    model: Model,
    sampler: &'g mut Sampler,
    /// Bytes that are not a whole character yet.
    pending: Pending,
    stops: StopMatcher,
    most: usize,
    count: usize,
    finish: Option<Finish>,
    prompt_tokens: usize,
    prompt_time: Duration,
    started: Instant,
}

impl Answer<'_> {
    /// Why it ended; `None` while it goes on.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Tokens of the prompt that were computed (the rest was in the cache), and the time that took.
    pub fn prompt_speed(&self) -> (usize, Duration) {
        (self.prompt_tokens, self.prompt_time)
    }

    /// Tokens of the answer so far, and the time since the prompt was done.
    pub fn answer_speed(&self) -> (usize, Duration) {
        (self.count, self.started.elapsed())
    }

    /// All of the answer's text.
    pub fn text(self) -> Result<String> {
        self.map(|piece| piece.map(|p| p.text)).collect()
    }

    fn step(&mut self) -> Result<Piece> {
        let token = if !self.sampler.options().is_greedy() {
            self.sampler.sample(self.engine.logits(0))?
        } else {
            if self.count + 1 < self.most {
                self.engine.run_ahead()?
            } else {
                self.engine.wait()?
            }
            self.engine.argmax(0)?
        };
        self.sampler.accept(token);
        self.count += 1;
        let tokenizer = self.model.tokenizer()?;
        if tokenizer.is_end(token) {
            return Ok(self.close(token, Finish::End));
        }
        let text = self.pending.push(tokenizer.piece(token)?);
        let step = self.stops.push(&text);
        if step.stopped_by.is_some() {
            self.finish = Some(Finish::Stop);
            return Ok(Piece { token, text: step.text });
        }
        let finish = if self.count >= self.most {
            Finish::Length
        } else if self.engine.len(0) >= self.engine.options().context {
            Finish::Context
        } else {
            self.engine.feed(&[token])?;
            self.cached.push(token);
            return Ok(Piece { token, text: step.text });
        };
        let rest = self.close(token, finish);
        Ok(Piece { token, text: step.text + &rest.text })
    }

    /// The last piece: what was held back.
    fn close(&mut self, token: u32, finish: Finish) -> Piece {
        self.finish = Some(finish);
        let last = self.pending.finish();
        let mut text = self.stops.push(&last).text;
        text.push_str(&self.stops.finish());
        Piece { token, text }
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.finish.is_some() {
            return None;
        }
        if self.most == 0 {
            self.finish = Some(Finish::Length);
            return None;
        }
        if self.cancel.load(Ordering::Acquire) {
            self.finish = Some(Finish::Cancelled);
            return None;
        }
        let step = self.step();
        if step.is_err() {
            // The cache may lack the token under way; the next prompt finds out what it holds.
            self.cached.truncate(self.engine.len(0));
            self.finish = Some(Finish::Cancelled);
        }
        Some(step)
    }
}
