//! Schemas without the parts that cannot be enforced: what is left still is.

use serde_json::{Map, Value, json};

/// Keywords that say something about a value and that the compiler does not know.
const UNSUPPORTED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Keywords whose values are objects of schemas, schemas, and lists of schemas.
const MAPS: &[&str] = &["$defs", "definitions", "properties", "patternProperties"];
const SCHEMAS: &[&str] = &["items", "additionalProperties", "additionalItems"];
const LISTS: &[&str] = &["prefixItems", "anyOf", "oneOf", "allOf"];

/// Keywords in the order in which they are given up, where it is not known which one fails.
const GIVEN_UP: &[&str] = &[
    "x-guidance",
    "pattern",
    "format",
    "multipleOf",
    "patternProperties",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "$ref",
    "allOf",
    "oneOf",
    "anyOf",
    "const",
    "enum",
    "additionalItems",
    "prefixItems",
    "items",
    "additionalProperties",
    "required",
    "properties",
    "type",
];

/// The most schemas that are compiled to find the parts that fail, and the values in all of them together.
const MAX_ATTEMPTS: usize = 96;
const MAX_WORK: usize = 20_000;

/// A schema of objects without the parts that cannot be compiled; of any object, if they cannot be found with bounded work.
/// `compiles` says whether a schema can be.
pub(super) fn relaxed(schema: &Value, compiles: &dyn Fn(&Value) -> bool) -> Value {
    let mut schema = schema.clone();
    drop_unsupported(&mut schema);
    let mut relaxer = Relaxer { compiles, attempts: MAX_ATTEMPTS, work: MAX_WORK, definitions: Map::new() };
    if !relaxer.try_schema(&schema) {
        relaxer.relax_definitions(&mut schema);
        relaxer.relax(&mut schema);
        as_object(&mut schema);
        if !relaxer.try_schema(&schema) {
            return json!({ "type": "object" });
        }
    }
    schema
}

/// Drops keywords that the compiler does not know, wherever they are keywords.
fn drop_unsupported(schema: &mut Value) {
    if let Some(fields) = schema.as_object_mut() {
        fields.retain(|name, _| !UNSUPPORTED.contains(&name.as_str()));
    }
    children(schema).into_iter().for_each(drop_unsupported);
}

/// The schemas directly within a schema.
fn children(schema: &mut Value) -> Vec<&mut Value> {
    let Some(fields) = schema.as_object_mut() else { return Vec::new() };
    let mut all = Vec::new();
    for (name, value) in fields {
        let name = name.as_str();
        if SCHEMAS.contains(&name) && value.is_object() {
            all.push(value);
            continue;
        }
        match value {
            Value::Object(inner) if MAPS.contains(&name) => all.extend(inner.values_mut()),
            // A list of items is that of an earlier draft.
            Value::Array(list) if LISTS.contains(&name) || name == "items" => all.extend(list),
            _ => {}
        }
    }
    all
}

/// The arguments of a tool are an object, whatever else is known of them.
fn as_object(schema: &mut Value) {
    let says = ["type", "$ref", "anyOf", "oneOf", "allOf"];
    match schema.as_object_mut() {
        Some(fields) if says.iter().any(|keyword| fields.contains_key(*keyword)) => {}
        Some(fields) => drop(fields.insert("type".to_owned(), "object".into())),
        None => *schema = json!({ "type": "object" }),
    }
}

/// The number of values in a value.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(values).sum(),
        Value::Object(fields) => fields.values().map(values).sum(),
        _ => 0,
    }
}

struct Relaxer<'a> {
    compiles: &'a dyn Fn(&Value) -> bool,
    /// What may still be compiled.
    attempts: usize,
    work: usize,
    /// The definitions of the whole schema, to which references within it are.
    definitions: Map<String, Value>,
}

