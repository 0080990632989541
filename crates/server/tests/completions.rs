//! `/v1/completions`, as lm-eval and others use it: prompts in all forms, echo, log-probabilities, streams.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{TestServer, Value, json, with};

const PATH: &str = "/v1/completions";

fn body() -> Value {
    json!({ "model": "small", "prompt": "hello the", "max_tokens": 6, "seed": 1, "ignore_eos": true })
}

#[test]
fn a_stream_is_the_completion() {
    let server = TestServer::start();
    let body = with(
        body(),
        json!({ "prompt": ["hello", "the the"], "n": 2, "echo": true, "logprobs": 2, "temperature": 2.0 }),
    );
    let whole = server.post(PATH, &body).ok();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    let streaming = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let chunks = server.post(PATH, &with(body, streaming)).chunks();
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        let own: Vec<&Value> = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter(|c| c["index"] == index)
            .collect();
        let text: String = own.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, choice["text"]);
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let parts: Vec<Value> = own
                .iter()
                .flat_map(|choice| choice["logprobs"][name].as_array().cloned().unwrap_or_default())
                .collect();
            let whole = choice["logprobs"][name].as_array().unwrap();
            assert_eq!(parts.len(), whole.len(), "{name}");
            for (part, whole) in parts.iter().zip(whole) {
                match (part.as_f64(), whole.as_f64()) {
                    // Steps with another number of rows round differently.
                    (Some(part), Some(whole)) => {
                        assert!((part - whole).abs() < 1e-4, "{name}: {part} {whole}")
                    }
                    _ if name == "top_logprobs" => assert_eq!(part.is_null(), whole.is_null()),
                    _ => assert_eq!(part, whole, "{name}"),
                }
            }
        }
        assert_eq!(own.last().unwrap()["finish_reason"], choice["finish_reason"]);
    }
    let last = chunks.last().unwrap();
    assert_eq!(
        (&last["choices"], &last["usage"]["total_tokens"]),
        (&json!([]), &whole["usage"]["total_tokens"])
    );
    server.assert_idle();
}

/// lm-eval sends tokens, asks for one more, and reads the log-probabilities of the prompt.
#[test]
fn log_likelihoods_are_there_for_lm_eval() {
    let server = TestServer::start();
    let tokens = server.post("/tokenize", &json!({ "content": "hello the end" })).ok()["tokens"].clone();
    let count = tokens.as_array().unwrap().len();
    let ask = |more: Value| {
        let body = json!({ "model": "small", "prompt": [tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true });
        server.post(PATH, &with(body, more)).ok()["choices"][0]["logprobs"].clone()
    };
    let logprobs = ask(json!({}));
    let found = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(found.len(), count + 1);
    assert!(found[0].is_null() && logprobs["top_logprobs"][0].is_null());
    for (place, (logprob, top)) in
        found.iter().zip(logprobs["top_logprobs"].as_array().unwrap()).enumerate().skip(1)
    {
        let most =
            top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(logprob.as_f64().unwrap() <= most, "{place}");
    }
    // The last token was sampled greedily: it is the most probable one.
    let last = found[count].as_f64().unwrap();
    let top = logprobs["top_logprobs"][count].as_object().unwrap();
    assert!(top.values().any(|value| value.as_f64() == Some(last)));
    // Nothing need be generated, and a prompt of one token has a list, too.
    let none = ask(json!({ "max_tokens": 0 }));
    assert_eq!(none["token_logprobs"].as_array().unwrap()[..], found[..count]);
    let one = ask(json!({ "max_tokens": 0, "prompt": [tokens[0]] }));
    assert_eq!(one["token_logprobs"], json!([null]));
}
