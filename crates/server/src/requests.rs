//! What routes make of a body, without answering it: for callers without a connection, tests and fuzzers.

use std::sync::Arc;

use crate::body::JsonBody;
use crate::dialects::{anthropic, llama_server, ollama, openai};
use crate::error::ApiError;
use crate::generation::Generation;
use crate::model::ServedModel;
use crate::prompt;

/// Routes whose bodies have texts for a model.
pub const PATHS: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/completion",
    "/infill",
    "/v1/embeddings",
    "/api/embed",
    "/rerank",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];

/// The generations that a request asks for; none if its path is for something else.
///
/// # Errors
/// A field is wrong.
pub fn parse(path: &str, body: &JsonBody, served: &Arc<ServedModel>) -> Result<Vec<Generation>, ApiError> {
    let fields = &body.fields();
    Ok(match path {
        "/v1/chat/completions" | "/apply-template" => vec![openai::chat::parse(fields, served)?],
        "/v1/completions" => openai::completions::parse(fields, served)?.generations,
        "/v1/responses" => vec![openai::responses::parse(fields, served)?],
        "/v1/messages" => vec![anthropic::messages::parse(fields, served)?],
        "/api/chat" => ollama::chat::parse(fields, served)?.into_iter().collect(),
        "/api/generate" => ollama::generate::parse(fields, served)?.into_iter().collect(),
        "/completion" => llama_server::completion::parse(fields, served)?,
        "/infill" => llama_server::infill::parse(fields, served)?,
        _ => Vec::new(),
    })
}

/// The tokens of the prompts or texts that a request of one of [`PATHS`] has; none for another path.
///
/// # Errors
/// A field is wrong, or a template does not take the messages.
pub fn prompts(path: &str, body: &JsonBody, served: &Arc<ServedModel>) -> Result<Vec<Vec<u32>>, ApiError> {
    let fields = &body.fields();
    match path {
        "/v1/embeddings" => {
            let texts = openai::embeddings::parse(fields, served)?.texts;
            texts.into_iter().map(|text| text.tokens(served)).collect()
        }
        "/api/embed" => ollama::embed::parse(fields, served)?.tokens(served),
        "/rerank" => llama_server::rerank::parse(fields)?.pairs(served),
        "/tokenize" => {
            let wanted = llama_server::tokens::TokenizeRequest::new(fields, served)?;
            Ok(vec![wanted.tokens(served)?])
        }
        "/detokenize" => Ok(vec![llama_server::tokens::listed(fields, served)?]),
        _ => {
            let generations = parse(path, body, served)?;
            generations.iter().map(|generation| prompt::tokens(served, generation)).collect()
        }
    }
}
