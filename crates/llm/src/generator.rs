//! Text generation: prompts and conversations in, text out.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use quadriga_runtime::{Detail, Progress, Scheduler};

use crate::answer::{Answer, AnswerProgress, Finish, TokenCounts};
use crate::answer_text::AnswerText;
use crate::constraint::Grammar;
use crate::engine::{BatchObserver, BatchToken, Engine, EngineOptions};
use crate::placement::Placement;
use crate::prompt_format::PromptFormat;
use crate::reasoning::ReasoningSplitter;
use crate::reasoning_budget::ReasoningBudget;
use crate::sampling::{ChainedHooks, Sampler, SamplingHook, SamplingOptions};
use crate::template::Message;
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
    /// What answers must be: JSON of a schema, for example. Reasoning before the answer is free.
    pub grammar: Option<Grammar>,
    /// The most tokens of an answer's reasoning, which is ended then; not limited if `None`.
    pub reasoning_budget: Option<usize>,
    /// Whether prompts are used as they are, without the chat template.
    pub raw: bool,
    /// The system prompt, for chat templates that have one and conversations that do not begin with a system message.
    pub system: Option<String>,
    /// Keyword arguments of the chat template, such as `enable_thinking`, and the list `tools`. See
    /// [`TemplateArguments::variables`](crate::template::TemplateArguments::variables).
    pub template_variables: serde_json::Map<String, serde_json::Value>,
    /// Whether control tokens that are spelled out in messages become those tokens, as if every message were
    /// [trusted](Message::trusted). Without it, they are text, also with `raw`.
    pub special: bool,
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
    cancel: Arc<AtomicBool>,
    prefill_observer: Option<PrefillObserver>,
}

/// What is known of the end of a prompt.
struct PromptEnd {
    /// The number of tokens that the next prompt of the conversation will begin with, too.
    lasting: Option<usize>,
    /// Whether a marker of reasoning at the end begins reasoning. One that a user wrote does not.
    opens: bool,
}

/// A function that is called after each batch of a prompt that needs several.
pub type PrefillObserver = Box<dyn FnMut(PrefillProgress) + Send>;

/// How far the prefill of a prompt is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefillProgress {
    /// Tokens computed so far.
    pub done: usize,
    /// Tokens to compute: those of the prompt that were not in the KV cache.
    pub total: usize,
}

/// The options of one request: what an answer is to be like.
///
/// ```no_run
/// use quadriga_llm::RequestOptions;
/// use quadriga_llm::sampling::SamplingOptions;
///
/// # fn example(generator: &mut quadriga_llm::Generator) -> Result<(), quadriga_llm::Error> {
/// let request = RequestOptions {
///     sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
///     max_tokens: Some(20),
///     // No token twice in a row.
///     hook: Some(Box::new(|tokens: &[u32], logits: &mut [f32]| {
///         if let Some(logit) = tokens.last().and_then(|last| logits.get_mut(*last as usize)) {
///             *logit = f32::NEG_INFINITY;
///         }
///     })),
///     ..generator.request_options()
/// };
/// let answer = generator.answer_with("Name a planet.", request)?.complete()?;
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct RequestOptions {
    /// Temperature, top-k, top-p, penalties, logit bias and other sampling options.
    pub sampling: SamplingOptions,
    /// Whether the random numbers start anew with the seed of `sampling`. Otherwise they continue from the previous
    /// answer, and a prompt that is sent again gets another answer.
    pub reseed: bool,
    /// The largest number of tokens of the answer; limited by the context alone if `None`.
    pub max_tokens: Option<usize>,
    /// Stop strings: the answer ends before the first of them.
    pub stops: Vec<String>,
    /// What the answer must be: JSON of a schema, for example. Reasoning before the answer is free.
    pub grammar: Option<Grammar>,
    /// The most tokens of the answer's reasoning, which is ended then; not limited if `None`.
    pub reasoning_budget: Option<usize>,
    /// Sees the logits before each token is sampled, and may change them.
    pub hook: Option<Box<dyn SamplingHook>>,
}

impl GeneratorOptions {
    /// How prompts for a model are written.
    pub(crate) fn format<'a>(&'a self, model: &'a Model) -> PromptFormat<'a> {
        let GeneratorOptions { raw, special, system, template_variables, .. } = self;
        PromptFormat { model, raw: *raw, special: *special, system: system.as_deref(), template_variables }
    }
}

impl Generator {
    /// A generator on the devices of [`GeneratorOptions::placement`]: by default the first GPU, for as many layers as
    /// fit, and the CPU.
    pub fn new(model: Model, mut options: GeneratorOptions) -> Result<Generator> {
        options.sampling.check()?;
        options.engine.greedy = options.sampling.is_greedy();
        let devices = options.placement.open_devices()?;
        let placed = options.placement.plan(&model, &devices, &options.engine)?;
        options.engine = placed.engine_options(&options.engine);
        Generator::on(model, &placed.scheduler, options, &mut |_| {})
    }

