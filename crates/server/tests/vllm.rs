//! Fields that vLLM adds to OpenAI's requests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, hello, json, with};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Control tokens of the model: a mark, and the end.
const START: u32 = 96;
const END: u32 = 97;

fn letter(letter: char) -> u32 {
    letter as u32 - '!' as u32
}

/// A completion that is the same each time.
fn greedy(more: Value) -> Value {
    let own =
        json!({ "model": "small", "prompt": "some words", "max_tokens": 24, "temperature": 0, "seed": 1 });
    with(own, more)
}

/// The only choice, whole and as a stream, which are the same.
#[track_caller]
fn choice(server: &TestServer, more: Value) -> Value {
    let whole = server.post(COMPLETIONS, &greedy(more.clone())).ok();
    let chunks = server.post(COMPLETIONS, &greedy(with(more, json!({ "stream": true })))).chunks();
    let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
    let text: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    let (whole, last) = (whole["choices"][0].clone(), choices.last().unwrap());
    assert_eq!(whole["text"], text);
    assert_eq!(whole["finish_reason"], last["finish_reason"]);
    assert_eq!(whole["stop_reason"], last["stop_reason"]);
    let ids: Vec<&Value> =
        choices.iter().flat_map(|choice| choice["token_ids"].as_array().into_iter().flatten()).collect();
    assert_eq!(ids, whole["token_ids"].as_array().into_iter().flatten().collect::<Vec<_>>());
    whole
}

fn ids(choice: &Value) -> Vec<u32> {
    choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn text(choice: &Value) -> &str {
    choice["text"].as_str().unwrap()
}

#[test]
fn stop_tokens_end_an_answer_and_are_shown_if_that_is_asked_for() {
    let server = TestServer::start();
    let plain = choice(&server, json!({ "return_token_ids": true }));
    let all = ids(&plain);
    // A token that occurs late for the first time.
    let at = (0..all.len()).rev().find(|at| !all[..*at].contains(&all[*at])).unwrap();
    assert!(at > 2, "{all:?}");
    let stopped =
        choice(&server, json!({ "stop_token_ids": [all[at], 5000 % 90], "return_token_ids": true }));
    let stop = if all[..at].contains(&(5000 % 90)) { 5000 % 90 } else { all[at] };
    let end = all.iter().position(|token| *token == stop).unwrap();
    assert_eq!(ids(&stopped), all[..=end]);
    assert_eq!((&stopped["finish_reason"], &stopped["stop_reason"]), (&json!("stop"), &json!(stop)));
    assert!(text(&plain).starts_with(text(&stopped)) && text(&stopped).len() < text(&plain).len());
    let kept = choice(&server, json!({ "stop_token_ids": [stop], "include_stop_str_in_output": true }));
    assert!(text(&plain).starts_with(text(&kept)) && text(&kept).len() > text(&stopped).len());
    // The same of stop strings.
    let word: String = text(&plain).chars().skip(6).take(2).collect();
    let stopped = choice(&server, json!({ "stop": word }));
    let kept = choice(&server, json!({ "stop": word, "include_stop_str_in_output": true }));
    assert_eq!((&kept["finish_reason"], &kept["stop_reason"]), (&json!("stop"), &json!(word)));
    assert_eq!(text(&kept), format!("{}{word}", text(&stopped)));
    // And of conversations.
    let chat = with(hello(), json!({ "stop_token_ids": (0..96).collect::<Vec<u32>>() }));
    let answer = server.post(CHAT, &chat).ok();
    assert_eq!(answer["usage"]["completion_tokens"], 1, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(""), &json!("stop")));
    assert!(choice["stop_reason"].as_u64().unwrap() < 96, "{answer}");
}

