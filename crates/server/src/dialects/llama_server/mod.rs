//! The interface of llama-server, of llama.cpp.

pub mod completion;
mod completion_answer;
mod completion_options;
mod completion_stream;
pub(crate) mod embedding;
pub mod infill;
mod model_events;
pub mod properties;
pub mod rerank;
mod slots;
mod template;
pub mod tokens;

use crate::openapi::{Answer, DescribedRoutes, Group, Operation};

/// A route with a body.
const fn operation(
    id: &'static str,
    summary: &'static str,
    request: fn() -> serde_json::Value,
    answer: fn() -> serde_json::Value,
) -> Operation {
    Operation { id, group: Group::LlamaServer, summary, request: Some(request), answer: Answer::Json(answer) }
}

/// The routes.
pub fn routes() -> DescribedRoutes {
    let completion = Operation {
        answer: Answer::JsonOrEvents(completion::answer_schema),
        ..operation("completion", "Continues prompts", completion::request_schema, completion::answer_schema)
    };
    let either = Operation {
        id: "completionOrOpenAi",
        request: Some(completion::either_request_schema),
        answer: Answer::JsonOrEvents(completion::either_answer_schema),
        ..completion
    };
    let infill = Operation {
        answer: Answer::JsonOrEvents(completion::answer_schema),
        ..operation("infill", "Fills a gap in a text", infill::request_schema, completion::answer_schema)
    };
    let tokenize =
        operation("tokenize", "The tokens of a text", tokens::tokenize_schema, tokens::tokens_schema);
    let detokenize =
        operation("detokenize", "The text of tokens", tokens::detokenize_schema, tokens::content_schema);
    let apply = operation(
        "applyTemplate",
        "A conversation as the chat template renders it",
        template::request_schema,
        template::prompt_schema,
    );
    let chat_count = operation(
        "countChatTokens",
        "Counts the tokens of a conversation",
        template::request_schema,
        template::count_schema,
    );
    let response_count = Operation {
        id: "countResponseTokens",
        request: Some(template::response_request_schema),
        ..chat_count
    };
    let rerank = operation(
        "rerank",
        "Sorts documents by how well they answer a query",
        rerank::request_schema,
        rerank::answer_schema,
    );
    let embedding =
        operation("embedding", "A vector for each text", embedding::request_schema, embedding::answer_schema);
    let get = |id, summary, answer| Operation {
        id,
        group: Group::LlamaServer,
        summary,
        request: None,
        answer: Answer::Json(answer),
    };
    DescribedRoutes::default()
        .post(&["/completion"], completion::completion, completion)
        .post(&["/completions"], completion::completion_or_openai, either)
        .post(&["/infill"], infill::infill, infill)
        .post(&["/tokenize"], tokens::tokenize, tokenize)
        .post(&["/detokenize"], tokens::detokenize, detokenize)
        .post(&["/apply-template"], template::apply, apply)
        .post(
            &["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"],
            template::count_chat,
            chat_count,
        )
        .post(
            &["/v1/responses/input_tokens", "/responses/input_tokens"],
            template::count_response,
            response_count,
        )
        .post(&["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"], rerank::rerank, rerank)
        .post(&["/embedding"], embedding::embedding, embedding)
        .post(
            &["/embeddings"],
            embedding::embedding_or_openai,
            Operation {
                id: "embeddingOrOpenAi",
                request: Some(embedding::either_request_schema),
                answer: Answer::Json(embedding::either_schema),
                ..embedding
            },
        )
        .get(
            &["/props"],
            properties::properties,
            get("properties", "Properties of the model and defaults of requests", properties::schema),
        )
        .get(
            &["/tokenizer_info"],
            tokens::tokenizer_info,
            get("tokenizerInfo", "The tokenizer, as vLLM describes it", tokens::tokenizer_schema),
        )
        .get(&["/slots"], slots::slots, get("slots", "The sequences that are being computed", slots::schema))
        .get(
            &["/models/sse"],
            model_events::follow,
            Operation {
                answer: Answer::Text("text/event-stream"),
                ..get("modelEvents", "What becomes of models, where there are several", properties::schema)
            },
        )
        .get(
            &["/lora-adapters"],
            properties::adapters,
            get("loraAdapters", "The adapters that are loaded: none", properties::adapters_schema),
        )
        .post(
            &["/lora-adapters"],
            properties::set_adapters,
            operation(
                "setLoraAdapters",
                "Sets the scales of adapters: of none",
                crate::openapi::schema::empty_list,
                properties::success_schema,
            ),
        )
}
