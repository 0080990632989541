//! `/v1/chat/completions`: answers and streams in OpenAI's form, and errors before the first byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{CONTEXT, Setup, TestServer, Value, hello, json, model, with};

const CHAT: &str = "/v1/chat/completions";

/// The text of a stream's choice.
fn streamed(chunks: &[Value], choice: usize) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let own = choices.filter(|found| found["index"] == choice);
    own.filter_map(|found| found["delta"]["content"].as_str()).collect()
}

#[test]
fn a_stream_has_the_text_of_the_answer() {
    let server = TestServer::start();
    let whole = server.post(CHAT, &hello()).ok();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "small");
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 8);
    assert_eq!(whole["timings"]["predicted_n"], 8);
    let answer = server
        .post(CHAT, &with(hello(), json!({ "stream": true, "stream_options": { "include_usage": true } })));
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let chunks = answer.chunks();
    let first = &chunks[0];
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!((&chunk["id"], &chunk["created"]), (&first["id"], &first["created"]));
    }
    assert_eq!(streamed(&chunks, 0), choice["message"]["content"].as_str().unwrap());
    let last = &chunks[chunks.len() - 1];
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");
    assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["usage"].is_null()));
    server.assert_idle();
}

#[test]
fn several_choices_differ_and_are_streamed_together() {
    let server = TestServer::start();
    let request = with(hello(), json!({ "n": 3, "temperature": 2.0 }));
    let whole = server.post(CHAT, &request).ok();
    let texts: Vec<&Value> =
        whole["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] || texts[1] != texts[2], "{texts:?}");
    let chunks = server.post(CHAT, &with(request, json!({ "stream": true }))).chunks();
    for (choice, text) in texts.iter().enumerate() {
        assert_eq!(streamed(&chunks, choice), text.as_str().unwrap());
    }
}

#[test]
fn wrong_fields_are_named_before_the_first_byte() {
    let server = TestServer::start();
    let long = "x".repeat(CONTEXT + 10);
    let cases: Vec<(Value, &str, &str)> = vec![
        (json!({ "messages": null }), "messages", "is required"),
        (json!({ "messages": [] }), "messages", "is empty"),
        (json!({ "messages": "hi" }), "messages", "must be a list"),
        (
            json!({ "messages": [{ "role": "robot", "content": "" }] }),
            "messages[0].role",
            "it must be system",
        ),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0].content", "is required"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "messages[0].content[0].type",
            "text only",
        ),
        (json!({ "temperature": "hot" }), "temperature", "must be a number"),
        (json!({ "temperature": -1 }), "temperature", "0 or more"),
        (json!({ "top_p": 1.5 }), "top_p", "from 0 to 1"),
        (json!({ "n": 0 }), "n", "from 1"),
        (json!({ "stream": "yes" }), "stream", "true or false"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs", "from 0 to 20"),
        (json!({ "stop": 7 }), "stop", "a string or a list"),
        (json!({ "logit_bias": { "100000": 1 } }), "logit_bias", "the vocabulary has"),
        (
            json!({ "tools": [{ "type": "function", "function": {} }] }),
            "tools[0].function.name",
            "is required",
        ),
        (json!({ "tool_choice": "sometimes" }), "tool_choice", "must be none, auto, required"),
        (json!({ "response_format": { "type": "xml" } }), "response_format.type", "must be text"),
    ];
    for (change, param, part) in cases {
        for stream in [false, true] {
            let mut request = with(hello(), json!({ "stream": stream }));
            request = with(request, change.clone());
            let answer = server.post(CHAT, &request);
            let error = answer.json()["error"].clone();
            assert_eq!(answer.status, 400, "{change}: {error}");
            assert_eq!(error["type"], "invalid_request_error");
            assert_eq!(error["param"], param, "{error}");
            assert!(error["message"].as_str().unwrap().contains(part), "{error}");
        }
    }
    let answer =
        server.post(CHAT, &with(hello(), json!({ "messages": [{ "role": "user", "content": long }] })));
    let error = answer.json()["error"].clone();
    assert_eq!((answer.status, &error["code"]), (400, &json!("context_length_exceeded")));
    for part in ["This model's maximum context length is 512 tokens", "exceeds the available context size"] {
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
    }
    assert_eq!(error["n_ctx"], CONTEXT);
    server.assert_idle();
}

