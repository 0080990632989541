//! The interface of llama-server: completions in all forms, tokens, templates, properties.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{CONTEXT, Setup, TestServer, Value, json, model, with};
use quadriga_server::{App, Keys, Limits, ModelRegistry};
use std::sync::Arc;

fn body() -> Value {
    json!({ "prompt": "hello the", "n_predict": 12, "seed": 1, "ignore_eos": true })
}

/// The chunks of a stream, which has no `[DONE]`.
fn chunks(server: &TestServer, body: &Value) -> Vec<Value> {
    let answer =
        server.client().stream("/completion", &with(body.clone(), json!({ "stream": true }))).answer();
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.events().iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
}

/// Clients take a server whose models have a status for one of several, and follow what becomes of them.
#[test]
fn one_model_has_no_status() {
    let server = TestServer::start();
    for entry in [server.get("/v1/models").ok()["data"][0].clone(), server.get("/models/small").ok()] {
        assert_eq!((&entry["id"], entry["meta"]["n_ctx"].as_u64()), (&json!("small"), Some(CONTEXT as u64)));
        assert!(entry.get("status").is_none() && entry.get("architecture").is_none(), "{entry}");
    }
    assert_eq!(server.get("/models/sse").status, 501);
    assert_eq!(server.get("/v1/models/none").status, 404);
}

