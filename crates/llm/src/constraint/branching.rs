//! How many ways an answer can go on at once under a schema.
//!
//! The parser of a grammar keeps an item for every reading of the answer so far, in one row per step, and limits the items of a row. A
//! schema whose rows would pass the limit could be compiled, and would fail in the middle of an answer: an upper bound of the items
//! refuses it before.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use serde_json::{Map, Value};

use super::bounds::{MAX_ITEMS, referred};

/// Items of an optional property: the rules that may begin with it, and those that leave it out.
const OPTIONAL: usize = 4;
/// Items of properties that are not listed, which may come after those that are.
const ADDITIONAL: usize = 7;
/// Items of an object beside its properties.
const OBJECT: usize = 2;
/// Items of an array beside its elements.
const ARRAY: usize = 6;
/// Items of any JSON value. All places of a row that take one share its rules.
const ANY: usize = 16;
/// Schemas that are looked at.
const MAX_VISITS: usize = 1_000_000;
/// Bytes of a reference that cost as much as a visit.
const VISIT_BYTES: usize = 64;
/// Items of a value that is one lexeme.
const SCALAR: usize = 1;

/// The reason why an answer under a schema could go on in too many ways, if it could.
pub(super) fn check_branching(schema: &Value) -> Result<(), String> {
    let mut bound = RowBound::new(schema);
    let items = bound.items(schema).saturating_add(ANY);
    if bound.visits > MAX_VISITS {
        return Err(
            "its alternatives within alternatives are too many to be compared; divide the schema".to_owned()
        );
    }
    match items {
        0..=MAX_ITEMS => Ok(()),
        items => Err(format!(
            "its optional properties and alternatives are too many at once ({items} items of the parser, {MAX_ITEMS} are supported: \
             {} optional properties in one place, or fewer alternatives with properties of their own); make properties required, or \
             divide the schema",
            MAX_ITEMS / OPTIONAL
        )),
    }
}

/// An upper bound of the items that a row of the parser has while it reads a value of a schema.
///
/// Alternatives are read beside each other until a text decides between them, so that their items add up. Parts that follow each other
/// are in different rows. What is read twice from one place is read once: a reference within itself adds nothing.
struct RowBound<'s> {
    root: &'s Value,
    /// Bounds of references; `None` while one is computed.
    known: FxHashMap<&'s str, Option<usize>>,
    /// Schemas that were looked at; alternatives may be more than once.
    visits: usize,
}

