//! Parts of JSON schemas.

use serde_json::{Map, Value, json};

/// A string.
pub fn text() -> Value {
    json!({ "type": "string" })
}

/// A string that is one of those listed.
pub fn one_of(known: &[&str]) -> Value {
    json!({ "type": "string", "enum": known })
}

/// A number.
pub fn number() -> Value {
    json!({ "type": "number" })
}

/// A number from a least to a largest one, both included.
pub fn between(least: f64, most: f64) -> Value {
    json!({ "type": "number", "minimum": least, "maximum": most })
}

/// A whole number of any sign.
pub fn integer() -> Value {
    json!({ "type": "integer", "minimum": -9_000_000_000_000_000_i64, "maximum": 9_000_000_000_000_000_i64 })
}

/// A whole number that is not negative.
pub fn count() -> Value {
    json!({ "type": "integer", "minimum": 0, "maximum": 9_000_000_000_000_000_i64 })
}

/// A whole number from a least to a largest one.
pub fn count_between(least: usize, most: usize) -> Value {
    json!({ "type": "integer", "minimum": least, "maximum": most })
}

/// `true` or `false`.
pub fn flag() -> Value {
    json!({ "type": "boolean" })
}

/// `false`: what a flag turns on is not supported.
pub fn off() -> Value {
    json!({ "type": "boolean", "enum": [false] })
}

/// A value that asks for nothing: what a field turns on is not supported.
pub fn nothing() -> Value {
    json!({ "enum": [false, "", [], {}, null] })
}

/// An empty string: what a field asks for is not supported.
pub fn empty_text() -> Value {
    json!({ "type": "string", "maxLength": 0 })
}

/// An empty list: what a field asks for is not supported.
pub fn empty_list() -> Value {
    json!({ "type": "array", "maxItems": 0 })
}

/// `null`: the field is not supported.
pub fn null() -> Value {
    json!({ "type": "null" })
}

/// An object with any fields.
pub fn any_object() -> Value {
    json!({ "type": "object" })
}

/// A list.
pub fn list(items: Value) -> Value {
    json!({ "type": "array", "items": items })
}

/// A list that is not empty.
pub fn filled_list(items: Value) -> Value {
    json!({ "type": "array", "items": items, "minItems": 1 })
}

/// A string, or a list of them.
pub fn texts() -> Value {
    any_of([text(), list(text())])
}

/// The name of a tool.
pub fn tool_name() -> Value {
    json!({ "type": "string", "pattern": "^[a-zA-Z0-9_.:/-]{1,128}$" })
}

/// A token.
pub fn token() -> Value {
    count_between(0, u32::MAX as usize)
}

/// One of several.
pub fn any_of<const N: usize>(schemas: [Value; N]) -> Value {
    json!({ "anyOf": schemas.to_vec() })
}

/// What a schema describes, or `null`.
pub fn nullable(schema: &Value) -> Value {
    let mut schema = schema.clone();
    let Some(object) = schema.as_object_mut() else { return schema };
    match object.get("type") {
        Some(Value::String(kind)) if kind == "null" => schema,
        Some(Value::String(kind)) => {
            let kinds = json!([kind, "null"]);
            object.insert("type".to_owned(), kinds);
            if let Some(Value::Array(known)) = object.get_mut("enum") {
                known.push(Value::Null);
            }
            schema
        }
        Some(_) => schema,
        None if object.contains_key("anyOf") => {
            if let Some(Value::Array(all)) = object.get_mut("anyOf") {
                all.push(json!({ "type": "null" }));
            }
            schema
        }
        None => schema,
    }
}

/// The fields of a request: those that are not required may be `null`, and others are ignored.
pub fn request<const N: usize>(required: &[&str], fields: Value, shared: [Value; N]) -> Value {
    let mut all = Map::new();
    for fields in shared.into_iter().chain([fields]) {
        if let Value::Object(fields) = fields {
            all.extend(fields);
        }
    }
    let properties: Map<String, Value> = all
        .into_iter()
        .map(|(name, schema)| {
            let schema = if required.contains(&name.as_str()) { schema } else { nullable(&schema) };
            (name, schema)
        })
        .collect();
    json!({ "type": "object", "required": required, "properties": properties })
}

/// A schema with further keywords.
pub fn with(mut schema: Value, more: Value) -> Value {
    if let (Some(schema), Value::Object(more)) = (schema.as_object_mut(), more) {
        schema.extend(more);
    }
    schema
}

/// An object whose `type` is another one than this, as tools of other vendors' own servers have it.
pub fn other_type(kind: &str) -> Value {
    let kind = json!({ "type": "string", "not": { "const": kind } });
    json!({ "type": "object", "required": ["type"], "properties": { "type": kind } })
}

/// The schema of an object with one more field, or another schema for one.
pub fn with_field(mut schema: Value, name: &str, field: Value) -> Value {
    if let Some(fields) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        fields.insert(name.to_owned(), field);
    }
    schema
}

/// The schema of an object that must have one more of its fields, which is not `null` then.
pub fn requiring(mut schema: Value, name: &str, field: Value) -> Value {
    if let Some(required) = schema.get_mut("required").and_then(Value::as_array_mut) {
        required.push(name.into());
    }
    with_field(schema, name, field)
}

/// An object of an answer that has all of these fields, and perhaps others.
pub fn answer(fields: Value) -> Value {
    let required: Vec<String> =
        fields.as_object().map(|fields| fields.keys().cloned().collect()).unwrap_or_default();
    json!({ "type": "object", "required": required, "properties": fields })
}
