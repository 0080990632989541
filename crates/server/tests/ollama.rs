//! Ollama's interface: lines instead of events, whole calls, models and their details.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{CONTEXT, Setup, TestServer, Value, json, model, with};

fn options() -> Value {
    json!({ "num_predict": 8, "seed": 1, "ignore_eos": true, "num_ctx": 100_000 })
}

fn chat() -> Value {
    let messages = json!([{ "role": "user", "content": "hello there" }]);
    json!({ "model": "small:latest", "messages": messages, "options": options() })
}

fn generate() -> Value {
    json!({ "model": "small", "prompt": "hello there", "options": options() })
}

fn whole(server: &TestServer, path: &str, body: &Value) -> Value {
    server.post(path, &with(body.clone(), json!({ "stream": false }))).ok()
}

/// The fields of an answer that do not depend on time.
fn steady(mut answer: Value) -> Value {
    let object = answer.as_object_mut().unwrap();
    object.retain(|name, _| !name.ends_with("_duration") && name != "created_at");
    answer
}

#[test]
fn lines_are_the_answer() {
    let server = TestServer::start();
    for (path, body, place) in
        [("/api/chat", chat(), "/message/content"), ("/api/generate", generate(), "/response")]
    {
        let body = with(body, json!({ "logprobs": true, "top_logprobs": 2 }));
        let whole = whole(&server, path, &body);
        assert_eq!(whole["model"], body["model"]);
        assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!("length")));
        assert_eq!(whole["eval_count"], 8);
        for name in ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"] {
            assert!(whole[name].is_u64(), "{name}: {whole}");
        }
        // Without a word about it, an answer is streamed.
        let answer = server.post(path, &body);
        assert_eq!(answer.header("content-type"), Some("application/x-ndjson"));
        let lines = answer.lines();
        let (last, parts) = lines.split_last().unwrap();
        assert!(parts.iter().all(|line| line["done"] == false));
        let text: String = lines.iter().filter_map(|line| line.pointer(place)?.as_str()).collect();
        assert_eq!(text, whole.pointer(place).unwrap().as_str().unwrap());
        let found: Vec<Value> =
            lines.iter().flat_map(|line| line["logprobs"].as_array().cloned().unwrap_or_default()).collect();
        assert_eq!(found.len(), 8);
        assert_eq!(Value::from(found), whole["logprobs"]);
        let mut joined = last.clone();
        *joined.pointer_mut(place).unwrap() = text.into();
        joined["logprobs"] = whole["logprobs"].clone();
        assert_eq!(steady(joined), steady(whole));
    }
    server.assert_idle();
}

/// A BOS token that begins every message is no beginning of the text that a context has already.
#[test]
fn turns_keep_their_marks_after_a_context() {
    let setup = Setup { model: model::with_turn_marks_as_bos(), ..Setup::default() };
    let server = setup.start();
    let first = whole(&server, "/api/generate", &generate());
    let context = first["context"].as_array().unwrap();
    assert_eq!(context[0], model::START);
    let body = with(generate(), json!({ "context": context }));
    let second = whole(&server, "/api/generate", &body);
    assert_eq!(second["context"][context.len()], model::START);
}

/// Clients divide the number of tokens by their time.
#[test]
fn the_only_token_of_an_answer_takes_time() {
    let server = TestServer::start();
    let body = with(generate(), json!({ "options": { "num_predict": 1 } }));
    let answer = whole(&server, "/api/generate", &body);
    assert_eq!(answer["eval_count"], 1);
    assert!(answer["eval_duration"].as_u64() > Some(0), "{answer}");
}

#[test]
fn conversations_go_on_with_a_context() {
    let server = TestServer::start();
    let first = whole(&server, "/api/generate", &generate());
    let context = first["context"].as_array().unwrap().len();
    assert_eq!(context, first["prompt_eval_count"].as_u64().unwrap() as usize + 8);
    let second = whole(&server, "/api/generate", &with(generate(), json!({ "context": first["context"] })));
    assert_eq!(
        second["prompt_eval_count"].as_u64().unwrap(),
        first["prompt_eval_count"].as_u64().unwrap() + context as u64
    );
    let raw = whole(&server, "/api/generate", &with(generate(), json!({ "raw": true })));
    assert_eq!(raw["prompt_eval_count"].as_u64().unwrap() as usize, "hello there".len() - 3);
    assert!(raw["context"].is_null());
    let system = whole(&server, "/api/generate", &with(generate(), json!({ "system": "be brief" })));
    assert!(system["prompt_eval_count"].as_u64() > first["prompt_eval_count"].as_u64());
}

/// They would change the prompt if it had a template.
#[test]
fn fields_that_a_prompt_without_a_template_cannot_have_are_refused() {
    let setup = Setup { model: model::with_fill_tokens(), ..Setup::default() };
    let server = setup.start();
    let context = json!([5, 6]);
    for (form, field, value) in [
        (json!({ "raw": true }), "system", json!("be brief")),
        (json!({ "raw": true }), "context", context.clone()),
        (json!({ "suffix": "end" }), "system", json!("be brief")),
        (json!({ "suffix": "end" }), "context", context),
        (json!({ "suffix": "end" }), "think", json!(true)),
        (json!({ "suffix": "end" }), "think", json!("low")),
    ] {
        let body = with(generate(), form);
        let refused = server.post("/api/generate", &with(body.clone(), json!({ field: value })));
        assert_eq!(refused.status, 400, "{field}: {}", refused.text());
        assert!(refused.text().contains(&format!("{field} cannot be used together")), "{}", refused.text());
        let nothing = json!({ "system": "", "think": false, "stream": false });
        server.post("/api/generate", &with(body, nothing)).ok();
    }
}

