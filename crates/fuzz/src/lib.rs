//! Fuzz targets: for any bytes, each checks what must hold of one parser, and panics if it does not.
//!
//! `scripts/fuzz` runs them under libFuzzer (see `fuzz/README.md`); the tests of this crate run them over the seeds and over random
//! mutations of these, so that every test run covers them without a build of its own.
//!
//! ```
//! let (_, gguf) = quadriga_fuzz::targets().into_iter().find(|(name, _)| *name == "gguf").ok_or("missing")?;
//! gguf(b"GGUF");
//! # Ok::<(), &str>(())
//! ```
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a target panics where something does not hold"
)]

#[cfg(feature = "models")]
pub mod config_json;
pub mod gguf;
#[cfg(feature = "server")]
pub mod request;
#[cfg(feature = "models")]
pub mod safetensors;
#[cfg(feature = "llm")]
pub mod template;
#[cfg(feature = "llm")]
pub mod tokenizer;
#[cfg(feature = "models")]
pub mod tokenizer_json;

/// Checks one input.
pub type Target = fn(&[u8]);

/// The targets of the features that are on, by name; `fuzz/corpus` has a folder of seeds for each.
pub fn targets() -> Vec<(&'static str, Target)> {
    vec![
        ("gguf", gguf::run),
        #[cfg(feature = "llm")]
        ("template", template::run),
        #[cfg(feature = "llm")]
        ("tokenizer", tokenizer::run),
        #[cfg(feature = "models")]
        ("config_json", config_json::run),
        #[cfg(feature = "models")]
        ("safetensors", safetensors::run),
        #[cfg(feature = "models")]
        ("tokenizer_json", tokenizer_json::run),
        #[cfg(feature = "server")]
        ("request_chat", request::chat),
        #[cfg(feature = "server")]
        ("request_completions", request::completions),
        #[cfg(feature = "server")]
        ("request_responses", request::responses),
        #[cfg(feature = "server")]
        ("request_messages", request::messages),
        #[cfg(feature = "server")]
        ("request_ollama_chat", request::ollama_chat),
        #[cfg(feature = "server")]
        ("request_ollama_generate", request::ollama_generate),
        #[cfg(feature = "server")]
        ("request_completion", request::completion),
        #[cfg(feature = "server")]
        ("request_infill", request::infill),
        #[cfg(feature = "server")]
        ("request_embeddings", request::embeddings),
        #[cfg(feature = "server")]
        ("request_ollama_embed", request::ollama_embed),
        #[cfg(feature = "server")]
        ("request_rerank", request::rerank),
        #[cfg(feature = "server")]
        ("request_tokenize", request::tokenize),
        #[cfg(feature = "server")]
        ("request_detokenize", request::detokenize),
        #[cfg(feature = "server")]
        ("request_apply_template", request::apply_template),
        #[cfg(feature = "server")]
        ("request_ollama_embeddings", request::ollama_embeddings),
        #[cfg(feature = "server")]
        ("request_embedding", request::embedding),
        #[cfg(feature = "server")]
        ("request_ollama_show", request::ollama_show),
        #[cfg(feature = "server")]
        ("request_load_model", request::load_model),
        #[cfg(feature = "server")]
        ("request_unload_model", request::unload_model),
        #[cfg(feature = "server")]
        ("request_lora_adapters", request::lora_adapters),
    ]
}
