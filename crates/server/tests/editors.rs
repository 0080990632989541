//! Completions as plugins of editors ask for them: they end with a block, or at a line once their time is over.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, hello, json, model, with};

fn filling() -> TestServer {
    Setup { model: model::with_fill_tokens(), ..Setup::default() }.start()
}

/// The tokens of these texts, each of which is one.
fn tokens(server: &TestServer, texts: &[&str]) -> Vec<Value> {
    let token = |text: &&str| {
        let tokens = server.post("/tokenize", &json!({ "content": text })).ok()["tokens"].clone();
        assert_eq!(tokens.as_array().unwrap().len(), 1, "{text:?}");
        tokens[0].clone()
    };
    texts.iter().map(token).collect()
}

/// Of a text, what comes before the first line that is indented less.
fn indented(text: &str, least: usize) -> &str {
    let mut place = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let code = line.trim_start_matches([' ', '\t']);
        let indent = line.len() - code.len();
        if number > 0 && !code.trim().is_empty() && indent < least {
            return &text[..place + indent];
        }
        place += line.len();
    }
    text
}

/// What llama.vim sends while somebody types, and before.
#[test]
fn plugins_of_editors_get_their_completions() {
    let server = filling();
    let extra = json!([{ "text": "int x;\n", "time": [1, 2], "filename": "a.c" }]);
    let body = json!({
        "id_slot": 0, "input_prefix": "the {\n", "input_suffix": "}\n", "input_extra": extra, "prompt": "    ",
        "n_predict": 8, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": false,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
            "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
            "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached",
            "generation_settings/n_ctx"],
    });
    let answer = server.post("/infill", &body).ok();
    assert!(answer["content"].is_string() && answer["timings/predicted_n"].is_u64(), "{answer}");
    assert_eq!(answer["truncated"], false, "{answer}");
    let warm = json!({
        "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": extra, "prompt": "", "n_predict": 0,
        "temperature": 0.0, "samplers": [], "cache_prompt": true, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
        "response_fields": [""],
    });
    assert_eq!(server.post("/infill", &warm).ok(), json!({}));
    let off = json!({ "n_indent": -1, "t_max_predict_ms": -1, "t_max_prompt_ms": -1 });
    server.post("/infill", &with(body.clone(), off)).ok();
    for name in ["n_indent", "t_max_predict_ms", "t_max_prompt_ms"] {
        let refused = server.post("/infill", &with(body.clone(), json!({ name: "4" })));
        assert_eq!(refused.status, 400);
        assert!(refused.json()["error"]["message"].as_str().unwrap().starts_with(name), "{}", refused.text());
    }
}

#[test]
fn an_answer_ends_before_a_line_that_is_indented_less() {
    let server = filling();
    let letters = tokens(&server, &[" ", "\n", "a", "b"]);
    let mut cut = 0;
    for seed in 0..12 {
        let body = json!({ "prompt": "the", "n_predict": 40, "seed": seed, "ignore_eos": true,
            "allowed_token_ids": letters, "temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0 });
        let whole = server.post("/completion", &body).ok()["content"].as_str().unwrap().to_owned();
        let wanted = indented(&whole, 2);
        let limited = with(body.clone(), json!({ "n_indent": 2 }));
        let answer = server.post("/completion", &limited).ok();
        assert_eq!(answer["content"], wanted, "seed {seed} of {whole:?}");
        assert_eq!(answer["stop_type"], "limit");
        let streamed = server.post("/completion", &with(limited, json!({ "stream": true }))).events();
        let chunk = |data: &String| serde_json::from_str::<Value>(data).unwrap()["content"].clone();
        let streamed: String =
            streamed.iter().map(|(_, data)| chunk(data).as_str().unwrap().to_owned()).collect();
        assert_eq!(streamed, wanted, "seed {seed} of {whole:?}");
        cut += usize::from(wanted != whole);
    }
    assert!(cut > 3, "{cut} answers were cut");
}

/// A time that is over with the second token.
#[test]
fn an_answer_ends_at_a_line_once_its_time_is_over() {
    let server = filling();
    let over = json!({ "t_max_predict_ms": 1e-6 });
    let lines = json!({ "prompt": "the", "n_predict": 9, "seed": 1, "ignore_eos": true,
        "allowed_token_ids": tokens(&server, &["\n"]) });
    assert_eq!(server.post("/completion", &lines).ok()["content"], "\n".repeat(9));
    let answer = server.post("/completion", &with(lines.clone(), over.clone())).ok();
    assert_eq!((&answer["content"], &answer["stop_type"]), (&json!("\n\n"), &json!("limit")));
    assert_eq!(answer["tokens_predicted"], 2);
    // Without a line break it goes on.
    let letters = with(lines, json!({ "allowed_token_ids": tokens(&server, &["a"]) }));
    assert_eq!(server.post("/completion", &with(letters, over.clone())).ok()["tokens_predicted"], 9);
    let chat = with(hello(), with(over, json!({ "allowed_token_ids": tokens(&server, &["\n"]) })));
    let choice = server.post("/v1/chat/completions", &chat).ok()["choices"][0].clone();
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("\n\n")));
}
