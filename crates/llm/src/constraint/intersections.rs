//! Schemas whose parts hold at once, judged by a plain validator: no answer is accepted that one of the parts refuses.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};
use toktrie::ApproximateTokEnv;

use super::bounds::referred;
use super::cancellation::Cancellation;
use super::schema::prepared;

/// Whether texts are answers under a schema; an error if the schema is refused.
pub(super) fn accepts(schema: &Value, texts: &[&str]) -> Result<Vec<bool>, String> {
    let schema = prepared(schema, &Cancellation::default())?;
    let vocabulary = ApproximateTokEnv::single_byte_env();
    let mut factory = ParserFactory::new_simple(&vocabulary).unwrap();
    factory.quiet();
    let answer = GrammarWithLexer { json_schema: Some(schema), ..Default::default() };
    let grammar = TopLevelGrammar { grammars: vec![answer], max_tokens: None };
    let matcher = Matcher::new(Ok(factory.create_parser(grammar).map_err(|error| error.to_string())?));
    let accepted = |text: &&str| {
        let mut matcher = matcher.deep_clone();
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        matcher.consume_tokens(&tokens).is_ok() && matcher.is_accepting().unwrap_or(false)
    };
    Ok(texts.iter().map(accepted).collect())
}

/// The validator: every keyword by its definition.
fn is_valid(schema: &Value, root: &Value, value: &Value) -> bool {
    let Some(fields) = schema.as_object() else { return schema == true };
    let number = |name: &str| fields.get(name).and_then(Value::as_f64);
    let count = |name: &str| fields.get(name).and_then(Value::as_u64);
    let list = |name: &str| fields.get(name).and_then(Value::as_array);
    let named = |name: &str| fields.get(name).and_then(Value::as_object);
    let within = |length: usize, least: &str, most: &str| {
        count(least).is_none_or(|least| length as u64 >= least)
            && count(most).is_none_or(|most| length as u64 <= most)
    };
    let own = match value {
        Value::Number(value) => {
            let value = value.as_f64().unwrap();
            number("minimum").is_none_or(|bound| value >= bound)
                && number("exclusiveMinimum").is_none_or(|bound| value > bound)
                && number("maximum").is_none_or(|bound| value <= bound)
                && number("exclusiveMaximum").is_none_or(|bound| value < bound)
                && number("multipleOf").is_none_or(|of| (value / of).fract() == 0.0)
        }
        Value::String(text) => within(text.chars().count(), "minLength", "maxLength"),
        Value::Array(items) => {
            let prefix = list("prefixItems").map_or(&[][..], Vec::as_slice);
            within(items.len(), "minItems", "maxItems")
                && items.iter().zip(prefix).all(|(item, schema)| is_valid(schema, root, item))
                && fields.get("items").is_none_or(|schema| {
                    items.iter().skip(prefix.len()).all(|item| is_valid(schema, root, item))
                })
        }
        Value::Object(object) => {
            let required = list("required").map_or(&[][..], Vec::as_slice);
            within(object.len(), "minProperties", "maxProperties")
                && required.iter().all(|name| object.contains_key(name.as_str().unwrap()))
                && object.iter().all(|(name, value)| {
                    let listed = named("properties").and_then(|properties| properties.get(name));
                    listed
                        .or(fields.get("additionalProperties"))
                        .is_none_or(|schema| is_valid(schema, root, value))
                })
        }
        _ => true,
    };
    let is = |kind: &Value| match value {
        Value::Null => kind == "null",
        Value::Bool(_) => kind == "boolean",
        Value::Number(value) => {
            kind == "number" || (kind == "integer" && value.as_f64().unwrap().fract() == 0.0)
        }
        Value::String(_) => kind == "string",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
    };
    let kinds = fields
        .get("type")
        .is_none_or(|kinds| kinds.as_array().map_or(is(kinds), |kinds| kinds.iter().any(is)));
    let equal = |other: &Value| match (value.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => value == other,
    };
    own && kinds
        && fields.get("const").is_none_or(equal)
        && list("enum").is_none_or(|all| all.iter().any(equal))
        && list("allOf").is_none_or(|all| all.iter().all(|schema| is_valid(schema, root, value)))
        // The compiler takes one of several for at least one of them.
        && ["anyOf", "oneOf"].into_iter().filter_map(list).all(|all| all.iter().any(|schema| is_valid(schema, root, value)))
        && fields
            .get("$ref")
            .and_then(Value::as_str)
            .is_none_or(|name| is_valid(referred(root, name).unwrap(), root, value))
}

