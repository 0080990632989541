//! `/v1/completions`: text that continues a prompt.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Value, json};

use super::FINGERPRINT;
use super::answer_head::AnswerHead;
use super::completion_logprobs::CompletionLogprobs;
use super::completion_stream::CompletionStream;
use super::request_fields::{StreamOptions, choices, priority, shares_prefix, slot, sse_ping};
use super::usage::{Usage, finish_name};
use super::vllm_answer::{prompt_logprobs, stop_reason};
use crate::call::Call;
use crate::dialects::fill_in_middle::FillTokens;
use crate::dialects::timings::timings;
use crate::dialects::{format_fields, prompt_fields, sampling_fields, vllm_fields};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Choice, Generation, Prompt};
use crate::model::ServedModel;
use crate::prompt::{MAX_COPIES, check_prompts};
use crate::stream::{self, StreamFormat};

/// The most log-probabilities that are reported for a token.
pub(crate) const MAX_LOGPROBS: usize = 20;

/// Tokens of an answer, if the request does not say.
const DEFAULT_TOKENS: usize = 16;

/// What is asked beside the generations themselves.
pub(crate) struct CompletionRequest {
    pub(crate) generations: Vec<Generation>,
    /// Whether answers begin with their prompt.
    pub(crate) echo: bool,
    /// Answers to each prompt.
    pub(crate) choices: usize,
}

/// Continues prompts.
pub async fn completions(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let fields = call.fields();
    let request = parse(&fields, &served)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let options = StreamOptions::new(&fields)?;
    let ping = sse_ping(&fields, call.app.limits().ping)?;
    let CompletionRequest { mut generations, echo, choices } = request;
    let token_ids = fields.flag("return_token_ids")?.unwrap_or(false);
    let truncated = generations.iter().any(|generation| generation.truncation.is_some());
    let progress = streams && options.needs_progress();
    for generation in &mut generations {
        (generation.progress, generation.streamed) = (progress, streams);
    }
    // Prompts that are cut are shown as they were used.
    let mut echoed = if echo && !truncated { echoed_texts(&served, &generations)? } else { Vec::new() };
    let shown = ShownFields {
        logprobs: fields.has("logprobs"),
        prompt_logprobs: fields.has("prompt_logprobs"),
        slot: fields.has("id_slot"),
        token_ids,
    };
    let running = served.generate_all(generations, &call.parsed()).await?;
    if echo && truncated {
        let prompts = running.prompts().iter();
        echoed =
            prompts.map(|prompt| prompt_fields::shown(&served, &Prompt::Tokens(prompt.clone()))).collect();
    }
    let head = AnswerHead::new("cmpl-", &served);
    if streams {
        let encoder = CompletionStream::new(head, &running, echoed, choices, (options, token_ids));
        return Ok(stream::respond(running, encoder, StreamFormat::Events, ping));
    }
    let usage = Usage::new(running.prompt_tokens(), choices);
    let prompts = running.prompts().to_vec();
    let write = move |answers: &[Choice]| {
        Ok(whole(&served, &head, answers, (&prompts, &echoed, choices), usage, shown))
    };
    running.finish().await?.written(write).await
}

/// The fields of an answer that are there only if they are asked for.
#[derive(Clone, Copy)]
struct ShownFields {
    logprobs: bool,
    prompt_logprobs: bool,
    slot: bool,
    token_ids: bool,
}

/// A whole answer. Of the prompts come their tokens, their texts if they are echoed, and the number of answers to each.
fn whole(
    served: &ServedModel,
    head: &AnswerHead,
    answers: &[Choice],
    (prompts, echoed, choices): (&[Vec<u32>], &[String], usize),
    mut usage: Usage,
    shown: ShownFields,
) -> Value {
    let mut list = Vec::new();
    for (number, answer) in answers.iter().enumerate() {
        usage.add(&answer.done);
        let prompt = number / choices;
        // All answers to a prompt have its log-probabilities.
        let first = answers.get(prompt * choices).and_then(|first| first.prompt_logprobs.as_deref());
        let echoed = echoed.get(prompt).map(|text| (text.as_str(), first.unwrap_or_default()));
        let tokens = prompts.get(prompt).map_or(&[][..], Vec::as_slice);
        let mut choice = choice_json(served, answer, echoed, tokens, shown.logprobs);
        if let Some(object) = choice.as_object_mut() {
            if shown.token_ids {
                object.insert("prompt_token_ids".to_owned(), tokens.into());
                object.insert("token_ids".to_owned(), answer.generated.clone().into());
            }
            let found = first.filter(|_| shown.prompt_logprobs);
            let found = found.map(|found| prompt_logprobs(served, tokens, found));
            object.extend(found.map(|found| ("prompt_logprobs".to_owned(), found)));
        }
        list.push(choice);
    }
    let mut whole = json!({
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": list,
        "usage": usage.json(),
        "system_fingerprint": FINGERPRINT,
        "timings": answers.first().map(|choice| timings(&choice.done)),
    });
    if let (Some(object), Some(first)) = (whole.as_object_mut(), answers.first().filter(|_| shown.slot)) {
        object.insert("id_slot".to_owned(), first.done.slot.into());
    }
    whole
}

