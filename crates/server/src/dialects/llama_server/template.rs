//! Conversations without an answer: rendered as a prompt, or counted.

use axum::Json;
use serde_json::{Value, json};

use crate::call::Call;
use crate::dialects::openai::{chat, responses};
use crate::error::ApiError;
use crate::openapi::schema::{answer, count, one_of, text};

/// `/apply-template`.
pub(super) async fn apply(call: Call) -> Result<Json<Value>, ApiError> {
    let served = call.model().await?;
    let generation = chat::parse(&call.fields(), &served)?;
    Ok(Json(json!({ "prompt": served.rendered(generation).await? })))
}

/// Counts the tokens of a chat completion's prompt.
pub(super) async fn count_chat(call: Call) -> Result<Json<Value>, ApiError> {
    let served = call.model().await?;
    let generation = chat::parse(&call.fields(), &served)?;
    Ok(counted(served.tokens(generation).await?.len()))
}

/// Counts the tokens of a response's prompt.
pub(super) async fn count_response(call: Call) -> Result<Json<Value>, ApiError> {
    let served = call.model().await?;
    let generation = responses::parse(&call.fields(), &served)?;
    Ok(counted(served.tokens(generation).await?.len()))
}

fn counted(tokens: usize) -> Json<Value> {
    Json(json!({ "object": "response.input_tokens", "input_tokens": tokens }))
}

/// The body of requests with a conversation: that of a chat completion.
pub(super) fn request_schema() -> Value {
    chat::request_schema()
}

/// The body of a response.
pub(super) fn response_request_schema() -> Value {
    responses::request_schema()
}

/// The answer of `/apply-template`.
pub(super) fn prompt_schema() -> Value {
    answer(json!({ "prompt": text() }))
}

/// A number of tokens.
pub(super) fn count_schema() -> Value {
    answer(json!({ "object": one_of(&["response.input_tokens"]), "input_tokens": count() }))
}