#[test]
fn an_answer_has_the_least_number_of_tokens() {
    let server = TestServer::start();
    let ends =
        json!({ "logit_bias": { END.to_string(): 100, START.to_string(): false }, "return_token_ids": true });
    assert_eq!(ids(&choice(&server, ends.clone())), [END]);
    for least in [1, 7] {
        let found = choice(&server, with(ends.clone(), json!({ "min_tokens": least })));
        assert_eq!(ids(&found).len(), least + 1, "{found}");
        assert_eq!(ids(&found).last(), Some(&END));
        // A stop token is no end before that either.
        let other = json!({ "logit_bias": { "40": 100 }, "stop_token_ids": [40], "min_tokens": least, "return_token_ids": true });
        let found = choice(&server, other);
        assert_eq!((ids(&found).len(), ids(&found).last()), (least + 1, Some(&40)), "{found}");
    }
    // Nor a stop string.
    let stop = json!({ "logit_bias": { "40": 100 }, "stop": "I" });
    assert_eq!(text(&choice(&server, stop.clone())), "");
    let found = choice(&server, with(stop, json!({ "min_tokens": 5 })));
    assert_eq!((text(&found), &found["stop_reason"]), ("IIIII", &json!("I")));
    // A grammar that is complete wins.
    let forced = choice(&server, json!({ "guided_choice": ["ab"], "min_tokens": 9 }));
    assert_eq!((text(&forced), &forced["finish_reason"]), ("ab", &json!("stop")));
    let answer = server.post(COMPLETIONS, &greedy(json!({ "min_tokens": 25 })));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("min_tokens")));
}

#[test]
fn only_allowed_tokens_are_generated_and_no_bad_words() {
    let server = TestServer::start();
    let allowed = json!({ "allowed_token_ids": [letter('x'), letter('y'), letter('z')], "temperature": 2, "max_tokens": 60 });
    let found = choice(&server, allowed);
    assert!(text(&found).len() == 60 && text(&found).chars().all(|c| "xyz".contains(c)), "{found}");
    let some = json!({ "allowed_token_ids": [letter('x'), letter('y')], "temperature": 2, "max_tokens": 60 });
    let plain = choice(&server, some.clone());
    assert!(text(&plain).contains("xy") && text(&plain).contains("yy"), "{plain}");
    let banned = choice(&server, with(some.clone(), json!({ "bad_words": ["xy", "yyy"] })));
    assert!(!text(&banned).contains("xy") && !text(&banned).contains("yyy"), "{banned}");
    // What is before the answer does not count.
    let begun = with(some.clone(), json!({ "prompt": "x", "bad_words": ["xy", "xx"], "max_tokens": 1 }));
    let seeds = (0..20).map(|seed| choice(&server, with(begun.clone(), json!({ "seed": seed }))));
    assert!(seeds.into_iter().any(|found| text(&found) == "y"));
    // A grammar without a word of these is still one.
    let grammar = with(some, json!({ "guided_choice": ["ab", "cd"], "bad_words": ["x"] }));
    assert!(["ab", "cd"].contains(&text(&choice(&server, grammar))));
    for (more, field) in [
        (json!({ "allowed_token_ids": [] }), "allowed_token_ids"),
        (json!({ "allowed_token_ids": [1, 100_000] }), "allowed_token_ids"),
        (json!({ "stop_token_ids": ["x"] }), "stop_token_ids"),
        (json!({ "stop_token_ids": [-1] }), "stop_token_ids"),
        (json!({ "bad_words": ["a", " "] }), "bad_words"),
        (json!({ "bad_words": vec!["a"; 513] }), "bad_words"),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let body = if path == CHAT { with(hello(), more.clone()) } else { greedy(more.clone()) };
            let answer = server.post(path, &body);
            assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
        }
    }
}

