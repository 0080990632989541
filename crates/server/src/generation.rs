//! One request for text, whatever dialect it came in, and what happens to it.
//!
//! A dialect turns JSON into [`Generation`]s, gives them to [`ServedModel::generate`](crate::model::ServedModel::generate),
//! and writes the [`GenerationEvent`]s of the [`Running`](crate::running::Running) that it gets. Everything that can be wrong
//! with a request is found before that returns, so that no error follows a first byte that could have been known.

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Finished, TokenLogprobs};
use quadriga_llm::template::Message;
use quadriga_llm::{AnswerRules, Finish, TokenCounts};
use serde_json::{Map, Value};

use crate::answer_tokens::{AnswerToken, TokenPart};
use crate::constraint::{Constraint, ToolChoice};
use crate::error::ApiError;
use crate::reasoning_output::ReasoningOutput;

/// What the answer continues.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, rendered with the model's chat template.
    Chat(ChatPrompt),
    /// A text; control tokens that are spelled out become those tokens.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Texts and tokens, one behind the other.
    Mixed(Vec<PromptPart>),
}

impl Prompt {
    /// The bytes of its texts.
    pub(crate) fn bytes(&self) -> usize {
        let part = |part: &PromptPart| match part {
            PromptPart::Text(text) | PromptPart::Plain(text) => text.len(),
            PromptPart::Token(_) => 0,
        };
        match self {
            Prompt::Chat(chat) => chat.messages.iter().map(|message| message.content.len()).sum(),
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(_) => 0,
            Prompt::Mixed(parts) => parts.iter().map(part).sum(),
        }
    }

    /// The number of its tokens that are there already.
    pub(crate) fn listed_tokens(&self) -> usize {
        match self {
            Prompt::Tokens(tokens) => tokens.len(),
            Prompt::Mixed(parts) => parts.iter().filter(|part| matches!(part, PromptPart::Token(_))).count(),
            Prompt::Chat(_) | Prompt::Text(_) => 0,
        }
    }
}

/// A part of a prompt that is made of texts and tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PromptPart {
    /// A text; control tokens that are spelled out become those tokens.
    Text(String),
    /// A text whose control tokens are text.
    Plain(String),
    /// A token.
    Token(u32),
}

/// A conversation, and what its template is given.
#[derive(Clone, Debug, Default)]
pub struct ChatPrompt {
    /// The messages.
    pub messages: Vec<Message>,
    /// Definitions of tools in OpenAI's format, `{"type": "function", "function": {…}}`.
    pub tools: Vec<Value>,
    /// Further keyword arguments of the template.
    pub variables: Map<String, Value>,
    /// Whether the answer continues the last message, which is the assistant's.
    pub continues: bool,
    /// Whether the header of the answer's message is left to the model.
    pub omits_generation_prompt: bool,
    /// Tokens of an earlier prompt and its answer, which the conversation follows.
    pub before: Vec<u32>,
    /// Whether, and how much, the model is to reason.
    pub reasoning: ReasoningEffort,
}

/// How much of a prompt is used, where a request asks that it be cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromptTruncation {
    /// The most tokens of the prompt; as many as the context has beside the answer if `None`.
    pub tokens: Option<usize>,
    /// The side that is kept.
    pub kept: PromptSide,
}

/// A side of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromptSide {
    /// The first tokens.
    Beginning,
    /// The last tokens.
    End,
}

/// Reasoning of any length, also where the server was started with a budget.
pub const NO_BUDGET: usize = usize::MAX;

/// How much a model is to reason before it answers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum ReasoningEffort {
    /// As the server was started, or else as the template does by default.
    #[default]
    Default,
    /// Not at all, if the template can ask for that.
    Off,
    /// Yes, if the template has to be asked for it.
    On,
    /// An effort by name, such as `low`, for templates that know some.
    Named(String),
    /// Nobody asked for reasoning: there is none if the template has a switch for it. A model without one reasons as it always does,
    /// with an effort by name if there is one.
    Unasked(Option<String>),
}

