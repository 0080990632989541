//! Tools: every form of `tool_choice`, streams, results, and what is no call; with templates of several families.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, hello, json, model, with};

const CHAT: &str = "/v1/chat/completions";

macro_rules! template {
    ($name:literal) => {
        ($name, include_str!(concat!("../../llm/tests/data/tool_templates/", $name, ".jinja")))
    };
}

/// Templates whose text the small model's vocabulary has.
const TEMPLATES: [(&str, &str); 6] = [
    template!("hermes"),
    template!("llama3"),
    template!("mistral"),
    template!("granite3"),
    template!("command_r7b"),
    template!("gemma"),
];

fn server(template: &str) -> TestServer {
    let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
    setup.batcher.engine.context = 2048;
    setup.start()
}

fn tools() -> Value {
    let light = json!({ "type": "object", "properties": { "on": { "type": "boolean" } }, "required": ["on"],
        "additionalProperties": false });
    let color = json!({ "type": "object", "properties": { "name": { "enum": ["red", "blue"] } }, "required": ["name"],
        "additionalProperties": false });
    json!([
        { "type": "function", "function": { "name": "light", "parameters": light } },
        { "type": "function", "function": { "name": "color", "parameters": color, "strict": true } },
    ])
}

fn request(choice: Value) -> Value {
    let more = json!({ "tools": tools(), "tool_choice": choice, "max_tokens": 200, "ignore_eos": false,
        "parallel_tool_calls": false });
    with(hello(), more)
}

/// Asserts that a call is one of the tools' with arguments of its schema; returns its name.
#[track_caller]
fn checked(call: &Value) -> String {
    assert_eq!(call["type"], "function");
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    let name = call["function"]["name"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    match name {
        "light" => assert!(arguments["on"].is_boolean(), "{arguments}"),
        "color" => assert!(["red", "blue"].contains(&arguments["name"].as_str().unwrap()), "{arguments}"),
        name => panic!("there is no tool {name}"),
    }
    name.to_owned()
}

/// The calls of a stream, put together as clients do.
fn streamed(chunks: &[Value]) -> (Vec<Value>, String, String) {
    let (mut calls, mut text, mut finish) = (Vec::<Value>::new(), String::new(), String::new());
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        finish.push_str(choice["finish_reason"].as_str().unwrap_or_default());
        for piece in choice["delta"]["tool_calls"].as_array().unwrap_or(&Vec::new()) {
            let index = piece["index"].as_u64().unwrap() as usize;
            let arguments = piece["function"]["arguments"].as_str().unwrap();
            if index == calls.len() {
                calls.push(piece.clone());
            } else {
                let call = &mut calls[index]["function"]["arguments"];
                *call = json!(call.as_str().unwrap().to_owned() + arguments);
            }
        }
    }
    (calls, text, finish)
}

#[test]
fn required_calls_are_enforced_in_every_family() {
    for (name, template) in TEMPLATES {
        let server = server(template);
        for choice in [json!("required"), json!({ "type": "function", "function": { "name": "color" } })] {
            let whole = server.post(CHAT, &request(choice.clone())).ok();
            let answer = &whole["choices"][0];
            assert_eq!(answer["finish_reason"], "tool_calls", "{name}: {whole}");
            assert_eq!(answer["message"]["content"], Value::Null, "{name}: {whole}");
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{name}: parallel calls are off");
            let called = checked(&calls[0]);
            assert!(choice == json!("required") || called == "color", "{name}: {called}");
            let chunks = server.post(CHAT, &with(request(choice), json!({ "stream": true }))).chunks();
            let (streamed, text, finish) = streamed(&chunks);
            assert_eq!((text.as_str(), finish.as_str()), ("", "tool_calls"), "{name}");
            assert_eq!(streamed.len(), 1);
            assert_eq!(streamed[0]["function"], calls[0]["function"], "{name}: the seed is the same");
        }
        server.assert_idle();
    }
}

