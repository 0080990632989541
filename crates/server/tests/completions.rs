//! `/v1/completions`, as lm-eval and others use it: prompts in all forms, echo, log-probabilities, streams.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::gate::Gate;
use crate::common::{Setup, TestServer, Value, json, with};

const PATH: &str = "/v1/completions";

fn body() -> Value {
    json!({ "model": "small", "prompt": "hello the", "max_tokens": 6, "seed": 1, "ignore_eos": true })
}

#[test]
fn a_stream_is_the_completion() {
    let server = TestServer::start();
    let body = with(
        body(),
        json!({ "prompt": ["hello", "the the"], "n": 2, "echo": true, "logprobs": 2, "temperature": 2.0 }),
    );
    let whole = server.post(PATH, &body).ok();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    let streaming = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let chunks = server.post(PATH, &with(body, streaming)).chunks();
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        let own: Vec<&Value> = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter(|c| c["index"] == index)
            .collect();
        let text: String = own.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, choice["text"]);
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let parts: Vec<Value> = own
                .iter()
                .flat_map(|choice| choice["logprobs"][name].as_array().cloned().unwrap_or_default())
                .collect();
            let whole = choice["logprobs"][name].as_array().unwrap();
            assert_eq!(parts.len(), whole.len(), "{name}");
            for (part, whole) in parts.iter().zip(whole) {
                match (part.as_f64(), whole.as_f64()) {
                    // Steps with another number of rows round differently.
                    (Some(part), Some(whole)) => {
                        assert!((part - whole).abs() < 1e-4, "{name}: {part} {whole}")
                    }
                    _ if name == "top_logprobs" => assert_eq!(part.is_null(), whole.is_null()),
                    _ => assert_eq!(part, whole, "{name}"),
                }
            }
        }
        assert_eq!(own.last().unwrap()["finish_reason"], choice["finish_reason"]);
    }
    let last = chunks.last().unwrap();
    assert_eq!(
        (&last["choices"], &last["usage"]["total_tokens"]),
        (&json!([]), &whole["usage"]["total_tokens"])
    );
    server.assert_idle();
}