/// A request for text.
#[derive(Clone, Debug)]
pub struct Generation {
    /// What the answer continues.
    pub prompt: Prompt,
    /// Temperature, top-k, top-p, penalties, logit bias and others. Choice `n` has the seed plus `n`.
    pub sampling: SamplingOptions,
    /// The largest number of tokens of an answer; limited by the context alone if `None`.
    pub max_tokens: Option<usize>,
    /// Stop strings: the answer ends before the first of them.
    pub stops: Vec<String>,
    /// The number of answers.
    pub choices: usize,
    /// The number of most probable tokens whose log-probabilities are reported beside that of each token.
    pub logprobs: Option<usize>,
    /// The field that asks for them, for errors.
    pub logprobs_field: &'static str,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Which tokens an answer may have, and where else it ends.
    pub rules: AnswerRules,
    /// How much of the prompt is used; a prompt that is too long is an error if `None`.
    pub truncation: Option<PromptTruncation>,
    /// Whether a prompt that begins with text gets the tokens that begin one.
    pub special_tokens: bool,
    /// Prefixes in the KV cache are shared with requests of the same salt.
    pub cache_salt: u64,
    /// The form that the answer must have.
    pub constraint: Constraint,
    /// The field that asks for it, for errors.
    pub constraint_field: Option<&'static str>,
    /// Which of the tools may or must be called.
    pub tool_choice: ToolChoice,
    /// Whether an answer may call several tools.
    pub parallel_tool_calls: bool,
    /// The most tokens of reasoning, [`NO_BUDGET`] for any number; as the server was started if `None`.
    pub reasoning_budget: Option<usize>,
    /// Where the reasoning is in the answer; as the server's flag says if `None`.
    pub reasoning_output: Option<ReasoningOutput>,
    /// The slot that the answer is to have, if it is free then.
    pub slot: Option<usize>,
    /// Requests of higher priority are started first.
    pub priority: i32,
    /// Whether the prompt's beginning may be found in the KV cache, and be found there by others.
    pub shares_prefix: bool,
    /// Whether each part of the prompt is reported when it is computed.
    pub progress: bool,
    /// Whether the answers are streamed while they are generated, and not collected until they are complete.
    pub streamed: bool,
}

impl Generation {
    /// A request with default options.
    pub fn new(prompt: Prompt) -> Generation {
        Generation {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens: None,
            stops: Vec::new(),
            choices: 1,
            logprobs: None,
            logprobs_field: "top_logprobs",
            prompt_logprobs: None,
            rules: AnswerRules::default(),
            truncation: None,
            special_tokens: true,
            cache_salt: 0,
            constraint: Constraint::None,
            constraint_field: None,
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            reasoning_budget: None,
            reasoning_output: None,
            slot: None,
            priority: 0,
            shares_prefix: true,
            progress: false,
            streamed: false,
        }
    }
}

/// A part of a call of a tool.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ToolCallPiece {
    /// The number of the call in its answer, from 0.
    pub index: usize,
    /// The call's identifier and the function's name, in its first piece.
    pub head: Option<(String, String)>,
    /// The next part of the arguments' JSON text.
    pub arguments: String,
}

/// A token of an answer and the text that it completes.
#[derive(Clone, PartialEq, Debug)]
pub struct Delta {
    /// The number of the answer, from 0. Of several prompts, the first has the first numbers.
    pub choice: usize,
    /// The token.
    pub token: u32,
    /// Text of the answer; often a word, or nothing.
    pub text: String,
    /// Text of the reasoning before it.
    pub reasoning: String,
    /// Parts of calls of tools.
    pub tool_calls: Vec<ToolCallPiece>,
    /// The tokens of which it is known now what they were for. All that have a part in the text are among them; others follow
    /// later, and those of a stop string never.
    pub tokens: Vec<AnswerToken>,
    /// The slot of the answer.
    pub slot: usize,
}

/// A part of an answer, in the order of generation.
#[derive(Clone, PartialEq, Debug)]
pub enum AnswerPart {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text of the answer.
    Text(String),
    /// A part of a call of a tool.
    ToolCall(ToolCallPiece),
}

impl Delta {
    /// The parts in their order: the call that was begun before is completed before text follows it, and text comes before the
    /// calls that begin.
    pub fn parts(&self) -> Vec<AnswerPart> {
        let continued = self.tool_calls.iter().take_while(|piece| piece.head.is_none()).count();
        let (continued, begun) = self.tool_calls.split_at(continued);
        let calls = |pieces: &[ToolCallPiece]| -> Vec<AnswerPart> {
            pieces.iter().cloned().map(AnswerPart::ToolCall).collect()
        };
        let texts = [AnswerPart::Reasoning(self.reasoning.clone()), AnswerPart::Text(self.text.clone())];
        let is_filled = |part: &AnswerPart| match part {
            AnswerPart::Reasoning(text) | AnswerPart::Text(text) => !text.is_empty(),
            AnswerPart::ToolCall(_) => true,
        };
        calls(continued).into_iter().chain(texts).chain(calls(begun)).filter(is_filled).collect()
    }
}

/// A section of a complete answer.
#[derive(Clone, PartialEq, Debug)]
pub enum AnswerSection {
    /// Reasoning.
    Reasoning(String),
    /// Text.
    Text {
        /// The text.
        text: String,
        /// How many of the answer's tokens are in it.
        tokens: usize,
    },
    /// The call of this number.
    ToolCall(usize),
}

