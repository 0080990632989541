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
use super::cancellation::Cancellation;
use super::formats::parts;

/// Keywords that refer to schemas of the same value.
const COMBINING: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];
/// Schemas that are looked at for the properties of combined ones, with the names in them: more than the values of a schema.
const MAX_VISITS: usize = 500_000;
/// Names that are added to schemas.
const MAX_ADDED: usize = 100_000;
/// Bytes of a name that cost as much as a visit.
const VISIT_BYTES: usize = 64;

/// Adds `additionalProperties: false` where a schema lists properties and does not say otherwise.
///
/// # Errors
/// Combined schemas list too many properties, or it was cancelled.
pub(super) fn close_objects(schema: &mut Value, cancellation: &Cancellation) -> Result<(), String> {
    let root = schema.clone();
    let mut closer = Closer {
        root: &root,
        shared: BTreeSet::new(),
        targets: BTreeSet::new(),
        visits: 0,
        added: 0,
        has_given_up: false,
        cancellation,
    };
    closer.find_shared(&root);
    closer.close(schema, Some(&root), None);
    match closer.has_given_up {
        true => Err("its combined schemas have too many properties; list them in fewer places".to_owned()),
        false => Ok(()),
    }
}

struct Closer<'s> {
    root: &'s Value,
    /// References to schemas that are combined with others somewhere: these are closed where they are referred to.
    shared: BTreeSet<&'s str>,
    /// The addresses of these schemas.
    targets: BTreeSet<*const Value>,
    visits: usize,
    added: usize,
    /// The work is too much, or nobody waits for it.
    has_given_up: bool,
    cancellation: &'s Cancellation,
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

/// What it costs to look at a name.
fn cost(name: &str) -> usize {
    1 + name.len() / VISIT_BYTES
}

impl<'s> Closer<'s> {
    /// Whether there may be so much more work.
    fn visit(&mut self, cost: usize) -> bool {
        self.visits += cost;
        self.has_given_up |= self.visits > MAX_VISITS || self.cancellation.is_cancelled();
        !self.has_given_up
    }

    /// Finds the references in combined schemas.
    fn find_shared(&mut self, schema: &'s Value) {
        let mut left = vec![schema];
        while let Some(part) = left.pop() {
            if part.as_object().is_some_and(combines) {
                let mut followed = BTreeSet::new();
                self.collect(part, &mut followed, &mut Listed::default());
                self.shared.extend(followed);
            }
            if self.has_given_up {
                return;
            }
            left.extend(parts(part));
        }
        let targets = self.shared.iter().filter_map(|name| referred(self.root, name));
        self.targets = targets.map(std::ptr::from_ref).collect();
    }