#[test]
fn a_request_without_a_prompt_loads_the_model() {
    let server = TestServer::start();
    let loaded =
        server.post("/api/chat", &json!({ "model": "small", "messages": [], "keep_alive": "5m" })).ok();
    assert_eq!((&loaded["done"], &loaded["done_reason"]), (&json!(true), &json!("load")));
    assert_eq!(loaded["message"], json!({ "role": "assistant", "content": "" }));
    let loaded = server.post("/api/generate", &json!({ "model": "small" })).ok();
    assert_eq!(loaded["done_reason"], "load");
}

#[test]
fn thinking_is_apart() {
    let template =
        format!("{}{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}", model::TEMPLATE);
    let server = Setup { model: model::with_template(&template), ..Setup::default() }.start();
    let whole = whole(&server, "/api/chat", &with(chat(), json!({ "think": true })));
    assert_eq!(whole["message"]["content"], "");
    let thinking = whole["message"]["thinking"].as_str().unwrap();
    assert!(!thinking.is_empty());
    let lines = server.post("/api/chat", &with(chat(), json!({ "think": true }))).lines();
    let streamed: String = lines.iter().filter_map(|line| line["message"]["thinking"].as_str()).collect();
    assert_eq!(streamed, thinking);
    let shown = server.post("/api/show", &json!({ "model": "small" })).ok();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("thinking")));
}

#[test]
fn models_are_described() {
    let server = TestServer::start();
    // Codex asks for a version with `/v1/responses`.
    let version = server.get("/api/version").ok()["version"].as_str().unwrap().to_owned();
    let numbers: Vec<u32> = version.split('.').map(|number| number.parse().unwrap()).collect();
    assert!(numbers.len() == 3 && numbers >= vec![0, 13, 4], "{version}");
    let tags = server.get("/api/tags").ok();
    let model = &tags["models"][0];
    assert_eq!(model["name"], "small");
    assert_eq!(model["details"]["family"], "llama");
    assert_eq!(model["details"]["format"], "gguf");
    assert_eq!(model["details"]["quantization_level"], "F32");
    assert_eq!(model["digest"].as_str().unwrap().len(), 64);
    assert!(model["size"].as_u64().unwrap() > 100_000);
    let loaded = server.get("/api/ps").ok();
    assert_eq!(loaded["models"][0]["context_length"], CONTEXT);
    let shown = server.post("/api/show", &json!({ "name": "small" })).ok();
    assert_eq!(shown["model_info"]["llama.context_length"], 4096);
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert!(shown["model_info"]["tokenizer.ggml.tokens"].is_null());
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    assert!(shown["parameters"].as_str().unwrap().starts_with("num_ctx"));
    assert!(shown["template"].as_str().unwrap().contains("tools"));
    let verbose = server.post("/api/show", &json!({ "model": "small", "verbose": true })).ok();
    assert_eq!(verbose["model_info"]["tokenizer.ggml.tokens"].as_array().unwrap().len(), 100);
    // Clients that look for Ollama find it; a browser gets the page.
    assert_eq!(server.get("/").text(), "Ollama is running");
    assert_eq!(server.client().send("HEAD", "/", b"").status, 200);
    assert!(server.client().header("accept", "text/html").get("/").text().contains("<html"));
}

#[test]
fn wrong_requests_are_refused_in_ollamas_form() {
    let server = TestServer::start();
    let cases = [
        ("/api/chat", json!({ "messages": [{ "role": "robot" }] }), "messages[0].role"),
        ("/api/chat", json!({ "messages": [{ "role": "user", "images": ["x"] }] }), "messages[0].images"),
        ("/api/chat", json!({ "options": { "temperature": "hot" } }), "options.temperature"),
        ("/api/chat", json!({ "options": { "num_ctx": "big" } }), "options.num_ctx"),
        ("/api/chat", json!({ "think": "hard" }), "think"),
        ("/api/chat", json!({ "format": "xml" }), "format"),
        ("/api/chat", json!({ "keep_alive": "soon" }), "keep_alive"),
        ("/api/chat", json!({ "stream": 1 }), "stream"),
        ("/api/generate", json!({ "prompt": 3 }), "prompt"),
        ("/api/generate", json!({ "context": ["x"] }), "context"),
        ("/api/generate", json!({ "template": "{{ .Prompt }}" }), "template"),
        ("/api/embed", json!({}), "input"),
    ];
    for (path, body, field) in cases {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        let error = answer.json();
        assert!(error["error"].as_str().unwrap().starts_with(field), "{error}");
    }
    let long = json!([{ "role": "user", "content": "x".repeat(CONTEXT) }]);
    let answer = server.post("/api/chat", &json!({ "messages": long }));
    assert_eq!(answer.status, 400);
    assert!(answer.json()["error"].as_str().unwrap().contains("exceeds the available context size"));
    // Options that are not known do not matter.
    let odd = json!({ "options": { "num_predict": 1, "num_gpu": 99, "unknown": [1] }, "model": "x", "stream": false, "messages": [{ "role": "user", "content": "x" }] });
    server.post("/api/chat", &odd).ok();
}

#[test]
fn routes_that_change_models_are_not_supported() {
    let server = TestServer::start();
    for path in ["/api/pull", "/api/copy", "/api/create"] {
        let answer = server.post(path, &json!({ "model": "x" }));
        let error = answer.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status == 501 && error.contains("not supported"), "{path}: {}", answer.text());
    }
}
