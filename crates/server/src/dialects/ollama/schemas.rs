//! The schemas of requests and answers.

use serde_json::{Value, json};

use super::request_fields::{HINTS, MAX_TOP_LOGPROBS};
use crate::dialects::sampling_fields::{self, limit_schema};
use crate::openapi::schema::{
    answer, any_object, any_of, count, count_between, empty_list, empty_text, flag, integer, list, number,
    one_of, request, text, texts, token, tool_name, with_field,
};

fn options() -> Value {
    let hints: Value = HINTS.iter().map(|name| ((*name).to_owned(), integer())).collect();
    let own = json!({ "num_predict": limit_schema(-2), "use_mmap": flag(), "stop": texts() });
    request(&[], own, [sampling_fields::schema(), hints])
}

/// Seconds, or a duration as Go writes it.
fn keep_alive() -> Value {
    let units = r"^[-+]?([0-9]+|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$";
    any_of([number(), json!({ "type": "string", "pattern": units })])
}

fn common() -> Value {
    let think = any_of([flag(), one_of(&["low", "medium", "high", "max"])]);
    json!({
        "model": text(),
        "name": text(),
        "stream": flag(),
        "truncate": flag(),
        "shift": flag(),
        "format": any_of([one_of(&["", "json"]), any_object()]),
        "options": options(),
        "think": think,
        "keep_alive": keep_alive(),
        "logprobs": flag(),
        "top_logprobs": count_between(0, MAX_TOP_LOGPROBS),
    })
}

/// The body of `/api/chat`.
pub(super) fn chat_request() -> Value {
    let function = request(&["name"], json!({ "name": text(), "arguments": any_object() }), []);
    let call = request(&["function"], json!({ "id": text(), "function": function }), []);
    let message = request(
        &["role"],
        json!({
            "role": one_of(&["system", "user", "assistant", "tool"]),
            "content": text(),
            "thinking": text(),
            "tool_calls": list(call),
            "tool_name": text(),
            "name": text(),
            "images": empty_list(),
            "tool_call_id": text(),
        }),
        [],
    );
    let definition = request(
        &["name"],
        json!({ "name": tool_name(), "description": text(), "parameters": any_object(), "strict": flag() }),
        [],
    );
    let tool = request(&["function"], json!({ "type": one_of(&["function"]), "function": definition }), []);
    request(&[], json!({ "messages": list(message), "tools": list(tool) }), [common()])
}

/// The last object of `/api/chat`.
pub(super) fn chat() -> Value {
    let function = answer(json!({ "name": text(), "arguments": any_object() }));
    let message = answer(json!({ "role": one_of(&["assistant"]), "content": text() }));
    let message = with_field(message, "thinking", text());
    let message = with_field(message, "tool_calls", list(answer(json!({ "function": function }))));
    answer(json!({
        "model": text(),
        "created_at": text(),
        "message": message,
        "done": flag(),
        "done_reason": one_of(&["stop", "length", "load", "unload"]),
    }))
}

/// The body of `/api/generate`.
pub(super) fn generate_request() -> Value {
    let own = json!({
        "prompt": text(),
        "suffix": text(),
        "system": text(),
        "raw": flag(),
        "template": empty_text(),
        "images": empty_list(),
        "context": list(token()),
    });
    request(&[], own, [common()])
}

/// The last object of `/api/generate`.
pub(super) fn generate() -> Value {
    let whole = answer(json!({
        "model": text(),
        "created_at": text(),
        "response": text(),
        "done": flag(),
        "done_reason": one_of(&["stop", "length", "load", "unload"]),
    }));
    with_field(whole, "thinking", text())
}

/// The body of `/api/embed`.
pub(super) fn embed_request() -> Value {
    let fields = json!({
        "model": text(),
        "name": text(),
        "input": texts(),
        "truncate": flag(),
        "dimensions": count(),
        "options": any_object(),
        "keep_alive": keep_alive(),
    });
    request(&["input"], fields, [])
}

/// The answer of `/api/embed`.
pub(super) fn embed() -> Value {
    answer(json!({
        "model": text(),
        "embeddings": list(list(number())),
        "total_duration": count(),
        "load_duration": count(),
        "prompt_eval_count": count(),
    }))
}

/// The body of `/api/embeddings`.
pub(super) fn embeddings_request() -> Value {
    let fields = json!({ "model": text(), "name": text(), "prompt": text(), "keep_alive": keep_alive() });
    request(&[], fields, [])
}

/// The answer of `/api/embeddings`.
pub(super) fn embeddings() -> Value {
    answer(json!({ "embedding": list(number()) }))
}

/// The body of `/api/show`.
pub(super) fn show_request() -> Value {
    request(&[], json!({ "model": text(), "name": text(), "verbose": flag() }), [])
}

fn details() -> Value {
    answer(json!({
        "format": text(),
        "family": text(),
        "families": list(text()),
        "parameter_size": text(),
        "quantization_level": text(),
    }))
}

/// The answer of `/api/show`.
pub(super) fn show() -> Value {
    answer(json!({
        "modelfile": text(),
        "parameters": text(),
        "template": text(),
        "details": details(),
        "model_info": any_object(),
        "capabilities": list(text()),
        "modified_at": text(),
    }))
}

/// The answer of `/api/version`.
pub(super) fn version() -> Value {
    answer(json!({ "version": text() }))
}

fn listed(more: Value) -> Value {
    let mut fields = json!({
        "name": text(),
        "model": text(),
        "modified_at": text(),
        "size": count(),
        "digest": text(),
        "details": details(),
    });
    if let (Some(fields), Value::Object(more)) = (fields.as_object_mut(), more) {
        fields.extend(more);
    }
    answer(json!({ "models": list(answer(fields)) }))
}

/// The answer of `/api/tags`.
pub(super) fn tags() -> Value {
    listed(json!({}))
}

/// The answer of `/api/ps`.
pub(super) fn running() -> Value {
    listed(json!({ "expires_at": text(), "size_vram": count(), "context_length": count() }))
}
