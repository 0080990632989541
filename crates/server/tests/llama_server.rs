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

#[test]
fn streams_of_models_are_not_taken_for_a_model() {
    let server = TestServer::start();
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
    for unsupported in
        [json!({ "mirostat": 2 }), json!({ "dynatemp_range": 0.5 }), json!({ "post_sampling_probs": true })]
    {
        let answer = server.post("/completion", &with(body(), unsupported.clone()));
        let name = unsupported.as_object().unwrap().keys().next().unwrap().clone();
        assert_eq!(answer.status, 400);
        assert!(answer.json()["error"]["message"].as_str().unwrap().starts_with(&name));
    }
    server
        .post("/completion", &with(body(), json!({ "mirostat": 0, "dynatemp_range": 0, "id_slot": -1 })))
        .ok();
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
    assert!(
        server.post("/api/show", &json!({ "model": "small" })).ok()["capabilities"]
            .to_string()
            .contains("insert")
    );
}
