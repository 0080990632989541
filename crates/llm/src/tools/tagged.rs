//! Arguments between tags, as JSON.

use serde_json::Value;

use super::tool::Tool;

/// The value of an argument that is marked as JSON.
pub(super) fn json(text: &str) -> Value {
    serde_json::from_str(text.trim()).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// The value of an argument that is written between tags: texts are written as they are, other values as JSON.
pub(super) fn value(tool: Option<&Tool>, name: &str, text: &str) -> Value {
    let schema = tool.and_then(|tool| tool.parameter(name));
    let types = schema.map(types).unwrap_or_default();
    let parsed = serde_json::from_str::<Value>(text.trim()).ok();
    let is_text = || Value::String(text.to_owned());
    let takes_text = |parsed: &Value| types.contains(&"string") || types.is_empty() && parsed.is_string();
    match parsed {
        Some(Value::Null) if types.contains(&"null") => Value::Null,
        Some(parsed) if !takes_text(&parsed) => parsed,
        _ => is_text(),
    }
}

/// Whether an argument is written as it is.
pub(super) fn is_text(schema: &Value) -> bool {
    types(schema) == ["string"]
}

/// The types that a schema allows.
fn types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(name)) => vec![name.as_str()],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => {
            let all = ["anyOf", "oneOf"].iter().filter_map(|keyword| schema.get(keyword)?.as_array());
            let mut all: Vec<&str> = all.flatten().flat_map(types).collect();
            let values = schema.get("enum").and_then(Value::as_array);
            if values.is_some_and(|values| values.iter().all(Value::is_string)) {
                all.push("string");
            }
            all
        }
    }
}
