//! From a [`Generation`] to the requests of the engine: the prompt is rendered and tokenized, and everything is checked.

use quadriga_llm::constraint::Cancellation;
use quadriga_llm::reasoning::{ReasoningFormat, ReasoningSplitter};
use quadriga_llm::serving::Request;
use quadriga_llm::template::{Message, TemplateArguments};
use quadriga_llm::{Error, GeneratorOptions};
use serde_json::Value;

use crate::call::random_seed;
use crate::constraint::Constraint;
use crate::error::ApiError;
use crate::generation::{ChatPrompt, Generation, Prompt, PromptPart, PromptSide, ReasoningEffort};
use crate::hooks;
use crate::model::ServedModel;
use crate::reasoning_default;
use crate::reasoning_output::{ReasoningOutput, ReasoningPlace};

/// The most answers of one request.
pub(crate) const MAX_CHOICES: usize = 128;

/// The requests of one [`Generation`], one for each choice.
pub(crate) struct Prepared {
    pub(crate) requests: Vec<Request>,
    pub(crate) stops: Vec<String>,
    pub(crate) prompt: Vec<u32>,
    /// Where the reasoning of answers is put.
    pub(crate) reasoning: ReasoningPlace,
    /// The slot that answers would rather have.
    pub(crate) slot: Option<usize>,
    /// Whether answers are streamed while they are generated.
    pub(crate) streamed: bool,
}

/// The most bytes of what each answer has a copy of, for all answers of a request together: stop strings, logit biases, forms.
pub(crate) const MAX_COPIES: usize = 16 << 20;

/// Refuses more answers than can run and wait together, before anything is made for each of them.
pub(crate) fn check_answers(served: &ServedModel, generations: &[Generation]) -> Result<(), ApiError> {
    let Some(first) = generations.first() else { return Ok(()) };
    check_count(served, first, generations.len())
}

/// The same for the prompts of one request, none of which is longer than the context unless it may be cut: nothing is made of them
/// before that is known.
pub(crate) fn check_prompts(
    served: &ServedModel,
    generation: &Generation,
    prompts: &[Prompt],
) -> Result<(), ApiError> {
    check_count(served, generation, prompts.len())?;
    match generation.truncation {
        None => prompts.iter().try_for_each(|prompt| check_length(served, prompt)),
        Some(_) => Ok(()),
    }
}

/// Refuses a prompt that is longer than the context whatever its tokens are.
fn check_length(served: &ServedModel, prompt: &Prompt) -> Result<(), ApiError> {
    served.check_length(prompt.bytes())?;
    let (wanted, context) = (prompt.listed_tokens(), served.context());
    match wanted >= context {
        true => Err(Error::ContextFull { wanted, used: 0, context }.into()),
        false => Ok(()),
    }
}

fn check_count(served: &ServedModel, generation: &Generation, prompts: usize) -> Result<(), ApiError> {
    let field = if prompts > 1 { "prompt" } else { "n" };
    let answers = prompts.saturating_mul(generation.choices);
    let most = served.options.queue.saturating_add(served.options.engine.sequences);
    if answers > most {
        let problem = format!("asks for {answers} answers; at most {most} can run and wait (--queue)");
        return Err(ApiError::field(field, problem));
    }
    let sampling = &generation.sampling;
    let texts = generation.stops.iter().chain(&sampling.dry.sequence_breakers);
    let texts: usize = texts.map(|text| text.len() + size_of::<String>()).sum();
    let copied = texts + sampling.logit_bias.len() * size_of::<(u32, f32)>() + generation.rules.bytes();
    // Each prompt has a copy of the form, until it is compiled.
    let form = if prompts > 1 { generation.constraint.bytes() } else { 0 };
    let all = answers.saturating_mul(copied).saturating_add(prompts.saturating_mul(form));
    if answers > 1 && all > MAX_COPIES {
        let problem = format!(
            "asks for {answers} answers with {} bytes of stop strings, lists of tokens, logit biases and schemas or grammars each; ask for fewer, or use shorter ones",
            copied + form
        );
        return Err(ApiError::field(field, problem));
    }
    Ok(())
}

/// Renders, tokenizes and checks.
pub(crate) fn rendered(served: &ServedModel, mut generation: Generation) -> Result<Rendered, ApiError> {
    if let (Constraint::None, Some(grammar)) = (&generation.constraint, &served.defaults.grammar) {
        (generation.constraint, generation.constraint_field) = (grammar.into(), None);
    }
    reasoning_default::fill_in(served, &mut generation);
    generation.sampling.check()?;
    if generation.choices == 0 || generation.choices > MAX_CHOICES {
        return Err(ApiError::field("n", format!("must be from 1 to {MAX_CHOICES}")));
    }
    hooks::check_tools(&generation)?;
    check_bias(served, &generation)?;
    let context = served.context();
    if generation.truncation.is_none() {
        // What is before the text, and tokens among texts, do not make it shorter.
        check_length(served, &generation.prompt)?;
    }
    let first = render(served, &generation)?;
    check_tokens(served, &generation, &first.prompt)?;
    if first.prompt.len() >= context {
        return Err(Error::ContextFull { wanted: first.prompt.len(), used: 0, context }.into());
    }
    Ok(Rendered { generation, first })
}

