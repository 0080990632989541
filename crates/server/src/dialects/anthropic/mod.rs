//! Anthropic's interface.

mod answer;
mod input;
pub mod messages;
mod schemas;
mod stream;
mod system;
mod tools;

use crate::openapi::{Answer, DescribedRoutes, Group, Operation};

/// The routes.
pub fn routes() -> DescribedRoutes {
    DescribedRoutes::default()
        .post(
            &["/v1/messages"],
            messages::messages,
            Operation {
                id: "createMessage",
                group: Group::Anthropic,
                summary: "Answers a conversation",
                request: Some(schemas::message_request),
                answer: Answer::JsonOrEvents(schemas::message),
            },
        )
        .post(
            &["/v1/messages/count_tokens"],
            messages::count_tokens,
            Operation {
                id: "countTokens",
                group: Group::Anthropic,
                summary: "Counts the tokens of a conversation; never waits for a generation",
                request: Some(schemas::count_request),
                answer: Answer::Json(schemas::token_count),
            },
        )
}