/// The request as [`Generation`]s.
pub(crate) fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<CompletionRequest, ApiError> {
    sampling_fields::refuse_unsupported(fields)?;
    let choices = choices(fields)?;
    if fields.count("best_of")?.is_some_and(|best| best > choices) {
        return Err(fields.error("best_of", "must not be larger than n: answers are not ranked"));
    }
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo && suffix.is_some() {
        return Err(fields.error("suffix", "cannot be used together with echo"));
    }
    let logprobs = fields.count("logprobs")?;
    if logprobs.is_some_and(|count| count > MAX_LOGPROBS) {
        return Err(fields.error("logprobs", format!("must be from 0 to {MAX_LOGPROBS}")));
    }
    let names = ["max_tokens", "max_completion_tokens", "n_predict"];
    let max_tokens = sampling_fields::max_tokens(fields, &names, sampling_fields::NO_LIMIT, served)?;
    let given = names.iter().any(|name| fields.has(name));
    let template = Generation {
        sampling: sampling_fields::sampling(fields, served)?,
        max_tokens: max_tokens.or((!given).then_some(DEFAULT_TOKENS)),
        stops: sampling_fields::stops(fields, "stop", served)?,
        choices,
        logprobs,
        logprobs_field: "logprobs",
        // More than either asks for are no harm to the other.
        prompt_logprobs: logprobs.filter(|_| echo).max(vllm_fields::prompt_logprobs(fields)?),
        special_tokens: fields.flag("add_special_tokens")?.unwrap_or(true),
        constraint: format_fields::constraint(fields)?,
        constraint_field: format_fields::constraint_field(fields),
        slot: slot(fields, served)?,
        priority: priority(fields)?,
        shares_prefix: shares_prefix(fields)?,
        ..Generation::new(Prompt::Tokens(Vec::new()))
    };
    let template = vllm_fields::apply(fields, served, template)?;
    let prompts = prompt_fields::prompts(fields, "prompt")?;
    check_prompts(served, &template, &prompts)?;
    let prompts = match suffix {
        Some(suffix) => before_suffix(fields, served, prompts, suffix, template.special_tokens)?,
        None => prompts,
    };
    let generations = prompts.into_iter().map(|prompt| Generation { prompt, ..template.clone() }).collect();
    Ok(CompletionRequest { generations, echo, choices })
}

/// Prompts whose answers are to fit before a text. `begins`: whether they have the tokens that begin one.
fn before_suffix(
    fields: &Fields<'_>,
    served: &ServedModel,
    prompts: Vec<Prompt>,
    suffix: &str,
    begins: bool,
) -> Result<Vec<Prompt>, ApiError> {
    const NAME: &str = "suffix";
    if prompts.len() > 1 && suffix.len().saturating_mul(prompts.len()) > MAX_COPIES {
        return Err(fields.error(NAME, format!("is too long for {} prompts", prompts.len())));
    }
    let lacking = || fields.error(NAME, format!("is refused: {}", FillTokens::missing(served).message));
    let tokens = FillTokens::of(&served.model).ok_or_else(lacking)?;
    let bos = FillTokens::bos(served).filter(|_| begins);
    let filled = |prompt| match prompt {
        Prompt::Text(text) => Ok(Prompt::Mixed(tokens.prompt(&text, suffix, &[], bos))),
        _ => Err(fields.error(NAME, "needs prompts that are texts")),
    };
    let filled = prompts.into_iter().map(filled).collect::<Result<Vec<Prompt>, ApiError>>()?;
    // They are longer now.
    filled.iter().try_for_each(|prompt| served.check_length(prompt.bytes()))?;
    Ok(filled)
}

/// The texts with which answers begin.
fn echoed_texts(served: &ServedModel, generations: &[Generation]) -> Result<Vec<String>, ApiError> {
    let text = |generation: &Generation| match &generation.prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Tokens(tokens) => Ok(served.model.tokenizer()?.decode(tokens)?),
        prompt => Ok(prompt_fields::shown(served, prompt)),
    };
    generations.iter().map(text).collect()
}

/// An answer, behind its prompt if that is echoed with these log-probabilities.
fn choice_json(
    served: &ServedModel,
    choice: &Choice,
    echoed: Option<(&str, &[quadriga_llm::serving::TokenLogprobs])>,
    prompt: &[u32],
    wants_logprobs: bool,
) -> Value {
    let mut logprobs = CompletionLogprobs::new(choice.control_text);
    if let Some((_, found)) = echoed {
        logprobs.add_prompt(served, prompt, found);
    }
    logprobs.add_answer(served, &choice.tokens);
    json!({
        "index": choice.done.choice,
        "text": format!("{}{}", echoed.map_or("", |(text, _)| text), choice.text),
        "logprobs": wants_logprobs.then(|| logprobs.json()),
        "finish_reason": finish_name(&choice.done.finish),
        "stop_reason": stop_reason(&choice.done.finish),
    })
}
