//! The interfaces of other servers. Each turns JSON into [`Generation`](crate::generation::Generation)s and their events into
//! JSON; what is common to several is in this module's own files.

pub mod anthropic;
pub mod error_body;
mod fill_in_middle;
pub mod format_fields;
pub mod llama_server;
pub mod ollama;
pub mod openai;
mod prompt_fields;
pub mod sampling_fields;
mod time;
pub mod timings;
mod vllm_fields;

/// Whose interface a route belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dialect {
    /// OpenAI.
    OpenAi,
    /// Anthropic.
    Anthropic,
    /// Ollama.
    Ollama,
    /// llama-server, of llama.cpp.
    LlamaServer,
}

/// Routes of llama-server alone.
const LLAMA_SERVER: &[&str] = &[
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/props",
    "/slots",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/embedding",
    "/health",
    "/v1/health",
    "/metrics",
    "/lora-adapters",
    "/models/load",
    "/models/unload",
];

/// What further paths of llama-server begin with.
const BELOW: [&str; 3] = ["/slots/", "/v1/stream", "/v1/chat/completions/control"];

impl Dialect {
    /// The dialect of a path, known or not, which decides the form of its errors. Paths that OpenAI and llama-server share have
    /// OpenAI's form.
    pub fn of_path(path: &str) -> Dialect {
        if path.starts_with("/v1/messages") {
            Dialect::Anthropic
        } else if path.starts_with("/api/") {
            Dialect::Ollama
        } else if LLAMA_SERVER.contains(&path) || BELOW.iter().any(|below| path.starts_with(below)) {
            Dialect::LlamaServer
        } else {
            Dialect::OpenAi
        }
    }
}
