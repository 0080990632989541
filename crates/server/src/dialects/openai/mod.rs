//! OpenAI's interface.

mod answer_head;
pub mod chat;
mod chat_stream;
mod completion_logprobs;
mod completion_stream;
pub mod completions;
pub mod embeddings;
pub mod logprobs;
pub mod messages;
pub mod models;
mod request_fields;
mod response_input;
mod response_items;
mod response_object;
mod response_stream;
pub mod responses;
pub mod usage;

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use crate::app::App;

/// The name of the software in answers.
pub(crate) const FINGERPRINT: &str = concat!("quadriga-", env!("CARGO_PKG_VERSION"));

/// The routes, each with and without `/v1`.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/responses", post(responses::responses))
        .route("/responses", post(responses::responses))
        .route("/v1/models", get(models::list))
        .route("/models", get(models::list))
        .route("/v1/models/{*name}", get(models::retrieve))
}
