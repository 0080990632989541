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
pub(crate) mod request_fields;
mod response_input;
mod response_items;
mod response_object;
mod response_stream;
pub mod responses;
pub(crate) mod schemas;
pub mod usage;
mod vllm_answer;

use crate::openapi::{Answer, DescribedRoutes, Group, Operation};

/// The name of the software in answers.
pub(crate) const FINGERPRINT: &str = concat!("quadriga-", env!("CARGO_PKG_VERSION"));

/// The routes, each with and without `/v1`. `/completions` is one of llama-server's, too.
pub fn routes() -> DescribedRoutes {
    let group = Group::OpenAi;
    DescribedRoutes::default()
        .post(
            &["/v1/chat/completions", "/chat/completions"],
            chat::chat,
            Operation {
                id: "createChatCompletion",
                group,
                summary: "Answers a conversation",
                request: Some(schemas::chat_request),
                answer: Answer::JsonOrEvents(schemas::chat),
            },
        )
        .post(
            &["/v1/completions"],
            completions::completions,
            Operation {
                id: "createCompletion",
                group,
                summary: "Continues prompts",
                request: Some(schemas::completion_request),
                answer: Answer::JsonOrEvents(schemas::completion),
            },
        )
        .post(
            &["/v1/responses", "/responses"],
            responses::responses,
            Operation {
                id: "createResponse",
                group,
                summary: "Answers a conversation; nothing is stored",
                request: Some(schemas::response_request),
                answer: Answer::JsonOrEvents(schemas::response),
            },
        )
        .post(
            &["/v1/embeddings"],
            embeddings::embeddings,
            Operation {
                id: "createEmbedding",
                group,
                summary: "A vector for each text",
                request: Some(schemas::embedding_request),
                answer: Answer::Json(schemas::embeddings),
            },
        )
        .get(
            &["/v1/models", "/models"],
            models::list,
            Operation {
                id: "listModels",
                group,
                summary: "All models",
                request: None,
                answer: Answer::Json(schemas::models),
            },
        )
        .get(
            &["/v1/models/{*model}", "/models/{*model}"],
            models::retrieve,
            Operation {
                id: "retrieveModel",
                group,
                summary: "One model",
                request: None,
                answer: Answer::Json(schemas::model),
            },
        )
}
