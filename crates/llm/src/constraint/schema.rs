//! JSON schemas as the compiler takes them.

use serde_json::{Map, Value, json};

use super::bounds::{MAX_BOUND, NUMBER_BOUNDS, check_schema, referred};

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
    simplify(&mut schema);
    resolve_escaped(&mut schema);
    if let Some(fields) = schema.as_object_mut().filter(|fields| !fields.contains_key("x-guidance")) {
        let options = json!({ "whitespace_pattern": WHITE_SPACE, "coerce_one_of": true });
        fields.insert("x-guidance".to_owned(), options);
    }
    schema
}

/// Drops formats that are not known, and tightens bounds of numbers that the compiler cannot compute with.
fn simplify(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(simplify),
        Value::Object(fields) => {
            let format = fields.get("format").and_then(Value::as_str);
            if format.is_some_and(|format| !FORMATS.contains(&format)) {
                fields.shift_remove("format");
            }
            for (name, loose) in NUMBER_BOUNDS {
                let bound = fields.get_mut(name).filter(|bound| bound.is_number());
                if let Some(bound) = bound
                    && bound.as_f64().is_some_and(|bound| bound * loose > MAX_BOUND)
                {
                    *bound = json!(MAX_BOUND * loose);
                }
            }
            let schemas = fields.iter_mut().filter(|(name, _)| !DATA.contains(&name.as_str()));
            schemas.for_each(|(_, value)| simplify(value));
        }
        _ => {}
    }
}

/// Replaces references with escapes, which the compiler does not read, by ones to copies under names without.
fn resolve_escaped(schema: &mut Value) {
    const DEFINITIONS: &str = "$defs";
    let original = schema.clone();
    let mut names: Vec<String> = Vec::new();
    rename(schema, &mut names);
    let mut at = 0;
    while let Some(reference) = names.get(at).cloned() {
        let target = referred(&original, &reference).cloned();
        if let Some(mut target) = target {
            rename(&mut target, &mut names);
            let definitions = schema
                .as_object_mut()
                .map(|fields| fields.entry(DEFINITIONS).or_insert_with(|| Value::Object(Map::new())));
            if let Some(definitions) = definitions.and_then(Value::as_object_mut) {
                definitions.insert(copy_name(at), target);
            }
        }
        at += 1;
    }
}

/// The name of a copy of a definition.
fn copy_name(number: usize) -> String {
    format!("x-escaped-{number}")
}

/// Has references with escapes refer to copies; `names` are the references that have one.
fn rename(schema: &mut Value, names: &mut Vec<String>) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, names)),
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get_mut("$ref")
                && reference.starts_with("#/")
                && reference.contains('~')
            {
                let known = names.iter().position(|name| name == reference);
                let number = known.unwrap_or(names.len());
                if known.is_none() {
                    names.push(reference.clone());
                }
                *reference = format!("#/$defs/{}", copy_name(number));
            }
            let schemas = fields.iter_mut().filter(|(name, _)| !DATA.contains(&name.as_str()));
            schemas.for_each(|(_, value)| rename(value, names));
        }
        _ => {}
    }
}
