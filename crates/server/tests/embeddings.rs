//! Embeddings in the forms of OpenAI, llama-server and Ollama: one vector whatever the form.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{CONTEXT, Setup, TestServer, Value, json, model};
use quadriga_llm::{Embedder, EmbedderOptions, EngineOptions};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_server::{App, Keys, Limits, ModelRegistry};

fn server() -> TestServer {
    let loader = || {
        let backend = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
        let scheduler = Scheduler::new([backend as Arc<dyn Backend>]);
        let engine = EngineOptions { context: CONTEXT, batch: 64, ..EngineOptions::default() };
        let options = EmbedderOptions { engine, ..EmbedderOptions::default() };
        Embedder::new(model::small(), &scheduler, options, &mut |_| {})
    };
    let served = Setup::default().served().with_embedder(Box::new(loader));
    TestServer::of(App::new(ModelRegistry::with(served), Keys::default(), Limits::default()))
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

/// Little-endian numbers of base64.
fn decoded(text: &str) -> Vec<f32> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => u32::from(letter - b'A'),
        b'a'..=b'z' => u32::from(letter - b'a') + 26,
        b'0'..=b'9' => u32::from(letter - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let letters: Vec<u8> = text.bytes().filter(|letter| *letter != b'=').collect();
    let mut bytes = Vec::new();
    for group in letters.chunks(4) {
        let number =
            group.iter().fold(0, |number, letter| number << 6 | value(*letter)) << (6 * (4 - group.len()));
        bytes.extend((0..group.len() - 1).map(|place| (number >> (16 - 8 * place)) as u8));
    }
    bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn every_form_has_the_same_vector() {
    let server = server();
    let openai = server.post("/v1/embeddings", &json!({ "input": ["hello", "the end"] })).ok();
    let data = openai["data"].as_array().unwrap();
    assert_eq!(data.len(), 2);
    let first = numbers(&data[0]["embedding"]);
    let length: f32 = first.iter().map(|value| value * value).sum();
    assert!((length - 1.0).abs() < 1e-4, "{length}");
    let base64 = server.post("/embeddings", &json!({ "input": "hello", "encoding_format": "base64" })).ok();
    assert_eq!(decoded(base64["data"][0]["embedding"].as_str().unwrap()), first);
    let tokens =
        server.post("/tokenize", &json!({ "content": "hello", "add_special": true })).ok()["tokens"].clone();
    let of_tokens = server.post("/v1/embeddings", &json!({ "input": [tokens] })).ok();
    assert_eq!(numbers(&of_tokens["data"][0]["embedding"]), first);
    for path in ["/embedding", "/embeddings"] {
        let own = server.post(path, &json!({ "content": "hello" })).ok();
        assert_eq!(numbers(&own[0]["embedding"][0]), first);
    }
    let ollama = server.post("/api/embed", &json!({ "model": "small", "input": "hello" })).ok();
    assert_eq!(numbers(&ollama["embeddings"][0]), first);
    let old = server.post("/api/embeddings", &json!({ "model": "small", "prompt": "hello" })).ok();
    assert_eq!(numbers(&old["embedding"]), first);
    let short = server.post("/v1/embeddings", &json!({ "input": "hello", "dimensions": 4 })).ok();
    assert_eq!(short["data"][0]["embedding"].as_array().unwrap().len(), 4);
}

#[test]
fn long_texts_are_not_cut_unasked() {
    let server = server();
    let text = "x".repeat(CONTEXT + 1);
    for (path, field) in [("/v1/embeddings", "input"), ("/api/embed", "input"), ("/embedding", "content")] {
        let answer = server.post(path, &json!({ field: text }));
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        assert!(answer.text().contains("exceeds the available context size"), "{}", answer.text());
    }
    server.post("/api/embed", &json!({ "input": text, "truncate": true })).ok();
    let refused = server.post("/rerank", &json!({ "query": "q", "documents": ["a"] }));
    assert_eq!(refused.status, 501, "{}", refused.text());
}