    /// A generator on a scheduler's backends; `progress` is called while the weights are loaded.
    pub fn on(
        model: Model,
        scheduler: &Scheduler,
        mut options: GeneratorOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Generator> {
        let sampler = Sampler::for_model(options.sampling.clone(), &model)?;
        options.engine.greedy = options.sampling.is_greedy();
        let engine = Engine::new(model, scheduler, options.engine.clone(), progress)?;
        Ok(Generator { engine, options, sampler, cancel: Arc::default(), prefill_observer: None })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine. The generator uses its sequence 0; tokens that are there when a prompt begins with them are not
    /// computed again.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Writes the tokens of the latest prompt and its answer, with their KV cache. See [`Engine::save_state`].
    pub fn save_state(&mut self, writer: &mut dyn Write) -> Result<()> {
        self.engine.save_state(0, writer)
    }

    /// Restores what [`Generator::save_state`] has written: a prompt that begins with the same tokens does not compute
    /// them again. See [`Engine::load_state`].
    pub fn load_state(&mut self, reader: &mut dyn Read) -> Result<()> {
        self.engine.load_state(0, reader)
    }

    /// Sets the observer of all batches from now on; `None` removes it. See [`Engine::observe`].
    pub fn observe(&mut self, observer: Option<(Detail, BatchObserver)>) {
        self.engine.observe(observer);
    }

    /// Sets the observer of the prefill of long prompts from now on; `None` removes it.
    pub fn observe_prefill(&mut self, observer: Option<PrefillObserver>) {
        self.prefill_observer = observer;
    }

    /// Sets the keyword arguments of the chat template from now on. See [`GeneratorOptions::template_variables`].
    pub fn set_template_variables(&mut self, variables: serde_json::Map<String, serde_json::Value>) {
        self.options.template_variables = variables;
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
    /// of the messages' plain text. Control tokens that are spelled out in a message are text, unless it is
    /// [trusted](Message::trusted) or [`GeneratorOptions::special`] is set.
    pub fn tokenize(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let format = self.format();
        format.tokenize(&format.with_tools(messages)?, true)
    }

    fn format(&self) -> PromptFormat<'_> {
        self.options.format(self.engine.model())
    }

    /// Request options with the generator's own sampling options, largest number of tokens, stop strings and grammar.
    pub fn request_options(&self) -> RequestOptions {
        RequestOptions {
            sampling: self.options.sampling.clone(),
            reseed: false,
            max_tokens: self.options.max_tokens,
            stops: self.options.stops.clone(),
            grammar: self.options.grammar.clone(),
            reasoning_budget: self.options.reasoning_budget,
            hook: None,
        }
    }

    /// Answers one prompt.
    pub fn answer(&mut self, prompt: &str) -> Result<Answer<'_>> {
        self.answer_with(prompt, self.request_options())
    }

    /// Answers one prompt, with options for this request.
    pub fn answer_with(&mut self, prompt: &str, request: RequestOptions) -> Result<Answer<'_>> {
        self.chat_with(&[Message::new("user", prompt)], request)
    }

