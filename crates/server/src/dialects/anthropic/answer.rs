//! The object that a message is.

use serde_json::{Map, Value, json};

use crate::generation::{Choice, FinishReason};

/// Why a message ended, and the stop sequence that was found.
pub(super) fn stop_reason(finish: &FinishReason) -> (&'static str, Option<&str>) {
    match finish {
        FinishReason::End => ("end_turn", None),
        FinishReason::Stop(found) => ("stop_sequence", found.as_deref()),
        FinishReason::Length => ("max_tokens", None),
        FinishReason::Context => ("model_context_window_exceeded", None),
        FinishReason::ToolCalls => ("tool_use", None),
    }
}

/// Counted tokens: cached ones are not among those of the input.
pub(super) fn usage(prompt: usize, cached: usize, answer: usize) -> Value {
    json!({
        "input_tokens": prompt.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    })
}

/// A message; without an end it is begun.
pub(super) fn message(
    id: &str,
    model: &str,
    content: Vec<Value>,
    end: Option<(&str, Option<&str>)>,
    usage: &Value,
) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": end.map(|(reason, _)| reason),
        "stop_sequence": end.and_then(|(_, sequence)| sequence),
        "usage": usage,
    })
}

/// The blocks of a complete answer.
pub(super) fn content(choice: &Choice) -> Vec<Value> {
    let mut blocks = Vec::new();
    if !choice.reasoning.is_empty() {
        blocks.push(json!({ "type": "thinking", "thinking": choice.reasoning, "signature": "" }));
    }
    if !choice.text.is_empty() {
        blocks.push(json!({ "type": "text", "text": choice.text }));
    }
    for call in &choice.tool_calls {
        // The client is to have an object; a text that is none is an argument without a name.
        let input = match serde_json::from_str(&call.arguments) {
            Ok(Value::Object(input)) => input,
            _ if call.arguments.trim().is_empty() => Map::new(),
            _ => Map::from_iter([("arguments".to_owned(), Value::from(call.arguments.clone()))]),
        };
        blocks.push(json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input }));
    }
    blocks
}