#[test]
fn a_stream_is_the_completion() {
    let server = TestServer::start();
    let body = with(body(), json!({ "n_probs": 2, "return_tokens": true }));
    let whole = server.post("/completion", &body).ok();
    assert_eq!(whole["stop"], true);
    assert_eq!(whole["stop_type"], "limit");
    assert_eq!(whole["tokens_predicted"], 12);
    assert_eq!(whole["tokens_evaluated"].as_u64().unwrap() as usize, "hello the".len() - 3);
    assert_eq!(whole["generation_settings"]["n_predict"], 12);
    assert_eq!(whole["generation_settings"]["seed"], 1);
    assert_eq!(whole["prompt"], "hello the");
    assert!(whole["timings"]["predicted_per_second"].as_f64().unwrap() > 0.0);
    let found = whole["completion_probabilities"].as_array().unwrap();
    assert_eq!(found.len(), 12);
    for one in found {
        assert_eq!(one["top_logprobs"].as_array().unwrap().len(), 2);
        assert!(one["logprob"].as_f64().unwrap() <= one["top_logprobs"][0]["logprob"].as_f64().unwrap());
    }
    let chunks = chunks(&server, &body);
    let (last, parts) = chunks.split_last().unwrap();
    let text: String = chunks.iter().map(|chunk| chunk["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["content"]);
    let all = |name: &str| -> Vec<Value> {
        chunks.iter().flat_map(|chunk| chunk[name].as_array().cloned().unwrap_or_default()).collect()
    };
    assert_eq!(Value::from(all("tokens")), whole["tokens"]);
    assert_eq!(Value::from(all("completion_probabilities")), whole["completion_probabilities"]);
    assert!(parts.iter().all(|chunk| chunk["stop"] == false));
    for name in
        ["stop", "stop_type", "tokens_predicted", "tokens_evaluated", "generation_settings", "has_new_line"]
    {
        assert_eq!(last[name], whole[name], "{name}");
    }
    server.assert_idle();
}

#[test]
fn prompts_have_many_forms() {
    let server = TestServer::start();
    let complete =
        |prompt: Value| server.post("/completion", &with(body(), json!({ "prompt": prompt }))).ok();
    let tokens = server.post("/tokenize", &json!({ "content": "hello the" })).ok()["tokens"].clone();
    let list = tokens.as_array().unwrap();
    let whole = complete(json!("hello the"));
    assert_eq!(complete(tokens.clone())["content"], whole["content"]);
    // Texts between tokens are one prompt with them.
    let mixed = json!(["hello", list[5]]);
    assert_eq!(complete(mixed)["tokens_evaluated"], whole["tokens_evaluated"]);
    let several = complete(json!(["hello the", tokens, ["hello", list[5]]]));
    let several = several.as_array().unwrap();
    assert_eq!(several.len(), 3);
    for (number, one) in several.iter().enumerate() {
        assert_eq!(one["index"], number);
        assert_eq!(one["content"], whole["content"]);
    }
    assert_eq!(complete(json!({ "prompt_string": "hello the" }))["content"], whole["content"]);
    for wrong in [
        json!([]),
        json!([[]]),
        json!([1, -1]),
        json!(3),
        json!([1, [2]]),
        json!({ "prompt_string": "x", "multimodal_data": ["a"] }),
    ] {
        let answer = server.post("/completion", &with(body(), json!({ "prompt": wrong })));
        assert_eq!(answer.status, 400, "{wrong}: {}", answer.text());
        assert!(
            answer.json()["error"]["message"].as_str().unwrap().starts_with("prompt"),
            "{}",
            answer.text()
        );
    }
    let long = server.post("/completion", &json!({ "prompt": "x".repeat(CONTEXT) }));
    assert_eq!(long.status, 400);
    let error = &long.json()["error"];
    assert_eq!((&error["type"], &error["n_ctx"]), (&json!("exceed_context_size_error"), &json!(CONTEXT)));
}

#[test]
fn options_of_the_answer_are_honoured() {
    let server = TestServer::start();
    let fields = json!({ "response_fields": ["content", "generation_settings/n_predict", "missing"] });
    let some = server.post("/completion", &with(body(), fields)).ok();
    assert_eq!(some.as_object().unwrap().len(), 2);
    assert_eq!(some["generation_settings/n_predict"], 12);
    // Nothing is generated: the prompt is computed.
    let none = server.post("/completion", &with(body(), json!({ "n_predict": 0 }))).ok();
    assert_eq!((&none["content"], &none["tokens_predicted"]), (&json!(""), &json!(0)));
    // The stop string that was found.
    let whole = server.post("/completion", &body()).ok()["content"].as_str().unwrap().to_owned();
    let part: String = whole.chars().skip(5).take(2).collect();
    let stopped = server.post("/completion", &with(body(), json!({ "stop": ["@@@@", part] }))).ok();
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(part)));
    // A sampler that is left out is off: only the most probable token is left with top_k.
    let greedy = with(body(), json!({ "top_k": 1, "temperature": 5.0 }));
    let without = with(greedy.clone(), json!({ "samplers": ["temperature"] }));
    let (greedy, without) =
        (server.post("/completion", &greedy).ok(), server.post("/completion", &without).ok());
    assert_ne!(greedy["content"], without["content"]);
    for unsupported in [
        json!({ "mirostat": 2 }),
        json!({ "dynatemp_range": 0.5 }),
        json!({ "post_sampling_probs": true }),
        json!({ "parse_tool_calls": false }),
        json!({ "min_keep": 2 }),
        json!({ "reasoning_budget_message": "enough" }),
        json!({ "generation_prompt": "<think>" }),
        json!({ "grammar_triggers": [{ "type": 0, "value": "<tool_call>" }] }),
        json!({ "preserved_tokens": [5] }),
        // They change nothing, but have a type.
        json!({ "n_keep": "all" }),
        json!({ "n_discard": true }),
    ] {
        let answer = server.post("/completion", &with(body(), unsupported.clone()));
        let name = unsupported.as_object().unwrap().keys().next().unwrap().clone();
        assert_eq!(answer.status, 400);
        assert!(answer.json()["error"]["message"].as_str().unwrap().starts_with(&name));
    }
    server
        .post("/completion", &with(body(), json!({ "mirostat": 0, "dynatemp_range": 0, "id_slot": -1 })))
        .ok();
    let off = json!({ "parse_tool_calls": true, "min_keep": 1, "reasoning_budget_message": "", "generation_prompt": "",
        "grammar_triggers": [], "preserved_tokens": [], "n_keep": -1, "n_discard": 0, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
        "post_sampling_probs": false, "adaptive_target": -1.0, "adaptive_decay": 0.9, "grammar_lazy": false,
        "grammar": "", "lora": [], "stop": [], "logit_bias": [], "n_probs": 0, "response_fields": [],
        "dry_multiplier": 0.0, "xtc_probability": 0.0, "top_n_sigma": -1.0, "typical_p": 1.0, "n_indent": 0,
        "t_max_predict_ms": 0, "t_max_prompt_ms": -1, "id_slot": -1, "backend_sampling": false, "seed": 1,
        "reasoning_budget_tokens": -1, "reasoning_format": "none", "timings_per_token": false });
    let neutral = server.post("/completion", &with(body(), off.clone())).ok();
    assert_eq!(neutral["content"], whole);
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
    let response = json!({ "input": "hi", "max_output_tokens": 2 });
    for (path, body) in
        [("/v1/chat/completions", chat), ("/v1/completions", body()), ("/v1/responses", response)]
    {
        server.post(path, &with(off.clone(), body)).ok();
    }
    // What the server says of itself can be sent back.
    let properties = server.get("/props").ok()["default_generation_settings"]["params"].clone();
    server.post("/completion", &with(properties, body())).ok();
}