/// lm-eval sends tokens, asks for one more, and reads the log-probabilities of the prompt.
#[test]
fn log_likelihoods_are_there_for_lm_eval() {
    let server = TestServer::start();
    let tokens = server.post("/tokenize", &json!({ "content": "hello the end" })).ok()["tokens"].clone();
    let count = tokens.as_array().unwrap().len();
    let ask = |more: Value| {
        let body = json!({ "model": "small", "prompt": [tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true });
        server.post(PATH, &with(body, more)).ok()["choices"][0]["logprobs"].clone()
    };
    let logprobs = ask(json!({}));
    let found = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(found.len(), count + 1);
    assert!(found[0].is_null() && logprobs["top_logprobs"][0].is_null());
    for (place, (logprob, top)) in
        found.iter().zip(logprobs["top_logprobs"].as_array().unwrap()).enumerate().skip(1)
    {
        let most =
            top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(logprob.as_f64().unwrap() <= most, "{place}");
    }
    // The last token was sampled greedily: it is the most probable one.
    let last = found[count].as_f64().unwrap();
    let top = logprobs["top_logprobs"][count].as_object().unwrap();
    assert!(top.values().any(|value| value.as_f64() == Some(last)));
    // Nothing need be generated, and a prompt of one token has a list, too.
    let none = ask(json!({ "max_tokens": 0 }));
    assert_eq!(none["token_logprobs"].as_array().unwrap()[..], found[..count]);
    let one = ask(json!({ "max_tokens": 0, "prompt": [tokens[0]] }));
    assert_eq!(one["token_logprobs"], json!([null]));
}

/// Requests are made for each answer: as many as can run and wait together.
#[test]
fn more_answers_than_can_wait_are_refused_at_once() {
    let mut setup = Setup::default();
    setup.batcher.queue = 8;
    let server = setup.start();
    let refused = |more: Value, field: &str| {
        for path in [PATH, "/completion"] {
            let answer = server.post(path, &with(body(), more.clone()));
            assert_eq!(answer.status, 400, "{path}: {}", answer.text());
            assert!(answer.text().contains(&format!("{field} asks for")), "{}", answer.text());
        }
    };
    refused(json!({ "prompt": vec!["a"; 7], "n": 2 }), "prompt");
    refused(json!({ "prompt": vec!["a"; 13] }), "prompt");
    refused(json!({ "n": 13 }), "n");
    assert_eq!(server.get("/status").ok()["computed_tokens"], 0);
    let all = server.post(PATH, &with(body(), json!({ "prompt": vec!["a"; 6], "n": 2 }))).ok();
    assert_eq!(all["choices"].as_array().unwrap().len(), 12);
    server.assert_idle();
    // What each of them has a copy of is limited, too.
    let server = TestServer::start();
    let many = |more: Value| with(json!({ "prompt": vec!["a"; 512], "max_tokens": 1 }), more);
    let stops = many(json!({ "stop": ["z".repeat(60_000)] }));
    let schema = many(json!({ "json_schema": { "enum": vec!["zz"; 10_000] } }));
    for (path, more) in [(PATH, &stops), ("/completion", &stops), (PATH, &schema), ("/completion", &schema)] {
        let answer = server.post(path, &with(body(), more.clone()));
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        assert!(answer.text().contains("stop strings"), "{}", answer.text());
    }
}

/// As many prompts as can run and wait are answered with the options that the server has by default, though the first answers are long
/// complete before the last prompt has a place.
#[test]
fn many_prompts_are_answered_in_one_request() {
    let mut setup = Setup::default();
    setup.batcher.engine.sequences = 32;
    let server = setup.start();
    let prompts: Vec<String> = (0..512).map(|number| format!("the {number}")).collect();
    let ask = json!({ "prompt": prompts, "max_tokens": 64, "ignore_eos": true });
    let answer = server.post(PATH, &with(body(), ask.clone())).ok();
    let choices = answer["choices"].as_array().unwrap();
    let order: Vec<u64> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(order, (0..512).collect::<Vec<u64>>());
    assert_eq!(answer["usage"]["completion_tokens"], 512 * 64);
    let all = server.post("/completion", &with(ask, json!({ "n_predict": 64 }))).ok();
    assert!(all.as_array().unwrap().iter().all(|answer| answer["tokens_predicted"] == 64));
    server.assert_idle();
}

#[test]
fn prompts_of_a_request_begin_together() {
    let server = TestServer::start();
    let served = server.app.models().loaded().pop().unwrap();
    let gate = Gate::new(&served);
    std::thread::scope(|scope| {
        let asks = || server.post(PATH, &with(body(), json!({ "prompt": ["a", "b", "c"] })));
        let answer = scope.spawn(asks);
        while served.state().running == 1 {
            gate.step();
        }
        assert_eq!(served.state().running, 4);
        drop(gate);
        answer.join().unwrap().ok();
    });
}

/// The memory for answers is shared, and no request takes it all.
#[test]
fn answers_that_take_too_much_memory_are_refused() {
    let mut setup = Setup::default();
    setup.limits.answer_memory = 2 << 20;
    let server = setup.start();
    let chat =
        json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 100, "logprobs": true });
    let many = [
        ("/completion", json!({ "prompt": "a", "n_predict": 100, "n_probs": 50 }), "n_probs"),
        ("/completion", json!({ "prompt": "a", "n_predict": 400, "n": 64 }), "n"),
        (PATH, json!({ "prompt": vec!["a"; 8], "max_tokens": 100, "logprobs": 5 }), "prompt"),
        (
            PATH,
            json!({ "prompt": vec!["ab".repeat(200); 2], "max_tokens": 1, "logprobs": 5, "echo": true }),
            "prompt",
        ),
        ("/v1/chat/completions", with(chat, json!({ "top_logprobs": 20 })), "top_logprobs"),
    ];
    for (path, body, field) in &many {
        let answer = server.post(path, body);
        assert_eq!(answer.status, 400, "{path} {body}: {}", answer.text());
        assert!(answer.text().contains(&format!("{field} asks for")), "{path}: {}", answer.text());
    }
    assert_eq!(server.get("/status").ok()["computed_tokens"], 0);
    // Streams are read while they are generated.
    for (path, body, _) in &many[..1] {
        let answer = server.client().stream(path, &with(body.clone(), json!({ "stream": true }))).answer();
        assert!(answer.events().pop().unwrap().1.contains("\"stop\":true"), "{}", answer.text());
    }
    // Nobody knows how long this one becomes.
    let open = json!({ "prompt": "a", "n_probs": 50, "ignore_eos": true });
    let answer = server.post("/completion", &open);
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("before it is complete"), "{}", answer.text());
    // What was taken is there for others.
    for _ in 0..6 {
        server.post("/completion", &with(open.clone(), json!({ "n_predict": 15 }))).ok();
    }
    server.assert_idle();
}

