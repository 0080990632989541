//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::response::Response;
use quadriga_llm::template::Message;
use serde_json::{Value, json};

use super::answer_head::AnswerHead;
use super::chat_stream::ChatStream;
use super::logprobs::MAX_TOP_LOGPROBS;
use super::request_fields::{
    EFFORTS, REFUSED_OF_CHATS, ShownParts, StreamOptions, VERBOSITIES, check_stream, choices, priority,
    reasoning, reasoning_output, shares_prefix, slot, sse_ping,
};
use super::usage::{Usage, finish_name};
use super::vllm_answer::{prompt_logprobs, stop_reason};
use super::{FINGERPRINT, logprobs, messages};
use crate::call::Call;
use crate::dialects::timings::timings;
use crate::dialects::{format_fields, sampling_fields, vllm_fields};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Choice, Generation, Prompt, WholeToolCall};
use crate::model::ServedModel;
use crate::prompt::ends_with_assistant;
use crate::stream::{self, StreamFormat};

/// Answers a conversation.
pub async fn chat(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let fields = call.fields();
    let mut generation = parse(&fields, &served)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let options = StreamOptions::new(&fields)?;
    generation.progress = streams && options.needs_progress();
    generation.streamed = streams;
    let ping = sse_ping(&fields, call.app.limits().ping)?;
    let shown = ShownParts::new(&fields)?;
    let running = served.generate(generation, &call.parsed()).await?;
    let head = AnswerHead::new("chatcmpl-", &served);
    if streams {
        let encoder = ChatStream::new(head, &running, options, shown);
        return Ok(stream::respond(running, encoder, StreamFormat::Events, ping));
    }
    let mut usage = Usage::new(running.prompt_tokens(), running.choices());
    let prompt = running.prompts().first().cloned().unwrap_or_default();
    let write = move |choices: &[Choice]| {
        choices.iter().for_each(|choice| usage.add(&choice.done));
        Ok(whole(&served, head, choices, &prompt, &usage, shown))
    };
    running.finish().await?.written(write).await
}

fn whole(
    served: &ServedModel,
    head: AnswerHead,
    choices: &[Choice],
    prompt: &[u32],
    usage: &Usage,
    shown: ShownParts,
) -> Value {
    let mut answer = json!({
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": choices.iter().map(|choice| choice_json(served, choice, shown)).collect::<Vec<_>>(),
        "usage": usage.json(),
        "system_fingerprint": FINGERPRINT,
        "timings": choices.first().map(|choice| timings(&choice.done)),
    });
    if let Some(object) = answer.as_object_mut() {
        if shown.token_ids {
            object.insert("prompt_token_ids".to_owned(), prompt.into());
        }
        if let Some(first) = choices.first().filter(|_| shown.slot) {
            object.insert("id_slot".to_owned(), first.done.slot.into());
        }
        let found = choices.first().and_then(|first| first.prompt_logprobs.as_deref());
        let found = found.map(|found| prompt_logprobs(served, prompt, found));
        object.extend(found.map(|found| ("prompt_logprobs".to_owned(), found)));
    }
    answer
}

/// The schema of the body.
pub(crate) fn request_schema() -> Value {
    super::schemas::chat_request()
}

/// The request as a [`Generation`].
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Generation, ApiError> {
    sampling_fields::refuse_unsupported(fields)?;
    vllm_fields::refuse(fields, REFUSED_OF_CHATS)?;
    format_fields::refuse_old_names(fields)?;
    check_modalities(fields)?;
    fields.one_of("verbosity", VERBOSITIES)?;
    check_stream(fields)?;
    // Templates write the tokens that begin a prompt; there is one beginning of the text in any case.
    fields.flag("add_special_tokens")?;
    ShownParts::new(fields)?;
    let messages = messages::messages(fields, "messages")?;
    let prompt = prompt(fields, messages)?;
    let tool_choice = format_fields::tool_choice(fields, &prompt.tools)?;
    let mut variables = prompt.variables;
    // Each must be an object.
    fields.objects("documents")?;
    if let Some(documents) = fields.list("documents")? {
        variables.insert("documents".to_owned(), documents.into());
    }
    let (reasoning, reasoning_budget) = reasoning(fields, fields.one_of("reasoning_effort", EFFORTS)?)?;
    let chat = ChatPrompt { variables, reasoning, ..prompt };
    let generation = Generation {
        sampling: sampling_fields::sampling(fields, served)?,
        max_tokens: sampling_fields::max_tokens(
            fields,
            &["max_completion_tokens", "max_tokens", "n_predict"],
            sampling_fields::NO_LIMIT,
            served,
        )?,
        stops: sampling_fields::stops(fields, "stop", served)?,
        choices: choices(fields)?,
        logprobs: top_logprobs(fields)?,
        constraint: format_fields::constraint(fields)?,
        constraint_field: format_fields::constraint_field(fields),
        parallel_tool_calls: fields
            .flag("parallel_tool_calls")?
            .unwrap_or_else(|| tool_choice.calls_several()),
        tool_choice,
        reasoning_budget,
        reasoning_output: Some(reasoning_output(fields, served)?),
        slot: slot(fields, served)?,
        priority: priority(fields)?,
        shares_prefix: shares_prefix(fields)?,
        prompt_logprobs: vllm_fields::prompt_logprobs(fields)?,
        ..Generation::new(Prompt::Chat(chat))
    };
    vllm_fields::apply(fields, served, generation)
}

