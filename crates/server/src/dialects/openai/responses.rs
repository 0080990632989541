//! `/v1/responses`, without stored responses: what belongs to a conversation is sent with each request.

use std::sync::Arc;

use axum::response::Response;
use serde_json::Value;

use super::logprobs::MAX_TOP_LOGPROBS;
use super::request_fields::{
    EFFORTS, REFUSED_OF_RESPONSES, STORED, VERBOSITIES, check_stream, priority, reasoning, shares_prefix,
    sse_ping,
};
use super::response_items::ResponseItem;
use super::response_object::ResponseObject;
use super::response_stream::ResponseStream;
use super::usage::Usage;
use super::{logprobs, response_input};
use crate::call::{Call, new_id};
use crate::constraint::Constraint;
use crate::dialects::{format_fields, sampling_fields, vllm_fields};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{AnswerSection, ChatPrompt, Choice, Generation, Prompt};
use crate::hooks::check_formats;
use crate::model::ServedModel;
use crate::prompt::ends_with_assistant;
use crate::stream::{self, StreamFormat};

/// Answers a conversation.
pub async fn responses(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let fields = call.fields();
    let mut generation = parse(&fields, &served)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    generation.streamed = streams;
    let ping = sse_ping(&fields, call.app.limits().ping)?;
    let object = ResponseObject::new(&fields, &served, &generation);
    let running = served.generate(generation, &call.parsed()).await?;
    if streams {
        let encoder = ResponseStream::new(object, &running);
        return Ok(stream::respond(running, encoder, StreamFormat::Events, ping));
    }
    let mut usage = Usage::new(running.prompt_tokens(), 1);
    let write = move |choices: &[Choice]| {
        let Some(choice) = choices.first() else {
            return Err(ApiError::new(crate::error::ErrorKind::Internal, "there is no answer"));
        };
        usage.add(&choice.done);
        let items = items(&served, choice);
        Ok(object.finished(&choice.done.finish, &items, &usage))
    };
    running.finish().await?.written(write).await
}

/// The schema of the body.
pub(crate) fn request_schema() -> Value {
    super::schemas::response_request()
}

/// The request as a [`Generation`].
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Generation, ApiError> {
    sampling_fields::refuse_unsupported(fields)?;
    vllm_fields::refuse(fields, REFUSED_OF_RESPONSES)?;
    check_stream(fields)?;
    for name in STORED {
        if fields.has(name) {
            return Err(fields.error(name, "is not supported: nothing is stored, send the whole input"));
        }
    }
    if fields.flag("background")?.unwrap_or(false) {
        return Err(fields.error("background", "is not supported: nothing is stored"));
    }
    check_metadata(fields)?;
    // They come back with the response.
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.text(name)?;
    }
    let messages = response_input::conversation(fields)?;
    let tools = response_input::tools(fields)?;
    let tool_choice = format_fields::tool_choice(fields, &tools)?;
    // Reasoning alone is no message that is begun.
    let has_text = messages.last().is_some_and(|last| !last.content.is_empty());
    let continues = has_text && ends_with_assistant(&messages);
    let effort = fields.object("reasoning")?.map(|reasoning| reasoning.one_of("effort", EFFORTS));
    let effort = effort.transpose()?.flatten();
    fields.one_of("truncation", &["auto", "disabled"])?;
    if let Some(text) = fields.object("text")? {
        text.one_of("verbosity", VERBOSITIES)?;
    }
    let (reasoning, reasoning_budget) = reasoning(fields, effort)?;
    let variables = fields.map("chat_template_kwargs")?.cloned().unwrap_or_default();
    let chat = ChatPrompt { messages, tools, variables, continues, reasoning, ..ChatPrompt::default() };
    let generation = Generation {
        sampling: sampling_fields::sampling(fields, served)?,
        max_tokens: sampling_fields::max_tokens(fields, &["max_output_tokens"], &[], served)?,
        stops: sampling_fields::stops(fields, "stop", served)?,
        logprobs: top_logprobs(fields)?,
        constraint: constraint(fields)?,
        constraint_field: Some("text.format"),
        parallel_tool_calls: fields
            .flag("parallel_tool_calls")?
            .unwrap_or_else(|| tool_choice.calls_several()),
        tool_choice,
        reasoning_budget,
        priority: priority(fields)?,
        shares_prefix: shares_prefix(fields)?,
        ..Generation::new(Prompt::Chat(chat))
    };
    vllm_fields::apply(fields, served, generation)
}

/// Metadata comes back with every event that has the response, and so has OpenAI's limits.
fn check_metadata(fields: &Fields<'_>) -> Result<(), ApiError> {
    const NAME: &str = "metadata";
    let Some(pairs) = fields.map(NAME)? else { return Ok(()) };
    let is_short = |(name, value): (&String, &Value)| {
        name.chars().count() <= 64 && value.as_str().is_some_and(|text| text.chars().count() <= 512)
    };
    match pairs.len() <= 16 && pairs.iter().all(is_short) {
        true => Ok(()),
        false => Err(fields.error(NAME, "must have at most 16 pairs of strings, of 64 and 512 characters")),
    }
}

/// Log-probabilities are asked for with `top_logprobs`, or by name in `include`.
fn top_logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let included = fields.list("include")?.unwrap_or_default();
    let included = included.iter().any(|name| name == "message.output_text.logprobs");
    match fields.count("top_logprobs")? {
        Some(top) if top > MAX_TOP_LOGPROBS => {
            Err(fields.error("top_logprobs", format!("must be from 0 to {MAX_TOP_LOGPROBS}")))
        }
        Some(0) | None => Ok(included.then_some(0)),
        Some(top) => Ok(Some(top)),
    }
}

fn constraint(fields: &Fields<'_>) -> Result<Constraint, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(Constraint::None) };
    let Some(format) = text.object("format")? else { return Ok(Constraint::None) };
    let known = ["text", "json_object", "json_schema"];
    Ok(match format.one_of("type", &known)?.ok_or_else(|| format.missing("type"))? {
        "json_object" => Constraint::JsonObject,
        "json_schema" => {
            format.text("name")?;
            let schema = format.schema("schema")?.ok_or_else(|| format.missing("schema"))?;
            if format.flag("strict")? == Some(true) {
                check_formats(&format.place("schema"), &schema)?;
            }
            Constraint::JsonSchema(schema)
        }
        _ => Constraint::None,
    })
}

/// The items of a complete answer, in the order of generation.
fn items(served: &ServedModel, choice: &Choice) -> Vec<ResponseItem> {
    let mut left = choice.text_tokens();
    let mut items = Vec::new();
    for section in &choice.sections {
        items.extend(match section {
            AnswerSection::Reasoning(text) => {
                Some(ResponseItem::Reasoning { id: new_id("rs_"), text: text.clone() })
            }
            AnswerSection::Text { text, tokens } => {
                Some(message(text, logprobs::of_text(served, left.by_ref().take(*tokens))))
            }
            AnswerSection::ToolCall(number) => {
                let call = choice.tool_calls.get(*number).cloned();
                call.map(|call| ResponseItem::Call { id: new_id("fc_"), call })
            }
        });
    }
    // An answer without text has an empty one.
    if items.is_empty() {
        items.push(message("", Vec::new()));
    }
    items
}

fn message(text: &str, logprobs: Vec<Value>) -> ResponseItem {
    ResponseItem::Message { id: new_id("msg_"), text: text.to_owned(), logprobs }
}