/// A [`Generation`] whose prompt is tokenized and whose grammars are not compiled.
pub(crate) struct Rendered {
    generation: Generation,
    first: Request,
}

impl Rendered {
    /// The request, and the tokens of its prompt.
    pub(crate) fn generation(&self) -> (&Generation, usize) {
        (&self.generation, self.first.prompt.len())
    }

    /// The requests, if no grammar has to be compiled for them.
    pub(crate) fn known(&self, served: &ServedModel, client: u64) -> Result<Option<Prepared>, ApiError> {
        // Grammars that were compiled before are found nevertheless.
        let nothing = Cancellation::default();
        nothing.cancel();
        self.requests(served, client, &nothing)
    }

    /// The requests. Grammars are compiled as long as that is not cancelled.
    pub(crate) fn compiled(
        &self,
        served: &ServedModel,
        client: u64,
        cancellation: &Cancellation,
    ) -> Result<Prepared, ApiError> {
        self.requests(served, client, cancellation)?.ok_or_else(|| Error::Cancelled.into())
    }

    /// The requests; none if it was cancelled.
    fn requests(
        &self,
        served: &ServedModel,
        client: u64,
        cancellation: &Cancellation,
    ) -> Result<Option<Prepared>, ApiError> {
        let Rendered { generation, first } = self;
        let salt = random_seed() | 1;
        let request = |choice: usize| -> Result<Option<Request>, ApiError> {
            let mut sampling = generation.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(choice as u64);
            let mut request = Request {
                sampling,
                max_tokens: generation.max_tokens,
                stops: generation.stops.clone(),
                logprobs: generation.logprobs,
                // The choices have one prompt.
                prompt_logprobs: generation.prompt_logprobs.filter(|_| choice == 0),
                rules: generation.rules.clone(),
                progress: generation.progress && choice == 0,
                salt: if generation.shares_prefix { generation.cache_salt } else { salt },
                priority: generation.priority,
                client,
                reasoning: first.reasoning.clone(),
                cancellation: cancellation.clone(),
                ..Request::new(first.prompt.clone())
            };
            Ok(hooks::constrain(&served.model, generation, &mut request)?.then_some(request))
        };
        let requests = (0..generation.choices).map(request).collect::<Result<Option<Vec<_>>, _>>()?;
        let output = generation.reasoning_output.unwrap_or(match served.reasoning_output {
            // Only chat completions have a place for both.
            ReasoningOutput::Both => ReasoningOutput::Apart,
            output => output,
        });
        let reasoning = ReasoningPlace::new(output, first.reasoning.format());
        let (stops, prompt) = (generation.stops.clone(), first.prompt.clone());
        let (slot, streamed) = (generation.slot, generation.streamed);
        Ok(requests.map(|requests| Prepared { requests, stops, prompt, reasoning, slot, streamed }))
    }
}

/// The engine refuses these, too, but does not know the field.
fn check_tokens(served: &ServedModel, generation: &Generation, prompt: &[u32]) -> Result<(), ApiError> {
    let field = match &generation.prompt {
        Prompt::Chat(chat) if chat.before.is_empty() => "messages",
        Prompt::Chat(_) => "context",
        Prompt::Text(_) | Prompt::Tokens(_) | Prompt::Mixed(_) => "prompt",
    };
    if prompt.is_empty() {
        return Err(ApiError::from(Error::EmptyPrompt).at(field));
    }
    let count = served.model.hyperparameters().vocabulary;
    match prompt.iter().find(|token| **token as usize >= count) {
        Some(token) => Err(unknown_token(field, *token, count)),
        None => Ok(()),
    }
}

/// The error of a field with a token that the vocabulary lacks.
pub(crate) fn unknown_token(field: &str, token: u32, count: usize) -> ApiError {
    ApiError::field(field, format!("has the token {token}; the vocabulary has {count}"))
}

/// A bias that bans every token leaves none to sample.
fn check_bias(served: &ServedModel, generation: &Generation) -> Result<(), ApiError> {
    let banned = generation.sampling.logit_bias.values().filter(|bias| **bias == f32::NEG_INFINITY).count();
    match banned > 0 && banned >= served.model.hyperparameters().vocabulary {
        true => Err(ApiError::field("logit_bias", "bans every token of the vocabulary")),
        false => Ok(()),
    }
}