#[test]
fn progress_and_speeds_are_streamed() {
    let server = TestServer::start();
    let prompt = "a long prompt ".repeat(12);
    let tokens = prompt.len();
    let body = with(body(), json!({ "prompt": prompt, "return_progress": true, "timings_per_token": true }));
    let first = chunks(&server, &body);
    let progress: Vec<&Value> =
        first.iter().map(|chunk| &chunk["prompt_progress"]).filter(|p| !p.is_null()).collect();
    // A step computes 64 tokens.
    assert_eq!(progress.len(), tokens.div_ceil(64));
    assert_eq!(progress.last().unwrap()["processed"], tokens);
    assert!(progress.iter().all(|progress| progress["total"] == tokens && progress["cache"] == 0));
    let with_text = first.iter().filter(|chunk| chunk["stop"] == false && chunk["prompt_progress"].is_null());
    for chunk in with_text {
        assert_eq!(chunk["timings"]["predicted_n"], chunk["tokens_predicted"]);
    }
    let cached = (tokens - 1) / 64 * 64;
    let second = chunks(&server, &body);
    assert_eq!(second[0]["prompt_progress"]["cache"], cached);
    assert_eq!(second.last().unwrap()["tokens_cached"], cached);
    assert_eq!(second.last().unwrap()["timings"]["cache_n"], cached);
    let apart = chunks(&server, &with(body, json!({ "cache_prompt": false })));
    assert_eq!(apart.last().unwrap()["tokens_cached"], 0);
}

#[test]
fn completions_without_v1_serve_both() {
    let server = TestServer::start();
    let own = server.post("/completions", &body()).ok();
    assert_eq!(own["stop_type"], "limit");
    let openai = server.post("/completions", &with(body(), json!({ "model": "small" }))).ok();
    assert_eq!(openai["object"], "text_completion");
    assert_eq!(openai["choices"][0]["text"], own["content"]);
}

#[test]
fn tokens_go_there_and_back() {
    let server = TestServer::start();
    let tokenize =
        |more: Value| server.post("/tokenize", &with(json!({ "content": "the <|end|>" }), more)).ok();
    let tokens = tokenize(json!({}))["tokens"].clone();
    assert_eq!(tokens.as_array().unwrap().len(), 3);
    let plain = tokenize(json!({ "parse_special": false }))["tokens"].as_array().unwrap().len();
    assert_eq!(plain, 2 + "<|end|>".len());
    let pieces = tokenize(json!({ "with_pieces": true }));
    assert_eq!(pieces["tokens"][2], json!({ "id": tokens[2], "piece": "<|end|>" }));
    let back = server.post("/detokenize", &json!({ "tokens": tokens })).ok();
    assert_eq!(back["content"], "the <|end|>");
    // The fields of vLLM, which lm-eval uses.
    let vllm = json!({ "prompt": "the <|end|>", "add_special_tokens": false });
    let own = server.post("/tokenize", &vllm).ok();
    assert_eq!((&own["tokens"], &own["count"], &own["max_model_len"]), (&tokens, &json!(3), &json!(512)));
    assert_eq!(back["prompt"], "the <|end|>");
    let info = server.get("/tokenizer_info").ok();
    assert_eq!((info["eos_token"].as_str(), &info["bos_token"]), (Some("<|end|>"), &Value::Null), "{info}");
    assert_eq!(info["chat_template"], model::TEMPLATE);
    let missing = server.post("/tokenize", &json!({ "prompt": null })).json();
    assert!(missing["error"]["message"].as_str().unwrap().starts_with("content"), "{missing}");
    for wrong in [json!({ "tokens": [100_000] }), json!({ "tokens": ["x"] }), json!({})] {
        let answer = server.post("/detokenize", &wrong);
        assert_eq!(answer.status, 400);
        assert!(answer.json()["error"]["message"].as_str().unwrap().starts_with("tokens"));
    }
}

