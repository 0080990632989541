//! What routes make of a body, without answering it: for callers without a connection, tests and fuzzers.

use std::sync::Arc;

use crate::body::JsonBody;
use crate::dialects::{anthropic, llama_server, ollama, openai};
use crate::error::ApiError;
use crate::generation::Generation;
use crate::model::ServedModel;
use crate::prompt;

/// Routes whose bodies are read as those of another one.
const SAME_BODIES: &[(&str, &str)] = &[
    ("/v1/chat/completions/input_tokens", "/v1/chat/completions"),
    ("/v1/responses/input_tokens", "/v1/responses"),
    ("/v1/messages/count_tokens", "/v1/messages"),
    ("/completions", "/completion"),
    ("/embeddings", "/embedding"),
];

/// Routes with a body of their own, each by its first path.
pub fn paths() -> Vec<&'static str> {
    let is_own = |path: &&str| SAME_BODIES.iter().all(|(same, _)| same != path);
    crate::routes::described().posted().into_iter().filter(is_own).collect()
}

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

/// Reads the body of `/lora-adapters`, which is a list.
///
/// # Errors
/// It names adapters, or is something else.
pub fn check_adapters(bytes: &[u8]) -> Result<(), ApiError> {
    llama_server::properties::check_adapters(&crate::body::parse_value(bytes)?)
}

/// The tokens of the prompts or texts that a request of one of [`paths`] has; none for one that names a model alone.
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
        "/api/embeddings" => ollama::embed::parse_one(fields)?.tokens(served),
        "/embedding" => {
            let (texts, _) = llama_server::embedding::parse(fields, served)?;
            texts.into_iter().map(|text| text.tokens(served)).collect()
        }
        "/api/show" => ollama::models::parse_show(fields).map(|_| Vec::new()),
        "/models/load" | "/models/unload" => crate::status::named_model(fields).map(|_| Vec::new()),
        "/rerank" => llama_server::rerank::parse(fields)?.pairs(served),
        "/tokenize" => {
            let wanted = llama_server::tokens::TokenizeRequest::new(fields, served)?;
            Ok(vec![wanted.tokens(served)?])
        }
        "/detokenize" => Ok(vec![llama_server::tokens::listed(fields, served)?]),
        _ => {
            let generations = parse(path, body, served)?;
            generations.into_iter().map(|generation| prompt::tokens(served, generation)).collect()
        }
    }
}