#[test]
fn control_tokens_are_in_the_text_if_that_is_asked_for() {
    let server = TestServer::start();
    let marks = json!({ "logit_bias": { START.to_string(): 100 }, "max_tokens": 2, "logprobs": 0 });
    assert_eq!(text(&choice(&server, marks.clone())), "");
    let shown = choice(&server, with(marks, json!({ "skip_special_tokens": false })));
    assert_eq!(text(&shown), "<|start|><|start|>");
    assert_eq!(shown["logprobs"]["text_offset"], json!([0, 9]));
    // The end is not a part of the text.
    let ends = json!({ "logit_bias": { END.to_string(): 100 }, "skip_special_tokens": false });
    assert_eq!(text(&choice(&server, ends)), "");
}

#[test]
fn prompts_are_cut_if_that_is_asked_for() {
    let server = TestServer::start();
    let prompt: Vec<u32> = "abcdefghij".chars().map(letter).collect();
    let of = |more: Value| {
        let answer = server.post(COMPLETIONS, &greedy(with(json!({ "return_token_ids": true }), more))).ok();
        let choice = &answer["choices"][0];
        assert_eq!(answer["usage"]["prompt_tokens"], choice["prompt_token_ids"].as_array().unwrap().len());
        (choice["prompt_token_ids"].clone(), choice["text"].clone())
    };
    let cut = of(json!({ "prompt": prompt, "truncate_prompt_tokens": 4 }));
    assert_eq!(cut, of(json!({ "prompt": &prompt[6..] })));
    assert_eq!(cut.0, json!(&prompt[6..]));
    let cut = of(json!({ "prompt": prompt, "truncate_prompt_tokens": 4, "truncation_side": "right" }));
    assert_eq!(cut.0, json!(&prompt[..4]));
    assert_eq!(of(json!({ "prompt": prompt, "truncate_prompt_tokens": 40 })).0, json!(prompt));
    // As many as fit beside the answer.
    let long = json!({ "prompt": "ab".repeat(2000), "truncate_prompt_tokens": -1, "echo": true });
    let (tokens, text) = of(long.clone());
    assert_eq!(tokens.as_array().unwrap().len(), crate::common::CONTEXT - 24);
    assert!(text.as_str().unwrap().starts_with(&"ab".repeat(244)), "{text}");
    assert_eq!(server.post(COMPLETIONS, &greedy(json!({ "prompt": "ab".repeat(2000) }))).status, 400);
    let messages = json!([{ "role": "user", "content": "ab".repeat(2000) }]);
    let chat = with(hello(), json!({ "messages": messages, "truncate_prompt_tokens": 100 }));
    assert_eq!(server.post(CHAT, &chat).ok()["usage"]["prompt_tokens"], 100);
    let counted = server.post("/v1/chat/completions/input_tokens", &chat).ok();
    assert_eq!(counted["input_tokens"], 100);
    let answer = server.post(CHAT, &with(chat, json!({ "truncate_prompt_tokens": 0 })));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("truncate_prompt_tokens")));
}

#[test]
fn log_probabilities_of_prompts_are_those_that_are_echoed() {
    let server = TestServer::start();
    let echoed =
        server.post(COMPLETIONS, &greedy(json!({ "echo": true, "logprobs": 3, "max_tokens": 1 }))).ok();
    let asked = json!({ "prompt_logprobs": 3, "max_tokens": 1, "return_token_ids": true });
    let found = server.post(COMPLETIONS, &greedy(asked)).ok();
    let prompt = found["choices"][0]["prompt_token_ids"].as_array().unwrap().clone();
    let list = found["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((list.len(), &list[0]), (prompt.len(), &Value::Null));
    let wanted = echoed["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    for (at, (token, found)) in prompt.iter().zip(list).enumerate().skip(1) {
        let own = &found[token.to_string()];
        assert_eq!(own["logprob"], wanted[at], "{found}");
        let ranks: Vec<u64> =
            found.as_object().unwrap().values().map(|one| one["rank"].as_u64().unwrap()).collect();
        assert!([1, 2, 3].iter().all(|rank| ranks.contains(rank)), "{found}");
        assert!(own["rank"].as_u64().unwrap() <= 3 || ranks.len() == 4, "{found}");
        let better = found
            .as_object()
            .unwrap()
            .values()
            .filter(|one| one["logprob"].as_f64().unwrap() > own["logprob"].as_f64().unwrap());
        assert!(better.count() < own["rank"].as_u64().unwrap() as usize, "{found}");
    }
    // Chat completions have them beside the choices.
    let chat = with(hello(), json!({ "prompt_logprobs": 0, "return_token_ids": true, "n": 2 }));
    let answer = server.post(CHAT, &chat).ok();
    let prompt = answer["prompt_token_ids"].as_array().unwrap();
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), prompt.len());
    assert_eq!(answer["choices"][1]["token_ids"].as_array().unwrap().len(), 8);
    let answer = server.post(CHAT, &with(chat.clone(), json!({ "stream": true })));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("prompt_logprobs")));
    for path in ["/v1/responses", "/completion"] {
        let answer = server.post(path, &json!({ "input": "x", "prompt": "x", "prompt_logprobs": 0 }));
        assert_eq!((answer.status, answer.text().contains("prompt")), (400, true), "{}", answer.text());
    }
}

