//! OpenAI's interface.

pub mod chat;
pub mod chat_stream;
pub mod logprobs;
pub mod messages;
pub mod models;
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
        .route("/v1/models", get(models::list))
        .route("/models", get(models::list))
        .route("/v1/models/{*name}", get(models::retrieve))
}
