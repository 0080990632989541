//! Anthropic's interface: messages whole and as streams, blocks in and out, counted tokens, errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{CONTEXT, Setup, TestServer, Value, json, model, with};

fn hello() -> Value {
    let messages = json!([{ "role": "user", "content": "hello there" }]);
    json!({ "model": "claude", "messages": messages, "max_tokens": 8, "seed": 1, "ignore_eos": true })
}

/// The events of a stream, each with its name, which must be the type of its data.
fn events(server: &TestServer, body: Value) -> Vec<Value> {
    let answer = server.client().stream("/v1/messages", &with(body, json!({ "stream": true }))).answer();
    assert_eq!(answer.status, 200, "{}", answer.text());
    let events = answer.events();
    let event = |(name, data): &(Option<String>, String)| {
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.as_deref(), data["type"].as_str());
        data
    };
    events.iter().map(event).collect()
}

/// Puts a message together as the SDK does, and checks the order of events.
fn assembled(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let mut open: Option<usize> = None;
    for event in &events[1..events.len() - 1] {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(open, None, "one block is open at a time");
                assert_eq!(event["index"], content.len());
                open = Some(content.len());
                content.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(Some(event["index"].as_u64().unwrap() as usize), open);
                let block = content.last_mut().unwrap();
                let delta = &event["delta"];
                let (field, part) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    other => panic!("{other}"),
                };
                block[field] = format!("{}{}", block[field].as_str().unwrap(), part.as_str().unwrap()).into();
            }
            "content_block_stop" => assert_eq!(Some(event["index"].as_u64().unwrap() as usize), open.take()),
            "message_delta" => {
                assert_eq!(open, None);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "ping" => {}
            other => panic!("{other}"),
        }
    }
    message
}

