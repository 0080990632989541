//! Hostile schemas on every route that takes one: each is refused with the field's name or answered, and the server goes on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_llm::constraint::MAX_COMPILING;

use crate::common::{Setup, TestServer, Value, hello, json, model, with};

/// A place of a request where a schema can be.
struct Place {
    path: &'static str,
    /// The field that errors name; none if a schema that cannot be enforced is ignored there.
    field: Option<&'static str>,
    body: fn(Value) -> Value,
}

fn conversation(more: Value) -> Value {
    with(json!({ "model": "small", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 3 }), more)
}

fn tool(schema: Value, strict: bool) -> Value {
    let function = json!({ "name": "odd", "parameters": schema, "strict": strict });
    json!({ "tools": [{ "type": "function", "function": function }], "tool_choice": "required" })
}

const PLACES: &[Place] = &[
    Place {
        path: "/v1/chat/completions",
        field: Some("response_format"),
        body: |schema| {
            let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
            conversation(json!({ "response_format": format }))
        },
    },
    Place {
        path: "/v1/chat/completions",
        field: Some("guided_json"),
        body: |schema| conversation(json!({ "guided_json": schema })),
    },
    Place {
        path: "/v1/chat/completions",
        field: Some("tools"),
        body: |schema| conversation(tool(schema, true)),
    },
    Place { path: "/v1/chat/completions", field: None, body: |schema| conversation(tool(schema, false)) },
    Place {
        path: "/v1/completions",
        field: Some("json_schema"),
        body: |schema| json!({ "model": "small", "prompt": "x", "max_tokens": 3, "json_schema": schema }),
    },
    Place {
        path: "/v1/responses",
        field: Some("text.format"),
        body: |schema| {
            let format = json!({ "type": "json_schema", "name": "x", "schema": schema });
            json!({ "input": "x", "max_output_tokens": 3, "text": { "format": format } })
        },
    },
    Place {
        path: "/v1/responses",
        field: Some("tools"),
        body: |schema| {
            let tool = json!({ "type": "function", "name": "odd", "parameters": schema, "strict": true });
            json!({ "input": "x", "max_output_tokens": 3, "tools": [tool], "tool_choice": "required" })
        },
    },
    Place {
        path: "/v1/messages",
        field: Some("output_config.format"),
        body: |schema| {
            conversation(
                json!({ "output_config": { "format": { "type": "json_schema", "schema": schema } } }),
            )
        },
    },
    Place {
        path: "/v1/messages",
        field: None,
        body: |schema| {
            let tools = json!([{ "name": "odd", "input_schema": schema }]);
            conversation(json!({ "tools": tools, "tool_choice": { "type": "any" } }))
        },
    },
    Place {
        path: "/api/chat",
        field: Some("format"),
        body: |schema| {
            conversation(json!({ "format": schema, "stream": false, "options": { "num_predict": 3 } }))
        },
    },
    Place {
        path: "/api/chat",
        field: None,
        body: |schema| {
            let function = json!({ "name": "odd", "parameters": schema });
            let tools = json!([{ "type": "function", "function": function }]);
            conversation(json!({ "tools": tools, "stream": false, "options": { "num_predict": 3 } }))
        },
    },
    Place {
        path: "/api/generate",
        field: Some("format"),
        body: |schema| json!({ "prompt": "x", "format": schema, "stream": false, "options": { "num_predict": 3 } }),
    },
    Place {
        path: "/completion",
        field: Some("json_schema"),
        body: |schema| json!({ "prompt": "x", "n_predict": 3, "json_schema": schema }),
    },
    Place {
        path: "/infill",
        field: Some("json_schema"),
        body: |schema| json!({ "input_prefix": "x", "input_suffix": "y", "n_predict": 3, "json_schema": schema }),
    },
];

/// An object with so many properties, all of which may be left out.
fn optional(count: usize) -> Value {
    let properties = (0..count).map(|at| (format!("k{at}"), json!({ "type": "string" })));
    json!({ "type": "object", "properties": properties.collect::<serde_json::Map<_, _>>() })
}