const TEXTS: &[&str] = &[
    "0",
    "-0.0",
    "0.001",
    "0.01",
    "0.010",
    "0.1",
    "0.5",
    "0.50",
    "0.99",
    "1",
    "1.0",
    "1.5",
    "1.99",
    "2",
    "2.0",
    "2.001",
    "2.5",
    "3",
    "3.5",
    "4",
    "5",
    "5.0",
    "6",
    "7.25",
    "9",
    "10",
    "10.5",
    "11",
    "12",
    "60",
    "99",
    "100",
    "101",
    "-0.001",
    "-0.1",
    "-0.5",
    "-1",
    "-1.0",
    "-1.5",
    "-2",
    "-2.5",
    "-3",
    "-9",
    "-10",
    "-11",
    "100.25",
    "null",
    "true",
    "false",
    r#""""#,
    r#""a""#,
    r#""ab""#,
    r#""abc""#,
    r#""abcd""#,
    r#""abcde""#,
    r#""é\n""#,
    "[]",
    "[1]",
    "[1,2]",
    r#"["a",2]"#,
    "[1,2,3]",
    "[3,3,3,3]",
    "[0,0,0,0,0]",
    "[0.5]",
    "{}",
    r#"{"a":1}"#,
    r#"{"a":3}"#,
    r#"{"b":1}"#,
    r#"{"a":1,"b":2}"#,
    r#"{"a":"x","b":2}"#,
    r#"{"a":1,"c":2}"#,
    r#"{"c":2}"#,
    r#"{"a":1,"b":2,"c":3}"#,
    r#"{"a":5,"b":5,"c":5,"d":5}"#,
    r#"{"a":[1,2]}"#,
    r#"{"a":{"a":1}}"#,
];

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 27)) >> 16) as usize % end
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

/// Some keywords of one schema.
fn schema(random: &mut Random, depth: usize) -> Value {
    let bounds = [-10.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.01, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0];
    let mut fields = Map::new();
    for _ in 0..1 + random.below(3) {
        let kind = random.below(if depth == 0 { 12 } else { 20 });
        let (name, value) = match kind {
            0..4 => {
                let name = random.of(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]);
                let bound: f64 = random.of(&bounds);
                (
                    name,
                    if bound.fract() == 0.0 && random.below(2) == 0 {
                        json!(bound as i64)
                    } else {
                        json!(bound)
                    },
                )
            }
            4 => ("multipleOf", random.of(&[json!(2), json!(0.5), json!(3)])),
            5 => (random.of(&["minLength", "maxLength"]), json!(random.below(5))),
            6 | 7 => (random.of(&["minItems", "maxItems"]), json!(random.below(5))),
            8 => (random.of(&["minProperties", "maxProperties"]), json!(random.below(4))),
            9 | 10 => {
                let kinds = ["integer", "number", "string", "array", "object", "null", "boolean"];
                let two = json!([random.of(&kinds), random.of(&kinds)]);
                let distinct = two[0] != two[1];
                ("type", if distinct && random.below(2) == 0 { two } else { json!(random.of(&kinds[..5])) })
            }
            11 => random.of(&[
                ("const", json!(3)),
                ("const", json!(0.5)),
                ("enum", json!([1, 0.5, "a", 10, [1, 2], null])),
                ("required", json!(["a"])),
                ("required", json!(["a", "b"])),
            ]),
            12 => ("$ref", json!(format!("#/$defs/{}", random.of(&["one", "two"])))),
            13 => ("items", schema(random, depth - 1)),
            14 => ("prefixItems", json!([schema(random, depth - 1)])),
            15 => ("properties", json!({ "a": schema(random, depth - 1), "b": schema(random, 0) })),
            16 => {
                ("additionalProperties", if random.below(2) == 0 { json!(false) } else { schema(random, 0) })
            }
            17 => ("anyOf", json!([schema(random, depth - 1), schema(random, depth - 1)])),
            _ => {
                let count = 2 + random.below(2);
                ("allOf", (0..count).map(|_| schema(random, depth - 1)).collect())
            }
        };
        fields.insert(name.to_owned(), value);
    }
    fields.into()
}

/// Only bounds of numbers, close to each other, in parts of all kinds; `names` are the definitions that it may refer to.
fn range(random: &mut Random, depth: usize, names: &[&str]) -> Value {
    let bounds = [-1.0, -0.5, -0.01, 0.0, 0.01, 0.5, 1.0, 1.5, 2.0, 2.5];
    let mut fields = Map::new();
    for _ in 0..1 + random.below(2) {
        let (name, value) = match random.below(if depth == 0 { 4 } else { 9 }) {
            0..4 => {
                let name = random.of(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]);
                (name, json!(random.of(&bounds)))
            }
            4 => ("$ref", json!(format!("#/$defs/{}", random.of(names)))),
            5 => (random.of(&["anyOf", "oneOf"]), ranges(random, depth - 1, names)),
            _ => ("allOf", ranges(random, depth - 1, names)),
        };
        fields.insert(name.to_owned(), value);
    }
    fields.into()
}

fn ranges(random: &mut Random, depth: usize, names: &[&str]) -> Value {
    json!([range(random, depth, names), range(random, depth, names)])
}