impl<'s> RowBound<'s> {
    fn new(root: &'s Value) -> RowBound<'s> {
        RowBound { root, known: FxHashMap::default(), visits: 0 }
    }

    fn items(&mut self, schema: &'s Value) -> usize {
        self.visits += 1;
        match schema {
            _ if self.visits > MAX_VISITS => SCALAR,
            Value::Object(fields) => self.of_fields(fields),
            // Any value, or none.
            _ => SCALAR,
        }
    }

    fn of_fields(&mut self, fields: &'s Map<String, Value>) -> usize {
        let mut whole = Combined::default();
        let plain = self.plain(fields);
        whole.add(1, plain);
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            let items = self.of_reference(reference);
            whole.add(1, items);
        }
        for part in fields.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            // A union within a part is one with all other parts.
            let (count, items) = self.union(part);
            whole.add(count, items);
        }
        for name in ["anyOf", "oneOf"] {
            if let Some(options) = fields.get(name).and_then(Value::as_array) {
                let items = self.alternatives(options);
                whole.add(options.len(), items);
            }
        }
        whole.items()
    }

    /// The alternatives of a schema that is a part of another one, and their items.
    fn union(&mut self, schema: &'s Value) -> (usize, usize) {
        let mut target = schema;
        // References that lead to each other are refused before.
        for _ in 0..16 {
            match target.get("$ref").and_then(Value::as_str).and_then(|name| referred(self.root, name)) {
                Some(next) => target = next,
                None => break,
            }
        }
        let lists = ["anyOf", "oneOf"].iter().filter_map(|name| target.get(name).and_then(Value::as_array));
        let count = lists.map(Vec::len).fold(1_usize, usize::saturating_mul);
        (count, self.items(schema))
    }

    fn of_reference(&mut self, reference: &'s str) -> usize {
        self.visits += reference.len() / VISIT_BYTES;
        match self.known.get(reference) {
            Some(Some(items)) => return *items,
            Some(None) => return 0,
            None => {}
        }
        let Some(target) = referred(self.root, reference) else { return 0 };
        self.known.insert(reference, None);
        let items = self.items(target);
        self.known.insert(reference, Some(items));
        items
    }

    /// The items of what a schema says itself, without references and alternatives.
    fn plain(&mut self, fields: &'s Map<String, Value>) -> usize {
        if fields.contains_key("const") {
            return SCALAR;
        }
        if let Some(values) = fields.get("enum").and_then(Value::as_array) {
            return values.iter().map(value_items).fold(SCALAR, usize::saturating_add);
        }
        let is = |kind: &str| match fields.get("type") {
            Some(Value::String(own)) => own == kind,
            Some(Value::Array(kinds)) => kinds.iter().any(|own| own == kind),
            _ => true,
        };
        let speaks = |names: &[&str]| names.iter().any(|name| fields.contains_key(*name));
        let mut items = SCALAR;
        // What says nothing of objects and arrays is any value.
        if is("object") && (fields.contains_key("type") || speaks(OBJECT_KEYWORDS)) {
            items = items.saturating_add(self.object(fields));
        }
        if is("array") && (fields.contains_key("type") || speaks(ARRAY_KEYWORDS)) {
            items = items.saturating_add(self.array(fields));
        }
        items
    }

    fn object(&mut self, fields: &'s Map<String, Value>) -> usize {
        self.object_until(fields, None)
    }

    /// The items of an object up to the property `last`, in the order in which properties are written.
    fn object_until(&mut self, fields: &'s Map<String, Value>, last: Option<&str>) -> usize {
        let required = required(fields);
        let (mut optional, mut inner) = (0_usize, 0_usize);
        let properties = fields.get("properties").and_then(Value::as_object).into_iter().flatten();
        let mut ended = false;
        for (name, schema) in properties {
            optional += usize::from(!required.contains(name.as_str()));
            inner = inner.max(self.items(schema));
            if last == Some(name.as_str()) {
                ended = true;
                break;
            }
        }
        let mut own = optional.saturating_mul(OPTIONAL);
        if !ended {
            let patterns = fields.get("patternProperties").and_then(Value::as_object).into_iter().flatten();
            // A name may match several, whose values are read beside each other then.
            let mut matched = 0_usize;
            for (_, schema) in patterns {
                own = own.saturating_add(OPTIONAL);
                matched = matched.saturating_add(self.items(schema));
            }
            if fields.get("additionalProperties") != Some(&Value::Bool(false)) {
                own = own.saturating_add(ADDITIONAL);
                let additional =
                    fields.get("additionalProperties").map_or(SCALAR, |schema| self.items(schema));
                inner = inner.max(matched.saturating_add(additional));
            }
            inner = inner.max(matched);
            if ["minProperties", "maxProperties"].iter().any(|name| fields.contains_key(*name)) {
                // Each optional property may be the one that must be there.
                own = own.saturating_add(optional.saturating_mul(optional));
            }
        }
        own.max(inner).saturating_add(OBJECT)
    }

    fn array(&mut self, fields: &'s Map<String, Value>) -> usize {
        let mut inner = fields.get("items").map_or(SCALAR, |schema| self.items(schema));
        let prefix = fields.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for schema in prefix {
            inner = inner.max(self.items(schema));
        }
        // Every item of the prefix may be the last. Repetitions that are counted have rules for powers of two.
        let counted = ["minItems", "maxItems"].iter().filter_map(|name| fields.get(*name)?.as_u64());
        let counting = counted.map(|count| 4 * (u64::BITS - count.leading_zeros()) as usize).sum::<usize>();
        inner.max(prefix.len().saturating_mul(2)).saturating_add(counting + ARRAY)
    }

    /// The items of alternatives: all of them, or up to a property that tells them apart and then those of one.
    fn alternatives(&mut self, options: &'s [Value]) -> usize {
        let each: Vec<usize> = options.iter().map(|option| self.items(option).saturating_add(1)).collect();
        let all = each.iter().copied().fold(0, usize::saturating_add);
        if all <= MAX_ITEMS {
            return all;
        }
        let Some((tag, objects)) = self.discriminator(options) else { return all };
        let openings = objects
            .iter()
            .map(|fields| self.object_until(fields, Some(&tag)).saturating_add(1))
            .fold(0, usize::saturating_add);
        openings.max(each.into_iter().max().unwrap_or(0))
    }

    /// A property that each of some alternatives requires with a constant of its own, and the objects that they are.
    fn discriminator(&self, options: &'s [Value]) -> Option<(String, Vec<&'s Map<String, Value>>)> {
        let resolve = |option: &'s Value| match option.get("$ref").and_then(Value::as_str) {
            Some(reference) => referred(self.root, reference).and_then(Value::as_object),
            None => option.as_object(),
        };
        let objects: Vec<&Map<String, Value>> = options.iter().map(resolve).collect::<Option<_>>()?;
        let first = objects.first()?.get("properties").and_then(Value::as_object)?;
        let required: Vec<BTreeSet<&str>> = objects.iter().map(|fields| required(fields)).collect();
        let tag = first.keys().find(|name| {
            let constants = objects.iter().zip(&required).map(|(fields, required)| {
                constant(fields, name).filter(|_| required.contains(name.as_str()))
            });
            let tags = constants.collect::<Option<BTreeSet<&str>>>();
            tags.is_some_and(|tags| tags.len() == objects.len())
        })?;
        Some((tag.clone(), objects))
    }
}

