//! Parses any bytes as the body of a request for text, of each route in turn: an error that blames the request, or prompts whose
//! tokens exist.
//!
//! The first letter selects the route, the rest is the body.
#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../crates/server/tests/common/model.rs"]
mod model;

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use quadriga_llm::EngineOptions;
use quadriga_server::ServedModel;
use quadriga_server::body::JsonBody;
use quadriga_server::requests;

/// A model that never computes anything.
static SERVED: LazyLock<Arc<ServedModel>> = LazyLock::new(|| {
    let engine = EngineOptions { context: 512, ..EngineOptions::default() };
    Arc::new(ServedModel::encoder("small", model::with_fill_tokens(), engine, None))
});

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let number = usize::from(first.wrapping_sub(b'a')) % requests::PATHS.len();
    let Some(path) = requests::PATHS.get(number) else { return };
    let Ok(body) = JsonBody::parse(rest) else { return };
    match requests::prompts(path, &body, &SERVED) {
        Err(error) => assert!(!error.status().is_server_error(), "{path}: {error:?}"),
        Ok(prompts) => {
            let count = SERVED.model.hyperparameters().vocabulary;
            // Tokens that a request spells out as numbers are checked when it is submitted.
            let spelled = rest.contains(&b'[');
            assert!(spelled || prompts.iter().flatten().all(|token| (*token as usize) < count));
        }
    }
});
