//! Values that a field cannot have are refused with its name, on every route that reads it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{TestServer, Value, hello, json, with};

#[test]
fn values_that_would_be_ignored_are_refused_by_name() {
    let server = TestServer::start();
    let response = json!({ "model": "small", "input": "x", "max_output_tokens": 2 });
    let ollama =
        json!({ "model": "small", "messages": [{ "role": "user", "content": "x" }], "stream": false });
    let tool = |name: &str| json!([{ "type": "function", "function": { "name": name } }]);
    let cases = [
        ("/v1/chat/completions", hello(), json!({ "modalities": ["text", "audio"] }), "modalities"),
        ("/v1/chat/completions", hello(), json!({ "audio": { "voice": "x" } }), "audio"),
        ("/v1/chat/completions", hello(), json!({ "reasoning_effort": "bogus" }), "reasoning_effort"),
        ("/v1/chat/completions", hello(), json!({ "verbosity": "bogus" }), "verbosity"),
        ("/v1/chat/completions", hello(), json!({ "top_logprobs": 3 }), "top_logprobs"),
        ("/v1/chat/completions", hello(), json!({ "tools": tool("bad name!") }), "tools[0]"),
        ("/v1/chat/completions", hello(), json!({ "tools": tool("") }), "tools[0]"),
        ("/v1/responses", response.clone(), json!({ "truncation": "bogus" }), "truncation"),
        ("/v1/responses", response.clone(), json!({ "metadata": { "a": 5 } }), "metadata"),
        (
            "/v1/responses",
            response.clone(),
            json!({ "reasoning": { "effort": "bogus" } }),
            "reasoning.effort",
        ),
        ("/v1/responses", response, json!({ "text": { "verbosity": "bogus" } }), "text.verbosity"),
        ("/v1/messages", hello(), json!({ "output_config": { "effort": "bogus" } }), "output_config.effort"),
        ("/api/chat", ollama.clone(), json!({ "truncate": 5 }), "truncate"),
        ("/api/chat", ollama.clone(), json!({ "shift": 5 }), "shift"),
        // Both of two names are read, and so is what a sampler that is off has.
        (
            "/api/chat",
            ollama,
            json!({ "messages": [{ "role": "tool", "tool_name": "f", "name": 5 }] }),
            "messages[0].name",
        ),
        ("/v1/chat/completions", hello(), json!({ "n": 1, "n_cmpl": 0 }), "n_cmpl"),
        ("/v1/chat/completions", hello(), json!({ "samplers": [], "dry_multiplier": -1 }), "dry_multiplier"),
        ("/v1/chat/completions", hello(), json!({ "temperature": 1e31 }), "temperature"),
    ];
    for (path, body, more, field) in cases {
        let answer = server.post(path, &with(body.clone(), more.clone()));
        assert_eq!(answer.status, 400, "{path} {more}: {}", answer.text());
        assert!(answer.text().contains(field), "{path} {more}: {}", answer.text());
        server.post(path, &with(body, json!({ field.split(['.', '[']).next().unwrap(): null }))).ok();
    }
    let fine = json!({ "modalities": ["text"], "reasoning_effort": "low", "verbosity": "high", "top_logprobs": 0,
        "tools": tool("mcp__server-1.read:file/x") });
    server.post("/v1/chat/completions", &with(hello(), fine)).ok();
}

#[test]
fn tokens_that_the_vocabulary_lacks_are_refused_by_the_name_of_their_field() {
    let server = TestServer::start();
    for (path, body, field) in [
        ("/v1/embeddings", json!({ "input": [1, 999_999] }), "input"),
        ("/v1/embeddings", json!({ "input": [[1], [999_999]] }), "input"),
        ("/embedding", json!({ "content": [999_999] }), "content"),
        ("/api/generate", json!({ "prompt": "x", "context": [999_999] }), "context"),
        ("/completion", json!({ "prompt": [999_999] }), "prompt"),
        ("/tokenize", json!({ "content": "", "prompt": [999_999] }), "prompt"),
        ("/v1/completions", json!({ "prompt": [1, 999_999] }), "prompt"),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        assert!(
            answer.text().contains(&format!("{field} has the token 999999")),
            "{path}: {}",
            answer.text()
        );
    }
    let answer = server.post("/v1/embeddings", &json!({ "input": [1, 999_999] }));
    assert_eq!(answer.json()["error"]["param"], "input");
}

#[test]
fn grammars_are_in_the_notation_that_is_named_or_found() {
    let server = TestServer::start();
    let text = |more: Value| {
        let body = with(with(hello(), json!({ "ignore_eos": false })), more);
        let answer = server.post("/v1/chat/completions", &body).ok();
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    for lark in [
        "start: \"ab\"",
        "?start: \"ab\"",
        "  !start: \"ab\"",
        "start : \"ab\"",
        "// a rule\n  start[capture]: \"ab\"",
        "%llguidance {}\nstart: \"ab\"",
    ] {
        assert_eq!(text(json!({ "grammar": lark })), "ab", "{lark}");
        let format = json!({ "type": "grammar", "grammar": lark });
        assert_eq!(text(json!({ "response_format": format })), "ab", "{lark}");
    }
    let gbnf = "root ::= start\nstart ::= \"cd\"";
    assert_eq!(text(json!({ "grammar": gbnf })), "cd");
    // A name is stronger than a guess.
    let gbnf = "root ::= \"cd\" # \n# start: x";
    assert_eq!(text(json!({ "grammar": gbnf, "grammar_syntax": "gbnf" })), "cd");
    assert_eq!(text(json!({ "guided_grammar": gbnf, "grammar_syntax": "gbnf" })), "cd");
    assert_eq!(text(json!({ "structured_outputs": { "grammar": gbnf, "syntax": "gbnf" } })), "cd");
    for (more, field) in [
        (json!({ "grammar": gbnf, "grammar_syntax": "lark" }), "grammar"),
        (json!({ "grammar": gbnf, "grammar_syntax": "ebnf" }), "grammar_syntax"),
        (
            json!({ "response_format": { "type": "grammar", "grammar": gbnf, "syntax": "x" } }),
            "response_format.syntax",
        ),
    ] {
        let answer = server.post("/v1/chat/completions", &with(hello(), more));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
    }
}