#[test]
fn a_stream_is_the_message() {
    let server = TestServer::start();
    let whole = server.post("/v1/messages", &hello()).ok();
    assert!(whole["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(whole["type"], "message");
    assert_eq!(whole["model"], "claude");
    assert_eq!(whole["stop_reason"], "max_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 8);
    assert!(!whole["content"][0]["text"].as_str().unwrap().is_empty());
    let streamed = events(&server, hello());
    let mut message = assembled(&streamed);
    assert_eq!(message["usage"]["output_tokens"], 8);
    // The prompt is shorter than a page, so nothing of it is cached: both count the same.
    assert_eq!(streamed[0]["message"]["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    message["id"] = whole["id"].clone();
    assert_eq!(message, whole);
    server.assert_idle();
}

#[test]
fn cached_tokens_are_counted_apart_from_the_first_event_on() {
    let server = TestServer::start();
    let long = json!([{ "role": "user", "content": "a long text of many letters ".repeat(10) }]);
    let body = with(hello(), json!({ "messages": long }));
    let count = server.post("/v1/messages/count_tokens", &body).ok()["input_tokens"].as_u64().unwrap();
    let first = events(&server, body.clone());
    let usage = &first[0]["message"]["usage"];
    assert_eq!(usage["input_tokens"], count);
    assert_eq!(usage["cache_read_input_tokens"], 0);
    let second = events(&server, body);
    let usage = &second[0]["message"]["usage"];
    let cached = usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(cached, count / 64 * 64);
    assert_eq!(usage["input_tokens"], count - cached);
}

#[test]
fn the_billing_header_does_not_defeat_the_cache() {
    let server = TestServer::start();
    let ask = |code: &str| {
        let header = format!("x-anthropic-billing-header: cc_version=2.1; cch={code};");
        let rest = "You are a careful assistant. ".repeat(8);
        let system = json!([{ "type": "text", "text": header }, { "type": "text", "text": rest }]);
        server.post("/v1/messages", &with(hello(), json!({ "system": system }))).ok()
    };
    assert_eq!(ask("a1b2c")["usage"]["cache_read_input_tokens"], 0);
    assert!(ask("99fee")["usage"]["cache_read_input_tokens"].as_u64().unwrap() >= 192);
}

#[test]
fn stop_reasons_say_what_happened() {
    let server = TestServer::start();
    let body = |more: Value| with(hello(), more);
    let whole = server.post("/v1/messages", &body(json!({ "max_tokens": 20 }))).ok();
    let text = whole["content"][0]["text"].as_str().unwrap().to_owned();
    let part: String = text.chars().skip(8).take(2).collect();
    let stops = json!({ "max_tokens": 20, "stop_sequences": ["never to be found", part] });
    let stopped = server.post("/v1/messages", &body(stops.clone())).ok();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], part);
    assert_eq!(stopped["content"][0]["text"].as_str(), text.split(&part).next());
    let streamed = assembled(&events(&server, body(stops)));
    assert_eq!(streamed["stop_sequence"], part);
    assert_eq!(streamed["content"], stopped["content"]);
    // The end of a turn, and a full context.
    let end = body(json!({ "logit_bias": { "<|end|>": 100 }, "ignore_eos": false, "max_tokens": 500 }));
    assert_eq!(server.post("/v1/messages", &end).ok()["stop_reason"], "end_turn");
    let full = server.post("/v1/messages", &body(json!({ "max_tokens": 10_000 }))).ok();
    assert_eq!(full["stop_reason"], "model_context_window_exceeded");
    assert_eq!(
        full["usage"]["input_tokens"].as_u64().unwrap() + full["usage"]["output_tokens"].as_u64().unwrap(),
        CONTEXT as u64
    );
}

#[test]
fn thinking_is_a_block() {
    let template =
        format!("{}{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}", model::TEMPLATE);
    let server = Setup { model: model::with_template(&template), ..Setup::default() }.start();
    let whole = server.post("/v1/messages", &hello()).ok();
    assert_eq!(whole["content"][0]["type"], "thinking", "{whole}");
    assert_eq!(whole["content"][0]["signature"], "");
    let streamed = assembled(&events(&server, hello()));
    assert_eq!(streamed["content"], whole["content"]);
}

/// There is no thinking unless it is asked for, if the template has a switch. A model that always thinks does so.
#[test]
fn thinking_is_off_unless_it_is_asked_for() {
    let switch = "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n\
        {% else %}<think>\n{% endif %}{% endif %}";
    let server_of = |end: &str| {
        let template = format!("{}{end}", model::TEMPLATE);
        Setup { model: model::with_template(&template), ..Setup::default() }.start()
    };
    let kinds = |server: &TestServer, more: Value| {
        let asked = with(hello(), more);
        let whole = server.post("/v1/messages", &asked).ok();
        assert_eq!(assembled(&events(server, asked))["content"], whole["content"]);
        whole["content"][0]["type"].as_str().unwrap().to_owned()
    };
    let tokens = |server: &TestServer, more: Value| {
        server.post("/v1/messages/count_tokens", &with(hello(), more)).ok()["input_tokens"].as_u64().unwrap()
    };
    let asked = [
        json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } }),
        json!({ "thinking": { "type": "adaptive" } }),
        json!({ "thinking": { "type": "adaptive" }, "output_config": { "effort": "low" } }),
    ];
    let unasked = [json!({}), json!({ "thinking": null }), json!({ "output_config": { "effort": "high" } })];
    let off = json!({ "thinking": { "type": "disabled" } });
    let server = server_of(switch);
    let without = tokens(&server, off.clone());
    for more in &asked {
        assert_eq!(kinds(&server, more.clone()), "thinking", "{more}");
        assert!(tokens(&server, more.clone()) < without);
    }
    for more in unasked.iter().chain([&off]) {
        assert_eq!(kinds(&server, more.clone()), "text", "{more}");
        assert_eq!(tokens(&server, more.clone()), without);
    }
    let always = server_of("{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}");
    for more in asked.iter().chain(&unasked) {
        assert_eq!(kinds(&always, more.clone()), "thinking", "{more}");
    }
}

#[test]
fn blocks_become_messages_of_the_template() {
    let server = TestServer::start();
    let count = |body: Value| server.post("/v1/messages/count_tokens", &body).ok()["input_tokens"].clone();
    let prompt = |openai: Value| {
        let prompt = server.post("/apply-template", &json!({ "messages": openai })).ok()["prompt"].clone();
        let tokens = server.post("/tokenize", &json!({ "content": prompt })).ok()["tokens"].clone();
        json!(tokens.as_array().unwrap().len())
    };
    let call = json!({ "type": "tool_use", "id": "toolu_1", "name": "f", "input": { "x": 1 } });
    let messages = json!([
        { "role": "system", "content": "more rules" },
        { "role": "user", "content": [{ "type": "text", "text": "one" }, { "type": "text", "text": "two" }] },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "hm", "signature": "s" },
            { "type": "redacted_thinking", "data": "x" },
            { "type": "text", "text": "calling" },
            call,
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "toolu_1", "content": [{ "type": "text", "text": "7" }], "cache_control": { "type": "ephemeral" } },
            { "type": "text", "text": "and now" },
        ] },
        { "role": "system", "content": "a reminder" },
    ]);
    let blocks = count(json!({ "system": [{ "type": "text", "text": "rules" }], "messages": messages }));
    let same = prompt(json!([
        { "role": "system", "content": "rules\nmore rules" },
        { "role": "user", "content": "one\ntwo" },
        { "role": "assistant", "content": "calling", "tool_calls": [
            { "id": "toolu_1", "function": { "name": "f", "arguments": "{\"x\":1}" } },
        ] },
        { "role": "tool", "tool_call_id": "toolu_1", "content": "7" },
        { "role": "user", "content": "and now\na reminder" },
    ]));
    assert_eq!(blocks, same);
    // Tools that only Anthropic runs are skipped.
    let user = json!([{ "role": "user", "content": "x" }]);
    let tool = json!({ "name": "own", "input_schema": { "type": "object" } });
    let foreign = json!({ "type": "web_search_20250305", "name": "web_search" });
    let own = count(json!({ "messages": user, "tools": [tool] }));
    assert_eq!(count(json!({ "messages": user, "tools": [foreign, tool] })), own);
    assert_ne!(count(json!({ "messages": user })), own);
    let none = json!({ "messages": user, "tools": [tool], "tool_choice": { "type": "none" } });
    assert_eq!(count(none), count(json!({ "messages": user })));
}