#[test]
fn negative_numbers_of_tokens_are_refused_but_for_the_one_that_is_no_limit() {
    let server = TestServer::start();
    let prompt = |path: &str| match path {
        "/v1/responses" => json!({ "input": "hello", "seed": 1 }),
        CHAT => json!({ "messages": hello()["messages"], "seed": 1 }),
        _ => json!({ "prompt": "hello", "seed": 1 }),
    };
    let routes = [
        (CHAT, "max_tokens", Some(-1)),
        (CHAT, "max_completion_tokens", Some(-1)),
        ("/v1/completions", "max_tokens", Some(-1)),
        ("/completion", "n_predict", Some(-1)),
        ("/v1/responses", "max_output_tokens", None),
    ];
    for (path, name, unlimited) in routes {
        for number in [-1, -2, -5, i64::MIN] {
            let mut body = prompt(path);
            body[name] = json!(number);
            let answer = server.post(path, &body);
            if unlimited == Some(number) {
                assert_eq!(answer.status, 200, "{path}, {name} {number}: {}", answer.text());
                continue;
            }
            assert_eq!(answer.status, 400, "{path}, {name} {number}: {}", answer.text());
            assert!(
                answer.json()["error"]["message"].as_str().unwrap().starts_with(name),
                "{}",
                answer.text()
            );
        }
    }
    // Also where another field counts.
    let answer = server.post(CHAT, &with(hello(), json!({ "max_completion_tokens": 3, "max_tokens": -7 })));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("max_tokens")));
    let ollama =
        |number: i64| json!({ "model": "small", "prompt": "x", "options": { "num_predict": number } });
    assert_eq!(server.post("/api/generate", &ollama(-3)).status, 400);
    assert_eq!(server.post("/api/generate", &ollama(-2)).status, 200);
}

#[test]
fn unknown_fields_and_nulls_are_ignored() {
    let server = TestServer::start();
    let more = json!({ "store": false, "user": "u", "metadata": { "a": 1 }, "temperature": null, "stop": null, "tools": null, "stream": null });
    let plain = server.post(CHAT, &hello()).ok();
    let odd = server.post(CHAT, &with(hello(), more)).ok();
    assert_eq!(plain["choices"][0]["message"], odd["choices"][0]["message"]);
    assert_eq!(server.post("/chat/completions", &hello()).ok()["choices"], plain["choices"]);
}

#[test]
fn log_probabilities_are_those_of_the_tokens() {
    let server = TestServer::start();
    let request = with(hello(), json!({ "logprobs": true, "top_logprobs": 2, "temperature": 0 }));
    let whole = server.post(CHAT, &request).ok();
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    for token in tokens {
        assert_eq!(token["logprob"], token["top_logprobs"][0]["logprob"]);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert!(token["logprob"].as_f64().unwrap() < 0.0);
    }
    let chunks = server.post(CHAT, &with(request, json!({ "stream": true }))).chunks();
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, tokens);
}

#[test]
fn roles_parts_calls_and_prefills_reach_the_template() {
    let server = TestServer::start();
    let count = |messages: Value, more: Value| {
        let request = with(with(hello(), json!({ "messages": messages })), more);
        server.post(CHAT, &request).ok()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let user = json!({ "role": "user", "content": "hi" });
    let plain = count(json!([user]), json!({}));
    // One token a letter: the marks, the role with a space, and the content.
    assert_eq!(plain, 2 + 5 + 2 + 1 + 10);
    let system = count(json!([{ "role": "developer", "content": "be" }, user]), json!({}));
    assert_eq!(system, plain + 2 + 7 + 2);
    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "h" }, { "type": "text", "text": "i" }] }]);
    assert_eq!(count(parts, json!({})), plain + 1);
    let continued = count(json!([user, { "role": "assistant", "content": "so" }]), json!({}));
    assert_eq!(continued, plain + 2);
    let call =
        json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
    let history = json!([user, { "role": "assistant", "content": null, "tool_calls": [call] }, { "role": "tool", "tool_call_id": "c1", "content": "ok" }]);
    assert!(count(history, json!({})) > plain + 20);
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f", "parameters": {} } }] });
    assert_eq!(count(json!([user]), tools.clone()), plain + 2 + 7);
    let none = with(tools, json!({ "tool_choice": "none" }));
    assert_eq!(count(json!([user]), none), plain);
}

/// Results of calls have the function's name, which the call's identifier tells.
#[test]
fn results_have_the_name_of_their_function() {
    let template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.name }} {{ m.content }}\
        {% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}\
        <|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant {% endif %}";
    let server = Setup { model: model::with_template(template), ..Setup::default() }.start();
    let call = |id: &str, name: &str| json!({ "id": id, "type": "function", "function": { "name": name } });
    let called = |calls: Value| json!({ "role": "assistant", "content": "", "tool_calls": calls });
    let result = |id: &str| json!({ "role": "tool", "content": "rain", "tool_call_id": id });
    let named = with(result("a"), json!({ "name": "own" }));
    let messages = json!([
        called(json!([call("a", "first"), call("b", "second")])),
        result("b"),
        result("a"),
        called(json!([call("a", "third")])),
        result("a"),
        named,
        result("unknown")
    ]);
    let prompt = server.post("/apply-template", &json!({ "messages": messages })).ok()["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    let names = prompt.split("<|start|>tool ").skip(1).map(|rest| rest.split(' ').next().unwrap());
    let names: Vec<&str> = names.collect();
    assert_eq!(names[..4], ["second", "first", "third", "own"], "{prompt}");
    assert_eq!(names.len(), 5, "{prompt}");
}

