//! What is asked of a [`Batcher`](super::Batcher), and what it says.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use crate::answer::{Finish, TextPiece, TokenCounts};
use crate::answer_rules::AnswerRules;
use crate::constraint::{Cancellation, Grammar};
use crate::generator::GeneratorOptions;
use crate::hyperparameters::Pooling;
use crate::reasoning::{ReasoningFormat, ReasoningSplitter};
use crate::reasoning_budget::{ReasoningBudget, end_of_reasoning};
use crate::sampling::{ChainedHooks, SamplingHook, SamplingOptions};
use crate::template::Message;
#[cfg(feature = "constraint")]
use crate::tool_constraint;
use crate::tools::ToolCallParser;
#[cfg(feature = "constraint")]
use crate::tools::ToolRules;
use crate::{Error, Model, Result};

/// The most log-probabilities that are reported at a token: they are kept for every token of a prompt.
const MAX_LOGPROBS: usize = 1000;

/// A prompt, and what its answer is to be like.
///
/// ```
/// use quadriga_llm::sampling::SamplingOptions;
/// use quadriga_llm::serving::Request;
///
/// let request = Request {
///     sampling: SamplingOptions { temperature: 0.7, seed: 1, ..SamplingOptions::default() },
///     max_tokens: Some(100),
///     stops: vec!["\n\n".to_owned()],
///     ..Request::new(vec![1, 450, 7483])
/// };
/// ```
pub struct Request {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Temperature, top-k, top-p, penalties, seed and other sampling options.
    pub sampling: SamplingOptions,
    /// The largest number of tokens of the answer; limited by the context alone if `None`.
    pub max_tokens: Option<usize>,
    /// Stop strings: the answer ends before the first of them.
    pub stops: Vec<String>,
    /// Which tokens the answer may have, and where else it ends.
    pub rules: AnswerRules,
    /// Sees the logits before each token is sampled, and may change them: for grammars, for example.
    pub hook: Option<Box<dyn SamplingHook>>,
    /// The number of most probable tokens whose log-probabilities are reported beside that of each token; `None`: no
    /// log-probabilities. At most 1,000.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// The prompt is embedded, and nothing is generated: how the vectors of its tokens become one. [`Pooling::Rank`] is for encoders.
    pub embedding: Option<Pooling>,
    /// Whether the embedding keeps its length, and is not divided by it.
    pub keeps_length: bool,
    /// Whether each part of the prompt is reported when it is computed, as [`Event::Progress`].
    pub progress: bool,
    /// Prompts of requests of higher priority are started and computed first.
    pub priority: i32,
    /// Who asks. Among requests of one priority, clients get equal shares.
    pub client: u64,
    /// Requests share prefixes in the KV cache only with those of the same salt.
    pub salt: u64,
    /// Tells reasoning in the answer from the rest.
    pub reasoning: ReasoningSplitter,
    /// Tells calls of tools in the answer from the rest.
    pub tool_calls: Option<ToolCallParser>,
    /// Whether the answer goes on after an end-of-generation token, as benchmarks want it.
    pub past_end: bool,
    /// Ends the compiling of its grammars. A request that was submitted is cancelled by its number.
    pub cancellation: Cancellation,
}

impl Request {
    /// The last message of a conversation, rendered with the model's chat template. Sampling options, stop strings, the largest
    /// number of tokens, grammar, budget of reasoning and all that concerns the template are those of `options`.
    pub fn chat(model: &Model, options: &GeneratorOptions, messages: &[Message]) -> Result<Request> {
        Request::chat_with(model, options, messages, true)
    }