/// Schemas that cannot be enforced.
fn refused() -> Vec<Value> {
    let chain: serde_json::Map<String, Value> = (0..5000)
        .map(|at| (format!("d{at}"), json!({ "anyOf": [{ "$ref": format!("#/$defs/d{}", at + 1) }] })))
        .chain([("d5000".to_owned(), json!({}))])
        .collect();
    let object = |name: String| json!({ "type": "object", "properties": { name: { "type": "string" } } });
    let crossed: Vec<Value> = (0..20)
        .map(|at| {
            let [a, b, c] = ["a", "b", "c"].map(|letter| object(format!("{letter}{at}")));
            json!({ "anyOf": [a, b, c] })
        })
        .collect();
    let options: Vec<Value> = (0..2500).map(|at| object(format!("k{at}"))).collect();
    vec![
        optional(1200),
        json!({ "anyOf": options }),
        json!({ "type": "object", "$ref": "#/$defs/d0", "$defs": chain }),
        json!({ "type": "object", "allOf": crossed }),
        json!({ "type": "thing" }),
        json!({ "$ref": "https://example.com/schema" }),
        json!({ "$ref": "#/$defs/none" }),
        json!({ "$ref": "#" }),
        json!({ "type": "object", "properties": { "a": { "$ref": "#/$defs/l" } }, "required": ["a"],
            "$defs": { "l": { "$ref": "#/$defs/m" }, "m": { "$ref": "#/$defs/l" } } }),
        json!({ "type": "object", "properties": { "x": { "type": "integer", "minimum": 1e300 } }, "required": ["x"] }),
        json!({ "type": "object", "properties": { "x": { "type": "string", "pattern": "(" } }, "required": ["x"] }),
        json!({ "type": "object", "properties": { "x": { "type": "integer", "minimum": 3, "maximum": 2 } },
            "required": ["x"] }),
    ]
}

/// Schemas that may be refused or not, if only the request comes to an end.
fn others() -> Vec<Value> {
    let doubling: serde_json::Map<String, Value> = (0..60)
        .map(|at| {
            let next = json!({ "$ref": format!("#/$defs/d{}", at + 1) });
            (format!("d{at}"), json!({ "allOf": [{ "anyOf": [next, next] }, { "anyOf": [next, next] }] }))
        })
        .chain([("d60".to_owned(), json!({ "type": "object" }))])
        .collect();
    let deep = (0..50).fold(json!({ "type": "null" }), |inner, _| json!({ "type": "array", "items": inner }));
    let options: Vec<Value> = (1..40)
        .map(|count| {
            let fields = (0..count).map(|at| (format!("k{at}"), json!({ "type": "string" })));
            json!({ "type": "object", "properties": fields.collect::<serde_json::Map<_, _>>() })
        })
        .collect();
    let many: Vec<String> = (0..5000).map(|at| format!("value {at}")).collect();
    let within =
        |schema: Value| json!({ "type": "object", "properties": { "x": schema }, "required": ["x"] });
    vec![
        json!({ "$ref": "#/$defs/d0", "$defs": doubling }),
        json!({ "anyOf": options }),
        json!({ "type": "object", "properties": { "a": { "$ref": "#" } }, "required": ["a"] }),
        within(deep),
        within(json!({ "enum": many })),
        within(json!({ "type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}b" })),
        within(json!({ "type": "array", "minItems": 1_000_000_000, "items": { "type": "null" } })),
        within(json!({ "type": "string", "minLength": 1_000_000, "maxLength": 2_000_000 })),
        within(json!({ "type": "number", "multipleOf": 1e-9, "minimum": -1e300 })),
    ]
}

fn server() -> TestServer {
    let template = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let fill = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    let mut setup = Setup { model: model::with_control(template, &fill), ..Setup::default() };
    // Tools are shown to the model with their schemas, long as they are.
    setup.batcher.engine.context = 4096;
    setup.start()
}

