//! Objects without undeclared properties.
//!
//! By the specification an object may have properties that its schema does not list. Models that are free to invent some do so until
//! their context is full, and no caller of a schema that lists properties wants that. So an object with `properties` and without
//! `additionalProperties` has the listed ones only, as with llama.cpp's converter.
//!
//! Schemas of one value may be combined (`allOf`, or `$ref` and alternatives beside other keywords). Each would refuse the properties
//! of the others: they stay as they are, and the schema that combines them lists the properties of all.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::bounds::referred;
use super::formats::parts;

/// Keywords that refer to schemas of the same value.
const COMBINING: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];
/// Schemas that are looked at for the properties of combined ones.
const MAX_VISITS: usize = 100_000;

/// Adds `additionalProperties: false` where a schema lists properties and does not say otherwise.
pub(super) fn close_objects(schema: &mut Value) {
    let root = schema.clone();
    let mut closer = Closer { root: &root, shared: BTreeSet::new(), visits: 0 };
    closer.find_shared(&root);
    closer.close(schema, &mut String::from("#"), None);
}

struct Closer<'s> {
    root: &'s Value,
    /// References to schemas that are combined with others somewhere: these are closed where they are referred to.
    shared: BTreeSet<&'s str>,
    visits: usize,
}

/// The properties of combined schemas.
#[derive(Default)]
struct Listed {
    /// Names in the order in which they are listed, with how many schemas list them.
    names: Map<String, Value>,
    /// Properties that must be there without being listed.
    required: Vec<String>,
    /// The largest `minProperties`.
    least: u64,
    /// A schema says itself which further properties there may be.
    is_explicit: bool,
    /// A schema lists properties.
    lists_any: bool,
}

/// Whether a schema refers to others of the same value beside what it says itself.
fn combines(fields: &Map<String, Value>) -> bool {
    let members = |name: &str| fields.get(name).map_or(0, |value| value.as_array().map_or(1, Vec::len));
    let referring = COMBINING.iter().filter(|name| members(name) > 0).count();
    let own = ["properties", "required", "minProperties"].iter().any(|name| fields.contains_key(*name));
    members("allOf") > 1 || referring > 1 || (referring == 1 && own)
}

fn may_be_object(fields: &Map<String, Value>) -> bool {
    match fields.get("type") {
        Some(Value::Array(types)) => types.iter().any(|name| name == "object"),
        Some(name) => name == "object",
        None => true,
    }
}

impl<'s> Closer<'s> {
    /// Finds the references in combined schemas.
    fn find_shared(&mut self, schema: &'s Value) {
        let mut left = vec![schema];
        while let Some(part) = left.pop() {
            if part.as_object().is_some_and(combines) {
                let mut followed = BTreeSet::new();
                self.collect(part, &mut followed, &mut Listed::default());
                self.shared.extend(followed);
            }
            left.extend(parts(part));
        }
    }

