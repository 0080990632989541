//! The object that a message is.

use serde_json::{Value, json};

use crate::generation::{AnswerSection, Choice, FinishReason};
use crate::partial_json;

/// Why a message ended, and the stop sequence that was found.
pub(super) fn stop_reason(finish: &FinishReason) -> (&'static str, Option<&str>) {
    match finish {
        FinishReason::End | FinishReason::StopToken(_) => ("end_turn", None),
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

/// The identifier of a call as this interface has it.
pub(super) fn tool_use_id(id: &str) -> String {
    format!("toolu_{}", id.trim_start_matches("call_"))
}

/// The blocks of a complete answer, in the order of generation.
pub(super) fn content(choice: &Choice) -> Vec<Value> {
    let block = |section: &AnswerSection| match section {
        AnswerSection::Reasoning(text) => {
            Some(json!({ "type": "thinking", "thinking": text, "signature": "" }))
        }
        AnswerSection::Text { text, .. } => Some(json!({ "type": "text", "text": text })),
        AnswerSection::ToolCall(number) => {
            let call = choice.tool_calls.get(*number)?;
            // The client is to have an object, even if the call was cut.
            let input = partial_json::object(&call.arguments);
            Some(
                json!({ "type": "tool_use", "id": tool_use_id(&call.id), "name": call.name, "input": input }),
            )
        }
    };
    choice.sections.iter().filter_map(block).collect()
}
