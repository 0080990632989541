//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answer_head::AnswerHead;
use super::chat_stream::ChatStream;
use super::logprobs::MAX_TOP_LOGPROBS;
use super::request_fields::{
    StreamOptions, check_stream, choices, priority, reasoning, shares_prefix, sse_ping,
};
use super::usage::{Usage, finish_name};
use super::{FINGERPRINT, logprobs, messages};
use crate::call::Call;
use crate::dialects::timings::timings;
use crate::dialects::{format_fields, sampling_fields};
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
    let ping = sse_ping(&fields, call.app.limits().ping)?;
    let running = served.generate(generation, &call.caller).await?;
    let head = AnswerHead::new("chatcmpl-", &served);
    if streams {
        let encoder = ChatStream::new(head, &running, options);
        return Ok(stream::respond(running, encoder, StreamFormat::Events, ping));
    }
    let mut usage = Usage::new(running.prompt_tokens(), running.choices());
    let choices = running.finish().await?;
    choices.iter().for_each(|choice| usage.add(&choice.done));
    Ok(Json(json!({
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": choices.iter().map(|choice| choice_json(&served, choice)).collect::<Vec<_>>(),
        "usage": usage.json(),
        "system_fingerprint": FINGERPRINT,
        "timings": choices.first().map(|choice| timings(&choice.done)),
    }))
    .into_response())
}

/// The schema of the body.
pub(crate) fn request_schema() -> Value {
    super::schemas::chat_request()
}

/// The request as a [`Generation`].
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Generation, ApiError> {
    sampling_fields::refuse_unsupported(fields)?;
    check_stream(fields)?;
    let messages = messages::messages(fields, "messages")?;
    let tools = format_fields::tools(fields)?;
    let tool_choice = format_fields::tool_choice(fields, &tools)?;
    let continues = continues(fields, &messages)?;
    let variables = fields.map("chat_template_kwargs")?.cloned().unwrap_or_default();
    let (reasoning, reasoning_budget) = reasoning(fields, fields.text("reasoning_effort")?)?;
    let chat = ChatPrompt { messages, tools, variables, continues, reasoning, ..ChatPrompt::default() };
    Ok(Generation {
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
        tool_choice,
        parallel_tool_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
        reasoning_budget,
        priority: priority(fields)?,
        shares_prefix: shares_prefix(fields)?,
        ..Generation::new(Prompt::Chat(chat))
    })
}

/// Whether the answer continues the last message: by default if that is the assistant's.
fn continues(fields: &Fields<'_>, messages: &[quadriga_llm::template::Message]) -> Result<bool, ApiError> {
    let ends = ends_with_assistant(messages);
    let wanted = fields.flag("continue_final_message")?;
    if wanted == Some(true) && !ends {
        return Err(fields.error("continue_final_message", "needs a last message of the assistant"));
    }
    let continues = ends && wanted.unwrap_or(true);
    let before = messages.split_last().map(|(_, before)| before).unwrap_or_default();
    if continues && before.last().is_some_and(|message| message.role == "assistant") {
        return Err(
            fields.error("messages", "ends with two messages of the assistant; only one can be continued")
        );
    }
    Ok(continues)
}

fn top_logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = fields.count("top_logprobs")?;
    if top.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
        return Err(fields.error("top_logprobs", format!("must be from 0 to {MAX_TOP_LOGPROBS}")));
    }
    Ok(match fields.flag("logprobs")?.unwrap_or(false) {
        true => Some(top.unwrap_or(0)),
        false => None,
    })
}

fn choice_json(served: &ServedModel, choice: &Choice) -> Value {
    let empty_with_calls = choice.text.is_empty() && !choice.tool_calls.is_empty();
    let content = Some(&choice.text).filter(|_| !empty_with_calls);
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if let Some(object) = message.as_object_mut() {
        if !choice.reasoning.is_empty() {
            object.insert("reasoning_content".to_owned(), choice.reasoning.clone().into());
        }
        if !choice.tool_calls.is_empty() {
            let calls: Vec<Value> = choice.tool_calls.iter().map(tool_call_json).collect();
            object.insert("tool_calls".to_owned(), calls.into());
        }
    }
    let tokens = || logprobs::of_text(served, &choice.tokens);
    let logprobs = choice.has_logprobs().then(|| json!({ "content": tokens(), "refusal": null }));
    json!({
        "index": choice.done.choice,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_name(&choice.done.finish),
    })
}

fn tool_call_json(call: &WholeToolCall) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments },
    })
}