    /// Adds the properties that a schema and those of the same value list.
    fn collect(&mut self, schema: &'s Value, followed: &mut BTreeSet<&'s str>, listed: &mut Listed) {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            listed.is_explicit = true;
            return;
        }
        let Some(fields) = schema.as_object() else { return };
        let says = ["additionalProperties", "patternProperties", "unevaluatedProperties"];
        listed.is_explicit |= says.iter().any(|name| fields.contains_key(*name));
        if let Some(properties) = fields.get("properties").and_then(Value::as_object) {
            listed.lists_any = true;
            for name in properties.keys() {
                let times = listed.names.get(name).and_then(Value::as_u64).unwrap_or(0);
                listed.names.insert(name.clone(), (times + 1).into());
            }
        }
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
        listed.required.extend(required.filter_map(Value::as_str).map(str::to_owned));
        let least = fields.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
        listed.least = listed.least.max(least);
        for name in ["allOf", "anyOf", "oneOf"] {
            let members = fields.get(name).and_then(Value::as_array).into_iter().flatten();
            members.for_each(|member| self.collect(member, followed, listed));
        }
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str)
            && followed.insert(reference)
            && let Some(target) = referred(self.root, reference)
        {
            self.collect(target, followed, listed);
        }
    }

    /// Closes the objects of a schema at `path`; its own only if nothing is combined with it. `combined` are the properties of
    /// the schemas that it is combined with.
    fn close(&mut self, schema: &mut Value, path: &mut String, combined: Option<&Listed>) {
        let root = self.root;
        let original = referred(root, path);
        let Some(fields) = schema.as_object_mut() else { return };
        let refers_to_shared =
            fields.get("$ref").and_then(Value::as_str).is_some_and(|name| self.shared.contains(name));
        let is_combined = combines(fields);
        let mut listed = Listed::default();
        if let Some(original) = original {
            self.collect(original, &mut BTreeSet::new(), &mut listed);
        }
        let is_shared = self.shared.contains(path.as_str());
        if combined.is_none()
            && !is_shared
            && (is_combined || refers_to_shared || fields.contains_key("properties"))
        {
            close_one(fields, &listed);
        }
        let all = combined.unwrap_or(&listed);
        let several = |key: &str| all.names.get(key).and_then(Value::as_u64) > Some(1);
        let with_members = combined.or((is_combined || is_shared).then_some(&listed));
        for (name, value) in fields.iter_mut() {
            let name = name.as_str();
            match value {
                Value::Object(named)
                    if matches!(name, "properties" | "patternProperties" | "$defs" | "definitions") =>
                {
                    for (key, value) in named.iter_mut() {
                        // Properties that combined schemas list together are combined themselves.
                        if name != "properties" || !several(key) {
                            self.close_at(value, path, &[name, key], None);
                        }
                    }
                }
                Value::Array(members) if matches!(name, "allOf" | "anyOf" | "oneOf") => {
                    for (place, member) in members.iter_mut().enumerate() {
                        self.close_at(member, path, &[name, &place.to_string()], with_members);
                    }
                }
                Value::Array(items) if matches!(name, "prefixItems" | "items") => {
                    for (place, item) in items.iter_mut().enumerate() {
                        self.close_at(item, path, &[name, &place.to_string()], None);
                    }
                }
                value if matches!(name, "items" | "additionalProperties" | "additionalItems") => {
                    self.close_at(value, path, &[name], None);
                }
                _ => {}
            }
        }
    }

    fn close_at(&mut self, schema: &mut Value, path: &mut String, steps: &[&str], combined: Option<&Listed>) {
        let length = path.len();
        for step in steps {
            path.push('/');
            path.push_str(&step.replace('~', "~0").replace('/', "~1"));
        }
        self.close(schema, path, combined);
        path.truncate(length);
    }
}

