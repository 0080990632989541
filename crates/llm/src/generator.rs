//! Text generation: prompts and conversations in, text out.

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

/// Options of a [`Generator`].
///
/// ```
/// use quadriga_llm::sampling::SamplingOptions;
/// use quadriga_llm::{EngineOptions, GeneratorOptions, GpuLayers, Placement};
///
/// let options = GeneratorOptions {
///     placement: Placement { gpu_layers: GpuLayers::Count(20), ..Placement::default() },
///     engine: EngineOptions { context: 8192, ..EngineOptions::default() },
///     sampling: SamplingOptions { temperature: 0.7, seed: 42, ..SamplingOptions::default() },
///     max_tokens: Some(256),
///     system: Some("You are a helpful assistant.".into()),
///     ..GeneratorOptions::default()
/// };
/// ```
#[derive(Clone, Debug, Default)]
pub struct GeneratorOptions {
    /// Devices, layers on accelerators and memory budgets, for [`Generator::new`].
    pub placement: Placement,
    /// Context size, batch size and type of the KV cache.
    pub engine: EngineOptions,
    /// Temperature, top-k, top-p, seed and other sampling options.
    pub sampling: SamplingOptions,
    /// The largest number of tokens of an answer; limited by the context alone if `None`.
    pub max_tokens: Option<usize>,
    /// Stop strings: an answer ends before the first of them.
    pub stops: Vec<String>,
    /// Whether prompts are used as they are, without the chat template.
    pub raw: bool,
    /// The system prompt, for chat templates that have one.
    pub system: Option<String>,
}

/// Generates text with a model: one answer after another, each streamed as it is generated.
///
/// ```no_run
/// use quadriga_llm::template::Message;
/// use quadriga_llm::{Generator, GeneratorOptions, Model};
///
/// let mut generator = Generator::new(Model::open("model.gguf")?, GeneratorOptions::default())?;
/// let mut conversation = vec![Message::new("user", "Name a planet.")];
/// let planet = generator.chat(&conversation)?.text()?;
/// conversation.push(Message::new("assistant", planet));
/// conversation.push(Message::new("user", "How many moons does it have?"));
/// for piece in generator.chat(&conversation)? {
///     print!("{}", piece?.text); // the prefix that is in the KV cache is not computed again
/// }
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub struct Generator {
    engine: Engine,
    options: GeneratorOptions,
    /// Its random state continues from answer to answer, so that a prompt that is sent again gets another answer.
    sampler: Sampler,
    /// The tokens in the KV cache of sequence 0: a prompt that begins with them need not compute them again.
    cached: Vec<u32>,
    cancel: Arc<AtomicBool>,
}

/// The reason why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The model generated an end-of-generation token.
    End,
    /// A stop string was found.
    Stop,
    /// The answer has [`GeneratorOptions::max_tokens`].
    Length,
    /// The context is full.
    Context,
    /// It was cancelled by [`Generator::cancel_flag`], or by an error.
    Cancelled,
}

/// A token of an answer and the text that it completes.
#[derive(Clone, PartialEq, Debug)]
pub struct TextPiece {
    /// The token.
    pub token: u32,
    /// Whole characters; often a word, empty while a character or a possible stop string is incomplete.
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

    /// A generator on a scheduler's backends; `progress` is called while the weights are loaded.
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

    /// A flag that cancels: when it is set, prefill ends after the current batch and an answer after the current token.
    /// The next prompt clears it.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancel)
    }

    /// The tokens of a conversation, rendered with the chat template; without one, or with [`GeneratorOptions::raw`],
    /// of the messages' plain text.
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

    /// Continues a prompt of tokens. The prefix that is in the KV cache is not computed again. If the prefill is
    /// cancelled, the answer has ended already, and the batches that were computed stay in the KV cache.
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
        let whole = self.prefill(tokens.get(kept..).unwrap_or_default())?;
        if let Err(error) = self.engine.wait() {
            self.cached.truncate(self.engine.len(0));
            return Err(error);
        }
        let prompt_time = started.elapsed();
        self.sampler.clear_recent();
        tokens.iter().for_each(|token| self.sampler.accept(*token));
        let max_tokens = self.options.max_tokens.unwrap_or(usize::MAX);
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
            max_tokens,
            count: 0,
            finish: (!whole).then_some(Finish::Cancelled),
            prompt_tokens,
            prompt_time,
            started: Instant::now(),
        })
    }
}

