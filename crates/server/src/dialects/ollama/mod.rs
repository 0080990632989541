//! Ollama's interface.

mod answer;
pub mod chat;
pub mod embed;
pub mod generate;
mod model_card;
pub(crate) mod models;
mod request_fields;
mod schemas;
mod stream;

use std::sync::Arc;

use axum::extract::State;

use self::model_card::ModelCards;
use crate::app::App;
use crate::openapi::{Answer, DescribedRoutes, Group, Operation};

/// The routes.
pub fn routes() -> DescribedRoutes {
    let group = Group::Ollama;
    let cards = Arc::new(ModelCards::default());
    let tags = {
        let cards = Arc::clone(&cards);
        move |State(app): State<Arc<App>>| models::tags(app, cards)
    };
    let running = move |State(app): State<Arc<App>>| models::running(app, cards);
    let get =
        |id, summary, answer| Operation { id, group, summary, request: None, answer: Answer::Json(answer) };
    DescribedRoutes::default()
        .get(
            &["/api/version"],
            models::version,
            get("ollamaVersion", "The version of the interface", schemas::version),
        )
        .get(&["/api/tags"], tags, get("ollamaTags", "All models", schemas::tags))
        .get(&["/api/ps"], running, get("ollamaPs", "The models that are loaded", schemas::running))
        .post(
            &["/api/show"],
            models::show,
            Operation {
                id: "ollamaShow",
                group,
                summary: "Everything about a model",
                request: Some(schemas::show_request),
                answer: Answer::Json(schemas::show),
            },
        )
        .post(
            &["/api/chat"],
            chat::chat,
            Operation {
                id: "ollamaChat",
                group,
                summary: "Answers a conversation",
                request: Some(schemas::chat_request),
                answer: Answer::JsonLines(schemas::chat),
            },
        )
        .post(
            &["/api/generate"],
            generate::generate,
            Operation {
                id: "ollamaGenerate",
                group,
                summary: "Answers a prompt",
                request: Some(schemas::generate_request),
                answer: Answer::JsonLines(schemas::generate),
            },
        )
        .post(
            &["/api/embed"],
            embed::embed,
            Operation {
                id: "ollamaEmbed",
                group,
                summary: "A vector for each text",
                request: Some(schemas::embed_request),
                answer: Answer::Json(schemas::embed),
            },
        )
        .post(
            &["/api/embeddings"],
            embed::embeddings,
            Operation {
                id: "ollamaEmbeddings",
                group,
                summary: "The vector of a text",
                request: Some(schemas::embeddings_request),
                answer: Answer::Json(schemas::embeddings),
            },
        )
}
