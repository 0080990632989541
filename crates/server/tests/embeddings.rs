//! Embeddings in the forms of OpenAI, llama-server and Ollama: one vector whatever the form.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::time::Duration;

use crate::common::{CONTEXT, Setup, TestServer, Value, hello, json, with};
use quadriga_llm::serving::BatcherOptions;

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
    let server = TestServer::start();
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
fn vectors_can_be_had_as_they_are() {
    let server = TestServer::start();
    let ask = |norm: i64| {
        let body = json!({ "content": ["hello", "the end"], "embd_normalize": norm });
        let vectors = server.post("/embedding", &body).ok();
        [0, 1].map(|index| numbers(&vectors[index]["embedding"][0]))
    };
    for (own, scaled) in ask(-1).iter().zip(ask(2)) {
        let length = own.iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!(length > 0.0 && (length - 1.0).abs() > 0.01, "{length}");
        let close = own.iter().zip(&scaled).all(|(own, scaled)| (own / length - scaled).abs() < 1e-5);
        assert!(close, "{own:?} {scaled:?}");
    }
    let refused = server.post("/embedding", &json!({ "content": "x", "embd_normalize": -2 }));
    assert!(refused.status == 400 && refused.text().contains("embd_normalize"), "{}", refused.text());
}

#[test]
fn long_texts_are_not_cut_unasked() {
    let server = TestServer::start();
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

/// Texts are parts of the steps that generate answers: no engine of their own computes them meanwhile.
#[test]
fn texts_are_computed_in_parts_beside_streams() {
    let setup = Setup::default();
    // As small as parts get.
    let batcher = BatcherOptions { token_time: Some(Duration::ZERO), ..setup.batcher.clone() };
    let server = Setup { batcher, ..setup }.start();
    let computed = || server.get("/status").ok()["computed_tokens"].as_u64().unwrap();
    let body = with(hello(), json!({ "stream": true, "max_tokens": 400 }));
    let mut stream = server.client().stream("/v1/chat/completions", &body);
    stream.chunk().unwrap();
    let before = computed();
    // As many texts as need several turns, of many steps each.
    let texts: Vec<String> = (0..12).map(|number| format!("{number}{}", "x".repeat(300))).collect();
    let answer = server.post("/v1/embeddings", &json!({ "input": texts })).ok();
    assert_eq!(answer["data"].as_array().unwrap().len(), texts.len());
    let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(computed() >= before + tokens, "{} {before} {tokens}", computed());
    let mut rest = Vec::new();
    while let Some(chunk) = stream.chunk() {
        rest.extend(chunk);
    }
    assert!(String::from_utf8(rest).unwrap().contains("[DONE]"));
    server.assert_idle();
}

#[test]
fn texts_of_clients_that_went_away_are_not_computed() {
    let server = TestServer::start();
    let texts: Vec<String> = (0..2000).map(|number| format!("{number}{}", "x".repeat(300))).collect();
    let body = json!({ "input": texts }).to_string();
    let mut stream = server.client().connect();
    let head =
        format!("POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    std::io::Write::write_all(&mut stream, (head + &body).as_bytes()).unwrap();
    while server.get("/status").ok()["running"] == 0 {}
    drop(stream);
    server.assert_idle();
    let computed = server.get("/status").ok()["computed_tokens"].as_u64().unwrap();
    assert!(computed < 300 * 2000, "all texts were computed: {computed} tokens");
}

/// Texts that cannot fit are not tokenized: how many tokens they have is known as far as that is enough.
#[test]
fn texts_that_cannot_fit_are_refused_by_their_length() {
    let server = TestServer::start();
    // The longest token has nine letters.
    let text = "x".repeat(CONTEXT * 9 + 9);
    let least = format!("your request has {} tokens", CONTEXT + 1);
    for (path, body) in [
        ("/v1/embeddings", json!({ "input": ["a", text] })),
        ("/api/embed", json!({ "input": text })),
        ("/api/embeddings", json!({ "prompt": text })),
        ("/embedding", json!({ "content": text })),
        ("/v1/completions", json!({ "prompt": text })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": text }] })),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        assert!(answer.text().contains(&least), "{path}: {}", answer.text());
    }
    let cut = server.post("/api/embed", &json!({ "input": text, "truncate": true })).ok();
    assert_eq!(cut["prompt_eval_count"], CONTEXT);
    let bias = json!({ "logit_bias": [["y".repeat(40_000), 1], ["z".repeat(40_000), 1]] });
    let refused = server.post("/completion", &with(bias, json!({ "prompt": "a" })));
    assert!(refused.status == 400 && refused.text().contains("logit_bias"), "{}", refused.text());
}

#[test]
fn embeddings_count_in_the_metrics_of_their_model() {
    let server = TestServer::start();
    let counter = |name: &str| -> f64 {
        let text = server.get("/metrics").text();
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    };
    server.post("/v1/embeddings", &json!({ "input": [[5, 6, 7], [8, 9]] })).ok();
    assert_eq!(counter("llamacpp:prompt_tokens_total{"), 5.0);
    assert_eq!(counter("vllm:request_success_total{"), 1.0);
}