    /// Answers the last message of a conversation.
    pub fn chat(&mut self, messages: &[Message]) -> Result<Answer<'_>> {
        self.chat_with(messages, self.request_options())
    }

    /// Answers the last message of a conversation, with options for this request.
    pub fn chat_with(&mut self, messages: &[Message], request: RequestOptions) -> Result<Answer<'_>> {
        let messages = &self.format().with_tools(messages)?;
        let tokens = self.format().tokenize(messages, true)?;
        // The next prompt has the answer in place of the template's beginning of one, which may be more than its header:
        // models that forget must be able to return to where these part.
        let lasting = match self.engine.options().checkpoints {
            0 => None,
            _ => self.format().tokenize(messages, false).ok().map(|history| common(&tokens, &history)),
        };
        let opens = !self.format().is_forged(messages)?;
        self.start(&tokens, request, PromptEnd { lasting, opens })
    }

    /// Continues a prompt of tokens. The prefix that is in the KV cache is not computed again. If the prefill is
    /// cancelled, the answer has ended already, and the batches that were computed stay in the KV cache.
    pub fn continue_tokens(&mut self, tokens: &[u32]) -> Result<Answer<'_>> {
        self.continue_with(tokens, self.request_options())
    }

    /// As [`Generator::continue_tokens`], with options for this request.
    pub fn continue_with(&mut self, tokens: &[u32], request: RequestOptions) -> Result<Answer<'_>> {
        self.start(tokens, request, PromptEnd { lasting: None, opens: true })
    }

    /// The hook of an answer with a grammar, and with a budget of reasoning, which sees what the grammar leaves.
    fn constrained(
        &self,
        grammar: Option<Grammar>,
        budget: Option<usize>,
        splitter: &ReasoningSplitter,
        hook: Option<Box<dyn SamplingHook>>,
    ) -> Result<Option<Box<dyn SamplingHook>>> {
        let (model, mut hook) = (self.engine.model(), hook);
        let mut add = |next: Box<dyn SamplingHook>| {
            hook = Some(match hook.take() {
                Some(first) => Box::new(ChainedHooks(first, next)),
                None => next,
            });
        };
        if let Some(grammar) = grammar {
            add(model.constraints()?.compile_answer(&grammar, splitter, model.tokenizer()?)?.hook());
        }
        if let Some(budget) = budget
            && let Some(limit) = ReasoningBudget::new(model, splitter, budget)?
        {
            add(Box::new(limit));
        }
        Ok(hook)
    }

    fn start(&mut self, tokens: &[u32], request: RequestOptions, end: PromptEnd) -> Result<Answer<'_>> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let context = self.engine.options().context;
        if tokens.len() >= context {
            return Err(Error::ContextFull { wanted: tokens.len() + 1, used: 0, context });
        }
        let RequestOptions { sampling, reseed, max_tokens, stops, grammar, reasoning_budget, hook } = request;
        let splitter = self.format().splitter(tokens, end.opens)?;
        let hook = self.constrained(grammar, reasoning_budget, &splitter, hook)?;
        let tool_calls = self.format().tool_call_parser()?;
        let greedy = sampling.is_greedy() && hook.is_none();
        let mut sampler = Sampler::for_model(sampling, self.engine.model())?;
        if !reseed {
            sampler.set_random_state(self.sampler.random_state());
        }
        tokens.iter().for_each(|token| sampler.accept(*token));
        self.sampler = sampler;
        self.cancel.store(false, Ordering::Release);
        let common = common(self.engine.tokens(0), tokens);
        // The last token's logits are needed, so it is computed in any case.
        let kept = self.engine.truncate(0, common.min(tokens.len() - 1));
        let started = Instant::now();
        let lasting = end.lasting.and_then(|lasting| lasting.checked_sub(kept)).unwrap_or(0);
        let whole = self.compute_prompt(tokens.get(kept..).unwrap_or_default(), lasting, greedy)?;
        let counts = TokenCounts { prompt: self.engine.len(0), cached: kept, ..TokenCounts::default() };
        let finish = (!whole).then_some(Finish::Cancelled);
        let Generator { engine, sampler, cancel, .. } = self;
        let model = engine.model().clone();
        let progress = AnswerProgress::new(
            AnswerText::new(stops, splitter, tool_calls),
            max_tokens,
            counts,
            started.elapsed(),
            finish,
        );
        Ok(Answer { engine, cancel, model, sampler, hook, progress })
    }
}

impl Generator {
    /// Prefill, and the wait for it. The next prompt is expected to begin with the first `lasting` tokens. False if it was
    /// cancelled between two batches.
    fn compute_prompt(&mut self, tokens: &[u32], lasting: usize, greedy: bool) -> Result<bool> {
        self.engine.set_greedy(greedy)?;
        let whole = match tokens.split_last() {
            // Models that forget can return to the end of the conversation so far, to where the next prompt parts from this
            // one, and to the end of this prompt: the last token is computed again then.
            Some((last, before)) if self.engine.options().checkpoints > 0 && !before.is_empty() => {
                let (first, second) = before.split_at_checked(lasting).unwrap_or((before, &[]));
                let mut whole = true;
                for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
                    self.engine.checkpoint(0)?;
                    whole = whole && self.prefill(part, false)?;
                }
                if whole {
                    self.engine.checkpoint(0)?;
                }
                whole && self.prefill(&[*last], true)?
            }
            _ => self.prefill(tokens, true)?,
        };
        self.engine.wait()?;
        Ok(whole)
    }

    /// Prefill: appends a prompt batch by batch, with an output after the last token if it is wanted. False if it was
    /// cancelled between two batches.
    fn prefill(&mut self, tokens: &[u32], output: bool) -> Result<bool> {
        let batch_size = self.engine.options().batch.max(1);
        let batches = tokens.len().div_ceil(batch_size);
        let (mut done, total) = (0, tokens.len());
        for (i, tokens) in tokens.chunks(batch_size).enumerate() {
            if self.cancel.load(Ordering::Acquire) {
                return Ok(false);
            }
            // Only the logits after the last token are needed.
            let last = if output && i + 1 == batches { tokens.len() } else { 0 };
            let batch: Vec<BatchToken> = tokens
                .iter()
                .zip(1..)
                .map(|(token, count)| BatchToken { sequence: 0, token: *token, output: count == last })
                .collect();
            self.engine.extend(&batch)?;
            done += tokens.len();
            if let Some(observer) = self.prefill_observer.as_mut().filter(|_| batches > 1) {
                observer(PrefillProgress { done, total });
            }
        }
        Ok(true)
    }
}

/// The length of the common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
