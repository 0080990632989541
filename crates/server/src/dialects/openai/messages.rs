//! Messages of a conversation in OpenAI's format.

use std::collections::HashMap;

use quadriga_llm::template::{Message, ToolCall};
use serde_json::{Map, Value, json};

use crate::error::{ApiError, quoted};
use crate::fields::Fields;
use crate::openapi::schema::{any_of, list, one_of, request, text};

/// Roles that messages may have.
const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// The conversation in a field.
pub fn messages(fields: &Fields<'_>, name: &str) -> Result<Vec<Message>, ApiError> {
    let list = fields.objects(name)?.ok_or_else(|| fields.missing(name))?;
    if list.is_empty() {
        return Err(fields.error(name, "is empty; it must have a message"));
    }
    let mut all = list.iter().map(message).collect::<Result<Vec<_>, _>>()?;
    name_results(&mut all);
    Ok(all)
}

/// Results of calls have the names of the functions that were called, which their identifiers tell.
fn name_results(all: &mut [Message]) {
    let mut names: HashMap<String, String> = HashMap::new();
    for message in all {
        let calls = message.tool_calls.iter().filter_map(|call| Some((call.id.clone()?, call.name.clone())));
        names.extend(calls);
        if message.role == "tool" && message.name.is_none() {
            message.name = message.tool_call_id.as_ref().and_then(|id| names.get(id)).cloned();
        }
    }
}

fn message(fields: &Fields<'_>) -> Result<Message, ApiError> {
    let role = fields.one_of("role", ROLES)?.ok_or_else(|| fields.missing("role"))?;
    let role = match role {
        "developer" => "system",
        "function" => "tool",
        role => role,
    };
    let tool_calls = match fields.objects("tool_calls")? {
        Some(calls) => calls.iter().map(tool_call).collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    let content = content(fields, "content")?;
    if content.is_none() && (role != "assistant" || tool_calls.is_empty()) {
        return Err(fields.missing("content"));
    }
    let (reasoning, other) = (fields.text("reasoning_content")?, fields.text("reasoning")?);
    let reasoning = reasoning.or(other);
    Ok(Message {
        reasoning_content: reasoning.map(str::to_owned),
        tool_calls,
        tool_call_id: fields.text("tool_call_id")?.map(str::to_owned),
        name: fields.text("name")?.map(str::to_owned),
        ..Message::new(role, content.unwrap_or_default())
    })
}

/// A text, or the texts of a list of parts.
pub fn content(fields: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    match fields.value(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(_)) => {
            let parts = fields.objects(name)?.unwrap_or_default();
            let texts = parts.iter().map(part_text).collect::<Result<Vec<_>, _>>()?;
            Ok(Some(texts.join("\n")))
        }
        Some(_) => Err(fields.error(name, "must be a string or a list of parts")),
    }
}

fn part_text<'a>(part: &Fields<'a>) -> Result<&'a str, ApiError> {
    match part.required_text("type")? {
        "text" | "input_text" | "output_text" => part.required_text("text"),
        "refusal" => part.required_text("refusal"),
        kind => Err(part.error("type", format!("is {}; the model takes text only", quoted(kind)))),
    }
}

fn tool_call(fields: &Fields<'_>) -> Result<ToolCall, ApiError> {
    let function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
    Ok(ToolCall {
        id: fields.text("id")?.map(str::to_owned),
        name: function.required_text("name")?.to_owned(),
        arguments: arguments(&function, "arguments")?,
    })
}

/// The arguments of a call, which templates expect as an object; a text that is none stays a text.
pub fn arguments(fields: &Fields<'_>, name: &str) -> Result<Value, ApiError> {
    Ok(match fields.value(name) {
        None => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ => Value::String(text.clone()),
        },
        Some(Value::Object(object)) => Value::Object(object.clone()),
        Some(_) => return Err(fields.error(name, "must be a string or an object")),
    })
}

/// The schema of a message's content.
pub(crate) fn content_schema() -> Value {
    let kinds = ["text", "input_text", "output_text"];
    let part = request(&["type", "text"], json!({ "type": one_of(&kinds), "text": text() }), []);
    let refusal =
        request(&["type", "refusal"], json!({ "type": one_of(&["refusal"]), "refusal": text() }), []);
    any_of([text(), list(any_of([part, refusal]))])
}