/// A named tool is called once, and others so often that an answer ends, however much a model would like to go on. It may end after
/// the first call.
#[test]
fn calls_come_to_an_end() {
    // The token that ends answers, and the one that ends a list of calls.
    let end = |bias: i32| {
        let more = json!({ "parallel_tool_calls": true, "max_tokens": 3000 });
        with(more, json!({ "logit_bias": { "97": bias, "60": bias } }))
    };
    let named = json!({ "type": "function", "function": { "name": "light" } });
    for (name, template) in [TEMPLATES[0], TEMPLATES[2], TEMPLATES[3]] {
        let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
        setup.batcher.engine.context = 4096;
        let server = setup.start();
        for (choice, bias, wanted) in
            [(json!("required"), 100, 1), (json!("required"), -100, 16), (named.clone(), -100, 1)]
        {
            let whole = server.post(CHAT, &with(request(choice.clone()), end(bias))).ok();
            let answer = &whole["choices"][0];
            assert_eq!(answer["finish_reason"], "tool_calls", "{name}, {choice}: {whole}");
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), wanted, "{name}, {choice}, bias {bias}: {whole}");
            calls.iter().for_each(|call| drop(checked(call)));
        }
        // Anthropic's form of the same.
        let light = &tools()[0]["function"];
        let body = json!({
            "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 3000, "seed": 1,
            "tools": [{ "name": "light", "input_schema": light["parameters"] }],
            "tool_choice": { "type": "tool", "name": "light" }, "logit_bias": { "97": -100 },
        });
        let whole = server.post("/v1/messages", &body).ok();
        assert_eq!(whole["stop_reason"], "tool_use", "{name}: {whole}");
        let content = whole["content"].as_array().unwrap();
        assert_eq!(content.len(), 1, "{name}: {whole}");
        assert!(content[0]["id"].as_str().unwrap().starts_with("toolu_"), "{whole}");
        let streamed = server.post("/v1/messages", &with(body, json!({ "stream": true })));
        assert!(streamed.text().contains("\"id\":\"toolu_"), "{}", streamed.text());
        server.assert_idle();
    }
}

#[test]
fn calls_that_are_required_are_one_with_the_declared_arguments() {
    let server = server(TEMPLATES[0].1);
    // Neither `additionalProperties` nor `strict`, as most clients send it.
    let light =
        json!({ "type": "object", "properties": { "on": { "type": "boolean" } }, "required": ["on"] });
    let tools = json!([{ "type": "function", "function": { "name": "light", "parameters": light } }]);
    for seed in 0..6 {
        let more = json!({ "tools": tools, "tool_choice": "required", "max_tokens": 200, "seed": seed, "temperature": 2.0, "reasoning_effort": "none" });
        let answer = server.post(CHAT, &with(hello(), more)).ok();
        let calls = answer["choices"][0]["message"]["tool_calls"].as_array();
        let calls = calls.unwrap_or_else(|| panic!("seed {seed}: {answer}"));
        assert_eq!(calls.len(), 1, "{answer}");
        let arguments: Value =
            serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments.as_object().unwrap().len(), 1, "{arguments}");
    }
}

#[test]
fn allowed_tools_none_and_auto() {
    let server = server(TEMPLATES[0].1);
    let allowed = json!({ "type": "allowed_tools", "allowed_tools": { "mode": "required",
        "tools": [{ "type": "function", "function": { "name": "light" } }] } });
    let whole = server.post(CHAT, &request(allowed)).ok();
    assert_eq!(checked(&whole["choices"][0]["message"]["tool_calls"][0]), "light");
    // Without tools the prompt is shorter, and nothing is a call.
    let none = server.post(CHAT, &request(json!("none"))).ok();
    assert!(none["choices"][0]["message"].get("tool_calls").is_none());
    let auto = server.post(CHAT, &request(json!("auto"))).ok();
    let prompt = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(&none) < prompt(&auto), "{none} {auto}");
    assert!(auto["choices"][0]["message"]["content"].is_string(), "random text is text: {auto}");
    // Errors name the field.
    let wrong = json!({ "type": "function", "function": { "name": "window" } });
    let error = server.post(CHAT, &request(wrong)).json()["error"].clone();
    assert_eq!(error["param"], "tool_choice.function.name", "{error}");
    let grammar = with(request(json!("auto")), json!({ "grammar": "root ::= \"x\"" }));
    let answer = server.post(CHAT, &grammar);
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("grammar")),
        "{}",
        answer.text()
    );
}

#[test]
fn strict_schemas_that_cannot_be_compiled_are_refused() {
    let server = server(TEMPLATES[0].1);
    let with_schema = |strict: bool| {
        let parameters =
            json!({ "type": "object", "properties": { "x": { "type": "string", "pattern": "(?=a)" } } });
        let function = json!({ "name": "odd", "parameters": parameters, "strict": strict });
        with(request(json!("required")), json!({ "tools": [{ "type": "function", "function": function }] }))
    };
    let answer = server.post(CHAT, &with_schema(true));
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("odd"), "{}", answer.text());
    // Otherwise it loses its pattern.
    let whole = server.post(CHAT, &with(with_schema(false), json!({ "max_tokens": 40 }))).ok();
    assert_eq!(whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "odd", "{whole}");
}