#[test]
fn token_ids_and_counts_come_with_the_chunks_of_a_conversation() {
    let server = TestServer::start();
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let body = with(hello(), json!({ "stream": true, "stream_options": options, "return_token_ids": true }));
    let chunks = server.post(CHAT, &body).chunks();
    let whole = server.post(CHAT, &with(hello(), json!({ "return_token_ids": true }))).ok();
    assert_eq!(chunks[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    let ids: Vec<Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(json!(ids), whole["choices"][0]["token_ids"]);
    let counts: Vec<u64> =
        chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] == 0 && counts.last() == Some(&8), "{counts:?}");
    assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
}

#[test]
fn the_end_of_a_prompt_can_be_chosen() {
    let server = TestServer::start();
    let prompt = |messages: Value, more: Value| {
        let body = with(json!({ "messages": messages }), more);
        server.post("/apply-template", &body).ok()["prompt"].as_str().unwrap().to_owned()
    };
    let asked = json!([{ "role": "user", "content": "a" }]);
    let begun = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]);
    let user = "<|start|>user a<|end|>";
    assert_eq!(prompt(asked.clone(), json!({})), format!("{user}<|start|>assistant "));
    assert_eq!(prompt(asked.clone(), json!({ "add_generation_prompt": false })), user);
    assert_eq!(prompt(begun.clone(), json!({})), format!("{user}<|start|>assistant b"));
    let complete = format!("{user}<|start|>assistant b<|end|>");
    assert_eq!(prompt(begun.clone(), json!({ "add_generation_prompt": false })), complete);
    let next = format!("{complete}<|start|>assistant ");
    assert_eq!(prompt(begun.clone(), json!({ "add_generation_prompt": true })), next);
    let continued = json!({ "add_generation_prompt": false, "continue_final_message": true });
    assert_eq!(prompt(begun.clone(), continued), format!("{user}<|start|>assistant b"));
    // What is generated follows the same prompt.
    for messages in [&asked, &begun] {
        for flag in [true, false] {
            let fields =
                json!({ "messages": messages, "add_generation_prompt": flag, "return_token_ids": true });
            let answer = server.post(CHAT, &with(hello(), fields.clone())).ok();
            let text = prompt(messages.clone(), json!({ "add_generation_prompt": flag }));
            let tokens = server.post("/tokenize", &json!({ "content": text, "parse_special": true })).ok();
            assert_eq!(answer["prompt_token_ids"], tokens["tokens"], "{fields}");
        }
    }
    let both = json!({ "messages": begun, "add_generation_prompt": true, "continue_final_message": true });
    let answer = server.post(CHAT, &with(hello(), both));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("continue_final_message")));
}

