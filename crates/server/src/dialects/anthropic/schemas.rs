//! The schemas of requests and answers.

use serde_json::{Value, json};

use crate::dialects::sampling_fields;
use crate::openapi::schema::{
    answer, any_object, any_of, count, filled_list, flag, list, nullable, one_of, other_type, request, text,
    tool_name,
};

/// The body of `/v1/messages`.
pub(super) fn message_request() -> Value {
    let most =
        json!({ "max_tokens": { "type": "integer", "minimum": 1, "maximum": 9_000_000_000_000_000_i64 } });
    request(&["messages", "max_tokens"], fields(), [sampling_fields::schema(), most])
}

/// The body of `/v1/messages/count_tokens`.
pub(super) fn count_request() -> Value {
    request(&["messages"], fields(), [sampling_fields::schema()])
}

fn fields() -> Value {
    let text_block = request(&["type", "text"], json!({ "type": one_of(&["text"]), "text": text() }), []);
    let tool = request(
        &["name", "input_schema"],
        json!({
            "name": tool_name(),
            "description": text(),
            "input_schema": any_object(),
            "type": one_of(&["custom"]),
            "strict": flag(),
        }),
        [],
    );
    let choice = request(
        &["type"],
        json!({
            "type": one_of(&["auto", "any", "tool", "none"]),
            "name": text(),
            "disable_parallel_tool_use": flag(),
        }),
        [],
    );
    let thinking = request(
        &["type"],
        json!({
            "type": one_of(&["enabled", "disabled", "adaptive"]),
            "budget_tokens": count(),
        }),
        [],
    );
    let format =
        request(&["type", "schema"], json!({ "type": one_of(&["json_schema"]), "schema": any_object() }), []);
    json!({
        "model": text(),
        "messages": filled_list(message_schema(&text_block)),
        "system": any_of([text(), list(text_block)]),
        "stream": flag(),
        "stop_sequences": list(text()),
        "tools": list(any_of([tool, other_type("custom")])),
        "tool_choice": choice,
        "thinking": thinking,
        "output_config": request(&[], json!({ "effort": one_of(super::messages::EFFORTS), "format": format.clone() }), []),
        "output_format": format,
    })
}

/// Blocks of tools that Anthropic's servers run.
const SERVER_BLOCKS: [&str; 6] = [
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
];

fn message_schema(text_block: &Value) -> Value {
    let thinking =
        request(&["type", "thinking"], json!({ "type": one_of(&["thinking"]), "thinking": text() }), []);
    let tool_use = request(
        &["type", "id", "name"],
        json!({ "type": one_of(&["tool_use"]), "id": text(), "name": text(), "input": any_object() }),
        [],
    );
    let redacted = request(&["type"], json!({ "type": one_of(&["redacted_thinking"]) }), []);
    let inner = any_of([text(), list(request(&["text"], json!({ "text": text() }), []))]);
    let source = any_of([
        request(&["type", "data"], json!({ "type": one_of(&["text"]), "data": text() }), []),
        request(&["type", "content"], json!({ "type": one_of(&["content"]), "content": inner.clone() }), []),
    ]);
    let document = request(
        &["type", "source"],
        json!({ "type": one_of(&["document"]), "source": source, "title": text() }),
        [],
    );
    let found = request(
        &["type", "content"],
        json!({ "type": one_of(&["search_result"]), "content": inner, "title": text() }),
        [],
    );
    let readable = || any_of([text_block.clone(), document.clone(), found.clone()]);
    let reference = request(
        &["type", "tool_name"],
        json!({ "type": one_of(&["tool_reference"]), "tool_name": text() }),
        [],
    );
    // Others end like these, too.
    let of_server = || request(&["type"], json!({ "type": one_of(&SERVER_BLOCKS) }), []);
    let result = request(
        &["type", "tool_use_id"],
        json!({
            "type": one_of(&["tool_result"]),
            "tool_use_id": text(),
            "content": any_of([text(), list(any_of([readable(), reference, of_server()]))]),
            "is_error": flag(),
        }),
        [],
    );
    let of = |roles: &[&str], block: Value| {
        request(
            &["role", "content"],
            json!({ "role": one_of(roles), "content": any_of([text(), list(block)]) }),
            [],
        )
    };
    any_of([
        of(&["user"], any_of([readable(), result, of_server()])),
        of(&["assistant"], any_of([readable(), thinking, redacted, tool_use, of_server()])),
        of(&["system"], readable()),
    ])
}

/// A message.
pub(super) fn message() -> Value {
    let usage = json!({
        "input_tokens": count(),
        "cache_creation_input_tokens": count(),
        "cache_read_input_tokens": count(),
        "output_tokens": count(),
    });
    let reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"];
    answer(json!({
        "id": text(),
        "type": one_of(&["message"]),
        "role": one_of(&["assistant"]),
        "model": text(),
        "content": list(answer(json!({ "type": one_of(&["text", "thinking", "tool_use"]) }))),
        "stop_reason": one_of(&reasons),
        "stop_sequence": nullable(&text()),
        "usage": answer(usage),
    }))
}

/// A number of tokens.
pub(super) fn token_count() -> Value {
    answer(json!({ "input_tokens": count() }))
}
