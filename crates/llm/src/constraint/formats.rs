//! Formats of strings in JSON schemas.

use serde_json::Value;

/// Formats that the compiler knows. `unknown` is its name for any text.
const ENFORCED: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Formats that are enforced as another one.
const EQUIVALENT: &[(&str, &str)] = &[
    ("uuid1", "uuid"),
    ("uuid3", "uuid"),
    ("uuid4", "uuid"),
    ("uuid5", "uuid"),
    ("uuid6", "uuid"),
    ("uuid7", "uuid"),
    ("uuid8", "uuid"),
];

/// Formats that are enforced by a pattern.
const PATTERNS: &[(&str, &str)] = &[
    ("json-pointer", "^(/([^/~]|~[01])*)*$"),
    ("relative-json-pointer", "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$"),
    ("base64", "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"),
    ("base64url", "^[A-Za-z0-9_-]*={0,2}$"),
];

/// Formats of JSON Schema, OpenAPI, pydantic and zod that say how a value is meant and are not enforced.
const ANNOTATIONS: &[&str] = &[
    "binary",
    "byte",
    "char",
    "cidrv4",
    "cidrv6",
    "color",
    "cuid",
    "cuid2",
    "decimal",
    "directory-path",
    "double",
    "e164",
    "emoji",
    "file-path",
    "float",
    "guid",
    "idn-email",
    "idn-hostname",
    "int32",
    "int64",
    "ipv4interface",
    "ipv4network",
    "ipv6interface",
    "ipv6network",
    "ipvanyaddress",
    "ipvanyinterface",
    "ipvanynetwork",
    "iri",
    "iri-reference",
    "json-string",
    "jwt",
    "ksuid",
    "multi-host-uri",
    "name-email",
    "nanoid",
    "password",
    "path",
    "phone",
    "regex",
    "textarea",
    "uint32",
    "uint64",
    "ulid",
    "uri-reference",
    "uri-template",
    "url",
    "xid",
];

/// Keywords whose values are data and not schemas.
const DATA: &[&str] = &["const", "enum", "default", "examples"];

/// Keywords whose values are schemas by names, which may be any.
const NAMED: &[&str] = &["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// What becomes of a format.
#[cfg(feature = "constraint")]
pub(super) enum Enforcement {
    /// The compiler enforces it.
    Known,
    /// The compiler enforces this one in place of it.
    Format(&'static str),
    /// A pattern enforces it.
    Pattern(&'static str),
    /// It says nothing about a text.
    None,
}

/// How a format is enforced.
#[cfg(feature = "constraint")]
pub(super) fn enforcement(format: &str) -> Enforcement {
    let find =
        |table: &[(&str, &'static str)]| table.iter().find(|(name, _)| *name == format).map(|(_, by)| *by);
    if ENFORCED.contains(&format) {
        Enforcement::Known
    } else if let Some(other) = find(EQUIVALENT) {
        Enforcement::Format(other)
    } else {
        find(PATTERNS).map_or(Enforcement::None, Enforcement::Pattern)
    }
}

/// The schemas that are parts of a schema.
pub(super) fn parts(schema: &Value) -> Vec<&Value> {
    match schema {
        Value::Array(items) => items.iter().collect(),
        Value::Object(fields) => {
            fields.iter().flat_map(|(name, value)| parts_of_field(name, value)).collect()
        }
        _ => Vec::new(),
    }
}

fn parts_of_field<'s>(name: &str, value: &'s Value) -> Vec<&'s Value> {
    match value {
        _ if DATA.contains(&name) => Vec::new(),
        Value::Object(named) if NAMED.contains(&name) => named.values().collect(),
        value => vec![value],
    }
}

/// The schemas that are parts of a schema, to be changed.
#[cfg(feature = "constraint")]
pub(super) fn parts_mut(schema: &mut Value) -> Vec<&mut Value> {
    match schema {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(fields) => {
            fields.iter_mut().flat_map(|(name, value)| parts_of_field_mut(name, value)).collect()
        }
        _ => Vec::new(),
    }
}

/// Those in the value of one keyword.
#[cfg(feature = "constraint")]
pub(super) fn parts_of_field_mut<'s>(name: &str, value: &'s mut Value) -> Vec<&'s mut Value> {
    if DATA.contains(&name) {
        return Vec::new();
    }
    if NAMED.contains(&name) && value.is_object() {
        return value.as_object_mut().into_iter().flat_map(|named| named.values_mut()).collect();
    }
    vec![value]
}

/// A `format` in a schema that is not known: neither enforced, nor one of those that only say how a value is meant.
///
/// By the specification such a format says nothing about a text. A caller that asks for a strict schema may have meant another one.
///
/// ```
/// use quadriga_llm::constraint::unknown_format;
/// use serde_json::json;
///
/// let schema = json!({ "properties": { "at": { "type": "string", "format": "datetime" } } });
/// assert_eq!(unknown_format(&schema), Some("datetime"));
/// assert_eq!(unknown_format(&json!({ "type": "string", "format": "date-time" })), None);
/// ```
pub fn unknown_format(schema: &Value) -> Option<&str> {
    let is_known = |format: &str| {
        ENFORCED.contains(&format)
            || ANNOTATIONS.contains(&format)
            || EQUIVALENT.iter().chain(PATTERNS).any(|(name, _)| *name == format)
    };
    // Not by recursion: a schema may be nested more deeply than the stack is.
    let mut left = vec![schema];
    while let Some(schema) = left.pop() {
        let format = schema.get("format").and_then(Value::as_str);
        if let Some(format) = format.filter(|format| !is_known(format)) {
            return Some(format);
        }
        left.extend(parts(schema));
    }
    None
}