#[test]
fn schemas_that_cannot_be_enforced_are_refused_with_the_field() {
    let server = server();
    for place in PLACES {
        for schema in refused() {
            let shown: String = schema.to_string().chars().take(100).collect();
            let answer = server.post(place.path, &(place.body)(schema));
            // A prompt with the longest of them is too long.
            let is_long = answer.status == 400 && answer.text().contains("context");
            match place.field {
                Some(field) => {
                    assert_eq!(answer.status, 400, "{} {field} {shown}: {}", place.path, answer.text());
                    assert!(
                        is_long || answer.text().contains(field),
                        "{} {shown}: {}",
                        place.path,
                        answer.text()
                    );
                    assert!(answer.body.len() < 5000, "{} {shown}", place.path);
                }
                None => assert!(answer.status == 200 || is_long, "{} {shown}: {}", place.path, answer.text()),
            }
        }
    }
    server.assert_idle();
    server.post("/v1/chat/completions", &hello()).ok();
}

/// Definitions that refer to each other, and schemas within schemas, nearly as deep as they may be. Some are only found by whoever
/// looks at all of a schema.
#[test]
fn deep_schemas_fit_the_stack_of_any_thread() {
    let server = server();
    let chain = |count: usize, link: &dyn Fn(Value) -> Value| -> serde_json::Map<String, Value> {
        let link = |at: usize| link(json!({ "$ref": format!("#/$defs/d{}", at + 1) }));
        let links = (0..count).map(|at| (format!("d{at}"), link(at)));
        links.chain([(format!("d{count}"), json!({ "type": "object" }))]).collect()
    };
    let alternative = |next| json!({ "anyOf": [next] });
    let nested = |next| (0..30).fold(next, |inner, _| json!({ "allOf": [inner] }));
    for definitions in [chain(2700, &alternative), chain(220, &nested)] {
        let reached = json!({ "type": "object", "$ref": "#/$defs/d0", "$defs": definitions });
        let mut definitions = definitions;
        definitions.insert("z".to_owned(), json!({ "$ref": "#/$defs/d0", "required": [] }));
        let hidden = json!({ "type": "object", "properties": { "a": {} }, "$defs": definitions });
        for schema in [reached, hidden] {
            let whole = server.post("/completion", &completion(json!({ "json_schema": schema })));
            let called = server.post("/v1/chat/completions", &conversation(tool(schema, true)));
            for answer in [whole, called] {
                assert!([200, 400].contains(&answer.status), "{}", answer.text());
            }
        }
    }
    server.assert_idle();
    server.post("/v1/chat/completions", &hello()).ok();
}

/// Closing an object in each of so many places would take memory by their product.
#[test]
fn schemas_that_grow_when_they_are_closed_are_refused() {
    let server = server();
    let names: Vec<String> = (0..700).map(|at| format!("k{at}")).collect();
    let properties: serde_json::Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!(true))).collect();
    let mut definitions: serde_json::Map<String, Value> =
        (0..700).map(|at| (format!("p{at}"), json!({ "$ref": "#/$defs/b", "required": [] }))).collect();
    definitions
        .insert("b".to_owned(), json!({ "type": "object", "properties": properties, "required": names }));
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"],
        "$defs": definitions });
    let answer = server.post("/completion", &completion(json!({ "json_schema": schema })));
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(
        answer.text().contains("json_schema") && answer.text().contains("properties"),
        "{}",
        answer.text()
    );
    server.assert_idle();
}

#[test]
fn schemas_that_cost_much_come_to_an_end() {
    let server = server();
    for place in PLACES {
        for schema in others() {
            let shown: String = schema.to_string().chars().take(100).collect();
            let answer = server.post(place.path, &(place.body)(schema));
            assert!([200, 400].contains(&answer.status), "{} {shown}: {}", place.path, answer.text());
        }
    }
    server.assert_idle();
    server.post("/v1/chat/completions", &hello()).ok();
}

