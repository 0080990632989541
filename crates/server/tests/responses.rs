//! `/v1/responses`: events in the order and with the numbers that the SDK's accumulator needs, and the same response at their end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, json, model, with};

#[test]
fn numbers_come_back_as_they_were_written() {
    let server = TestServer::start();
    let body = json!({ "input": "hello", "max_output_tokens": 1, "temperature": 0.7, "top_p": 0.95 });
    let answer = server.post("/v1/responses", &body);
    assert!(
        answer.text().contains("\"temperature\":0.7,") && answer.text().contains("\"top_p\":0.95,"),
        "{}",
        answer.text()
    );
}

#[test]
fn events_add_up_to_the_response() {
    let server = TestServer::start();
    let body = json!({ "model": "small", "input": "hello there", "max_output_tokens": 8, "seed": 1, "ignore_eos": true, "top_logprobs": 1 });
    let whole = server.post("/v1/responses", &body).ok();
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let answer = server.post("/v1/responses", &with(body, json!({ "stream": true })));
    let events: Vec<Value> = answer
        .events()
        .iter()
        .map(|(name, data)| {
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(name.as_deref(), data["type"].as_str());
            data
        })
        .collect();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        kinds[kinds.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete"
        ]
    );
    assert!(kinds[4..kinds.len() - 4].iter().all(|kind| *kind == "response.output_text.delta"));
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    for event in events.iter().filter(|event| event["type"] == "response.output_text.delta") {
        assert_eq!((&event["output_index"], &event["content_index"]), (&json!(0), &json!(0)));
        assert!(event["logprobs"].is_array() && event["item_id"] == events[2]["item"]["id"]);
    }
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], text);
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!((&last["usage"], &last["status"]), (&whole["usage"], &whole["status"]));
    server.assert_idle();
}

#[test]
fn a_stop_string_completes_a_response() {
    let server = TestServer::start();
    let body = json!({ "input": "hello there", "max_output_tokens": 40, "seed": 1, "ignore_eos": true });
    let whole = server.post("/v1/responses", &body).ok();
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(6).take(2).collect();
    let stopped = with(body, json!({ "stop": [stop] }));
    let answer = server.post("/v1/responses", &stopped).ok();
    assert_eq!(
        (&answer["status"], &answer["incomplete_details"]),
        (&json!("completed"), &Value::Null),
        "{answer}"
    );
    assert_eq!(answer["output"][0]["status"], "completed");
    let found = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with(found) && !found.contains(&stop), "{stop:?} in {found:?}");
    let events = server.post("/v1/responses", &with(stopped, json!({ "stream": true }))).events();
    assert_eq!(events.last().unwrap().0.as_deref(), Some("response.completed"));
}

#[test]
fn reasoning_has_a_budget() {
    let template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant <think>{% endif %}{% if false %}</think>{% endif %}";
    let server = Setup { model: model::with_template(template), ..Setup::default() }.start();
    let body = json!({ "input": "hello", "max_output_tokens": 100, "seed": 1, "ignore_eos": true });
    let reasoned = |more: Value| {
        let whole = server.post("/v1/responses", &with(body.clone(), more)).ok();
        whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
    };
    assert!(reasoned(json!({})) > 40);
    let limited = reasoned(json!({ "reasoning_budget_tokens": 12 }));
    assert!((12..40).contains(&limited), "{limited}");
    assert_eq!(reasoned(json!({ "reasoning_budget_tokens": 0 })), 0);
    // Reasoning without an answer behind it is no answer that is begun.
    let thought = json!({ "type": "reasoning", "summary": [{ "type": "summary_text", "text": "hm" }] });
    assert!(reasoned(json!({ "input": [{ "role": "user", "content": "hello" }, thought] })) > 40);
}

#[test]
fn strict_tools_have_schemas_that_can_be_enforced() {
    let template = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
    setup.batcher.engine.context = 2048;
    let server = setup.start();
    let request = |strict: Value| {
        let pattern =
            json!({ "type": "object", "properties": { "x": { "type": "string", "pattern": "(?=a)" } } });
        let tool = json!({ "type": "function", "name": "odd", "parameters": pattern, "strict": strict });
        json!({ "model": "small", "input": "hello", "tools": [tool], "tool_choice": "required",
            "max_output_tokens": 40, "seed": 1 })
    };
    let refused = server.post("/v1/responses", &request(json!(true)));
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("tools")),
        "{}",
        refused.text()
    );
    assert!(refused.text().contains("odd"), "{}", refused.text());
    for strict in [json!(false), Value::Null] {
        let whole = server.post("/v1/responses", &request(strict)).ok();
        assert_eq!(whole["output"][0]["name"], "odd", "{whole}");
    }
    assert_eq!(server.post("/v1/responses", &request(json!("yes"))).status, 400);
    server.assert_idle();
}

