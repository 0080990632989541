//! Tokens and log-probabilities are those of the text that an answer has: not of stop strings, reasoning or calls.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Answer, Setup, TestServer, Value, json, model, with};

/// Reasoning has begun when the answer begins.
const THINKING: &str = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant <think>{% endif %}{% if false %}</think>{% endif %}";

fn joined(tokens: &Value) -> String {
    tokens.as_array().unwrap().iter().map(|token| token["token"].as_str().unwrap()).collect()
}

/// The text of a response's message, and that of its log-probabilities.
fn message(response: &Value) -> (String, String) {
    let items = response["output"].as_array().unwrap();
    let message = items.iter().find(|item| item["type"] == "message").unwrap();
    let part = &message["content"][0];
    (part["text"].as_str().unwrap().to_owned(), joined(&part["logprobs"]))
}

fn last_response(answer: &Answer) -> Value {
    let events = answer.events();
    serde_json::from_str::<Value>(&events.last().unwrap().1).unwrap()["response"].clone()
}

/// A request without control tokens in its answer.
fn body(more: Value) -> Value {
    let bias = json!({ "seed": 1, "ignore_eos": true, "temperature": 0, "logit_bias": { "96": -100 } });
    with(with(json!({ "model": "small" }), bias), more)
}

/// A stop string of several tokens in the middle of a text.
fn stop_in(text: &str) -> String {
    text.chars().skip(text.chars().count() / 2).take(3).collect()
}

#[test]
fn tokens_of_a_stop_string_are_not_of_the_text() {
    let server = TestServer::start();
    let streamed = json!({ "stream": true });
    let messages = json!([{ "role": "user", "content": "hello there" }]);

    let chat = body(json!({ "messages": messages, "max_tokens": 40, "logprobs": true, "top_logprobs": 1 }));
    let path = "/v1/chat/completions";
    let text = server.post(path, &chat).ok()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let chat = with(chat, json!({ "stop": stop_in(&text) }));
    let choice = server.post(path, &chat).ok()["choices"][0].clone();
    let content = choice["message"]["content"].as_str().unwrap();
    assert!(text.starts_with(content) && content.len() < text.len() && choice["finish_reason"] == "stop");
    assert_eq!(joined(&choice["logprobs"]["content"]), content);
    let chunks = server.post(path, &with(chat, streamed.clone())).chunks();
    let found: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(Value::from(found), choice["logprobs"]["content"]);

    let completion = body(json!({ "prompt": "hello there", "max_tokens": 40, "logprobs": 1 }));
    let path = "/v1/completions";
    let text = server.post(path, &completion).ok()["choices"][0]["text"].as_str().unwrap().to_owned();
    let completion = with(completion, json!({ "stop": stop_in(&text) }));
    let choice = server.post(path, &completion).ok()["choices"][0].clone();
    let texts = |tokens: &Value| -> String {
        tokens.as_array().into_iter().flatten().map(|token| token.as_str().unwrap()).collect()
    };
    assert_eq!(texts(&choice["logprobs"]["tokens"]), choice["text"].as_str().unwrap());
    let chunks = server.post(path, &with(completion, streamed.clone())).chunks();
    let found: String =
        chunks.iter().map(|chunk| texts(&chunk["choices"][0]["logprobs"]["tokens"])).collect();
    assert_eq!(found, choice["text"].as_str().unwrap());

    let own = body(json!({ "prompt": "hello there", "n_predict": 40, "n_probs": 1, "return_tokens": true,
        "stop": stop_in(&text) }));
    let whole = server.post("/completion", &own).ok();
    assert_eq!(whole["stop_type"], "word");
    assert_eq!(joined(&whole["completion_probabilities"]), whole["content"].as_str().unwrap());
    let shown = server.post("/detokenize", &json!({ "tokens": whole["tokens"] })).ok();
    assert_eq!(shown["content"], whole["content"]);
    let events = server.post("/completion", &with(own, streamed.clone())).events();
    let chunks: Vec<Value> = events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    let tokens: Vec<Value> =
        chunks.iter().flat_map(|chunk| chunk["tokens"].as_array().cloned().unwrap_or_default()).collect();
    assert_eq!(Value::from(tokens), whole["tokens"]);

    let request = body(json!({ "input": "hello there", "max_output_tokens": 40, "top_logprobs": 1 }));
    let (text, _) = message(&server.post("/v1/responses", &request).ok());
    let request = with(request, json!({ "stop": stop_in(&text) }));
    let (text, of_tokens) = message(&server.post("/v1/responses", &request).ok());
    assert_eq!(text, of_tokens);
    let (text, of_tokens) = message(&last_response(&server.post("/v1/responses", &with(request, streamed))));
    assert_eq!(text, of_tokens);
    server.assert_idle();
}