/// What is too much in the middle of an answer is found before the first byte, and what is accepted is answered to the end.
#[test]
fn schemas_with_many_optional_parts_do_not_fail_in_the_middle() {
    let server = server();
    let nested = |inner: Value| json!({ "type": "object", "properties": { "x": inner }, "required": ["x"] });
    let named =
        |at: usize| json!({ "type": "object", "properties": { format!("k{at}"): { "type": "string" } } });
    let options = |count: usize| json!({ "anyOf": (0..count).map(named).collect::<Vec<Value>>() });
    let stream = |path: &str, body: Value| server.post(path, &with(body, json!({ "stream": true })));
    for schema in [optional(1200), options(2500), nested(optional(1200)), nested(options(2500))] {
        for place in PLACES.iter().filter(|place| place.field.is_some()) {
            let answer = stream(place.path, (place.body)(schema.clone()));
            assert_eq!(answer.status, 400, "{}: {}", place.path, answer.text());
        }
    }
    for schema in [optional(520), options(200), nested(optional(520))] {
        let answer = stream("/completion", completion(json!({ "json_schema": schema, "n_predict": 24 })));
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(
            !answer.text().contains("error") && answer.text().contains("\"stop\":true"),
            "{}",
            answer.text()
        );
    }
    // Closed, each alternative would list the properties of all: such a schema stays as it is.
    let alternative = |at: usize| {
        let names = (0..10).map(|place| (format!("a{at}_{place}"), json!({ "type": "string" })));
        json!({ "properties": names.collect::<serde_json::Map<_, _>>() })
    };
    let combined = json!({ "type": "object", "properties": { "kind": { "type": "string" } }, "required": ["kind"],
        "anyOf": (0..30).map(alternative).collect::<Vec<Value>>() });
    for seed in 0..4 {
        let more = json!({ "json_schema": combined, "n_predict": 60, "temperature": 1, "seed": seed });
        let answer = stream("/completion", completion(more));
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(!answer.text().contains("error"), "{}", answer.text());
    }
    // A grammar may still come to a place where there is too much. The error is in words of the request.
    let alternatives: Vec<String> = (0..9000).map(|at| format!("[a-c] \"{at}\"")).collect();
    let grammar = format!("root ::= [a-b] ({})", alternatives.join(" | "));
    let answer = stream("/completion", completion(json!({ "grammar": grammar })));
    assert!(!answer.text().contains("hook"), "{}", answer.text());
    server.assert_idle();
}

/// Formats that are known are enforced or say how a text is meant; others are an error where the schema is strict.
#[test]
fn formats_that_are_not_known_are_refused_in_strict_schemas() {
    let server = server();
    let typed = |format: &str| {
        json!({ "type": "object", "properties": { "x": { "type": "string", "format": format } },
        "required": ["x"], "additionalProperties": false })
    };
    let response_format = |format: &str, strict: bool| {
        let schema = json!({ "name": "x", "schema": typed(format), "strict": strict });
        conversation(json!({ "response_format": { "type": "json_schema", "json_schema": schema } }))
    };
    let text_format = |format: &str, strict: bool| {
        let format = json!({ "type": "json_schema", "name": "x", "schema": typed(format), "strict": strict });
        json!({ "input": "x", "max_output_tokens": 3, "text": { "format": format } })
    };
    for format in [
        "date-time",
        "uuid4",
        "email",
        "uri",
        "binary",
        "path",
        "password",
        "json-string",
        "duration",
        "ipvanyaddress",
        "json-pointer",
        "int64",
    ] {
        for strict in [false, true] {
            server.post("/v1/chat/completions", &response_format(format, strict)).ok();
            server.post("/v1/responses", &text_format(format, strict)).ok();
            server.post("/v1/chat/completions", &conversation(tool(typed(format), strict))).ok();
        }
    }
    for (path, field, body) in [
        ("/v1/chat/completions", "response_format.json_schema.schema", response_format("bogus", true)),
        ("/v1/responses", "text.format.schema", text_format("bogus", true)),
        ("/v1/chat/completions", "tools[0]", conversation(tool(typed("bogus"), true))),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (400, Some(field)),
            "{}",
            answer.text()
        );
        assert!(answer.text().contains("bogus"), "{}", answer.text());
    }
    server.post("/v1/chat/completions", &response_format("bogus", false)).ok();
    server.post("/v1/chat/completions", &conversation(tool(typed("bogus"), false))).ok();
    // A pointer begins with a slash, or is empty.
    let schema = json!({ "type": "string", "format": "json-pointer", "minLength": 1, "maxLength": 3 });
    let answer = server.post("/completion", &completion(json!({ "json_schema": schema }))).ok();
    assert!(answer["content"].as_str().unwrap().starts_with("\"/"), "{answer}");
    // A property may have the name of a keyword.
    let schema = json!({ "type": "object", "properties": { "default": { "type": "string", "format": "bogus" } },
        "required": ["default"] });
    server.post("/completion", &completion(json!({ "json_schema": schema }))).ok();
}

