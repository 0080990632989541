//! The items that a response consists of.

use serde_json::{Value, json};

use super::usage::Usage;
use crate::generation::WholeToolCall;

/// An item of a response.
#[derive(Clone, Debug)]
pub(crate) enum ResponseItem {
    /// The model's reasoning.
    Reasoning {
        /// Its identifier.
        id: String,
        /// Its text.
        text: String,
    },
    /// A text.
    Message {
        /// Its identifier.
        id: String,
        /// Its text.
        text: String,
        /// Log-probabilities of its tokens, if they were asked for.
        logprobs: Vec<Value>,
    },
    /// A call of a function.
    Call {
        /// Its identifier; the call has another one.
        id: String,
        /// The call.
        call: WholeToolCall,
    },
}

impl ResponseItem {
    /// Its identifier.
    pub(crate) fn id(&self) -> &str {
        match self {
            ResponseItem::Reasoning { id, .. }
            | ResponseItem::Message { id, .. }
            | ResponseItem::Call { id, .. } => id,
        }
    }

    /// The content of a text.
    pub(crate) fn part(&self) -> Option<Value> {
        match self {
            ResponseItem::Reasoning { text, .. } => Some(json!({ "type": "reasoning_text", "text": text })),
            ResponseItem::Message { text, logprobs, .. } => {
                Some(json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs }))
            }
            ResponseItem::Call { .. } => None,
        }
    }

    /// The item without its content, as it is announced.
    pub(crate) fn announced(&self) -> Value {
        match self {
            ResponseItem::Reasoning { id, .. } => {
                json!({ "id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": [] })
            }
            ResponseItem::Message { id, .. } => {
                json!({ "id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": [] })
            }
            ResponseItem::Call { id, call } => json!({
                "id": id,
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
            }),
        }
    }

    /// The whole item with a status.
    pub(crate) fn json(&self, status: &str) -> Value {
        let mut item = self.announced();
        if let Some(object) = item.as_object_mut() {
            object.insert("status".to_owned(), status.into());
            match self {
                ResponseItem::Call { call, .. } => {
                    // A stop string may have cut it.
                    if serde_json::from_str::<Value>(&call.arguments).is_err() {
                        object.insert("status".to_owned(), "incomplete".into());
                    }
                    object.insert("arguments".to_owned(), call.arguments.clone().into());
                }
                item => {
                    object.insert("content".to_owned(), json!([item.part()]));
                }
            }
        }
        item
    }
}

/// Counted tokens, as responses have them.
pub(crate) fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": { "cached_tokens": usage.cached, "cache_write_tokens": 0 },
        "output_tokens": usage.answer,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning },
        "total_tokens": usage.prompt + usage.answer,
    })
}