#[test]
fn wrong_requests_are_refused_before_the_first_byte() {
    let server = TestServer::start();
    let user = json!([{ "role": "user", "content": "x" }]);
    let image = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
    let cases = [
        (json!({ "messages": user }), "max_tokens"),
        (json!({ "messages": user, "max_tokens": 0 }), "max_tokens"),
        (json!({ "messages": [], "max_tokens": 1 }), "messages"),
        (json!({ "messages": [{ "role": "tool", "content": "x" }], "max_tokens": 1 }), "messages[0].role"),
        (json!({ "messages": image, "max_tokens": 1 }), "messages[0].content[0].type"),
        (json!({ "messages": user, "max_tokens": 1, "temperature": "hot" }), "temperature"),
        (
            json!({ "messages": user, "max_tokens": 1, "tool_choice": { "type": "tool", "name": "f" } }),
            "tool_choice.name",
        ),
        (
            json!({ "messages": user, "max_tokens": 1, "thinking": { "type": "enabled" } }),
            "thinking.budget_tokens",
        ),
    ];
    for (body, field) in cases {
        for stream in [false, true] {
            let answer = server.post("/v1/messages", &with(body.clone(), json!({ "stream": stream })));
            assert_eq!(answer.status, 400, "{body}: {}", answer.text());
            let error = answer.json();
            assert_eq!(error["type"], "error");
            assert_eq!(error["error"]["type"], "invalid_request_error");
            assert!(error["error"]["message"].as_str().unwrap().starts_with(field), "{error}");
            assert_eq!(error["request_id"].as_str(), answer.header("x-request-id"));
        }
    }
    let long = json!([{ "role": "user", "content": "x".repeat(CONTEXT) }]);
    let answer = server.post("/v1/messages", &json!({ "messages": long, "max_tokens": 1, "stream": true }));
    assert_eq!(answer.status, 400);
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    for words in [
        "maximum context length is 512 tokens",
        "exceeds the available context size",
        "context_length_exceeded",
    ] {
        assert!(message.contains(words), "{message}");
    }
    // Unknown fields, betas and nulls do not matter.
    let odd = json!({ "messages": user, "max_tokens": 1, "metadata": { "user_id": "u" }, "betas": ["x"], "top_p": null, "x": [1] });
    server.post("/v1/messages?beta=true", &odd).ok();
}

#[test]
fn strict_tools_have_schemas_that_can_be_enforced() {
    let template = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
    setup.batcher.engine.context = 2048;
    let server = setup.start();
    let schema = json!({ "type": "object", "properties": { "x": { "type": "string", "pattern": "(?=a)" } } });
    let ask = |strict: Value| {
        let body = json!({
            "model": "small", "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 40, "seed": 1,
            "tools": [{ "name": "odd", "input_schema": schema, "strict": strict }],
            "tool_choice": { "type": "any" },
        });
        server.post("/v1/messages", &body)
    };
    let refused = ask(json!(true));
    assert!(refused.status == 400 && refused.text().contains("odd"), "{}", refused.text());
    assert_eq!(ask(json!("yes")).status, 400);
    ask(Value::Null).ok();
}

/// The SDKs read the identifier of a request under Anthropic's name of the header.
#[test]
fn the_identifier_of_a_request_has_both_names() {
    let server = TestServer::start();
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 1 });
    for (path, body) in
        [("/v1/messages", &body), ("/v1/messages/count_tokens", &body), ("/v1/messages", &json!({}))]
    {
        let answer = server.post(path, body);
        assert!(answer.header("request-id").is_some(), "{path}");
        assert_eq!(answer.header("request-id"), answer.header("x-request-id"), "{path}");
    }
    assert_eq!(server.get("/health").header("request-id"), None);
}

