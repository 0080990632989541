//! `/api/chat`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use quadriga_llm::template::{Message, ToolCall};
use serde_json::{Map, Value};

use super::answer::{AnswerForm, Head};
use super::request_fields::{
    KeepAlive, answered_name, generation, keep_alive, model, model_name, reasoning, refuse_images,
};
use super::stream::AnswerStream;
use crate::call::Call;
use crate::dialects::format_fields;
use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Choice, Generation, Prompt};
use crate::model::ServedModel;
use crate::prompt::ends_with_assistant;
use crate::stream::{self, StreamFormat};

/// Answers a conversation.
pub async fn chat(call: Call) -> Result<Response, ApiError> {
    let started = Instant::now();
    let fields = call.fields();
    let keep = keep_alive(&fields)?;
    if let Some(answer) = unloaded(&call, keep, started, AnswerForm::Chat).await? {
        return Ok(answer);
    }
    let served = model(&call).await?;
    let head = Head::new(answered_name(&fields, &served)?, started, AnswerForm::Chat);
    let generation = parse(&fields, &served)?;
    let streams = fields.flag("stream")?.unwrap_or(true);
    match generation {
        Some(generation) => {
            keep.apply(&call, &served)?;
            answer(call, &served, head, generation, streams).await
        }
        None => loaded(&call, &served, &head, keep),
    }
}

/// Fields of a request that only unloads a model, beside an empty prompt.
const UNLOADING: &[&str] = &["model", "name", "keep_alive", "stream", "messages", "prompt"];

/// The answer to a request that only unloads a model, which need not be loaded for that: no prompt, and no time to keep it.
/// A request with other fields is checked as any other, with the model.
pub(super) async fn unloaded(
    call: &Call,
    keep: KeepAlive,
    started: Instant,
    form: AnswerForm,
) -> Result<Option<Response>, ApiError> {
    let fields = call.fields();
    let is_plain = call.body.0.keys().all(|name| UNLOADING.contains(&name.as_str()));
    let asks = match form {
        AnswerForm::Chat => fields.list("messages")?.is_some_and(|messages| !messages.is_empty()),
        AnswerForm::Generate { .. } => fields.text("prompt")?.is_some_and(|prompt| !prompt.is_empty()),
    };
    if !keep.is_over() || !is_plain || asks {
        return Ok(None);
    }
    fields.flag("stream")?;
    let name = match model_name(&fields)? {
        Some(name) => name.to_owned(),
        None => call.app.models().describe(None).await?.name,
    };
    call.app.models().refresh().await;
    call.app.models().unload(&name)?;
    Ok(Some(Json(Head::new(name, started, form).without_answer("unload")).into_response()))
}

/// Answers a request.
pub(super) async fn answer(
    call: Call,
    served: &Arc<ServedModel>,
    head: Head,
    generation: Generation,
    streams: bool,
) -> Result<Response, ApiError> {
    let generation = Generation { streamed: streams, ..generation };
    let ping = call.app.limits().ping;
    let running = served.generate(generation, &call.parsed()).await?;
    let prompt = running.prompts().first().cloned().unwrap_or_default();
    if streams {
        let encoder = AnswerStream::new(head, Arc::clone(served), prompt);
        return Ok(stream::respond(running, encoder, StreamFormat::Lines, ping));
    }
    let served = Arc::clone(served);
    let write = move |choices: &[Choice]| {
        let missing = || ApiError::new(ErrorKind::Internal, "there is no answer");
        Ok(head.whole(&served, choices.first().ok_or_else(missing)?, &prompt))
    };
    running.finish().await?.written(write).await
}

/// The answer to a request that only loads the model, which it is now, or unloads it.
pub(super) fn loaded(
    call: &Call,
    served: &ServedModel,
    head: &Head,
    keep: KeepAlive,
) -> Result<Response, ApiError> {
    if keep.is_over() {
        call.app.models().unload(model_name(&call.fields())?.unwrap_or(&served.name))?;
        return Ok(Json(head.without_answer("unload")).into_response());
    }
    keep.apply(call, served)?;
    Ok(Json(head.without_answer("load")).into_response())
}

/// The request as a [`Generation`]; `None` if it has no messages.
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Option<Generation>, ApiError> {
    let messages = fields.objects("messages")?.unwrap_or_default();
    let messages = messages.iter().map(message).collect::<Result<Vec<_>, _>>()?;
    let tools = format_fields::tools(fields)?;
    let continues = ends_with_assistant(&messages);
    let is_empty = messages.is_empty();
    let chat =
        ChatPrompt { messages, tools, continues, reasoning: reasoning(fields)?, ..ChatPrompt::default() };
    let generation = generation(fields, served, Prompt::Chat(chat))?;
    Ok(Some(generation).filter(|_| !is_empty))
}

fn message(fields: &Fields<'_>) -> Result<Message, ApiError> {
    let known = ["system", "user", "assistant", "tool"];
    let role = fields.one_of("role", &known)?.ok_or_else(|| fields.missing("role"))?;
    refuse_images(fields)?;
    let calls = fields.objects("tool_calls")?.unwrap_or_default();
    let (name, older) = (fields.text("tool_name")?, fields.text("name")?);
    let name = name.or(older);
    Ok(Message {
        reasoning_content: fields.text("thinking")?.map(str::to_owned),
        tool_calls: calls.iter().map(tool_call).collect::<Result<_, _>>()?,
        tool_call_id: fields.text("tool_call_id")?.map(str::to_owned),
        name: name.map(str::to_owned),
        ..Message::new(role, fields.text("content")?.unwrap_or_default())
    })
}

fn tool_call(fields: &Fields<'_>) -> Result<ToolCall, ApiError> {
    let function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
    Ok(ToolCall {
        id: fields.text("id")?.map(str::to_owned),
        name: function.required_text("name")?.to_owned(),
        arguments: Value::Object(function.map("arguments")?.cloned().unwrap_or_else(Map::new)),
    })
}
