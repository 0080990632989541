//! JSON schemas as the compiler takes them.

use serde_json::{Map, Value, json};

use super::bounds::{COMPILER_STACK, check_schema, referred};
use super::branching::check_branching;
use super::cancellation::Cancellation;
use super::closed::close_objects;
use super::formats::{Enforcement, enforcement, parts, parts_mut};
use super::joined_bounds::join_bounds;
use super::numbers::{check_numbers, tighten_bounds};

/// White space between the parts of JSON: none, a space, or a line end with an indentation. It is limited, since models that
/// are unsure of what comes next tend to repeat it without end.
const WHITE_SPACE: &str = r"(?: |\t|\r?\n[ \t]{0,64})";

/// Escapes in strings. With those by number, a name could be written in a second way, which the schema of its property does not see.
const ESCAPES: &str = "nrbtf\\\"";

/// The same with those by number, which some control characters need.
const ALL_ESCAPES: &str = "nrbtf\\\"u";

/// Keywords whose values are data and not schemas.
const DATA: &[&str] = &["const", "enum", "default", "examples"];

/// Levels that a schema is read to on any thread.
const SHALLOW: usize = 256;

/// JSON of a schema, as the body of a rule of Lark; or why it cannot be one.
pub(crate) fn json_rule(schema: &Value) -> Result<String, String> {
    let prepare = || prepared(schema, &Cancellation::default());
    let prepared = match check_schema(schema)? {
        0..=SHALLOW => prepare(),
        _ => std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, prepare);
            let thread = thread.map_err(|error| format!("no thread reads it: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("it could not be read".to_owned()))
        }),
    };
    Ok(format!("%json {}", prepared?))
}

/// The schema with the options of the compiler, or the reason why it cannot be enforced, as far as it is known without compiling it.
///
/// It recurses over the schema and its references, as the compiler does: its thread must have the [stack](COMPILER_STACK) of that,
/// unless the schema is shallow.
pub(super) fn prepared(schema: &Value, cancellation: &Cancellation) -> Result<Value, String> {
    check_schema(schema)?;
    check_numbers(schema)?;
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => closed(other, cancellation)?,
    };
    simplify(&mut schema);
    join_bounds(&mut schema)?;
    resolve_escaped(&mut schema);
    let escapes = if lists_control_characters(&schema) { ALL_ESCAPES } else { ESCAPES };
    if let Some(fields) = schema.as_object_mut() {
        let own = || json!({ "whitespace_pattern": WHITE_SPACE, "coerce_one_of": true });
        let options = fields.entry("x-guidance").or_insert_with(own);
        if let Some(options) = options.as_object_mut() {
            options.entry("json_allowed_escapes").or_insert_with(|| escapes.into());
        }
    }
    Ok(schema)
}

/// The schema whose objects have the listed properties only; the schema itself where that alone has too many ways to go on, since
/// alternatives list the properties of all.
fn closed(schema: &Value, cancellation: &Cancellation) -> Result<Value, String> {
    let mut closed = schema.clone();
    close_objects(&mut closed, cancellation)?;
    if check_branching(&closed).is_ok() {
        return Ok(closed);
    }
    check_branching(schema)?;
    Ok(schema.clone())
}

/// Whether a text that an answer may be has a character that can only be written by its number.
fn lists_control_characters(schema: &Value) -> bool {
    let needs_number = |letter: char| letter.is_ascii_control() && !"\n\r\u{8}\t\u{c}".contains(letter);
    let mut listed: Vec<&Value> = Vec::new();
    let mut left = vec![schema];
    while let Some(part) = left.pop() {
        listed.extend(["const", "enum"].iter().filter_map(|name| part.get(name)));
        left.extend(parts(part));
    }
    while let Some(value) = listed.pop() {
        match value {
            Value::String(text) if text.contains(needs_number) => return true,
            Value::Array(items) => listed.extend(items),
            Value::Object(fields) => listed.extend(fields.values()),
            _ => {}
        }
    }
    false
}

/// Writes formats as the compiler knows them, drops those that cannot be enforced, and tightens bounds of numbers that the compiler
/// cannot compute with.
fn simplify(schema: &mut Value) {
    if let Value::Object(fields) = schema {
        simplify_format(fields);
        tighten_bounds(fields);
    }
    parts_mut(schema).into_iter().for_each(simplify);
}

fn simplify_format(fields: &mut Map<String, Value>) {
    let Some(format) = fields.get("format").and_then(Value::as_str) else { return };
    match enforcement(format) {
        Enforcement::Known => {}
        Enforcement::Format(other) => {
            fields.insert("format".to_owned(), other.into());
        }
        // A pattern of the schema's own says more.
        Enforcement::Pattern(pattern) if !fields.contains_key("pattern") => {
            fields.shift_remove("format");
            fields.insert("pattern".to_owned(), pattern.into());
        }
        Enforcement::Pattern(_) | Enforcement::None => {
            fields.shift_remove("format");
        }
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