/// How many of the schemas were refused, although a text satisfies them.
fn check_all(seeds: std::ops::Range<u64>, schema: impl Fn(&mut Random) -> Value) -> Vec<String> {
    let mut refused = Vec::new();
    for seed in seeds {
        let schema = schema(&mut Random(seed));
        let is_valid = |text: &&str| is_valid(&schema, &schema, &serde_json::from_str(text).unwrap());
        let valid: Vec<bool> = TEXTS.iter().map(is_valid).collect();
        match accepts(&schema, TEXTS) {
            Ok(accepted) => {
                let wrong = TEXTS
                    .iter()
                    .zip(valid.iter().zip(&accepted))
                    .filter(|(_, (valid, accepted))| **accepted && !**valid);
                let wrong: Vec<&&str> = wrong.map(|(text, _)| text).collect();
                assert!(wrong.is_empty(), "seed {seed}: {schema} accepts {wrong:?}");
                assert_eq!(
                    valid.contains(&true),
                    accepted.contains(&true),
                    "seed {seed}: {schema} accepts none"
                );
            }
            Err(error) if valid.contains(&true) => refused.push(format!("seed {seed}: {error}\n{schema}")),
            Err(_) => {}
        }
    }
    refused
}

#[test]
fn parts_that_hold_at_once_are_all_enforced() {
    let refused = check_all(0..400, |random| {
        let parts = json!([schema(random, 2), schema(random, 2)]);
        json!({ "allOf": parts, "$defs": { "one": schema(random, 0), "two": schema(random, 0) } })
    });
    // The compiler knows no numbers of optional properties.
    let others: Vec<&String> = refused.iter().filter(|error| !error.contains("maxProperties")).collect();
    assert!(others.len() <= 2, "{others:?}");
}

#[test]
fn bounds_of_numbers_in_several_parts_are_all_enforced() {
    let refused = check_all(0..600, |random| {
        let parts = ranges(random, 3, &["one", "two"]);
        let definitions = json!({ "one": range(random, 1, &["two"]), "two": range(random, 0, &[]) });
        json!({ "type": "number", "allOf": parts, "$defs": definitions })
    });
    assert!(refused.len() <= 30, "{} are refused: {refused:?}", refused.len());
}

/// What was wrong with intersections, or is easily wrong.
#[test]
fn ranges_may_be_split_over_members() {
    let two = json!({ "from": { "exclusiveMinimum": 0 }, "to": { "maximum": 0.5 } });
    let reference = |name: &str| json!({ "$ref": format!("#/$defs/{name}") });
    let cases: &[(Value, &[&str], &[&str])] = &[
        (
            json!({ "allOf": [{ "minimum": 3 }, { "maximum": 5 }], "type": "integer" }),
            &["3", "4", "5"],
            &["2", "6"],
        ),
        (
            json!({ "type": "integer", "allOf": [{ "exclusiveMinimum": 3 }, { "exclusiveMaximum": 5 }] }),
            &["4"],
            &["3", "5"],
        ),
        (
            json!({ "type": "number", "allOf": [{ "exclusiveMinimum": 0 }, { "maximum": 0.5 }] }),
            &["0.1", "0.5"],
            &["0", "0.0", "0.51"],
        ),
        (
            json!({ "type": "number", "exclusiveMinimum": 0, "anyOf": [{ "maximum": 0.5 }] }),
            &["0.1"],
            &["0", "0.0", "0.51"],
        ),
        (
            json!({ "type": "number", "minimum": 0, "exclusiveMinimum": true, "maximum": 0.5 }),
            &["0.1"],
            &["0", "0.0"],
        ),
        (
            json!({ "type": "number", "allOf": [reference("from"), reference("to")], "$defs": two }),
            &["0.1"],
            &["0", "0.51"],
        ),
        (
            json!({ "type": "number", "$ref": "#/$defs/from", "maximum": 0.5, "$defs": two }),
            &["0.1"],
            &["0", "0.51"],
        ),
        (
            json!({ "type": "string", "allOf": [{ "minLength": 2 }, { "maxLength": 3 }] }),
            &[r#""ab""#, r#""abc""#],
            &[r#""a""#, r#""abcd""#],
        ),
        (
            json!({ "type": "array", "allOf": [{ "minItems": 2 }, { "maxItems": 3 }] }),
            &["[1,2]", "[1,2,3]"],
            &["[1]", "[3,3,3,3]"],
        ),
        // Others are as they were.
        (
            json!({ "type": "object", "properties": { "a": { "type": "number", "exclusiveMinimum": 0 }, "b": { "type": "number", "maximum": 0.5 } } }),
            &[r#"{"a":0.00001}"#, r#"{"b":0}"#],
            &[r#"{"a":0}"#],
        ),
    ];
    for (schema, fine, wrong) in cases {
        assert_eq!(accepts(schema, fine), Ok(vec![true; fine.len()]), "{schema}: {fine:?}");
        assert_eq!(accepts(schema, wrong), Ok(vec![false; wrong.len()]), "{schema}: {wrong:?}");
    }
    let hidden = json!({ "from": { "exclusiveMinimum": 0 }, "some": { "anyOf": [{ "maximum": 0.5 }, { "minimum": 7 }] } });
    let refused =
        json!({ "type": "number", "allOf": [reference("from"), reference("some")], "$defs": hidden });
    assert!(prepared(&refused, &Cancellation::default()).unwrap_err().contains("exclusive bound"));
}
