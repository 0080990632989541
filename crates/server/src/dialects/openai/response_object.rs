//! The object that a response is.

use serde_json::{Map, Value, json};

use super::answer_head::{AnswerHead, unix_time};
use super::response_items::{self, ResponseItem};
use super::usage::Usage;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{FinishReason, Generation};
use crate::model::ServedModel;

/// A response's fields that do not change while it is generated.
#[derive(Clone, Debug)]
pub(crate) struct ResponseObject {
    head: AnswerHead,
    fields: Map<String, Value>,
}

/// A number as people write it: the shortest that means the same float.
fn as_written(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// The tools of a request with the fields that OpenAI's have in any case.
fn echoed_tools(mut tools: Value) -> Value {
    let all = tools.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut);
    for tool in all.filter(|tool| tool.get("type").is_some_and(|kind| kind == "function")) {
        for name in ["parameters", "strict"] {
            tool.entry(name).or_insert(Value::Null);
        }
    }
    tools
}

impl ResponseObject {
    pub(crate) fn new(request: &Fields<'_>, served: &ServedModel, generation: &Generation) -> ResponseObject {
        let given = |name: &str, default: Value| request.value(name).cloned().unwrap_or(default);
        let fields = json!({
            "instructions": given("instructions", Value::Null),
            "max_output_tokens": given("max_output_tokens", Value::Null),
            "max_tool_calls": null,
            "metadata": given("metadata", json!({})),
            "parallel_tool_calls": generation.parallel_tool_calls,
            "previous_response_id": null,
            "prompt_cache_key": given("prompt_cache_key", Value::Null),
            "reasoning": given("reasoning", json!({ "effort": null, "summary": null })),
            "safety_identifier": given("safety_identifier", Value::Null),
            "service_tier": "default",
            "store": false,
            "temperature": as_written(generation.sampling.temperature),
            "text": given("text", json!({ "format": { "type": "text" } })),
            "tool_choice": given("tool_choice", json!("auto")),
            "tools": echoed_tools(given("tools", json!([]))),
            "top_logprobs": generation.logprobs.unwrap_or(0),
            "top_p": as_written(generation.sampling.top_p),
            "truncation": "disabled",
            "user": given("user", Value::Null),
            "background": false,
        });
        let fields = match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        ResponseObject { head: AnswerHead::new("resp_", served), fields }
    }

    /// The response with a status.
    fn json(
        &self,
        status: &str,
        items: Vec<Value>,
        usage: Value,
        reason: Option<&str>,
        error: Value,
    ) -> Value {
        let mut object = Map::new();
        object.insert("id".to_owned(), self.head.id.clone().into());
        object.insert("object".to_owned(), "response".into());
        object.insert("created_at".to_owned(), self.head.created.into());
        object.insert("completed_at".to_owned(), (status == "completed").then(unix_time).into());
        object.insert("status".to_owned(), status.into());
        object.insert("error".to_owned(), error);
        object
            .insert("incomplete_details".to_owned(), json!(reason.map(|reason| json!({ "reason": reason }))));
        object.insert("model".to_owned(), self.head.model.clone().into());
        object.insert("output".to_owned(), items.into());
        object.insert("usage".to_owned(), usage);
        object.extend(self.fields.clone());
        object.into()
    }

    /// The response before its first item.
    pub(crate) fn in_progress(&self) -> Value {
        self.json("in_progress", Vec::new(), Value::Null, None, Value::Null)
    }

    /// The response when it is complete, or cut off.
    pub(crate) fn finished(&self, finish: &FinishReason, items: &[ResponseItem], usage: &Usage) -> Value {
        let cut = is_cut(finish);
        let (status, reason) =
            if cut { ("incomplete", Some("max_output_tokens")) } else { ("completed", None) };
        let last = items.len().saturating_sub(1);
        let items = items
            .iter()
            .enumerate()
            .map(|(number, item)| item.json(if cut && number == last { "incomplete" } else { "completed" }));
        self.json(status, items.collect(), response_items::usage(usage), reason, Value::Null)
    }

    /// The response when it failed.
    pub(crate) fn failed(&self, error: &ApiError, items: &[ResponseItem]) -> Value {
        let items = items.iter().map(|item| item.json("incomplete")).collect();
        let error = json!({ "code": "server_error", "message": error.message });
        self.json("failed", items, Value::Null, None, error)
    }
}

/// Whether an answer was cut off.
pub(crate) fn is_cut(finish: &FinishReason) -> bool {
    matches!(finish, FinishReason::Length | FinishReason::Context)
}