/// A keyword that cannot be enforced takes none of the others with it.
#[test]
fn schemas_that_are_not_strict_lose_only_what_cannot_be_enforced() {
    for (name, template) in TEMPLATES {
        let server = server(template);
        let properties = json!({
            "side": { "enum": ["left", "right"], "not": { "const": "left" } },
            "count": { "type": "integer", "minimum": 3, "maximum": 5, "if": {} },
            "code": { "enum": ["k1", "k2"], "pattern": "(?=k)" },
            "kind": { "$ref": "#/$defs/kind" },
        });
        let definitions = json!({ "kind": { "$ref": "#/$defs/letter" }, "letter": { "enum": ["x", "y"], "pattern": "(?=x)" } });
        let parameters = json!({ "type": "object", "properties": properties, "additionalProperties": false,
            "required": ["side", "count", "code", "kind"], "$defs": definitions, "dependentRequired": { "side": ["count"] } });
        let function = json!({ "name": "odd", "parameters": parameters });
        let tools = json!({ "tools": [{ "type": "function", "function": function }], "max_tokens": 200 });
        for seed in 0..4 {
            let more =
                with(tools.clone(), json!({ "seed": seed, "temperature": 1.5, "reasoning_effort": "none" }));
            let whole = server.post(CHAT, &with(request(json!("required")), more)).ok();
            let text = &whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
            let arguments: Value =
                serde_json::from_str(text.as_str().unwrap_or_else(|| panic!("{name}: {whole}")))
                    .unwrap_or_else(|error| panic!("{name}: {error}: {whole}"));
            assert!(["left", "right"].map(Value::from).contains(&arguments["side"]), "{name}: {whole}");
            assert!((3..=5).contains(&arguments["count"].as_i64().unwrap()), "{name}: {whole}");
            assert!(["k1", "k2"].map(Value::from).contains(&arguments["code"]), "{name}: {whole}");
            assert!(["x", "y"].map(Value::from).contains(&arguments["kind"]), "{name}: {whole}");
        }
    }
}

#[test]
fn calls_and_results_go_back_to_the_model() {
    for (name, template) in TEMPLATES {
        let server = server(template);
        let call = json!({ "id": "call_0123456789abcdef", "type": "function",
            "function": { "name": "light", "arguments": "{\"on\": true}" } });
        let messages = json!([
            { "role": "user", "content": "Make it bright." },
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "done" },
        ]);
        let answer = server
            .post(CHAT, &with(request(json!("auto")), json!({ "messages": messages, "max_tokens": 4 })));
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
    }
}

#[test]
fn reasoning_comes_first_and_has_a_budget() {
    let template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
        {{ (tools or []) | tojson }}{% if add_generation_prompt %}<|start|>assistant <think>{% endif %}\
        {% if false %}</think>{% endif %}";
    let server = server(template);
    let budget = json!({ "reasoning_budget_tokens": 12, "max_tokens": 300 });
    let whole = server.post(CHAT, &with(request(json!("required")), budget.clone())).ok();
    let message = &whole["choices"][0]["message"];
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{whole}");
    checked(&message["tool_calls"][0]);
    let counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((12..40).contains(&counted), "{whole}");
    // A schema, after the thinking.
    let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"],
        "additionalProperties": false });
    let format = json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } },
        "ignore_eos": false });
    let whole = server.post(CHAT, &with(with(hello(), format.clone()), budget)).ok();
    let message = &whole["choices"][0]["message"];
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{whole}");
    let value: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
    assert!(value["ok"].is_boolean(), "{whole}");
    // And without any.
    let off = json!({ "reasoning_effort": "none", "max_tokens": 100 });
    let whole = server.post(CHAT, &with(with(hello(), format), off)).ok();
    let message = &whole["choices"][0]["message"];
    assert!(message.get("reasoning_content").is_none(), "{whole}");
    assert!(serde_json::from_str::<Value>(message["content"].as_str().unwrap()).unwrap()["ok"].is_boolean());
    assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
}