impl Relaxer<'_> {
    /// Whether a part of the schema can be compiled; no, if that would be more than the bounded work.
    fn try_schema(&mut self, part: &Value) -> bool {
        let mut part = part.clone();
        if let Some(fields) = part.as_object_mut() {
            for (name, value) in &self.definitions {
                fields.entry(name.as_str()).or_insert_with(|| value.clone());
            }
        }
        let (attempts, work) = (self.attempts.checked_sub(1), self.work.checked_sub(values(&part)));
        let (Some(attempts), Some(work)) = (attempts, work) else {
            (self.attempts, self.work) = (0, 0);
            return false;
        };
        (self.attempts, self.work) = (attempts, work);
        (self.compiles)(&part)
    }

    /// Relaxes the definitions that cannot be compiled, so that the rest may refer to them. Each is tried with others of any value,
    /// as their faults are not its own.
    fn relax_definitions(&mut self, schema: &mut Value) {
        const NAMES: [&str; 2] = ["$defs", "definitions"];
        let Some(fields) = schema.as_object_mut() else { return };
        for name in NAMES {
            if let Some(Value::Object(own)) = fields.get(name) {
                let any: Map<String, Value> = own.keys().map(|key| (key.clone(), json!({}))).collect();
                self.definitions.insert(name.to_owned(), any.into());
            }
        }
        for name in NAMES {
            let Some(Value::Object(own)) = fields.get_mut(name) else { continue };
            for definition in own.values_mut().filter(|definition| !definition.is_boolean()) {
                if !self.try_schema(definition) {
                    self.relax(definition);
                }
            }
        }
        for name in NAMES {
            if let Some(own) = fields.get(name).filter(|own| own.is_object()) {
                self.definitions.insert(name.to_owned(), own.clone());
            }
        }
    }

    /// Relaxes a schema that cannot be compiled: the schemas within it first, then its own keywords.
    fn relax(&mut self, schema: &mut Value) {
        for name in MAPS.iter().skip(2).chain(SCHEMAS).chain(LISTS) {
            let Some(value) = schema.get_mut(*name) else { continue };
            let within: Vec<&mut Value> = match value {
                Value::Object(inner) if MAPS.contains(name) => inner.values_mut().collect(),
                Value::Array(list) => list.iter_mut().collect(),
                value => vec![value],
            };
            // What forbids or allows everything is no mistake.
            for child in within.into_iter().filter(|child| !child.is_boolean()) {
                if !self.try_schema(child) {
                    self.relax(child);
                }
            }
        }
        if self.try_schema(schema) {
            return;
        }
        let own: Vec<&str> =
            GIVEN_UP.iter().copied().filter(|keyword| schema.get(*keyword).is_some()).collect();
        for keyword in &own {
            let mut without = schema.clone();
            without.as_object_mut().map(|fields| fields.shift_remove(*keyword));
            if self.try_schema(&without) {
                *schema = without;
                return;
            }
        }
        for keyword in own {
            schema.as_object_mut().map(|fields| fields.shift_remove(keyword));
            if self.try_schema(schema) {
                return;
            }
        }
        *schema = json!({});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A compiler that knows no pattern with a parenthesis, no other type than these, and no reference that leads nowhere.
    fn compiles(schema: &Value) -> bool {
        fn is_fine(value: &Value, root: &Value) -> bool {
            // Nothing satisfies `false`.
            let Some(fields) = value.as_object() else { return value != root || value != false };
            let known = ["object", "string", "integer", "array"];
            let is = |name: &str, fine: &dyn Fn(&str) -> bool| {
                fields.get(name).and_then(Value::as_str).is_none_or(fine)
            };
            let own = is("pattern", &|pattern| !pattern.contains('('))
                && is("type", &|kind| known.contains(&kind))
                && is("$ref", &|path| root.pointer(path.trim_start_matches('#')).is_some())
                && !fields.contains_key("not");
            let inner = ["properties", "$defs"].iter().filter_map(|name| fields.get(*name)?.as_object());
            own && inner.flat_map(Map::values).chain(fields.get("items")).all(|inner| is_fine(inner, root))
        }
        is_fine(schema, schema)
    }

    #[test]
    fn only_the_part_that_cannot_be_enforced_is_given_up() {
        let schema = json!({ "type": "object", "required": ["not", "a"], "properties": {
            "not": { "type": "string", "maxLength": 3, "pattern": "(" },
            "a": { "type": "array", "items": { "type": "thing", "minimum": 1 }, "uniqueItems": true },
            "b": { "type": "integer", "not": { "const": 5 }, "maximum": 7 },
            "c": { "$ref": "#/$defs/broken" },
            "d": { "$ref": "#/$defs/none" },
        }, "additionalProperties": false, "$defs": {
            "outer": { "type": "array", "items": { "$ref": "#/$defs/broken" } },
            "broken": { "type": "string", "pattern": "x(" },
        } });
        let wanted = json!({ "type": "object", "required": ["not", "a"], "properties": {
            "not": { "type": "string", "maxLength": 3 },
            "a": { "type": "array", "items": { "minimum": 1 } },
            "b": { "type": "integer", "maximum": 7 },
            "c": { "$ref": "#/$defs/broken" },
            "d": {},
        }, "additionalProperties": false, "$defs": {
            "outer": { "type": "array", "items": { "$ref": "#/$defs/broken" } },
            "broken": { "type": "string" },
        } });
        assert_eq!(relaxed(&schema, &compiles), wanted);
        // Data is no schema.
        let data =
            json!({ "type": "object", "properties": { "x": { "enum": [{ "not": 1 }] } }, "uniqueItems": 1 });
        let kept = json!({ "type": "object", "properties": { "x": { "enum": [{ "not": 1 }] } } });
        assert_eq!(relaxed(&data, &|_| true), kept);
    }

    #[test]
    fn the_work_is_bounded() {
        let many: Map<String, Value> =
            (0..3000).map(|at| (format!("p{at}"), json!({ "type": "string" }))).collect();
        let attempts = std::cell::Cell::new(0);
        let never = |_: &Value| {
            attempts.set(attempts.get() + 1);
            false
        };
        let any = json!({ "type": "object" });
        assert_eq!(relaxed(&json!({ "type": "object", "properties": many }), &never), any);
        assert!(attempts.get() <= MAX_ATTEMPTS, "{attempts:?}");
    }
}