#[test]
fn a_salt_keeps_prefixes_apart() {
    let server = TestServer::start();
    let cached = |salt: Value| {
        let body = greedy(json!({ "prompt": "x".repeat(200), "max_tokens": 1, "cache_salt": salt }));
        let answer = server.post(COMPLETIONS, &body).ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    for salt in [Value::Null, json!("mine"), json!("yours")] {
        assert_eq!(cached(salt.clone()), 0, "{salt}");
        assert!(cached(salt.clone()) > 100, "{salt}");
    }
    assert_eq!(server.post(COMPLETIONS, &greedy(json!({ "cache_salt": "" }))).status, 400);
}

#[test]
fn json_is_spaced_as_it_is_asked_for() {
    let server = TestServer::start();
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["x"] }, "b": { "enum": [1] } },
        "required": ["a", "b"], "additionalProperties": false });
    let outputs = json!({ "structured_outputs": { "json": schema, "disable_any_whitespace": true } });
    for seed in 0..5 {
        let more = with(outputs.clone(), json!({ "seed": seed, "temperature": 3, "max_tokens": 60 }));
        assert_eq!(text(&choice(&server, more)), r#"{"a":"x","b":1}"#);
    }
    let wide = json!({ "guided_json": schema, "guided_whitespace_pattern": " {3}", "max_tokens": 90 });
    let found = choice(&server, wide);
    assert_eq!(serde_json::from_str::<Value>(text(&found)).unwrap(), json!({ "a": "x", "b": 1 }));
    let body = greedy(json!({ "structured_outputs": { "structural_tag": "x" } }));
    let answer = server.post(COMPLETIONS, &body);
    let field = json!("structured_outputs.structural_tag");
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &field));
}

/// With vLLM's name all tokens count, as there; with llama-server's the last 64.
#[test]
fn the_repetition_penalty_counts_all_tokens() {
    let setup = Setup::default();
    let server = setup.start();
    // The prompt has an x, and then many others.
    let prompt = format!("x{}", "a".repeat(100));
    let bias = json!({ letter('x').to_string(): 100 });
    let found = |name: &str| {
        let more = json!({ "prompt": prompt, "logit_bias": bias, name: 1e9, "max_tokens": 1 });
        text(&choice(&server, more)).to_owned()
    };
    assert_eq!(found("repeat_penalty"), "x");
    assert_ne!(found("repetition_penalty"), "x");
}

/// vLLM's form for conversations: the tokens are those of the rendered text.
#[test]
fn conversations_are_tokenized() {
    let server = TestServer::start();
    let tool =
        json!({ "type": "function", "function": { "name": "look", "parameters": { "type": "object" } } });
    let chat = json!({ "messages": [{ "role": "user", "content": "hi <|end|>" }, { "role": "assistant", "content": "the" }] });
    for more in [
        json!({}),
        json!({ "add_generation_prompt": true }),
        json!({ "add_generation_prompt": false }),
        json!({ "continue_final_message": true }),
        json!({ "tools": [tool], "chat_template_kwargs": { "x": 1 } }),
    ] {
        let asked = with(with(chat.clone(), more), json!({ "return_token_strs": true }));
        let found = server.post("/tokenize", &asked).ok();
        let prompt = server.post("/apply-template", &asked).ok()["prompt"].as_str().unwrap().to_owned();
        let texts: Vec<&str> =
            found["token_strs"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
        assert_eq!(texts.concat(), prompt);
        assert_eq!(found["count"], found["tokens"].as_array().unwrap().len());
        // What a message spells out is text.
        assert!(texts.contains(&"<|start|>") && texts.contains(&"|"), "{texts:?}");
    }
    let plain = server.post("/tokenize", &json!({ "prompt": "the a", "return_token_strs": true })).ok();
    assert_eq!(plain["token_strs"], json!(["the", " ", "a"]));
    let broken = server.post("/tokenize", &json!({ "messages": [{ "role": "nobody" }] }));
    assert_eq!(
        (broken.status, &broken.json()["error"]["message"].as_str().unwrap()[..11]),
        (400, "messages[0]")
    );
}