#[test]
fn templates_are_applied_and_counted() {
    let server = TestServer::start();
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    let prompt = server.post("/apply-template", &chat).ok()["prompt"].clone();
    assert_eq!(prompt, "<|start|>user hi<|end|><|start|>assistant ");
    let tokens = server.post("/tokenize", &json!({ "content": prompt })).ok()["tokens"].clone();
    let count = tokens.as_array().unwrap().len();
    for path in ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"] {
        assert_eq!(
            server.post(path, &chat).ok(),
            json!({ "object": "response.input_tokens", "input_tokens": count })
        );
    }
    let response = json!({ "input": "hi" });
    assert_eq!(server.post("/v1/responses/input_tokens", &response).ok()["input_tokens"], count);
    let usage =
        server.post("/v1/chat/completions", &with(chat.clone(), json!({ "max_tokens": 1 }))).ok()["usage"]
            .clone();
    assert_eq!(usage["prompt_tokens"], count);
    let prefill = json!({ "messages": [{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "Well" }] });
    assert_eq!(
        server.post("/apply-template", &prefill).ok()["prompt"],
        "<|start|>user hi<|end|><|start|>assistant Well"
    );
}

/// Whatever templates cannot write by themselves, and with or without reasoning.
#[test]
fn applied_templates_are_the_prompts_of_chats() {
    let opened = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant <think>{% endif %}{% if false %}</think>{% endif %}";
    let gemma = include_str!("../../llm/tests/data/tool_templates/gemma.jinja");
    let hermes = include_str!("../../llm/tests/data/tool_templates/hermes.jinja");
    let kimi = include_str!("../../llm/tests/data/tool_templates/kimi_k2.jinja");
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let call =
        json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{\"x\": 1}" } });
    let messages = json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c1", "content": "rain" }]);
    for template in [opened, gemma, hermes, kimi] {
        let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
        setup.batcher.engine.context = 4096;
        let server = setup.start();
        for more in [json!({}), json!({ "tools": [tool] }), json!({ "reasoning_effort": "none" })] {
            let body = with(json!({ "messages": messages, "max_tokens": 1 }), more);
            let prompt = server.post("/apply-template", &body).ok()["prompt"].as_str().unwrap().to_owned();
            assert!(prompt.contains("rain"), "{prompt}");
            let tokens = server.post("/tokenize", &json!({ "content": prompt })).ok()["tokens"].clone();
            let usage = server.post("/v1/chat/completions", &body).ok()["usage"].clone();
            assert_eq!(usage["prompt_tokens"], tokens.as_array().unwrap().len(), "{body}: {prompt}");
        }
    }
}

#[test]
fn properties_and_slots_are_those_of_the_model() {
    let server = TestServer::start();
    let properties = server.get("/props").ok();
    assert_eq!(properties["default_generation_settings"]["n_ctx"], CONTEXT);
    assert_eq!(properties["total_slots"], 4);
    assert_eq!(properties["chat_template"], model::TEMPLATE);
    assert_eq!(properties["chat_template_caps"]["supports_tools"], true);
    assert_eq!(properties["eos_token"], "<|end|>");
    let slots = server.get("/slots").ok();
    assert_eq!(slots.as_array().unwrap().len(), 4);
    assert!(slots.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false));
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 200);
    assert_eq!(server.get("/lora-adapters").ok(), json!([]));
}

#[test]
fn slots_of_several_models_have_their_names() {
    let registry = ModelRegistry::default();
    for name in ["first", "second"] {
        registry.insert(
            Setup::default()
                .served_on(name, Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())),
        );
    }
    let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
    let names = |path: &str| -> Vec<Value> {
        server.get(path).ok().as_array().unwrap().iter().map(|slot| slot["model"].clone()).collect()
    };
    assert_eq!(names("/slots"), [["first"; 4], ["second"; 4]].concat());
    assert_eq!(names("/slots?model=second"), ["second"; 4]);
    assert_eq!(server.get("/slots?model=third").status, 404);
}

