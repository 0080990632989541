//! JSON schemas as the compiler takes them.

use serde_json::{Value, json};

use super::bounds::check_schema;

/// White space between the parts of JSON: none, a space, or line ends with an indentation. It is limited, since models that
/// are unsure of what comes next tend to repeat it without end.
const WHITE_SPACE: &str = r"(?: |\t|(?:\r?\n){1,2}[ \t]{0,64})";

/// Formats that the compiler knows; by the specification others say nothing about a text.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Keywords whose values are data and not schemas.
const DATA: &[&str] = &["const", "enum", "default", "examples"];

/// JSON of a schema, as the body of a rule of Lark; or why it cannot be one.
pub(crate) fn json_rule(schema: &Value) -> Result<String, String> {
    check_schema(schema)?;
    Ok(format!("%json {}", prepared(schema)))
}

/// The schema with the options of the compiler.
pub(super) fn prepared(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    drop_unknown_formats(&mut schema);
    if let Some(fields) = schema.as_object_mut().filter(|fields| !fields.contains_key("x-guidance")) {
        let options = json!({ "whitespace_pattern": WHITE_SPACE, "coerce_one_of": true });
        fields.insert("x-guidance".to_owned(), options);
    }
    schema
}

fn drop_unknown_formats(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(drop_unknown_formats),
        Value::Object(fields) => {
            let format = fields.get("format").and_then(Value::as_str);
            if format.is_some_and(|format| !FORMATS.contains(&format)) {
                fields.shift_remove("format");
            }
            let schemas = fields.iter_mut().filter(|(name, _)| !DATA.contains(&name.as_str()));
            schemas.for_each(|(_, value)| drop_unknown_formats(value));
        }
        _ => {}
    }
}