    /// Adds the properties that a schema and those of the same value list.
    fn collect(&mut self, schema: &'s Value, followed: &mut BTreeSet<&'s str>, listed: &mut Listed) {
        if !self.visit(1) {
            return;
        }
        let Some(fields) = schema.as_object() else { return };
        let says = ["additionalProperties", "patternProperties", "unevaluatedProperties"];
        listed.is_explicit |= says.iter().any(|name| fields.contains_key(*name));
        if let Some(properties) = fields.get("properties").and_then(Value::as_object) {
            listed.lists_any = true;
            for name in properties.keys() {
                if !self.visit(cost(name)) {
                    return;
                }
                let times = listed.names.get(name).and_then(Value::as_u64).unwrap_or(0);
                listed.names.insert(name.clone(), (times + 1).into());
            }
        }
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
        for name in required.filter_map(Value::as_str) {
            if !self.visit(cost(name)) {
                return;
            }
            listed.required.push(name.to_owned());
        }
        let least = fields.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
        listed.least = listed.least.max(least);
        for name in ["allOf", "anyOf", "oneOf"] {
            let members = fields.get(name).and_then(Value::as_array).into_iter().flatten();
            members.for_each(|member| self.collect(member, followed, listed));
        }
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str)
            && self.visit(cost(reference))
            && followed.insert(reference)
            && let Some(target) = referred(self.root, reference)
        {
            self.collect(target, followed, listed);
        }
    }

    /// Closes the objects of a schema, of which there is the original; its own only if nothing is combined with it. `combined` are
    /// the properties of the schemas that it is combined with.
    fn close(&mut self, schema: &mut Value, original: Option<&'s Value>, combined: Option<&Listed>) {
        let Some(fields) = schema.as_object_mut().filter(|_| self.visit(1)) else { return };
        let refers_to_shared =
            fields.get("$ref").and_then(Value::as_str).is_some_and(|name| self.shared.contains(name));
        let is_combined = combines(fields);
        let is_shared = original.is_some_and(|original| self.targets.contains(&std::ptr::from_ref(original)));
        let may_list = is_combined || refers_to_shared || fields.contains_key("properties");
        let mut listed = Listed::default();
        // Chains of references that list nothing are not followed from each of their links.
        if let Some(original) = original.filter(|_| combined.is_none() && (may_list || is_shared)) {
            self.collect(original, &mut BTreeSet::new(), &mut listed);
        }
        if combined.is_none() && !is_shared && may_list {
            self.close_one(fields, &listed);
        }
        let all = combined.unwrap_or(&listed);
        let several = |key: &str| all.names.get(key).and_then(Value::as_u64) > Some(1);
        let with_members = combined.or((is_combined || is_shared).then_some(&listed));
        for (name, value) in fields.iter_mut() {
            let name = name.as_str();
            let original = original.and_then(|original| original.get(name));
            match value {
                Value::Object(named)
                    if matches!(name, "properties" | "patternProperties" | "$defs" | "definitions") =>
                {
                    for (key, value) in named.iter_mut() {
                        // Properties that combined schemas list together are combined themselves.
                        if name != "properties" || !several(key) {
                            self.close(value, original.and_then(|named| named.get(key.as_str())), None);
                        }
                    }
                }
                Value::Array(members) if matches!(name, "allOf" | "anyOf" | "oneOf") => {
                    for (place, member) in members.iter_mut().enumerate() {
                        let original = original.and_then(|members| members.get(place));
                        self.close(member, original, with_members);
                    }
                }
                Value::Array(items) if matches!(name, "prefixItems" | "items") => {
                    for (place, item) in items.iter_mut().enumerate() {
                        self.close(item, original.and_then(|items| items.get(place)), None);
                    }
                }
                value if matches!(name, "items" | "additionalProperties" | "additionalItems") => {
                    self.close(value, original, None);
                }
                _ => {}
            }
        }
    }

    /// Closes a schema of objects that lists these properties.
    fn close_one(&mut self, fields: &mut Map<String, Value>, listed: &Listed) {
        if self.has_given_up || !listed.lists_any || listed.is_explicit || !may_be_object(fields) {
            return;
        }
        let own = fields.get("properties").and_then(Value::as_object);
        let is_new = |name: &&str| own.is_none_or(|own| !own.contains_key(*name));
        let named = listed.names.keys().chain(&listed.required).map(String::as_str);
        let mut known = BTreeSet::new();
        let new: Vec<&str> = named.filter(is_new).filter(|name| known.insert(*name)).collect();
        // More properties than are listed must be others.
        if listed.least > (own.map_or(0, Map::len) + new.len()) as u64 {
            return;
        }
        self.added += new.iter().map(|name| cost(name)).sum::<usize>();
        if self.added > MAX_ADDED {
            self.has_given_up = true;
            return;
        }
        // What is listed before keeps its place.
        let properties = fields.entry("properties").or_insert_with(|| json!({}));
        if !properties.is_object() {
            *properties = json!({});
        }
        if let Some(properties) = properties.as_object_mut() {
            properties.extend(new.into_iter().map(|name| (name.to_owned(), json!({}))));
        }
        fields.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
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

    /// A definition of so many properties, to which as many others refer.
    fn shared(count: usize) -> Value {
        let names: Vec<String> = (0..count).map(|at| format!("k{at}")).collect();
        let properties: Map<String, Value> = names.iter().map(|name| (name.clone(), json!(true))).collect();
        let mut definitions: Map<String, Value> =
            (0..count).map(|at| (format!("p{at}"), json!({ "$ref": "#/$defs/b", "required": [] }))).collect();
        definitions
            .insert("b".to_owned(), json!({ "type": "object", "properties": properties, "required": names }));
        json!({ "type": "object", "properties": { "a": {} }, "$defs": definitions })
    }

    /// The names that a closed schema has take the place of so many references.
    #[test]
    fn the_names_that_are_added_are_bounded() {
        let closed = |count: usize| {
            let mut schema = shared(count);
            close_objects(&mut schema, &Cancellation::default()).map(|()| schema)
        };
        let few = closed(100).unwrap();
        assert_eq!(few["$defs"]["p7"]["properties"].as_object().unwrap().len(), 100);
        assert!(closed(700).unwrap_err().contains("combined schemas"));
        // Long names are as many short ones.
        let name = "x".repeat(50_000);
        let long = json!({ "properties": { name.as_str(): {} }, "$defs": (0..400)
            .map(|at| (format!("p{at}"), json!({ "$ref": "#", "required": [] })))
            .collect::<Map<String, Value>>() });
        assert!(close_objects(&mut long.clone(), &Cancellation::default()).is_err());
        // Nobody waits for it.
        let cancelled = Cancellation::default();
        cancelled.cancel();
        assert!(close_objects(&mut shared(100), &cancelled).is_err());
    }

    #[test]
    fn white_space_is_bounded() {
        let schema =
            json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
        let texts = ["{\"a\": 1}", "{\n  \"a\": 1\n}", "{\n\n\"a\": 1}", "{  \"a\": 1}", "{\"a\"\n\n:\n\n1}"];
        assert_eq!(accepted(&schema, &texts), texts[..2]);
    }
}