/// Closes a schema of objects that lists these properties.
fn close_one(fields: &mut Map<String, Value>, listed: &Listed) {
    if !listed.lists_any || listed.is_explicit || !may_be_object(fields) {
        return;
    }
    let mut all = fields.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    for name in listed.names.keys().chain(&listed.required) {
        all.entry(name.as_str()).or_insert_with(|| json!({}));
    }
    // More properties than are listed must be others.
    if listed.least > all.len() as u64 {
        return;
    }
    fields.insert("properties".to_owned(), all.into());
    fields.insert("additionalProperties".to_owned(), Value::Bool(false));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::super::intersections::accepts;
    use super::*;

    /// The texts that are answers under a schema.
    fn accepted<'t>(schema: &Value, texts: &[&'t str]) -> Vec<&'t str> {
        let which = accepts(schema, texts).unwrap();
        texts.iter().zip(which).filter(|(_, accepted)| *accepted).map(|(text, _)| *text).collect()
    }

    const TEXTS: [&str; 5] = [r#"{"a":1}"#, r#"{"a":1,"z":1}"#, r#"{"a":1,"b":2}"#, r#"{"b":2}"#, "{}"];

    #[test]
    fn an_object_has_the_listed_properties_unless_the_schema_allows_others() {
        let number = || json!({ "type": "integer" });
        let listed = json!({ "type": "object", "properties": { "a": number() } });
        assert_eq!(accepted(&listed, &TEXTS), [TEXTS[0], TEXTS[4]]);
        let nested = json!({ "type": "array", "items": { "anyOf": [listed, { "type": "null" }] } });
        assert_eq!(accepted(&nested, &[r#"[{"a":1},null]"#, r#"[{"z":1}]"#]), [r#"[{"a":1},null]"#]);
        for open in [json!(true), number()] {
            let open =
                json!({ "properties": { "a": number() }, "additionalProperties": open, "type": "object" });
            assert_eq!(accepted(&open, &TEXTS), TEXTS);
        }
        assert_eq!(accepted(&json!({ "type": "object" }), &TEXTS), TEXTS);
        assert_eq!(accepted(&json!({ "type": "object", "properties": {} }), &TEXTS), ["{}"]);
        // What must be there is listed, in a way.
        let required = json!({ "type": "object", "properties": { "a": number() }, "required": ["a", "b"] });
        assert_eq!(accepted(&required, &TEXTS), [TEXTS[2]]);
        let many = json!({ "type": "object", "properties": { "a": number() }, "required": ["a"], "minProperties": 2 });
        assert_eq!(accepted(&many, &TEXTS), [TEXTS[1], TEXTS[2]]);
    }

    #[test]
    fn combined_schemas_have_the_properties_of_all_of_them() {
        let number = || json!({ "type": "integer" });
        let base = json!({ "type": "object", "properties": { "a": number() }, "required": ["a"] });
        let more = json!({ "type": "object", "properties": { "b": number() } });
        let all = json!({ "allOf": [base, more] });
        assert_eq!(accepted(&all, &TEXTS), [TEXTS[0], TEXTS[2]]);
        let referring =
            json!({ "$ref": "#/$defs/base", "properties": { "b": number() }, "$defs": { "base": base } });
        assert_eq!(accepted(&referring, &TEXTS), [TEXTS[0], TEXTS[2]]);
        // The same definition is closed where it stands alone.
        let both = json!({ "type": "array", "$defs": { "base": base }, "prefixItems": [
            { "$ref": "#/$defs/base" }, { "allOf": [{ "$ref": "#/$defs/base" }, more] }] });
        let texts =
            [r#"[{"a":1},{"a":1,"b":1}]"#, r#"[{"a":1,"b":1},{"a":1}]"#, r#"[{"a":1},{"a":1,"z":1}]"#];
        assert_eq!(accepted(&both, &texts), [texts[0]]);
        let either = json!({ "type": "object", "properties": { "a": number(), "b": number() },
            "anyOf": [{ "required": ["a"] }, { "required": ["b"] }] });
        assert_eq!(accepted(&either, &TEXTS), [TEXTS[0], TEXTS[2], TEXTS[3]]);
        let inner = |name: &str| json!({ "type": "object", "properties": { "x": { "type": "object", "properties": { name: number() } } } });
        let within = json!({ "allOf": [inner("a"), inner("b")] });
        assert_eq!(accepted(&within, &[r#"{"x":{"a":1,"b":2}}"#]).len(), 1);
        let open = json!({ "allOf": [base, { "type": "object", "additionalProperties": true }] });
        assert_eq!(accepted(&open, &TEXTS), TEXTS[..3]);
    }

    #[test]
    fn recursive_schemas_are_closed() {
        let node = json!({ "type": "object", "properties": { "a": { "type": "integer" },
            "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] } }, "required": ["a", "next"] });
        let schema = json!({ "$ref": "#/$defs/node", "$defs": { "node": node } });
        let texts = [r#"{"a":1,"next":{"a":2,"next":null}}"#, r#"{"a":1,"next":{"a":2,"next":null,"z":0}}"#];
        assert_eq!(accepted(&schema, &texts), [texts[0]]);
    }

    #[test]
    fn white_space_is_bounded() {
        let schema =
            json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
        let texts = ["{\"a\": 1}", "{\n  \"a\": 1\n}", "{\n\n\"a\": 1}", "{  \"a\": 1}", "{\"a\"\n\n:\n\n1}"];
        assert_eq!(accepted(&schema, &texts), texts[..2]);
    }
}