/// Keywords of objects.
const OBJECT_KEYWORDS: &[&str] = &[
    "properties",
    "required",
    "patternProperties",
    "additionalProperties",
    "minProperties",
    "maxProperties",
];
/// Keywords of arrays.
const ARRAY_KEYWORDS: &[&str] = &["items", "prefixItems", "minItems", "maxItems"];

/// Schemas that a value must satisfy at once. Every choice of alternatives of one goes with every choice of another.
#[derive(Default)]
struct Combined(Vec<(usize, usize)>);

impl Combined {
    fn add(&mut self, alternatives: usize, items: usize) {
        self.0.push((alternatives.max(1), items));
    }

    fn items(&self) -> usize {
        let choices = self.0.iter().map(|(count, _)| *count).fold(1_usize, usize::saturating_mul);
        self.0
            .iter()
            .fold(0_usize, |sum, (count, items)| sum.saturating_add((choices / count).saturating_mul(*items)))
    }
}

/// The items of a value that is listed.
fn value_items(value: &Value) -> usize {
    match value {
        Value::Object(_) | Value::Array(_) => 2,
        _ => 0,
    }
}

fn required(fields: &Map<String, Value>) -> BTreeSet<&str> {
    let names = fields.get("required").and_then(Value::as_array);
    names.into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The text that a property must be, if there is one.
fn constant<'s>(fields: &'s Map<String, Value>, name: &str) -> Option<&'s str> {
    let property = fields.get("properties")?.get(name)?;
    let only = property
        .get("enum")
        .and_then(Value::as_array)
        .filter(|all| all.len() == 1)
        .and_then(|all| all.first());
    property.get("const").or(only)?.as_str()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
    use llguidance::{Matcher, ParserFactory};
    use serde_json::json;
    use toktrie::ApproximateTokEnv;

    use super::super::cancellation::Cancellation;
    use super::super::schema::prepared;
    use super::*;

    /// A small generator of random numbers.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((mixed ^ (mixed >> 27)) >> 16) as usize % end
        }
    }

    fn schema(random: &mut Random, depth: usize) -> Value {
        if depth == 0 {
            let leaves = [
                json!({ "type": "string" }),
                json!({ "type": "integer" }),
                json!({ "type": ["boolean", "null"] }),
                json!({ "enum": ["a", "ab", 1, { "a": [1, 2] }] }),
                json!({}),
                json!({ "$ref": "#/$defs/node" }),
            ];
            return leaves[random.below(leaves.len())].clone();
        }
        match random.below(6) {
            4 | 5 => {
                // Wide, as only optional parts and alternatives make it.
                let names = 5 + random.below(25);
                let object = |random: &mut Random| {
                    let properties: Map<String, Value> =
                        (0..names).map(|at| (format!("k{at}"), schema(random, 0))).collect();
                    let closed =
                        json!({ "type": "object", "properties": properties, "additionalProperties": false });
                    let open =
                        json!({ "type": "object", "properties": { "a": {}, "b": { "type": "integer" } } });
                    if random.below(2) == 0 { closed } else { open }
                };
                match random.below(3) {
                    0 => {
                        json!({ "anyOf": (0..1 + random.below(20)).map(|_| object(random)).collect::<Vec<Value>>() })
                    }
                    _ => object(random),
                }
            }
            0 => {
                let options: Vec<Value> =
                    (0..1 + random.below(4)).map(|_| schema(random, depth - 1)).collect();
                json!({ "anyOf": options })
            }
            1 => {
                let mut array = json!({ "type": "array", "items": schema(random, depth - 1) });
                if random.below(2) == 0 {
                    array["minItems"] = json!(random.below(3));
                    array["maxItems"] = json!(3 + random.below(40));
                }
                if random.below(3) == 0 {
                    array["prefixItems"] = json!([schema(random, depth - 1), schema(random, depth - 1)]);
                }
                array
            }
            _ => {
                let names = ["a", "b", "ab", "c", "d", "ba"];
                let first = random.below(3);
                let used = &names[first..first + 1 + random.below(names.len() - first)];
                let properties: Map<String, Value> =
                    used.iter().map(|name| ((*name).to_owned(), schema(random, depth - 1))).collect();
                let needed: Vec<&&str> = used.iter().filter(|_| random.below(3) == 0).collect();
                let mut object = json!({ "type": "object", "properties": properties, "required": needed });
                if random.below(2) == 0 {
                    object["additionalProperties"] = json!(false);
                }
                object
            }
        }
    }

    /// Whether a random answer under a schema can be read with so many items in a row; the text if not.
    fn read(schema: &Value, items: usize, random: &mut Random) -> Result<(), String> {
        let vocabulary = ApproximateTokEnv::single_byte_env();
        let mut factory = ParserFactory::new_simple(&vocabulary).unwrap();
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_items_in_row: items,
            step_max_items: 1_000_000,
            verbose_errors: false,
            ..Default::default()
        };
        let answer = GrammarWithLexer { json_schema: Some(schema.clone()), ..Default::default() };
        // One that cannot be compiled has no rows.
        let Ok(parser) = factory.create_parser(TopLevelGrammar { grammars: vec![answer], max_tokens: None })
        else {
            return Ok(());
        };
        let mut matcher = Matcher::new(Ok(parser));
        let mut text = Vec::new();
        for _ in 0..60 {
            let mask = matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
            let allowed: Vec<u8> = (32..127).filter(|byte| mask.is_allowed(u32::from(*byte))).collect();
            // Texts end soon: rows are between them.
            let marks: Vec<u8> =
                allowed.iter().copied().filter(|byte| b"\"{}[],:abk12".contains(byte)).collect();
            let from = if marks.is_empty() { &allowed } else { &marks };
            if from.is_empty() || matcher.is_stopped() {
                break;
            }
            let byte = from[random.below(from.len())];
            text.push(byte);
            let shown = || String::from_utf8_lossy(&text).into_owned();
            matcher.consume_token(u32::from(byte)).map_err(|error| format!("{error} after {}", shown()))?;
        }
        Ok(())
    }

    #[test]
    fn no_row_has_more_items_than_the_bound() {
        for seed in 0..150 {
            let mut random = Random(seed);
            let depth = 1 + random.below(4);
            let mut schema = schema(&mut random, depth);
            schema["$defs"] = json!({ "node": { "type": "object",
                "properties": { "a": { "type": "integer" }, "ab": { "$ref": "#/$defs/node" }, "c": {} } } });
            // As it is compiled.
            let Ok(schema) = prepared(&schema, &Cancellation::default()) else { continue };
            let items = RowBound::new(&schema).items(&schema) + ANY;
            for _ in 0..3 {
                if let Err(error) = read(&schema, items, &mut random) {
                    panic!("seed {seed}: {items} items: {error}\n{schema}");
                }
            }
        }
    }

    #[test]
    fn alternatives_add_up_unless_a_property_tells_them_apart() {
        let names: Vec<String> = (0..300).map(|at| format!("k{at}")).collect();
        let optional: Map<String, Value> =
            names.iter().map(|name| (name.clone(), json!({ "type": "string" }))).collect();
        let object = |tag: Option<usize>| {
            let mut properties = Map::new();
            if let Some(tag) = tag {
                properties.insert("kind".to_owned(), json!({ "const": format!("kind {tag}") }));
            }
            properties.extend(optional.clone());
            let required: &[&str] = if tag.is_some() { &["kind"] } else { &[] };
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
        };
        let options = |tagged: bool| (0..20).map(|at| object(tagged.then_some(at))).collect::<Vec<Value>>();
        check_branching(&object(None)).unwrap();
        check_branching(&json!({ "anyOf": options(true) })).unwrap();
        let refused = check_branching(&json!({ "anyOf": options(false) })).unwrap_err();
        assert!(refused.contains("alternatives"), "{refused}");
        // The same through references, and within other values.
        let definitions: Map<String, Value> =
            options(false).into_iter().enumerate().map(|(at, option)| (format!("d{at}"), option)).collect();
        let references: Vec<Value> = (0..20).map(|at| json!({ "$ref": format!("#/$defs/d{at}") })).collect();
        let inner = json!({ "type": "array", "items": { "oneOf": references } });
        let nested = json!({ "type": "object", "properties": { "x": inner }, "$defs": definitions });
        assert!(check_branching(&nested).is_err());
    }
}
