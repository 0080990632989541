//! Parses any bytes as the body of a request, one target for each route: an error that blames the request, or prompts whose
//! tokens exist, and requests that the engine takes, with their schemas and grammars compiled.

#[allow(dead_code, unreachable_pub, reason = "the tests use more of it")]
#[path = "../../server/tests/common/model.rs"]
mod model;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use quadriga_llm::EngineOptions;
use quadriga_server::ServedModel;
use quadriga_server::body::JsonBody;
use quadriga_server::requests;
use serde_json::Value;

/// A model that never computes anything.
static SERVED: LazyLock<Arc<ServedModel>> = LazyLock::new(|| {
    let engine = EngineOptions { context: 512, ..EngineOptions::default() };
    Arc::new(ServedModel::encoder("small", model::with_fill_tokens(), engine, None))
});

/// Defines the target of a route.
macro_rules! routes {
    ($($name:ident $path:literal)*) => {
        $(
            #[doc = concat!("Checks one body of `", $path, "`.")]
            pub fn $name(bytes: &[u8]) {
                check($path, bytes);
            }
        )*
        /// The routes that have a target.
        pub const PATHS: &[&str] = &[$($path),*];
    };
}

routes! {
    chat "/v1/chat/completions"
    completions "/v1/completions"
    responses "/v1/responses"
    messages "/v1/messages"
    ollama_chat "/api/chat"
    ollama_generate "/api/generate"
    completion "/completion"
    infill "/infill"
    embeddings "/v1/embeddings"
    ollama_embed "/api/embed"
    rerank "/rerank"
    tokenize "/tokenize"
    detokenize "/detokenize"
    apply_template "/apply-template"
    ollama_embeddings "/api/embeddings"
    embedding "/embedding"
    ollama_show "/api/show"
    load_model "/models/load"
    unload_model "/models/unload"
    lora_adapters "/lora-adapters"
}

fn check(path: &str, bytes: &[u8]) {
    if path == "/lora-adapters" {
        if let Err(error) = requests::check_adapters(bytes) {
            assert!(!error.status().is_server_error(), "{path}: {error:?}");
        }
        return;
    }
    let Ok(body) = JsonBody::parse(bytes) else { return };
    let count = SERVED.model.hyperparameters().vocabulary;
    match requests::prompts(path, &body, &SERVED) {
        Err(error) => assert!(!error.status().is_server_error(), "{path}: {error:?}"),
        Ok(prompts) => {
            // Tokens that a request spells out as numbers are checked when it is submitted.
            let spelled = if SPELL_TOKENS.contains(&path) { numbers(&body) } else { BTreeSet::new() };
            let exists = |token: &u32| (*token as usize) < count || spelled.contains(&u64::from(*token));
            assert!(prompts.iter().flatten().all(exists), "{path}: {prompts:?}");
        }
    }
    for generation in requests::parse(path, &body, &SERVED).unwrap_or_default() {
        match SERVED.prepare(generation) {
            Err(error) => assert!(!error.status().is_server_error(), "{path}: {error:?}"),
            Ok(requests) => {
                for request in requests {
                    let prompt = &request.prompt;
                    assert!(!prompt.is_empty() && prompt.len() < SERVED.context(), "{path}: {prompt:?}");
                    assert!(prompt.iter().all(|token| (*token as usize) < count), "{path}: {prompt:?}");
                }
            }
        }
    }
}

/// Routes whose bodies may have tokens that nobody has looked at yet.
const SPELL_TOKENS: &[&str] =
    &["/v1/completions", "/completion", "/api/generate", "/v1/embeddings", "/embedding"];

/// All whole numbers of a body.
fn numbers(body: &JsonBody) -> BTreeSet<u64> {
    let (mut found, mut rest) = (BTreeSet::new(), body.0.values().collect::<Vec<&Value>>());
    while let Some(value) = rest.pop() {
        found.extend(value.as_u64());
        rest.extend(value.as_array().into_iter().flatten());
        rest.extend(value.as_object().into_iter().flat_map(|object| object.values()));
    }
    found
}
