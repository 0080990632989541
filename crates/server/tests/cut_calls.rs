//! Calls of tools that the largest number of tokens or a stop string cuts: their arguments are in the call and nowhere else, whole and
//! streamed, in every dialect.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, json, model, with};

/// From within the first tag to behind the first call.
const LIMITS: [usize; 9] = [5, 14, 30, 41, 50, 58, 63, 68, 90];

fn server() -> TestServer {
    let template = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
    setup.batcher.engine.context = 2048;
    setup.start()
}

fn schema() -> Value {
    json!({ "type": "object", "properties": { "on": { "type": "boolean" } }, "required": ["on"],
        "additionalProperties": false })
}

fn streamed(server: &TestServer, path: &str, body: &Value) -> Vec<Value> {
    let answer = server.post(path, &with(body.clone(), json!({ "stream": true })));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let events = answer.events().into_iter().filter(|(_, data)| data != "[DONE]");
    events.map(|(_, data)| serde_json::from_str(&data).unwrap()).collect()
}

fn chat() -> Value {
    let tool = json!({ "type": "function", "function": { "name": "light", "parameters": schema() } });
    json!({ "messages": [{ "role": "user", "content": "x" }], "tools": [tool], "tool_choice": "required", "seed": 1,
        "temperature": 0 })
}

/// The calls of a message: name and arguments.
fn calls(message: &Value) -> Vec<(String, String)> {
    let text = |call: &Value, name: &str| call["function"][name].as_str().unwrap().to_owned();
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    calls.iter().map(|call| (text(call, "name"), text(call, "arguments"))).collect()
}

/// Asserts that arguments are the beginning of those of a call.
#[track_caller]
fn assert_arguments(arguments: &str) {
    let dense: String = arguments.chars().filter(|letter| !letter.is_whitespace()).collect();
    let wanted = ["{\"on\":true}", "{\"on\":false}"];
    assert!(wanted.iter().any(|wanted| wanted.starts_with(&dense)), "{arguments}");
}

#[test]
fn chat_completions() {
    let server = server();
    let mut cut = 0;
    for limit in LIMITS {
        let body = with(chat(), json!({ "max_tokens": limit }));
        let whole = server.post("/v1/chat/completions", &body).ok();
        let message = &whole["choices"][0]["message"];
        assert!(message["content"].as_str().unwrap_or_default().is_empty(), "{limit}: {whole}");
        let found = calls(message);
        found.iter().for_each(|(_, arguments)| assert_arguments(arguments));
        cut += usize::from(found.iter().any(|(_, text)| serde_json::from_str::<Value>(text).is_err()));
        let (mut text, mut pieces) = (String::new(), Vec::<(String, String)>::new());
        for chunk in streamed(&server, "/v1/chat/completions", &body) {
            let delta = &chunk["choices"][0]["delta"];
            text.push_str(delta["content"].as_str().unwrap_or_default());
            for piece in delta["tool_calls"].as_array().unwrap_or(&Vec::new()) {
                let arguments = piece["function"]["arguments"].as_str().unwrap();
                match piece["function"]["name"].as_str() {
                    Some(name) => pieces.push((name.to_owned(), arguments.to_owned())),
                    None => pieces.last_mut().unwrap().1.push_str(arguments),
                }
            }
        }
        assert_eq!((text.as_str(), pieces), ("", found), "{limit}");
    }
    assert!(cut > 0, "no limit cut the arguments");
    // A stop string cuts as well.
    let body = with(chat(), json!({ "max_tokens": 200, "stop": ["on"] }));
    let whole = server.post("/v1/chat/completions", &body).ok();
    let message = &whole["choices"][0]["message"];
    assert_eq!((&whole["choices"][0]["finish_reason"], &message["content"]), (&json!("stop"), &Value::Null));
    assert_arguments(&calls(message)[0].1);
}

#[test]
fn messages() {
    let server = server();
    let tools = json!([{ "name": "light", "input_schema": schema() }]);
    for limit in LIMITS {
        let body = json!({ "messages": [{ "role": "user", "content": "x" }], "tools": tools, "seed": 1, "temperature": 0,
            "tool_choice": { "type": "any" }, "max_tokens": limit });
        let whole = server.post("/v1/messages", &body).ok();
        let (mut blocks, mut partial) = (Vec::new(), Vec::<String>::new());
        for event in streamed(&server, "/v1/messages", &body) {
            if event["type"] == "content_block_start" {
                blocks.push(event["content_block"]["type"].clone());
                partial.push(String::new());
            }
            let delta = &event["delta"]["partial_json"];
            if let Some(text) = delta.as_str() {
                partial.last_mut().unwrap().push_str(text);
            }
        }
        let content = whole["content"].as_array().unwrap();
        let kinds: Vec<Value> = content.iter().map(|block| block["type"].clone()).collect();
        assert_eq!(kinds, blocks, "{limit}: {whole}");
        for (block, partial) in content.iter().zip(&partial) {
            assert_eq!(block["type"], "tool_use", "{limit}: {whole}");
            assert_arguments(partial);
            let input = block["input"].as_object().unwrap();
            assert!(input.keys().all(|key| key == "on"), "{limit}: {whole}");
            // The last piece is not lost.
            let value = serde_json::from_str::<Value>(partial);
            assert!(value.is_err() || value.unwrap() == block["input"], "{limit}: {partial} {whole}");
        }
    }
}

#[test]
fn responses() {
    let server = server();
    let tool = json!({ "type": "function", "name": "light", "parameters": schema() });
    for limit in LIMITS {
        let body = json!({ "input": "x", "tools": [tool], "tool_choice": "required", "seed": 1, "temperature": 0,
            "max_output_tokens": limit });
        let whole = server.post("/v1/responses", &body).ok();
        let events = streamed(&server, "/v1/responses", &body);
        let plain = |response: &Value| -> Vec<Value> {
            let items = response["output"].as_array().unwrap().iter();
            let fields = ["type", "status", "name", "arguments", "content"];
            items.map(|item| fields.iter().map(|field| item[*field].clone()).collect()).collect()
        };
        let last = &events.last().unwrap()["response"];
        assert_eq!(plain(&whole), plain(last), "{limit}");
        assert_eq!(whole["status"], last["status"]);
        let output = whole["output"].as_array().unwrap();
        if whole["status"] == "incomplete" {
            assert_eq!(output.last().unwrap()["status"], "incomplete", "{limit}: {whole}");
            assert!(output[..output.len() - 1].iter().all(|item| item["status"] == "completed"), "{whole}");
        }
        let sum: String = events
            .iter()
            .filter(|event| event["type"] == "response.function_call_arguments.delta")
            .map(|event| event["delta"].as_str().unwrap())
            .collect();
        let all: String = output.iter().filter_map(|item| item["arguments"].as_str()).collect();
        assert_eq!(sum, all, "{limit}");
        for item in output {
            match item["type"].as_str().unwrap() {
                "function_call" => assert_arguments(item["arguments"].as_str().unwrap()),
                _ => assert_eq!(item["content"][0]["text"], "", "{limit}: {whole}"),
            }
        }
    }
}