impl AnswerSection {
    /// Adds a part to the sections that it belongs to.
    pub(crate) fn add(sections: &mut Vec<AnswerSection>, part: AnswerPart) {
        match (sections.last_mut(), part) {
            (Some(AnswerSection::Reasoning(text)), AnswerPart::Reasoning(more))
            | (Some(AnswerSection::Text { text, .. }), AnswerPart::Text(more)) => text.push_str(&more),
            (_, AnswerPart::Reasoning(text)) => sections.push(AnswerSection::Reasoning(text)),
            (_, AnswerPart::Text(text)) => sections.push(AnswerSection::Text { text, tokens: 0 }),
            (_, AnswerPart::ToolCall(piece)) if piece.head.is_some() => {
                sections.push(AnswerSection::ToolCall(piece.index));
            }
            (_, AnswerPart::ToolCall(_)) => {}
        }
    }
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub struct Done {
    /// The number of the answer.
    pub choice: usize,
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt, of those the ones found in the KV cache, and tokens of the answer.
    pub counts: TokenCounts,
    /// Of the answer's tokens, those of reasoning.
    pub reasoning_tokens: usize,
    /// When it was started, and how long it took.
    pub times: Finished,
    /// The last tokens, which no [`Delta`] has.
    pub tokens: Vec<AnswerToken>,
    /// The slot of the answer.
    pub slot: usize,
}

/// Why an answer ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model ended it.
    End,
    /// This stop string was found; `None` if the request has none of this number.
    Stop(Option<String>),
    /// This stop token was sampled.
    StopToken(u32),
    /// It has the largest number of tokens.
    Length,
    /// The context is full.
    Context,
    /// The model called tools.
    ToolCalls,
}

impl FinishReason {
    pub(crate) fn new(finished: &Finished, stops: &[String]) -> FinishReason {
        match finished.finish {
            Finish::End | Finish::Cancelled => FinishReason::End,
            Finish::Stop(number) => FinishReason::Stop(stops.get(number).cloned()),
            Finish::StopToken(token) => FinishReason::StopToken(token),
            Finish::Length => FinishReason::Length,
            Finish::Context => FinishReason::Context,
        }
    }
}

/// Something that happened to a request.
#[derive(Clone, Debug)]
pub enum GenerationEvent {
    /// A part of a prompt was computed, if that was asked for. The last one comes before the first token.
    Progress {
        /// The first choice of the prompt.
        choice: usize,
        /// Tokens of the prompt that were found in the KV cache.
        cached: usize,
        /// Tokens of the prompt that are in the KV cache now, those included.
        computed: usize,
        /// The slot of the answer.
        slot: usize,
    },
    /// The log-probabilities of a prompt's tokens, for each but the first, if they were asked for.
    PromptLogprobs {
        /// The first choice of the prompt.
        choice: usize,
        /// The log-probabilities.
        logprobs: Vec<TokenLogprobs>,
    },
    /// A token of an answer.
    Delta(Delta),
    /// An answer is complete.
    Done(Done),
    /// The request failed; nothing follows.
    Failed(ApiError),
}

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The text.
    pub text: String,
    /// The model's reasoning.
    pub reasoning: String,
    /// Calls of tools.
    pub tool_calls: Vec<WholeToolCall>,
    /// Reasoning, text and calls in the order of generation.
    pub sections: Vec<AnswerSection>,
    /// The tokens, with log-probabilities if they were asked for. Those of a stop string are left out.
    pub tokens: Vec<AnswerToken>,
    /// Log-probabilities of the prompt, for each token but the first, if they were asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// All tokens that were generated.
    pub generated: Vec<u32>,
    /// Whether control tokens are in the text, by their names.
    pub control_text: bool,
    /// How it ended.
    pub done: Done,
}

impl Choice {
    /// The tokens of the text.
    pub fn text_tokens(&self) -> impl Iterator<Item = &AnswerToken> {
        self.tokens.iter().filter(|token| token.part == TokenPart::Text)
    }

    /// Whether log-probabilities were asked for.
    pub fn has_logprobs(&self) -> bool {
        self.tokens.iter().any(|token| token.logprobs.is_some())
    }
}

/// A call of a tool.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct WholeToolCall {
    /// The call's identifier.
    pub id: String,
    /// The name of the function.
    pub name: String,
    /// The JSON text of its arguments.
    pub arguments: String,
}

impl WholeToolCall {
    /// Adds pieces to the calls that they belong to.
    pub fn add(calls: &mut Vec<WholeToolCall>, pieces: Vec<ToolCallPiece>) {
        for piece in pieces {
            if calls.len() <= piece.index {
                calls.resize_with(piece.index + 1, WholeToolCall::default);
            }
            let Some(call) = calls.get_mut(piece.index) else { continue };
            if let Some((id, name)) = piece.head {
                (call.id, call.name) = (id, name);
            }
            call.arguments.push_str(&piece.arguments);
        }
    }
}