/// The values of a metric: of all lines that begin with this name and a label or a space.
fn metric(text: &str, name: &str) -> f64 {
    let line =
        text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    let line = line.unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn metrics_have_the_names_of_llama_server_and_vllm() {
    let server = TestServer::start();
    let two = with(body(), json!({ "n_predict": 8, "ignore_eos": true, "n": 2 }));
    server.post("/completion", &two).ok();
    let text = server.get("/metrics").text();
    let of = |name: &str| metric(&text, name);
    for (name, kind) in [
        ("prompt_tokens_total", "counter"),
        ("prompt_tokens_cached_total", "counter"),
        ("prompt_seconds_total", "counter"),
        ("tokens_predicted_total", "counter"),
        ("tokens_predicted_seconds_total", "counter"),
        ("n_decode_total", "counter"),
        ("n_tokens_max", "counter"),
        ("spec_decode_num_draft_tokens_total", "counter"),
        ("spec_decode_num_accepted_tokens_total", "counter"),
        ("n_busy_slots_per_decode", "gauge"),
        ("prompt_tokens_seconds", "gauge"),
        ("predicted_tokens_seconds", "gauge"),
        ("requests_processing", "gauge"),
        ("requests_deferred", "gauge"),
    ] {
        let name = format!("llamacpp:{name}");
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name} in {text}");
        assert!(of(&name) >= 0.0, "{name}");
    }
    assert_eq!(of("llamacpp:tokens_predicted_total"), 16.0);
    assert_eq!(of("llamacpp:requests_processing"), 0.0);
    let busy = of("llamacpp:n_busy_slots_per_decode");
    assert!(busy > 1.0 && busy <= 2.0, "{busy} sequences of a step");
    // Two answers of eight tokens.
    for (name, count) in [
        ("time_to_first_token_seconds", 2.0),
        ("inter_token_latency_seconds", 14.0),
        ("request_queue_time_seconds", 2.0),
    ] {
        let name = format!("vllm:{name}");
        assert!(text.contains(&format!("# TYPE {name} histogram\n")), "{name} in {text}");
        assert_eq!(of(&format!("{name}_count")), count, "{name}");
        assert!(of(&format!("{name}_sum")) > 0.0 || name.contains("queue"), "{name}");
        assert!(
            text.contains(&format!("{name}_bucket{{model_name=\"small\",le=\"+Inf\"}} {count}\n")),
            "{name} in {text}"
        );
    }
}