/// A conversation with what its template is given: tools, further variables, and how it ends.
pub(crate) fn prompt(fields: &Fields<'_>, messages: Vec<Message>) -> Result<ChatPrompt, ApiError> {
    let (continues, omits_generation_prompt) = prompt_end(fields, &messages)?;
    Ok(ChatPrompt {
        messages,
        tools: format_fields::tools(fields)?,
        variables: fields.map("chat_template_kwargs")?.cloned().unwrap_or_default(),
        continues,
        omits_generation_prompt,
        ..ChatPrompt::default()
    })
}

/// Answers are text.
fn check_modalities(fields: &Fields<'_>) -> Result<(), ApiError> {
    const NAME: &str = "modalities";
    let wanted = fields.texts(NAME)?.unwrap_or_default();
    match wanted.iter().find(|wanted| *wanted != "text") {
        Some(other) => Err(fields.error(NAME, format!("has {other:?}; answers are text"))),
        None => Ok(()),
    }
}

/// Whether the answer continues the last message, by default if that is the assistant's, and whether the header of a new message
/// is left out.
fn prompt_end(fields: &Fields<'_>, messages: &[Message]) -> Result<(bool, bool), ApiError> {
    const NAME: &str = "continue_final_message";
    let ends = ends_with_assistant(messages);
    let (wanted, header) = (fields.flag(NAME)?, fields.flag("add_generation_prompt")?);
    if wanted == Some(true) && !ends {
        return Err(fields.error(NAME, "needs a last message of the assistant"));
    }
    if wanted == Some(true) && header == Some(true) {
        return Err(fields.error(NAME, "cannot be used together with add_generation_prompt"));
    }
    // Whoever speaks of the header wants a new message, unless the other field says otherwise.
    let continues = ends && wanted.unwrap_or(header.is_none());
    let before = messages.split_last().map(|(_, before)| before).unwrap_or_default();
    if continues && before.last().is_some_and(|message| message.role == "assistant") {
        return Err(
            fields.error("messages", "ends with two messages of the assistant; only one can be continued")
        );
    }
    Ok((continues, !continues && header == Some(false)))
}

fn top_logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = fields.count("top_logprobs")?;
    if top.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
        return Err(fields.error("top_logprobs", format!("must be from 0 to {MAX_TOP_LOGPROBS}")));
    }
    match fields.flag("logprobs")?.unwrap_or(false) {
        true => Ok(Some(top.unwrap_or(0))),
        false if top.is_some_and(|top| top > 0) => {
            Err(fields.error("top_logprobs", "needs logprobs to be true"))
        }
        false => Ok(None),
    }
}

fn choice_json(served: &ServedModel, choice: &Choice, shown: ShownParts) -> Value {
    let empty_with_calls = choice.text.is_empty() && !choice.tool_calls.is_empty();
    let content = Some(&choice.text).filter(|_| !empty_with_calls);
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if let Some(object) = message.as_object_mut() {
        if !choice.reasoning.is_empty() && shown.reasoning {
            object.insert("reasoning_content".to_owned(), choice.reasoning.clone().into());
        }
        if !choice.tool_calls.is_empty() {
            let calls: Vec<Value> = choice.tool_calls.iter().map(tool_call_json).collect();
            object.insert("tool_calls".to_owned(), calls.into());
        }
    }
    let tokens = || logprobs::of_text(served, &choice.tokens);
    let logprobs = choice.has_logprobs().then(|| json!({ "content": tokens(), "refusal": null }));
    let mut value = json!({
        "index": choice.done.choice,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_name(&choice.done.finish),
        "stop_reason": stop_reason(&choice.done.finish),
    });
    if let Some(object) = value.as_object_mut().filter(|_| shown.token_ids) {
        object.insert("token_ids".to_owned(), choice.generated.clone().into());
    }
    value
}

fn tool_call_json(call: &WholeToolCall) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments },
    })
}