    /// As [`chat`](Self::chat); without generation prompt, the model itself begins the message that follows.
    pub fn chat_with(
        model: &Model,
        options: &GeneratorOptions,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Request> {
        let format = options.format(model);
        let messages = &format.with_tools(messages)?;
        let prompt = format.tokenize(messages, add_generation_prompt)?;
        let opens = !format.is_forged(messages)?;
        let mut request = Request {
            tool_calls: format.tool_call_parser()?,
            sampling: options.sampling.clone(),
            max_tokens: options.max_tokens,
            stops: options.stops.clone(),
            reasoning: format.splitter(&prompt, opens)?,
            ..Request::new(prompt)
        };
        if let Some(grammar) = &options.grammar {
            request.constrain(model, grammar)?;
        }
        if let Some(budget) = options.reasoning_budget {
            request.limit_reasoning(model, budget)?;
        }
        Ok(request)
    }

    /// Keeps the answer within a grammar, from its beginning; after the reasoning, if [`Request::reasoning`] says that the
    /// model may begin with it. Adds to the request's [hook](Request::hook).
    ///
    /// # Errors
    /// [`Error::Grammar`] if the grammar cannot be compiled, [`Error::Cancelled`] if the request was [cancelled](Request::cancellation).
    pub fn constrain(&mut self, model: &Model, grammar: &Grammar) -> Result<()> {
        let (engine, tokenizer) = (model.constraints()?, model.tokenizer()?);
        let constraint = engine.compile_until(grammar, &self.reasoning, tokenizer, &self.cancellation)?;
        self.add_hook(constraint.hook());
        Ok(())
    }

    /// Lets the answer have calls of tools as the rules say, and nothing that is almost one. Adds to the request's
    /// [hook](Request::hook).
    ///
    /// # Errors
    /// [`Error::Grammar`] if the schema of a strict tool or of the answer cannot be compiled, [`Error::Cancelled`] if the request
    /// was [cancelled](Request::cancellation).
    #[cfg(feature = "constraint")]
    pub fn constrain_tools(&mut self, model: &Model, rules: &ToolRules<'_>) -> Result<()> {
        let (hook, tools) = tool_constraint::compile(model, rules, &self.reasoning, &self.cancellation)?;
        let parser = model.tool_call_parser(tools)?;
        self.tool_calls = Some(if hook.is_some() { parser.with_certain_calls() } else { parser });
        if let Some(hook) = hook {
            self.add_hook(hook);
        }
        Ok(())
    }

    /// Ends the answer's reasoning after so many tokens. Call it after the request was constrained.
    pub fn limit_reasoning(&mut self, model: &Model, tokens: usize) -> Result<()> {
        if let Some(hook) = ReasoningBudget::new(model, &self.reasoning, tokens)? {
            self.add_hook(Box::new(hook));
        }
        Ok(())
    }

    /// Has the answer begin without reasoning, where the template cannot be asked for that: the prompt ends with an empty one.
    pub fn skip_reasoning(&mut self, model: &Model) -> Result<()> {
        let Some(text) = self.empty_reasoning() else { return Ok(()) };
        self.prompt.extend(model.tokenizer()?.encode(&text, true));
        self.reasoning = ReasoningSplitter::new(None, false);
        Ok(())
    }

    /// The text that [`Request::skip_reasoning`] adds to the prompt, if it does.
    pub fn empty_reasoning(&self) -> Option<String> {
        let format @ ReasoningFormat::Markers { open, .. } = self.reasoning.format()? else { return None };
        let end = end_of_reasoning(format);
        Some(if self.reasoning.is_open() { end } else { format!("{open}\n{end}") })
    }

    /// Adds a hook after those that there are.
    pub fn add_hook(&mut self, hook: Box<dyn SamplingHook>) {
        self.hook = Some(match self.hook.take() {
            Some(first) => Box::new(ChainedHooks(first, hook)),
            None => hook,
        });
    }

    /// A request with default options.
    pub fn new(prompt: Vec<u32>) -> Request {
        Request {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens: None,
            stops: Vec::new(),
            rules: AnswerRules::default(),
            hook: None,
            logprobs: None,
            prompt_logprobs: None,
            embedding: None,
            keeps_length: false,
            progress: false,
            priority: 0,
            client: 0,
            salt: 0,
            reasoning: ReasoningSplitter::new(None, false),
            tool_calls: None,
            past_end: false,
            cancellation: Cancellation::default(),
        }
    }
}

/// The number of a request, from 1 on, in the order in which they were submitted.
// No request is 0, so that an absent one has a number, too: the compiler may compare both before it looks which there is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub(super) NonZeroU64);

impl RequestId {
    /// Of the request after so many others.
    pub(super) fn after(others: u64) -> RequestId {
        RequestId(NonZeroU64::MIN.saturating_add(others))
    }
}

/// Log-probabilities at one token.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct TokenLogprobs {
    /// That of the token.
    pub logprob: f64,
    /// The token's place among all by their probability, from 1.
    pub rank: usize,
    /// The most probable tokens with theirs, most probable first.
    pub top: Vec<(u32, f64)>,
}

/// Something that happened to a request.
#[derive(Clone, Debug)]
pub enum Event {
    /// A part of the prompt was computed, and that is to be reported. The last one comes before the first token.
    Progress {
        /// Tokens of the prompt that were found in the KV cache.
        cached: usize,
        /// Tokens of the prompt that are in the KV cache now, those included.
        computed: usize,
        /// The time since the first step that computed a part of it began.
        prefill: Duration,
    },
    /// The prompt was computed, and its log-probabilities were asked for: one for each token but the first.
    Prompt {
        /// The log-probabilities.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The prompt was computed, and its embedding was asked for.
    Embedding {
        /// The vector of the text, of length 1 unless it [keeps its own](Request::keeps_length); with [`Pooling::None`] those of all
        /// tokens, one after another.
        vector: Vec<f32>,
    },
    /// A token of the answer.
    Token {
        /// The token and the text that it completes.
        piece: TextPiece,
        /// If they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is complete.
    Finished(Finished),
    /// It cannot be answered. Other requests go on.
    Failed(Arc<Error>),
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Finished {
    /// Why.
    pub finish: Finish,
    /// Tokens of the prompt, of those the ones found in the KV cache, and tokens of the answer.
    pub counts: TokenCounts,
    /// From submission to the first step that computed a part of it.
    pub queued: Duration,
    /// From submission to the first token; to the end if there is none.
    pub first_token: Duration,
    /// From the first token to the last one.
    pub decode: Duration,
    /// Tokens that were guessed, by lookup or a draft model, and checked.
    pub guessed: usize,
    /// Of those, the ones that the model chose, too.
    pub guessed_right: usize,
}

/// Checks that a request can be answered by an engine of this context and vocabulary.
pub(super) fn check(request: &Request, context: usize, vocabulary: usize) -> Result<()> {
    if request.prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    let wanted = request.logprobs.max(request.prompt_logprobs);
    if let Some(top) = wanted.filter(|top| *top > MAX_LOGPROBS) {
        let name = "the number of log-probabilities";
        return Err(Error::Option { name, value: top.to_string(), wanted: "at most 1000" });
    }
    if request.embedding == Some(Pooling::Rank) {
        return Err(Error::NoClassificationHead);
    }
    // A text that is embedded may fill the context.
    let needed = request.prompt.len() + usize::from(request.embedding.is_none());
    if needed > context {
        return Err(Error::ContextFull { wanted: needed, used: 0, context });
    }
    request.rules.check(vocabulary)?;
    match request.prompt.iter().find(|token| **token as usize >= vocabulary) {
        Some(token) => Err(Error::Token { token: *token, count: vocabulary }),
        None => Ok(()),
    }
}