/// The tokens of a prompt.
pub(crate) fn tokens(served: &ServedModel, mut generation: Generation) -> Result<Vec<u32>, ApiError> {
    reasoning_default::fill_in(served, &mut generation);
    Ok(render(served, &generation)?.prompt)
}

/// A request with the prompt and with what tells reasoning in its answer from the rest.
fn render(served: &ServedModel, generation: &Generation) -> Result<Request, ApiError> {
    let begins = generation.special_tokens;
    let mut request = match &generation.prompt {
        Prompt::Chat(chat) => render_chat(served, chat, hooks::uses_tools(generation))?,
        Prompt::Text(text) => Request::new(mixed(served, &[PromptPart::Text(text.clone())], begins)?),
        Prompt::Tokens(tokens) => Request::new(tokens.clone()),
        Prompt::Mixed(parts) => Request::new(mixed(served, parts, begins)?),
    };
    if let Some(truncation) = generation.truncation {
        let room = served.context().saturating_sub(generation.max_tokens.unwrap_or(1).max(1)).max(1);
        truncate(&mut request, truncation.kept, truncation.tokens.unwrap_or(room));
    }
    Ok(request)
}

/// Keeps so many tokens of a prompt.
fn truncate(request: &mut Request, kept: PromptSide, tokens: usize) {
    let Some(cut) = request.prompt.len().checked_sub(tokens).filter(|cut| *cut > 0) else { return };
    match kept {
        PromptSide::End => drop(request.prompt.drain(..cut)),
        PromptSide::Beginning => {
            request.prompt.truncate(tokens);
            // Whatever the template began at the end is not there any more.
            request.reasoning = ReasoningSplitter::new(None, false);
        }
    }
}

/// The tokens of texts and tokens; a text that comes first begins a prompt, if that is wanted.
fn mixed(served: &ServedModel, parts: &[PromptPart], begins: bool) -> Result<Vec<u32>, ApiError> {
    let mut tokens = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        match part {
            PromptPart::Token(token) => tokens.push(*token),
            PromptPart::Text(text) if number == 0 && begins => {
                tokens = served.model.tokenizer()?.encode_prompt(text, true);
            }
            PromptPart::Text(text) => tokens.extend(served.model.tokenizer()?.encode(text, true)),
            PromptPart::Plain(text) => tokens.extend(served.model.tokenizer()?.encode(text, false)),
        }
    }
    Ok(tokens)
}

/// The text of a conversation, rendered with the model's chat template.
pub(crate) fn text(served: &ServedModel, mut generation: Generation) -> Result<String, ApiError> {
    reasoning_default::fill_in(served, &mut generation);
    let Prompt::Chat(chat) = &generation.prompt else { return Ok(String::new()) };
    let Some(template) = served.model.template() else {
        return Err(ApiError::invalid("the model has no chat template"));
    };
    let options = options(served, chat, hooks::uses_tools(&generation));
    let (last, before) = match chat.messages.split_last().filter(|_| chat.continues) {
        Some((last, before)) => (last.content.as_str(), before),
        None => ("", chat.messages.as_slice()),
    };
    let own = before.first().is_none_or(|message| message.role != "system");
    let system = options.system.clone().filter(|_| own).map(|text| Message::new("system", text));
    let messages: Vec<Message> = system.into_iter().chain(before.iter().cloned()).collect();
    let mut messages = template.fitted(&messages);
    // As the requests of a chat are made.
    let tools = options.template_variables.get("tools").and_then(Value::as_array);
    let is_call = |message: &Message| message.role == "tool" || !message.tool_calls.is_empty();
    if tools.is_some_and(|tools| !tools.is_empty()) || messages.iter().any(is_call) {
        let tools = tools.map_or(&[][..], Vec::as_slice);
        messages = template.fitted(&served.model.tool_format()?.conversation(&messages, tools));
    }
    let mut skipped = None;
    if is_off(served, chat) && !chat.continues && !chat.omits_generation_prompt {
        let request = Request::chat(&served.model, &options, &chat.messages)?;
        skipped = request.empty_reasoning().filter(|_| reasons_anyway(served, &request));
    }
    let arguments = TemplateArguments {
        variables: options.template_variables,
        add_generation_prompt: !chat.omits_generation_prompt,
    };
    Ok(template.render_with(&messages, &arguments)? + &skipped.unwrap_or_default() + last)
}