/// What is longer than the context is refused before anything is made of it, such as the text of its tokens.
#[test]
fn lists_of_too_many_tokens_are_refused_as_such() {
    let server = TestServer::start();
    for (path, prompt) in
        [(PATH, json!(vec![1_000_000; 600])), ("/completion", json!([["a"], vec![1_000_000; 600]]))]
    {
        let answer = server.post(path, &json!({ "model": "small", "prompt": prompt, "echo": true }));
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("600"), "{}", answer.text());
    }
}

#[test]
fn prompts_without_room_are_refused_before_one_is_computed() {
    let mut setup = Setup::default();
    setup.batcher.queue = 2;
    let server = setup.start();
    let served = server.app.models().loaded().pop().unwrap();
    let gate = Gate::new(&served);
    let answer = server.post(PATH, &with(body(), json!({ "prompt": vec!["a"; 6] })));
    assert_eq!(answer.status, 429, "{}", answer.text());
    gate.step();
    assert_eq!(served.state().running, 1);
}

#[test]
fn cached_tokens_are_those_of_all_prompts() {
    let server = TestServer::start();
    let prompts = ["hello ".repeat(50), "world ".repeat(60)];
    let ask = |prompt: Value, n: usize| {
        let answer = server.post(PATH, &with(body(), json!({ "prompt": prompt, "n": n }))).ok();
        server.assert_idle();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    for prompt in &prompts {
        ask(json!(prompt), 1);
    }
    let each: u64 = prompts.iter().map(|prompt| ask(json!(prompt), 1)).sum();
    assert!(each > ask(json!(prompts[0]), 1));
    assert_eq!(ask(json!(prompts), 1), each);
    assert_eq!(ask(json!(prompts), 2), each);
}

#[test]
fn wrong_tokens_and_empty_prompts_are_named() {
    let server = TestServer::start();
    for prompt in [json!([5, 100_000]), json!("")] {
        let answer = server.post(PATH, &with(body(), json!({ "prompt": prompt })));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("prompt")), "{prompt}");
    }
    let answer = server.post(PATH, &with(body(), json!({ "samplers": ["top_k", "bogus"] })));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("samplers")));
    assert_eq!(server.post(PATH, &with(body(), json!({ "samplers": "kz" }))).status, 400);
    server.post(PATH, &with(body(), json!({ "samplers": "kpmt" }))).ok();
    // A rule of GBNF whose name is that of Lark's first rule.
    let grammar = "root::=start\nstart::=\"the\"";
    let whole = server.post(PATH, &with(body(), json!({ "grammar": grammar, "ignore_eos": false }))).ok();
    assert_eq!(whole["choices"][0]["text"], "the");
}