fn completion(more: Value) -> Value {
    with(json!({ "prompt": "x", "n_predict": 40, "temperature": 0 }), more)
}

#[test]
fn unusual_schemas_are_enforced() {
    let server = TestServer::start();
    let value = |schema: Value| -> Value {
        let answer = server.post("/completion", &completion(json!({ "json_schema": schema }))).ok();
        serde_json::from_str(answer["content"].as_str().unwrap()).unwrap_or_else(|_| panic!("{answer}"))
    };
    let escaped = json!({ "$defs": { "a/b~c": { "const": 17 }, "d/e": { "$ref": "#/$defs/a~1b~0c" } }, "$ref": "#/$defs/d~1e" });
    assert_eq!(value(escaped), 17);
    for (least, most) in [(json!(-1e300), json!(1e300)), (json!(i64::MIN), json!(i64::MAX))] {
        let schema = json!({ "type": "object", "properties": { "x": { "type": "integer", "minimum": least, "maximum": most } } ,
            "required": ["x"], "additionalProperties": false });
        let answer = server.post("/completion", &completion(json!({ "json_schema": schema }))).ok();
        assert!(answer["content"].as_str().unwrap().trim_start().starts_with('{'), "{answer}");
    }
}

/// Whole and as streams: the status is that of the error.
#[test]
fn requests_that_cannot_succeed_are_refused_before_the_first_byte() {
    let server = server();
    let rules: String = (0..5000).map(|at| format!("r{at} ::= \"a\" r{} | \"b\"\n", at + 1)).collect();
    let many = format!("root ::= r0\n{rules}r5000 ::= \"c\"\n");
    let vocabulary = 100 + 3;
    let banned: Vec<Value> = (0..vocabulary).map(|token| json!([token, false])).collect();
    let array =
        json!([{ "type": "function", "function": { "name": "x", "parameters": { "type": "array" } } }]);
    let both = json!({ "grammar": "root ::= \"x\"", "json_schema": { "type": "object" } });
    let cases = [
        ("/completion", completion(both.clone()), "grammar"),
        ("/v1/chat/completions", conversation(both), "grammar"),
        ("/completion", completion(json!({ "logit_bias": banned })), "logit_bias"),
        ("/v1/chat/completions", conversation(json!({ "tools": array })), "tools[0]"),
        ("/completion", completion(json!({ "json_schema": { "$ref": "#" } })), "json_schema"),
        ("/completion", completion(json!({ "grammar": "root ::= root \"x\"" })), "grammar"),
    ];
    for (path, body, field) in cases {
        for stream in [false, true] {
            let answer = server.post(path, &with(body.clone(), json!({ "stream": stream })));
            assert_eq!(answer.status, 400, "{path} {field} {stream}: {}", answer.text());
            assert!(answer.text().contains(field), "{path} {field}: {}", answer.text());
        }
    }
    let answer = server.post("/completion", &completion(json!({ "grammar": many })));
    assert!([200, 400].contains(&answer.status), "{}", answer.text());
    server.assert_idle();
}

