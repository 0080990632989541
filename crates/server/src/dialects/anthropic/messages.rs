//! `/v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::Json;
use axum::response::Response;
use serde_json::{Value, json};

use super::answer::{content, message, stop_reason, usage};
use super::stream::MessageStream;
use super::{input, tools};
use crate::call::{Call, new_id};
use crate::constraint::Constraint;
use crate::dialects::sampling_fields;
use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Choice, Generation, Prompt, ReasoningEffort};
use crate::model::ServedModel;
use crate::prompt::ends_with_assistant;
use crate::stream::{self, StreamFormat};

/// Answers a conversation.
pub async fn messages(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let fields = call.fields();
    let mut generation = parse(&fields, &served)?;
    let most = fields.count("max_tokens")?.ok_or_else(|| fields.missing("max_tokens"))?;
    if most == 0 {
        return Err(fields.error("max_tokens", "must be 1 or more"));
    }
    generation.max_tokens = Some(most);
    let streams = fields.flag("stream")?.unwrap_or(false);
    // The model as it was asked for: clients compare it.
    let name = fields.text("model")?.map_or_else(|| served.name.clone(), str::to_owned);
    // A stream begins with the number of cached tokens, which the first part of the prompt tells.
    (generation.progress, generation.streamed) = (streams, streams);
    let (request, ping) = (call.id.clone(), call.app.limits().ping);
    let running = served.generate(generation, &call.parsed()).await?;
    let id = new_id("msg_");
    if streams {
        let encoder = MessageStream::new(id, request, name, running.prompt_tokens());
        return Ok(stream::respond(running, encoder, StreamFormat::Events, ping));
    }
    let write = move |choices: &[Choice]| {
        let missing = || ApiError::new(ErrorKind::Internal, "there is no answer");
        let choice = choices.first().ok_or_else(missing)?;
        let (reason, sequence) = stop_reason(&choice.done.finish);
        let counts = choice.done.counts;
        let counted = usage(counts.prompt, counts.cached, counts.answer);
        Ok(message(&id, &name, content(choice), Some((reason, sequence)), &counted))
    };
    running.finish().await?.written(write).await
}

/// Counts the tokens of a conversation. It is rendered and tokenized beside the engine, so that nothing waits.
pub async fn count_tokens(call: Call) -> Result<Json<Value>, ApiError> {
    let served = call.model().await?;
    let generation = parse(&call.fields(), &served)?;
    let tokens = served.tokens(generation).await?;
    Ok(Json(json!({ "input_tokens": tokens.len() })))
}

/// The request as a [`Generation`].
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Generation, ApiError> {
    fields.flag("stream")?;
    let messages = input::conversation(fields)?;
    let tools = tools::tools(fields)?;
    let (tool_choice, parallel_tool_calls) = tools::choice(fields, &tools)?;
    let continues = ends_with_assistant(&messages);
    let config = fields.object("output_config")?;
    let (reasoning, reasoning_budget) = reasoning(fields, config.as_ref())?;
    let chat = ChatPrompt { messages, tools, continues, reasoning, ..ChatPrompt::default() };
    let format = match &config {
        Some(config) if config.has("format") => config.object("format")?,
        _ => fields.object("output_format")?,
    };
    Ok(Generation {
        sampling: sampling_fields::sampling(fields, served)?,
        max_tokens: None,
        stops: sampling_fields::stops(fields, "stop_sequences", served)?,
        constraint: constraint(format.as_ref())?,
        constraint_field: Some("output_config.format"),
        tool_choice,
        parallel_tool_calls,
        reasoning_budget,
        ..Generation::new(Prompt::Chat(chat))
    })
}

/// The efforts by name.
pub(super) const EFFORTS: &[&str] = &["low", "medium", "high", "xhigh", "max"];

/// How much the model is to reason.
fn reasoning(
    fields: &Fields<'_>,
    config: Option<&Fields<'_>>,
) -> Result<(ReasoningEffort, Option<usize>), ApiError> {
    let effort = config.map(|config| config.one_of("effort", EFFORTS)).transpose()?.flatten();
    // There is no thinking unless it is asked for, whatever the effort is.
    let Some(thinking) = fields.object("thinking")? else {
        return Ok((ReasoningEffort::Unasked(effort.map(str::to_owned)), None));
    };
    let effort = effort.map(|effort| ReasoningEffort::Named(effort.to_owned()));
    let known = ["enabled", "disabled", "adaptive"];
    let kind = thinking.one_of("type", &known)?.ok_or_else(|| thinking.missing("type"))?;
    let budget = thinking.count("budget_tokens")?;
    Ok(match kind {
        "disabled" => (ReasoningEffort::Off, None),
        "enabled" if budget.is_none() => return Err(thinking.missing("budget_tokens")),
        "enabled" => (effort.unwrap_or(ReasoningEffort::On), budget),
        _ => (effort.unwrap_or(ReasoningEffort::On), budget),
    })
}

/// The form of the answer.
fn constraint(format: Option<&Fields<'_>>) -> Result<Constraint, ApiError> {
    let Some(format) = format else { return Ok(Constraint::None) };
    match format.one_of("type", &["json_schema"])? {
        None => Err(format.missing("type")),
        Some(_) => {
            let schema = format.schema("schema")?.ok_or_else(|| format.missing("schema"))?;
            Ok(Constraint::JsonSchema(schema))
        }
    }
}