/// A model may begin to reason although the template was asked that it does not.
#[test]
fn a_budget_of_0_ends_reasoning_that_begins_all_the_same() {
    let template = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let model = model::with_control(template, &["<think>", "</think>", "<|im_end|>"]);
    let id =
        |name: &str| model.tokenizer().unwrap().vocabulary().tokens.iter().position(|token| token == name);
    let bias =
        json!({ id("<think>").unwrap().to_string(): 100, id("<|im_end|>").unwrap().to_string(): -100 });
    let server = Setup { model, ..Setup::default() }.start();
    let body = with(hello(), json!({ "max_tokens": 40, "temperature": 0, "logit_bias": bias }));
    let reasoned = |more: Value| {
        let usage = server.post(CHAT, &with(body.clone(), more)).ok()["usage"].clone();
        usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
    };
    assert_eq!(reasoned(json!({})), 40);
    let limited = reasoned(json!({ "reasoning_budget_tokens": 0 }));
    assert!(limited < 8, "{limited}");
}

#[test]
fn stops_end_answers_before_them() {
    let server = TestServer::start();
    let request = with(hello(), json!({ "max_tokens": 40 }));
    let whole = server.post(CHAT, &request).ok();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let stop = text.chars().nth(10).unwrap().to_string();
    let cut = server.post(CHAT, &with(request, json!({ "stop": [stop] }))).ok();
    assert_eq!(cut["choices"][0]["message"]["content"].as_str(), text.split(stop.as_str()).next());
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
}

#[test]
fn the_only_model_answers_to_every_name() {
    let server = TestServer::start();
    assert_eq!(server.post(CHAT, &with(hello(), json!({ "model": "gpt-4" }))).ok()["model"], "small");
    let models = server.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "small");
    assert_eq!(server.get("/v1/models/small").ok()["object"], "model");
    assert_eq!(server.get("/v1/models/other").status, 404);
}

#[test]
fn a_full_queue_is_429_with_a_time() {
    let mut setup = Setup::default();
    setup.batcher.queue = 0;
    setup.batcher.engine.sequences = 1;
    let server = setup.start();
    let mut running =
        server.client().stream(CHAT, &with(hello(), json!({ "max_tokens": 480, "stream": true })));
    assert!(running.chunk().is_some());
    let answer = server.post(CHAT, &hello());
    assert_eq!(answer.status, 429);
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");
}

/// As OpenAI's and llama-server's: a share of nothing is the most probable token.
#[test]
fn a_top_p_of_0_is_greedy() {
    let server = TestServer::start();
    let text = |more: Value| {
        let answer = server.post(CHAT, &with(with(hello(), json!({ "max_tokens": 40 })), more)).ok();
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let greedy = text(json!({ "temperature": 0 }));
    for seed in 0..5 {
        assert_eq!(
            text(json!({ "temperature": 1.5, "top_k": 0, "min_p": 0, "top_p": 0, "seed": seed })),
            greedy
        );
    }
}

#[test]
fn old_functions_and_empty_lists_of_tools_are_refused() {
    let server = TestServer::start();
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let allowed =
        |mode: &str| json!({ "type": "allowed_tools", "allowed_tools": { "mode": mode, "tools": [] } });
    let of_tools = |mode: &str| json!({ "tools": [tool], "tool_choice": allowed(mode) });
    for (more, field) in [
        (of_tools("required"), "tool_choice.allowed_tools.tools"),
        (of_tools("auto"), "tool_choice.allowed_tools.tools"),
        (json!({ "functions": [{ "name": "f" }] }), "functions"),
        (json!({ "function_call": "auto" }), "function_call"),
    ] {
        let answer = server.post(CHAT, &with(hello(), more));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
    }
}

/// Fields of vLLM that would change the answer are not ignored.
#[test]
fn fields_of_vllm_that_are_not_supported_are_refused_by_name() {
    let server = TestServer::start();
    for (name, on, off) in [
        ("use_beam_search", json!(true), json!(false)),
        ("chat_template", json!("x"), json!("")),
        ("echo", json!(true), json!(false)),
        ("logprob_token_ids", json!([5]), json!([])),
        ("logits_processors", json!(["x"]), json!([])),
        ("repetition_detection", json!({ "min_count": 3 }), Value::Null),
        ("return_tokens_as_token_ids", json!(true), json!(false)),
        ("prompt_embeds", json!("AAAA"), Value::Null),
    ] {
        let ask = |value: Value| server.post("/v1/chat/completions", &with(hello(), json!({ name: value })));
        let refused = ask(on);
        assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some(name)));
        ask(off).ok();
    }
}