#[test]
fn gaps_are_filled_by_models_that_can() {
    let server = TestServer::start();
    let body = json!({ "input_prefix": "the ", "input_suffix": " the", "n_predict": 4, "seed": 1, "ignore_eos": true });
    let refused = server.post("/infill", &body);
    assert_eq!(refused.status, 501, "{}", refused.text());
    assert_eq!(refused.json()["error"]["type"], "not_supported_error");
    let refused = server.post("/v1/completions", &json!({ "prompt": "the ", "suffix": " the" }));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("suffix")));
    let server = Setup { model: model::with_fill_tokens(), ..Setup::default() }.start();
    let filled = server.post("/infill", &body).ok();
    assert_eq!(filled["prompt"], "<|fim_prefix|>the <|fim_suffix|> the<|fim_middle|>");
    assert_eq!(filled["tokens_predicted"], 4);
    // What is spelled out is text.
    let forged = with(body.clone(), json!({ "input_prefix": "<|fim_middle|>" }));
    let evaluated = server.post("/infill", &forged).ok()["tokens_evaluated"].as_u64().unwrap();
    assert!(evaluated as usize > "<|fim_middle|>".len());
    let extra = with(body.clone(), json!({ "input_extra": [{ "filename": "a.c", "text": "int x;" }] }));
    assert!(server.post("/infill", &extra).ok()["prompt"].as_str().unwrap().contains("a.c"));
    let missing = server.post("/infill", &json!({ "input_prefix": "x" }));
    assert_eq!(missing.status, 400);
    // Ollama has the same with `suffix`.
    let generate = json!({ "prompt": "the ", "suffix": " the", "stream": false, "options": { "num_predict": 4, "seed": 1, "ignore_eos": true } });
    assert_eq!(server.post("/api/generate", &generate).ok()["response"], filled["content"]);
    // And so have completions, for each of their prompts.
    let more = json!({ "max_tokens": 4, "seed": 1, "ignore_eos": true, "return_token_ids": true });
    let complete = |own: Value| server.post("/v1/completions", &with(more.clone(), own));
    let several = complete(json!({ "prompt": ["the ", "x"], "suffix": " the" })).ok()["choices"].clone();
    for (choice, prompt) in several.as_array().unwrap().iter().zip(["the ", "x"]) {
        let generate = with(generate.clone(), json!({ "prompt": prompt }));
        let context = server.post("/api/generate", &generate).ok()["context"].clone();
        let tokens =
            [&choice["prompt_token_ids"], &choice["token_ids"]].map(|part| part.as_array().unwrap().clone());
        assert_eq!(context, json!(tokens.concat()));
    }
    assert_eq!(several[0]["text"], filled["content"]);
    let plain = complete(json!({ "prompt": "the ", "suffix": "" })).ok()["choices"][0].clone();
    assert_eq!(plain["prompt_token_ids"].as_array().unwrap().len(), 2);
    for wrong in [json!({ "prompt": [5, 6] }), json!({ "prompt": "x", "echo": true })] {
        let refused = complete(with(wrong, json!({ "suffix": "y" })));
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("suffix")));
    }
    let long = complete(json!({ "prompt": "x", "suffix": "y".repeat(8 * CONTEXT) }));
    assert_eq!((long.status, &long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert!(
        server.post("/api/show", &json!({ "model": "small" })).ok()["capabilities"]
            .to_string()
            .contains("insert")
    );
}

/// A slot is a hint: an answer has the one that it asks for if that is free, and says which one it had.
#[test]
fn answers_have_slots() {
    let server = TestServer::start();
    let infill = Setup { model: model::with_fill_tokens(), ..Setup::default() }.start();
    let gap = json!({ "input_prefix": "a", "input_suffix": "b", "n_predict": 2, "id_slot": 2 });
    assert_eq!(infill.post("/infill", &gap).ok()["id_slot"], 2);
    for slot in [0, 3] {
        let wanted = json!({ "id_slot": slot, "return_progress": true });
        assert_eq!(server.post("/completion", &with(body(), wanted.clone())).ok()["id_slot"], slot);
        let chunks = chunks(&server, &with(body(), wanted.clone()));
        assert!(chunks.iter().all(|chunk| chunk["id_slot"] == slot), "{chunks:?}");
        let chat = with(crate::common::hello(), wanted);
        assert_eq!(server.post("/v1/chat/completions", &chat).ok()["id_slot"], slot);
        let streamed = server.post("/v1/chat/completions", &with(chat, json!({ "stream": true }))).chunks();
        assert_eq!(streamed.last().unwrap()["id_slot"], slot);
    }
    assert_eq!(server.post("/completion", &body()).ok()["id_slot"], 0);
    assert!(server.post("/v1/chat/completions", &crate::common::hello()).ok().get("id_slot").is_none());
    for (path, wrong) in
        [("/completion", json!(4)), ("/completion", json!(-2)), ("/v1/chat/completions", json!("x"))]
    {
        let base = with(body(), crate::common::hello());
        let refused = server.post(path, &with(base, json!({ "id_slot": wrong })));
        assert_eq!(refused.status, 400, "{}", refused.text());
        assert!(
            refused.json()["error"]["message"].as_str().unwrap().starts_with("id_slot"),
            "{}",
            refused.text()
        );
    }
    server.assert_idle();
}

/// `/slots` tells with which options an answer is sampled, at the slot that it has.
#[test]
fn slots_have_the_options_of_their_answers() {
    let server = TestServer::start();
    let served = server.app.models().loaded().remove(0);
    let gate = crate::common::gate::Gate::new(&served);
    let asked = json!({ "prompt": "hello the", "n_predict": 300, "temperature": 0.25, "top_k": 7, "min_p": 0.5, "seed": 11,
        "stop": ["@@@"], "n_probs": 2, "id_slot": 2, "ignore_eos": true, "stream": true });
    let mut stream = server.client().connect();
    let text = asked.to_string();
    let head =
        format!("POST /completion HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", text.len());
    std::io::Write::write_all(&mut stream, (head + &text).as_bytes()).unwrap();
    while served.in_flight().is_empty() {
        std::thread::yield_now();
    }
    // Nothing of it is computed yet.
    assert!(server.get("/slots").ok().as_array().unwrap().iter().all(|slot| slot["params"] == json!({})));
    // Events of a step are told one after another, and the gate's are first.
    let mut slots = Value::Null;
    let mut busy = Vec::new();
    for _ in 0..50 {
        gate.step();
        slots = server.get("/slots").ok();
        let all = slots.as_array().unwrap().iter();
        busy = all.filter(|slot| slot["is_processing"] == true).cloned().collect();
        if !busy.is_empty() {
            break;
        }
    }
    assert_eq!(busy.len(), 1, "{slots}");
    let (slot, params) = (&busy[0], &busy[0]["params"]);
    assert_eq!((&slot["id"], &slot["n_prompt_tokens"]), (&json!(2), &json!(6)));
    for name in ["temperature", "top_k", "min_p", "seed", "n_predict", "n_probs", "ignore_eos", "stop"] {
        assert_eq!(params[name], asked[name], "{name} in {params}");
    }
    drop(stream);
    drop(gate);
    server.assert_idle();
    assert!(server.get("/slots").ok().as_array().unwrap().iter().all(|slot| slot["is_processing"] == false));
}

/// No adapter is ever loaded.
#[test]
fn adapters_that_do_not_exist_have_no_scale() {
    let server = TestServer::start();
    assert_eq!(server.get("/lora-adapters").ok(), json!([]));
    assert_eq!(server.post("/lora-adapters", &json!([])).ok(), json!({ "success": true }));
    for wrong in [json!([{ "id": 0, "scale": 1.0 }]), json!([5]), json!({}), json!("x"), json!(null)] {
        let refused = server.post("/lora-adapters", &wrong);
        assert_eq!(refused.status, 400, "{wrong}: {}", refused.text());
        assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
    }
    assert_eq!(server.client().send("POST", "/lora-adapters", b"").answer().status, 400);
    assert_eq!(server.client().send("POST", "/lora-adapters", b"[").answer().status, 400);
}

/// What a template can write is found by rendering it: words in it mean nothing.
#[test]
fn properties_have_what_the_template_writes() {
    let caps = |template: &str| {
        let server = Setup { model: model::with_template(template), ..Setup::default() }.start();
        server.get("/props").ok()["chat_template_caps"].clone()
    };
    let own = caps(model::TEMPLATE);
    for name in
        ["string_content", "system_role", "tools", "tool_calls", "parallel_tool_calls", "object_arguments"]
    {
        assert_eq!(own[format!("supports_{name}")], true, "{name}: {own}");
    }
    assert_eq!(own["supports_preserve_reasoning"], false);
    let words = caps(
        "{# tools tool_calls reasoning_content #}{% for m in messages %}{% if m.role == 'system' %}\
        {{ raise_exception('system') }}{% endif %}{{ m.content }}{% endfor %}",
    );
    let yes: Vec<&String> =
        words.as_object().unwrap().iter().filter(|(_, can)| **can == true).map(|(name, _)| name).collect();
    assert_eq!(yes, ["supports_string_content"], "{words}");
}

/// A request that only fills the cache took the time of its prompt, and nothing else.
#[test]
fn timings_without_an_answer_are_those_of_the_prompt() {
    let server = TestServer::start();
    let prompt = "a long prompt ".repeat(12);
    let asked = [
        ("/completion", json!({ "prompt": prompt, "n_predict": 0, "cache_prompt": false })),
        (
            "/v1/completions",
            json!({ "model": "small", "prompt": prompt, "max_tokens": 0, "cache_prompt": false }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": prompt }], "max_tokens": 0, "cache_prompt": false }),
        ),
    ];
    for (path, asked) in asked {
        let whole = server.post(path, &asked).ok();
        let events = server.post(path, &with(asked, json!({ "stream": true }))).events();
        let mut streamed = events.iter().filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok());
        let streamed = streamed.rfind(|chunk| !chunk["timings"].is_null()).unwrap();
        for timings in [&whole["timings"], &streamed["timings"]] {
            let number =
                |name: &str| timings[name].as_f64().unwrap_or_else(|| panic!("{path}: {name} of {timings}"));
            assert!(number("prompt_n") >= prompt.len() as f64, "{path}: {timings}");
            for name in ["prompt_ms", "prompt_per_token_ms", "prompt_per_second"] {
                assert!(number(name) > 0.0, "{path}: {name} of {timings}");
            }
            for name in
                ["cache_n", "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"]
            {
                assert_eq!(number(name), 0.0, "{path}: {name} of {timings}");
            }
        }
    }
}

/// `reasoning_format` says where reasoning is, whole and streamed.
#[test]
fn reasoning_is_where_the_request_says() {
    let template =
        format!("{}{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}", model::TEMPLATE);
    let server = Setup { model: model::with_template(&template), ..Setup::default() }.start();
    let ask = |format: &str| {
        let more = json!({ "reasoning_format": format, "reasoning_budget_tokens": 5, "max_tokens": 40 });
        let asked = with(crate::common::hello(), more);
        let message = server.post("/v1/chat/completions", &asked).ok()["choices"][0]["message"].clone();
        let chunks = server.post("/v1/chat/completions", &with(asked, json!({ "stream": true }))).chunks();
        let joined = |name: &str| -> String {
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][name].as_str()).collect()
        };
        let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
        ["content", "reasoning_content"].map(|name| {
            assert_eq!(text(name), joined(name), "{name}");
            text(name)
        })
    };
    let [content, reasoning] = ask("deepseek");
    assert!(!content.is_empty() && !reasoning.is_empty(), "{content:?} {reasoning:?}");
    let inline = format!("<think>\n{reasoning}\n</think>\n\n{content}");
    assert_eq!(ask("auto"), [content.clone(), reasoning.clone()]);
    assert_eq!(ask("none"), [inline.clone(), String::new()]);
    assert_eq!(ask("deepseek-legacy"), [inline, reasoning]);
    let refused = server
        .post("/v1/chat/completions", &with(crate::common::hello(), json!({ "reasoning_format": "x" })));
    assert_eq!(refused.status, 400);
}