/// Claude Code knows by these words that it has to shorten the conversation.
#[test]
fn prompts_that_are_too_long_are_refused_in_words_of_anthropic() {
    let server = TestServer::start();
    let long = json!([{ "role": "user", "content": "x y ".repeat(CONTEXT) }]);
    let refused = server.post("/v1/messages", &with(hello(), json!({ "messages": long })));
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    let (start, rest) = message.split_once(" maximum").unwrap();
    let numbers = start.strip_prefix("prompt is too long: ").unwrap().split_once(" tokens > ").unwrap();
    let (tokens, most): (usize, usize) = (numbers.0.parse().unwrap(), numbers.1.parse().unwrap());
    assert!(tokens > most && most == CONTEXT, "{message}");
    assert!(rest.contains("maximum context length") && rest.contains("context_length_exceeded"), "{message}");
    let others = json!({ "messages": [{ "role": "user", "content": "x y ".repeat(CONTEXT) }] });
    assert!(!server.post("/v1/chat/completions", &others).text().contains("prompt is too long"));
}

/// What Anthropic's servers did in a conversation is left out, and tools that a search has found are named.
#[test]
fn blocks_of_server_tools_are_understood() {
    let server = TestServer::start();
    let tokens = |messages: Value| {
        let body = json!({ "model": "x", "messages": messages });
        server.post("/v1/messages/count_tokens", &body).ok()["input_tokens"].clone()
    };
    let user = |content: Value| json!({ "role": "user", "content": content });
    let assistant = |content: Value| json!({ "role": "assistant", "content": content });
    let text = json!({ "type": "text", "text": "found it" });
    let mut searched = vec![text.clone()];
    for (kind, content) in [
        ("server_tool_use", json!({ "query": "x" })),
        ("web_search_tool_result", json!([{ "type": "web_search_result", "url": "x" }])),
        ("code_execution_tool_result", json!({ "type": "code_execution_result" })),
        ("mcp_tool_use", json!({})),
        ("mcp_tool_result", json!([])),
    ] {
        searched
            .push(json!({ "type": kind, "id": "s1", "name": "x", "tool_use_id": "s1", "content": content }));
    }
    let plain = tokens(json!([user(json!("hi")), assistant(json!([text])), user(json!("and?"))]));
    assert_eq!(tokens(json!([user(json!("hi")), assistant(searched.into()), user(json!("and?"))])), plain);
    let call = assistant(json!([{ "type": "tool_use", "id": "t1", "name": "find", "input": {} }]));
    let result =
        |content: Value| user(json!([{ "type": "tool_result", "tool_use_id": "t1", "content": content }]));
    let references = json!([{ "type": "tool_reference", "tool_name": "Read" }, { "type": "tool_reference", "tool_name": "Write" }]);
    assert_eq!(
        tokens(json!([user(json!("hi")), call, result(references)])),
        tokens(json!([
            user(json!("hi")),
            call,
            result(json!("Tool available: Read\nTool available: Write"))
        ]))
    );
    let unknown = json!({ "model": "x", "messages": [user(json!([{ "type": "picture" }]))] });
    assert_eq!(server.post("/v1/messages/count_tokens", &unknown).status, 400);
}

/// Clients of Anthropic read other fields of models.
#[test]
fn models_have_the_fields_of_anthropic_if_its_header_is_there() {
    let server = TestServer::start();
    let get = |path: &str| {
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nanthropic-version: 2023-06-01\r\nconnection: close\r\n\r\n"
        );
        let text = String::from_utf8(server.client().raw(head.as_bytes())).unwrap();
        serde_json::from_str::<Value>(&text[text.find('{').unwrap()..=text.rfind('}').unwrap()]).unwrap()
    };
    let all = get("/v1/models");
    assert_eq!(
        (&all["has_more"], &all["first_id"], &all["last_id"]),
        (&json!(false), &json!("small"), &json!("small"))
    );
    for model in [&all["data"][0], &get("/v1/models/small")] {
        assert_eq!(
            (&model["type"], &model["display_name"], &model["id"]),
            (&json!("model"), &json!("small"), &json!("small"))
        );
        let created = model["created_at"].as_str().unwrap();
        assert!(created.starts_with("20") && created.ends_with('Z'), "{created}");
    }
    assert!(server.get("/v1/models").ok()["data"][0].get("display_name").is_none());
}
