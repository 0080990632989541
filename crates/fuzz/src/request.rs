//! Parses any bytes as the body of a request, one target for each route: an error that blames the request, or prompts whose
//! tokens exist.

#[allow(dead_code, unreachable_pub, reason = "the tests use more of it")]
#[path = "../../server/tests/common/model.rs"]
mod model;

use std::sync::{Arc, LazyLock};

use quadriga_llm::EngineOptions;
use quadriga_server::ServedModel;
use quadriga_server::body::JsonBody;
use quadriga_server::requests;

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
    let Ok(body) = JsonBody::parse(bytes) else { return };
    match requests::prompts(path, &body, &SERVED) {
        Err(error) => assert!(!error.status().is_server_error(), "{path}: {error:?}"),
        Ok(prompts) => {
            let count = SERVED.model.hyperparameters().vocabulary;
            // Tokens that a request spells out as numbers are checked when it is submitted.
            let spelled = bytes.contains(&b'[');
            assert!(spelled || prompts.iter().flatten().all(|token| (*token as usize) < count));
        }
    }
}