fn render_chat(served: &ServedModel, chat: &ChatPrompt, uses_tools: bool) -> Result<Request, ApiError> {
    let mut request = render_messages(served, chat, uses_tools)?;
    if !chat.before.is_empty() {
        let bos = served.model.tokenizer()?.vocabulary().bos;
        let starts = request.prompt.first().copied() == bos && bos.is_some();
        // There is one beginning of the text. A token that begins further messages marks turns, as <|im_start|> does, which some
        // files name as their BOS token.
        let marks_turns = request.prompt.iter().filter(|token| Some(**token) == bos).count() > 1;
        let skipped = usize::from(starts && !marks_turns);
        request.prompt = chat.before.iter().chain(request.prompt.iter().skip(skipped)).copied().collect();
    }
    Ok(request)
}

fn render_messages(served: &ServedModel, chat: &ChatPrompt, uses_tools: bool) -> Result<Request, ApiError> {
    let options = options(served, chat, uses_tools);
    let Some((last, before)) = chat.messages.split_last().filter(|_| chat.continues) else {
        let opens = !chat.omits_generation_prompt;
        let mut request = Request::chat_with(&served.model, &options, &chat.messages, opens)?;
        let is_off = is_off(served, chat);
        if is_off && reasons_anyway(served, &request) {
            request.skip_reasoning(&served.model)?;
        }
        let is_harmony = matches!(request.reasoning.format(), Some(ReasoningFormat::Harmony));
        if (is_off || is_switched_off(served, &options)) && !is_harmony {
            request.reasoning = request.reasoning.without_reasoning();
        }
        return Ok(request);
    };
    // The template ends with the header of the assistant's message, behind which the message begins.
    let mut request = Request::chat(&served.model, &options, before)?;
    let special = options.special || last.trusted;
    request.prompt.extend(served.model.tokenizer()?.encode(&last.content, special));
    request.reasoning = ReasoningSplitter::new(None, false);
    Ok(request)
}

/// Whether there is to be no reasoning. Where nobody asked for it, that is so if the template has a switch; the harmony format has
/// none.
fn is_off(served: &ServedModel, chat: &ChatPrompt) -> bool {
    let Some(template) = served.model.template() else { return chat.reasoning == ReasoningEffort::Off };
    match chat.reasoning {
        ReasoningEffort::Off => true,
        ReasoningEffort::Unasked(_) => {
            !matches!(template.reasoning(), Some(ReasoningFormat::Harmony))
                && !template.without_reasoning().is_empty()
        }
        ReasoningEffort::Default | ReasoningEffort::On | ReasoningEffort::Named(_) => false,
    }
}

/// Whether the template is asked for no reasoning by its own variables.
fn is_switched_off(served: &ServedModel, options: &GeneratorOptions) -> bool {
    let switch = served.model.template().map(|template| template.without_reasoning()).unwrap_or_default();
    let variables = &options.template_variables;
    !switch.is_empty() && switch.iter().all(|(name, off)| variables.get(name) == Some(off))
}

/// Whether the model reasons although the template was asked that it does not.
fn reasons_anyway(served: &ServedModel, request: &Request) -> bool {
    let has_switch = served.model.template().is_some_and(|template| !template.without_reasoning().is_empty());
    request.reasoning.is_open() || !has_switch
}

/// The options with which the template is rendered.
fn options(served: &ServedModel, chat: &ChatPrompt, uses_tools: bool) -> GeneratorOptions {
    let mut options = served.defaults.clone();
    let variables = &mut options.template_variables;
    let template = served.model.template();
    let is_off = is_off(served, chat);
    match &chat.reasoning {
        _ if is_off => variables.extend(template.map(|t| t.without_reasoning()).unwrap_or_default()),
        ReasoningEffort::Default | ReasoningEffort::Off | ReasoningEffort::Unasked(None) => {}
        ReasoningEffort::On => {
            for name in ["enable_thinking", "thinking", "enable_reasoning"] {
                if template.is_some_and(|template| template.reads(name)) {
                    variables.insert(name.to_owned(), Value::Bool(true));
                }
            }
        }
        ReasoningEffort::Named(effort) | ReasoningEffort::Unasked(Some(effort)) => {
            variables.insert("reasoning_effort".to_owned(), effort.clone().into());
        }
    }
    // A message that is begun has no reasoning before it.
    if chat.continues {
        variables.extend(template.map(|t| t.without_reasoning()).unwrap_or_default());
    }
    variables.extend(chat.variables.clone());
    if uses_tools {
        variables.insert("tools".to_owned(), chat.tools.clone().into());
    }
    options
}

/// Whether the last message is the assistant's, which an answer would continue.
pub(crate) fn ends_with_assistant(messages: &[Message]) -> bool {
    messages.last().is_some_and(|message| message.role == "assistant" && message.tool_calls.is_empty())
}
