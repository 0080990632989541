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

/// A template with calls of tools, whose prompts end within reasoning.
const CALLS: &str = "{% if tools %}<|start|>system {{ tools | tojson }}<|end|>{% endif %}\
    {% for m in messages %}<|start|>{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n\
    {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant <think>\n{% endif %}{# </think> #}";

/// Every kind of item, one behind the other: each is opened, filled and closed before the next.
#[test]
fn items_are_streamed_one_after_another() {
    let parts = [
        "Hm, ",
        "light.",
        "\n</think>\n\n",
        "I switch",
        " it.",
        "\n<tool_call>\n{\"name\": \"light\", \"arguments\": {\"on\":",
        " true}}\n</tool_call>",
        // The template has nothing between calls.
        "<tool_call>\n{\"name\": \"light\", \"arguments\": {\"on\": false",
        "}}\n</tool_call>",
    ];
    let mut setup = Setup { model: model::answering(CALLS, &parts), ..Setup::default() };
    setup.batcher.engine.context = 2048;
    let server = setup.start();
    let schema =
        json!({ "type": "object", "properties": { "on": { "type": "boolean" } }, "required": ["on"] });
    let tool = json!({ "type": "function", "name": "light", "parameters": schema });
    let body = json!({ "input": "x", "tools": [tool], "temperature": 0, "max_output_tokens": 100 });
    let whole = server.post("/v1/responses", &body).ok();
    let events = server.post("/v1/responses", &with(body, json!({ "stream": true }))).events();
    let events: Vec<Value> = events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    let last = &events.last().unwrap()["response"];
    let output = last["output"].as_array().unwrap();
    let ids: Vec<&str> = output.iter().map(|item| item["id"].as_str().unwrap()).collect();
    let mut seen: Vec<(&str, Value, Value, Value)> = Vec::new();
    let mut sums = [""; 4].map(String::from);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
        let kind = event["type"].as_str().unwrap();
        if let Some(delta) = event["delta"].as_str() {
            sums[event["output_index"].as_u64().unwrap() as usize].push_str(delta);
        }
        let place =
            (kind, event["output_index"].clone(), event["content_index"].clone(), event["item_id"].clone());
        if !kind.ends_with(".delta") || seen.last() != Some(&place) {
            seen.push(place);
        }
    }
    let none = Value::Null;
    let whole_item = |kind, index: usize| (kind, json!(index), none.clone(), none.clone());
    let part = |kind, index: usize| (kind, json!(index), json!(0), json!(ids[index]));
    let call = |kind, index: usize| (kind, json!(index), none.clone(), json!(ids[index]));
    let response = |kind| (kind, none.clone(), none.clone(), none.clone());
    let wanted = vec![
        response("response.created"),
        response("response.in_progress"),
        whole_item("response.output_item.added", 0),
        part("response.content_part.added", 0),
        part("response.reasoning_text.delta", 0),
        part("response.reasoning_text.done", 0),
        part("response.content_part.done", 0),
        whole_item("response.output_item.done", 0),
        whole_item("response.output_item.added", 1),
        part("response.content_part.added", 1),
        part("response.output_text.delta", 1),
        part("response.output_text.done", 1),
        part("response.content_part.done", 1),
        whole_item("response.output_item.done", 1),
        whole_item("response.output_item.added", 2),
        call("response.function_call_arguments.delta", 2),
        call("response.function_call_arguments.done", 2),
        whole_item("response.output_item.done", 2),
        whole_item("response.output_item.added", 3),
        call("response.function_call_arguments.delta", 3),
        call("response.function_call_arguments.done", 3),
        whole_item("response.output_item.done", 3),
        response("response.completed"),
    ];
    assert_eq!(seen, wanted, "{events:#?}");
    // What items are when they are closed, they are in the response, streamed or not.
    let content =
        |item: &Value| [&item["content"][0]["text"], &item["name"], &item["arguments"]].map(Value::clone);
    for (index, item) in output.iter().enumerate() {
        let of_item = |kind: &str| {
            let mut found =
                events.iter().filter(|event| event["output_index"] == index && event["type"] == kind);
            let first = found.next().cloned();
            assert!(found.next().is_none(), "{kind} of {index}");
            first.unwrap_or_default()
        };
        let added = &of_item("response.output_item.added")["item"];
        assert_eq!(
            (&added["id"], &added["type"], &added["status"]),
            (&item["id"], &item["type"], &json!("in_progress"))
        );
        assert_eq!(&of_item("response.output_item.done")["item"], item);
        assert_eq!((&item["status"], content(item)), (&json!("completed"), content(&whole["output"][index])));
        let text =
            [&item["content"][0]["text"], &item["arguments"]].into_iter().find_map(Value::as_str).unwrap();
        assert_eq!(sums[index], text);
        let done = ["reasoning_text", "output_text", "function_call_arguments"]
            .map(|kind| of_item(&format!("response.{kind}.done")));
        let done = done.iter().find(|done| !done.is_null()).unwrap();
        assert_eq!([&done["text"], &done["arguments"]].into_iter().find_map(Value::as_str), Some(text));
        let closed = of_item("response.content_part.done");
        assert_eq!(closed["part"], item["content"][0]);
    }
    let names: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(names, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!((sums[0].trim_end(), sums[1].trim_end()), ("Hm, light.", "I switch it."));
    let arguments = |index: usize| serde_json::from_str::<Value>(&sums[index]).unwrap();
    assert_eq!((arguments(2), arguments(3)), (json!({ "on": true }), json!({ "on": false })));
    let calls: Vec<&Value> = output.iter().filter_map(|item| item.get("call_id")).collect();
    assert!(calls.len() == 2 && calls[0] != calls[1], "{output:?}");
    // A response is complete at a time, and none before.
    assert!(last["completed_at"].as_u64() >= last["created_at"].as_u64() && last["completed_at"].is_u64());
    assert_eq!(
        (&events[0]["response"]["completed_at"], &events[0]["response"]["output"]),
        (&none, &json!([]))
    );
    // Tools come back with the fields that clients must find.
    assert_eq!(last["tools"][0].get("strict"), Some(&none));
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