/// Only one of two forms could be kept, and the other would be broken silently.
#[test]
fn two_forms_of_one_answer_are_refused() {
    let server = TestServer::start();
    let format = json!({ "type": "json_object" });
    let cases = [
        (json!({ "response_format": format, "grammar": "root ::= \"a\"" }), "grammar"),
        (json!({ "response_format": format, "guided_regex": "a" }), "guided_regex"),
        (json!({ "guided_choice": ["a"], "guided_regex": "b" }), "guided_choice"),
        (json!({ "structured_outputs": { "regex": "a", "choice": ["b"] } }), "structured_outputs.choice"),
        (json!({ "json_schema": { "type": "string" }, "grammar": "root ::= \"a\"" }), "grammar"),
    ];
    for (more, field) in cases {
        let answer = server.post("/v1/chat/completions", &with(conversation(json!({})), more.clone()));
        assert_eq!(answer.status, 400, "{more}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], field, "{more}: {}", answer.text());
        assert!(answer.text().contains("cannot be used together with"), "{more}: {}", answer.text());
    }
    // What asks for no form is none.
    let fine = json!({ "response_format": { "type": "text" }, "grammar": "", "guided_json_object": false, "guided_regex": "ab",
        "structured_outputs": {}, "json_schema": null });
    let answer = server.post("/v1/chat/completions", &with(conversation(json!({})), fine)).ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "ab");
}

/// The engine compares every token with them, and each choice has its own.
#[test]
fn lists_that_tokens_are_compared_with_are_bounded() {
    let server = TestServer::start();
    let many: Vec<String> = (0..513).map(|number| format!("stop {number}")).collect();
    let long = vec!["x".repeat(70 << 10)];
    for (path, field) in [
        ("/v1/chat/completions", "stop"),
        ("/v1/messages", "stop_sequences"),
        ("/v1/chat/completions", "dry_sequence_breakers"),
    ] {
        for list in [&many, &long] {
            let answer = server.post(path, &with(conversation(json!({})), json!({ field: list })));
            assert_eq!(answer.status, 400, "{field}: {}", answer.text());
            assert!(answer.text().contains(&format!("{field} has ")), "{field}: {}", answer.text());
        }
        server.post(path, &with(conversation(json!({})), json!({ field: &many[..512] }))).ok();
    }
}

/// Whoever waits for a compiler holds no thread that others need.
#[test]
fn requests_that_wait_for_a_compiler_hold_up_no_other() {
    let app = Setup::default().app();
    let served = app.models().loaded().pop().unwrap();
    let local = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let server = TestServer::with_threads(app, local.into(), MAX_COMPILING + 1);
    let form = |number: usize| with(hello(), json!({ "guided_regex": format!("[ab]{{{number}}}") }));
    server.post("/v1/chat/completions", &form(1)).ok();
    let engine = served.model.constraints().unwrap();
    let held = engine.hold_compilers().unwrap();
    // More than there are threads.
    let waiting: Vec<_> = (2..12)
        .map(|number| {
            let mut stream = server.client().connect();
            let body = form(number).to_string();
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            std::io::Write::write_all(&mut stream, (head + &body).as_bytes()).unwrap();
            stream
        })
        .collect();
    // Until all were read.
    while server.app.requests().active() < waiting.len() {}
    let counted = server.post("/v1/messages/count_tokens", &conversation(json!({}))).ok();
    assert!(counted["input_tokens"].as_u64().unwrap() > 0, "{counted}");
    // Long texts have turns of their own.
    let long = json!({ "messages": [{ "role": "user", "content": "x ".repeat(40_000) }] });
    assert!(server.post("/v1/messages/count_tokens", &long).ok()["input_tokens"].as_u64().unwrap() > 40_000);
    // Neither a chat nor a form that was compiled before needs a compiler.
    server.post("/v1/chat/completions", &hello()).ok();
    server.post("/v1/chat/completions", &form(1)).ok();
    drop(held);
    for mut stream in waiting {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    }
    server.assert_idle();
}
