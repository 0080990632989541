//! What the server was started with holds for requests that say nothing else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, hello, json, with};
use quadriga_llm::constraint::Grammar;
use quadriga_server::{App, Keys, Limits, ModelRegistry};

const CHAT: &str = "/v1/chat/completions";

/// A server whose answers have this form.
fn constrained(grammar: Grammar) -> TestServer {
    let mut setup = Setup::default();
    setup.defaults.grammar = Some(grammar);
    setup.start()
}

#[test]
fn every_text_route_answers_under_the_servers_grammar() {
    let server = constrained(Grammar::Gbnf("root ::= \"yes\" | \"no\"".to_owned()));
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let chat = json!({ "model": "small", "messages": messages, "max_tokens": 9, "stream": false });
    let text = json!({ "model": "small", "prompt": "hello", "stream": false });
    let input = json!({ "model": "small", "input": "hello" });
    for (path, body, place) in [
        (CHAT, &chat, "/choices/0/message/content"),
        ("/v1/messages", &chat, "/content/0/text"),
        ("/api/chat", &chat, "/message/content"),
        ("/api/generate", &text, "/response"),
        ("/v1/completions", &text, "/choices/0/text"),
        ("/completion", &text, "/content"),
        ("/v1/responses", &input, "/output/0/content/0/text"),
    ] {
        let answer = server.post(path, body).ok();
        let text = answer.pointer(place).and_then(Value::as_str);
        assert!(matches!(text, Some("yes" | "no")), "{path}: {answer}");
    }
    // A request with a form of its own has that one.
    let own = server.post(CHAT, &with(chat.clone(), json!({ "grammar": "root ::= \"maybe\"" }))).ok();
    assert_eq!(own["choices"][0]["message"]["content"], "maybe");
    // Calls of tools are no text of the grammar.
    let tools = json!([{ "type": "function", "function": { "name": "now" } }]);
    let refused = server.post(CHAT, &with(chat, json!({ "tools": tools })));
    assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some("tools")));
}

#[test]
fn the_servers_schema_holds_without_one_of_the_request() {
    let schema = json!({ "type": "object", "properties": { "a": { "enum": [1, 2] } }, "required": ["a"],
        "additionalProperties": false });
    let server = constrained(Grammar::JsonSchema(schema));
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 200 });
    let answer = server.post(CHAT, &body).ok();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(value == json!({ "a": 1 }) || value == json!({ "a": 2 }), "{value}");
}

/// llama-server's README has the schema beside the type, OpenAI's clients in an object of its own.
#[test]
fn a_schema_may_be_beside_the_type_of_the_format() {
    let server = TestServer::start();
    let format = json!({ "type": "json_schema", "schema": { "const": "a" } });
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 50 });
    let answer = server.post(CHAT, &with(body, json!({ "response_format": format }))).ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "\"a\"", "{answer}");
    let without = json!({ "response_format": { "type": "json_schema" } });
    let refused = server.post(CHAT, &with(hello(), without));
    assert_eq!(refused.json()["error"]["param"], "response_format.json_schema");
}

#[test]
fn requests_without_a_seed_have_that_of_the_server() {
    let setup = Setup::default();
    let served = setup.served().with_seed(Some(7));
    let server = TestServer::of(App::new(ModelRegistry::with(served), Keys::default(), Limits::default()));
    let ask = |seed: Value| {
        let body = with(hello(), json!({ "max_tokens": 40, "temperature": 2, "seed": seed }));
        server.post(CHAT, &body).ok()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let first = ask(Value::Null);
    assert_eq!(first, ask(Value::Null));
    assert_eq!(first, ask(json!(7)));
    assert_ne!(first, ask(json!(8)));
    assert_ne!(first, ask(json!(-1)), "-1 asks for a random one");
}