#[test]
fn metadata_is_limited() {
    let server = TestServer::start();
    let ask = |metadata: Value| {
        let body = json!({ "input": "hello", "max_output_tokens": 2, "metadata": metadata });
        server.post("/v1/responses", &body)
    };
    assert_eq!(ask(json!({ "a": "b" })).ok()["metadata"]["a"], "b");
    for wrong in [json!({ "a": "x".repeat(513) }), json!({ "x".repeat(65): "a" })] {
        let answer = ask(wrong);
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("metadata")));
    }
}

/// Clients offer them to every model: those that are no functions are left out, unless one of them must be called.
#[test]
fn tools_that_are_no_functions_are_left_out() {
    let server = TestServer::start();
    let custom = json!({ "type": "custom", "name": "code", "format": { "type": "text" } });
    let search = json!({ "type": "web_search" });
    let function = json!({ "type": "function", "name": "f", "parameters": { "type": "object" } });
    let tokens = |tools: Value| {
        let body = json!({ "input": "x", "tools": tools, "max_output_tokens": 1 });
        server.post("/v1/responses", &body).ok()["usage"]["input_tokens"].clone()
    };
    assert_eq!(tokens(json!([search, custom, function])), tokens(json!([function])));
    assert_eq!(tokens(json!([search, custom])), tokens(json!([])));
    for choice in [
        json!("required"),
        json!({ "type": "custom", "name": "code" }),
        json!({ "type": "web_search" }),
        json!({ "type": "function", "name": "code" }),
    ] {
        let body = json!({ "input": "x", "tools": [search, custom], "tool_choice": choice });
        let refused = server.post("/v1/responses", &body);
        assert_eq!(refused.status, 400, "{choice}: {}", refused.text());
        assert!(refused.json()["error"]["param"].as_str().unwrap().starts_with("tool_choice"));
    }
}

/// What Codex and others keep in a conversation beside messages and calls of functions.
#[test]
fn items_of_other_tools_are_calls_or_left_out() {
    let server = TestServer::start();
    let tokens = |input: Value| {
        server.post("/v1/responses/input_tokens", &json!({ "input": input })).ok()["input_tokens"].clone()
    };
    let user = |text: &str| json!({ "role": "user", "content": text });
    let plain = tokens(json!([user("hi"), user("and?")]));
    for kind in [
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "computer_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "compaction",
        "additional_tools",
        "agent_message",
    ] {
        let item = json!({ "type": kind, "id": "x", "status": "completed", "encrypted_content": "x" });
        assert_eq!(tokens(json!([user("hi"), item, user("and?")])), plain, "{kind}");
    }
    let agent = json!({ "type": "agent_message", "content": [{ "type": "encrypted_content" }, { "type": "input_text", "text": "yes" }] });
    assert_eq!(tokens(json!([user("hi"), agent])), tokens(json!([user("hi"), user("yes")])));
    let call = |arguments: &str, name: &str| json!({ "type": "function_call", "call_id": "c", "name": name, "arguments": arguments });
    let output = |kind: &str| json!({ "type": kind, "call_id": "c", "output": "done" });
    let custom = json!({ "type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+ x" });
    assert_eq!(
        tokens(json!([user("hi"), custom, output("custom_tool_call_output")])),
        tokens(json!([user("hi"), call("{\"input\":\"+ x\"}", "patch"), output("function_call_output")]))
    );
    let action = json!({ "type": "exec", "command": ["ls"] });
    let shell = json!({ "type": "local_shell_call", "call_id": "c", "action": action });
    let wanted =
        tokens(json!([user("hi"), call(&action.to_string(), "local_shell"), output("function_call_output")]));
    assert_eq!(tokens(json!([user("hi"), shell, output("local_shell_call_output")])), wanted);
    let by_id = json!({ "type": "local_shell_call_output", "id": "c", "output": "done" });
    assert_eq!(tokens(json!([user("hi"), shell, by_id])), wanted);
    let unknown = json!({ "input": [{ "type": "something_else" }] });
    assert_eq!(server.post("/v1/responses", &unknown).status, 400);
}