/// They are known, and there is something else in their place.
#[test]
fn routes_that_are_known_and_absent_say_so() {
    let server = TestServer::start();
    for (method, path) in [
        ("POST", "/slots/0?action=save"),
        ("GET", "/v1/stream?conv_id=1"),
        ("DELETE", "/v1/stream?conv_id=1"),
        ("POST", "/v1/streams/lookup"),
        ("POST", "/v1/chat/completions/control"),
    ] {
        let answer = server.client().send(method, path, b"{}").answer();
        assert_eq!(answer.status, 501, "{path}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!((&error["type"], &error["code"]), (&json!("not_supported_error"), &json!(501)), "{path}");
    }
    assert_eq!(server.post("/v1/streamers", &json!({})).status, 404);
}

/// Text that repeats is guessed; what of it was right is told, as with a draft model.
#[test]
fn guesses_are_counted() {
    let mut setup = Setup::default();
    setup.batcher.lookup = 4;
    let server = setup.start();
    let letter = server.post("/tokenize", &json!({ "content": "a" })).ok()["tokens"].clone();
    let asked =
        json!({ "prompt": "aaaaaaaa", "n_predict": 40, "allowed_token_ids": letter, "ignore_eos": true });
    let timings = server.post("/completion", &asked).ok()["timings"].clone();
    let number = |name: &str| timings[name].as_u64().unwrap_or_else(|| panic!("{name} of {timings}"));
    assert!(number("draft_n") >= number("draft_n_accepted") && number("draft_n_accepted") > 0, "{timings}");
    assert!(number("draft_n_accepted") < number("predicted_n"), "{timings}");
    let without = TestServer::start().post("/completion", &asked).ok()["timings"].clone();
    assert!(without.get("draft_n").is_none(), "{without}");
}