/// A template that closes the reasoning itself leaves none before a constrained answer, however much the model wants it.
#[test]
fn reasoning_that_is_off_leaves_no_way_around_a_schema() {
    let template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant {% if enable_thinking is defined and enable_thinking is false %}\
        <think>\n\n</think>\n\n{% endif %}{% endif %}";
    let server = server(template);
    let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"],
        "additionalProperties": false });
    // The first token is `<`, wherever that is allowed.
    let wanted = json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } },
        "ignore_eos": false, "max_tokens": 60, "logit_bias": { "27": 100 } });
    let ask = |more: Value| {
        let whole = server.post(CHAT, &with(with(hello(), wanted.clone()), more)).ok();
        whole["choices"][0]["message"].clone()
    };
    let reasoned = ask(json!({}));
    assert!(reasoned["reasoning_content"].as_str().unwrap().starts_with('<'), "{reasoned}");
    for off in [
        json!({ "chat_template_kwargs": { "enable_thinking": false } }),
        json!({ "reasoning_effort": "none" }),
    ] {
        let message = ask(off);
        assert!(message.get("reasoning_content").is_none(), "{message}");
        let value: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
        assert!(value["ok"].is_boolean(), "{message}");
    }
}

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let server = TestServer::start();
    let text = |more: Value| {
        let whole = server
            .post(CHAT, &with(with(hello(), json!({ "max_tokens": 120, "ignore_eos": false })), more))
            .ok();
        whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let schema = json!({ "type": "array", "items": { "enum": [1, 2] }, "minItems": 3, "maxItems": 3 });
    let value: Value = serde_json::from_str(&text(
        json!({ "response_format": { "type": "json_object", "schema": schema } }),
    ))
    .unwrap();
    assert_eq!(value.as_array().unwrap().len(), 3);
    assert_eq!(text(json!({ "grammar": "root ::= \"ab\" \"c\"" })), "abc");
    assert_eq!(text(json!({ "grammar": "%llguidance {}\nstart: \"x\" \"y\"" })), "xy");
    assert!(["no", "yes"].contains(&text(json!({ "guided_choice": ["yes", "no"] })).as_str()));
    let date = text(json!({ "structured_outputs": { "regex": "[0-9]{4}-[0-9]{2}" } }));
    assert!(date.len() == 7 && date.as_bytes()[4] == b'-', "{date}");
    let completion = json!({ "prompt": "x", "json_schema": schema, "max_tokens": 60, "seed": 3 });
    let whole = server.post("/v1/completions", &completion).ok();
    assert!(
        serde_json::from_str::<Value>(whole["choices"][0]["text"].as_str().unwrap()).unwrap().is_array(),
        "{whole}"
    );
    for (more, param) in [
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "thing" } } } }),
            "response_format",
        ),
        (json!({ "grammar": "root ::= (" }), "grammar"),
        (json!({ "guided_regex": "(" }), "guided_regex"),
    ] {
        for stream in [false, true] {
            let answer = server.post(CHAT, &with(with(hello(), more.clone()), json!({ "stream": stream })));
            assert_eq!(
                (answer.status, &answer.json()["error"]["param"]),
                (400, &json!(param)),
                "{}",
                answer.text()
            );
        }
    }
    server.assert_idle();
}

/// Markers that are control tokens, which have no text of their own.
#[test]
fn calls_between_control_tokens() {
    let thinking = template!("mistral_args").1.to_owned()
        + "{%- if add_generation_prompt %}{{- '[THINK]' }}{%- else %}{{- '' if true else '[/THINK]' }}{%- endif %}";
    let thinks = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "</s>"];
    let families: [(&str, &str, &[&str]); 3] = [
        ("mistral that reasons", &thinking, &thinks),
        ("mistral", template!("mistral_args").1, &["[TOOL_CALLS]", "[ARGS]", "</s>"]),
        (
            "harmony",
            template!("harmony").1,
            &["<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"],
        ),
    ];
    for (name, template, control) in families {
        let mut setup = Setup { model: model::with_control(template, control), ..Setup::default() };
        setup.batcher.engine.context = 2048;
        let server = setup.start();
        let mut ended = 0;
        for seed in 0..12 {
            let more = json!({ "seed": seed, "max_tokens": 300, "reasoning_budget_tokens": 4 });
            let whole = server.post(CHAT, &with(request(json!("required")), more.clone())).ok();
            // Remarks before a call may be longer than the answer.
            if whole["choices"][0]["finish_reason"] != "tool_calls" {
                continue;
            }
            ended += 1;
            let calls = whole["choices"][0]["message"]["tool_calls"].as_array().unwrap();
            checked(&calls[0]);
            let stream = with(with(request(json!("required")), more), json!({ "stream": true }));
            let (streamed, ..) = streamed(&server.post(CHAT, &stream).chunks());
            assert_eq!(streamed[0]["function"], calls[0]["function"], "{name}");
        }
        assert!(ended > 0, "{name}: no call in any answer");
        server.assert_idle();
    }
}