#[test]
fn ollamas_context_ends_before_a_stop_string() {
    let server = TestServer::start();
    let options = json!({ "num_predict": 40, "seed": 1, "temperature": 0, "ignore_eos": true });
    let body = json!({ "model": "small", "prompt": "hello there", "options": options, "logprobs": true,
        "logit_bias": { "96": -100 } });
    let ask =
        |body: &Value| server.post("/api/generate", &with(body.clone(), json!({ "stream": false }))).ok();
    let text = ask(&body)["response"].as_str().unwrap().to_owned();
    let stopped = with(body, json!({ "options": with(options, json!({ "stop": [stop_in(&text)] })) }));
    let whole = ask(&stopped);
    assert_eq!(joined(&whole["logprobs"]), whole["response"].as_str().unwrap());
    let context = whole["context"].as_array().unwrap();
    let answer = &context[whole["prompt_eval_count"].as_u64().unwrap() as usize..];
    let shown = server.post("/detokenize", &json!({ "tokens": answer })).ok();
    assert_eq!(shown["content"], whole["response"]);
    let lines = server.post("/api/generate", &stopped).lines();
    assert_eq!(lines.last().unwrap()["context"], whole["context"]);
}

#[test]
fn tokens_of_reasoning_are_not_of_the_text() {
    let server = Setup { model: model::with_template(THINKING), ..Setup::default() }.start();
    let request = body(json!({ "input": "hello", "max_output_tokens": 60, "top_logprobs": 1,
        "reasoning_budget_tokens": 12 }));
    let whole = server.post("/v1/responses", &request).ok();
    let kinds = |response: &Value| -> Vec<String> {
        let items = response["output"].as_array().unwrap();
        items.iter().map(|item| item["type"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(kinds(&whole), ["reasoning", "message"], "{whole}");
    let (text, of_tokens) = message(&whole);
    assert_eq!(text, of_tokens);
    let streamed = last_response(&server.post("/v1/responses", &with(request, json!({ "stream": true }))));
    assert_eq!(kinds(&streamed), ["reasoning", "message"], "{streamed}");
    assert_eq!(message(&streamed), (text.clone(), text));
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let chat = body(json!({ "messages": messages, "max_tokens": 60, "logprobs": true,
        "reasoning_budget_tokens": 12 }));
    let choice = server.post("/v1/chat/completions", &chat).ok()["choices"][0].clone();
    assert!(!choice["message"]["reasoning_content"].as_str().unwrap().is_empty(), "{choice}");
    assert_eq!(joined(&choice["logprobs"]["content"]), choice["message"]["content"].as_str().unwrap());
}

#[test]
fn calls_have_their_arguments_beside_log_probabilities() {
    let template = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
    setup.batcher.engine.context = 2048;
    let server = setup.start();
    let schema = json!({ "type": "object", "properties": { "on": { "type": "boolean" } }, "required": ["on"],
        "additionalProperties": false });
    let request = json!({
        "model": "small", "input": "hello", "max_output_tokens": 200, "seed": 1, "top_logprobs": 2,
        "tools": [{ "type": "function", "name": "light", "parameters": schema }],
        "tool_choice": "required", "parallel_tool_calls": false,
    });
    let steady = |response: &Value| -> Vec<Value> {
        let items = response["output"].as_array().unwrap();
        items.iter().map(|item| json!([item["type"], item["status"], item["arguments"]])).collect()
    };
    let whole = steady(&server.post("/v1/responses", &request).ok());
    let arguments: Value = serde_json::from_str(whole[0][2].as_str().unwrap()).unwrap();
    assert!(arguments["on"].is_boolean() && whole.len() == 1, "{whole:?}");
    let answer = server.post("/v1/responses", &with(request, json!({ "stream": true })));
    assert_eq!(steady(&last_response(&answer)), whole);
    server.assert_idle();
}