impl Generator {
    /// Prefill: appends a prompt batch by batch. False if it was cancelled between two batches.
    fn prefill(&mut self, tokens: &[u32]) -> Result<bool> {
        let batch_size = self.engine.options().batch.max(1);
        let batches = tokens.len().div_ceil(batch_size);
        for (i, tokens) in tokens.chunks(batch_size).enumerate() {
            if self.cancel.load(Ordering::Acquire) {
                return Ok(false);
            }
            // Only the logits after the last token are needed.
            let last = if i + 1 == batches { tokens.len() } else { 0 };
            let batch: Vec<BatchToken> = tokens
                .iter()
                .zip(1..)
                .map(|(token, count)| BatchToken { sequence: 0, token: *token, output: count == last })
                .collect();
            self.engine.extend(&batch)?;
            self.cached.extend_from_slice(tokens);
        }
        Ok(true)
    }
}

/// An answer that is being generated: an iterator over its text.
pub struct Answer<'g> {
    engine: &'g mut Engine,
    cached: &'g mut Vec<u32>,
    cancel: &'g AtomicBool,
    model: Model,
    sampler: &'g mut Sampler,
    /// Bytes that are not a whole character yet.
    pending: Pending,
    stops: StopMatcher,
    max_tokens: usize,
    count: usize,
    finish: Option<Finish>,
    prompt_tokens: usize,
    prompt_time: Duration,
    started: Instant,
}

impl Answer<'_> {
    /// The reason why it ended; `None` before that.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// The number of prompt tokens that were computed (the others were in the KV cache), and the time of the prefill.
    pub fn prompt_speed(&self) -> (usize, Duration) {
        (self.prompt_tokens, self.prompt_time)
    }

    /// The number of tokens generated so far, and the time since the prefill.
    pub fn answer_speed(&self) -> (usize, Duration) {
        (self.count, self.started.elapsed())
    }

    /// Generates the whole answer and returns its text.
    pub fn text(self) -> Result<String> {
        self.map(|piece| piece.map(|p| p.text)).collect()
    }

    fn step(&mut self) -> Result<TextPiece> {
        let token = if !self.sampler.options().is_greedy() {
            self.sampler.sample(self.engine.logits(0))?
        } else {
            if self.count + 1 < self.max_tokens {
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
            return Ok(TextPiece { token, text: step.text });
        }
        let finish = if self.count >= self.max_tokens {
            Finish::Length
        } else if self.engine.len(0) >= self.engine.options().context {
            Finish::Context
        } else {
            self.engine.feed(&[token])?;
            self.cached.push(token);
            return Ok(TextPiece { token, text: step.text });
        };
        let rest = self.close(token, finish);
        Ok(TextPiece { token, text: step.text + &rest.text })
    }

    /// The last piece, with the text that was held back.
    fn close(&mut self, token: u32, finish: Finish) -> TextPiece {
        self.finish = Some(finish);
        let last = self.pending.finish();
        let mut text = self.stops.push(&last).text;
        text.push_str(&self.stops.finish());
        TextPiece { token, text }
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<TextPiece>;

    fn next(&mut self) -> Option<Result<TextPiece>> {
        if self.finish.is_some() {
            return None;
        }
        if self.max_tokens == 0 {
            self.finish = Some(Finish::Length);
            return None;
        }
        if self.cancel.load(Ordering::Acquire) {
            self.finish = Some(Finish::Cancelled);
            return None;
        }
        let step = self.step();
        if step.is_err() {
            // The current token may not be in the KV cache.
            self.cached.truncate(self.engine.len(0));
            self.finish = Some(Finish::Cancelled);
        }
        Some(step)
    }
}
