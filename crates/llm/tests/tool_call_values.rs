//! Values and names of arguments that calls write in other ways than JSON does: between tags, and as Python does.
#![cfg(feature = "constraint")]

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_llm::tools::{Tool, ToolCallParser, ToolCallPiece, ToolChoice, ToolRules};
use serde_json::{Value, json};

use crate::tool_calls::{FAMILIES, Family, format, generate, parsed, tokenizer};

fn families<'a>(names: &'a [&str]) -> impl Iterator<Item = &'static Family> + 'a {
    FAMILIES.iter().filter(|family| names.contains(&family.name))
}

fn tool(properties: Value) -> Arc<[Tool]> {
    let required: Vec<&String> = properties.as_object().unwrap().keys().collect();
    let parameters = json!({ "type": "object", "properties": properties, "required": required,
        "additionalProperties": false, "$defs": { "City": { "type": "string", "enum": ["Bern"] } } });
    [Tool { name: "f".to_owned(), parameters, strict: true }].into()
}

/// The arguments of the one call that random models generate under the grammar.
fn generated(family: &Family, tools: &Arc<[Tool]>, rng: &mut Rng) -> Vec<Value> {
    let (tokenizer, format) = (tokenizer(family), Arc::new(format(family)));
    let parser = ToolCallParser::new(Arc::clone(&format), Arc::clone(tools)).with_certain_calls();
    let rules = ToolRules { tools, choice: ToolChoice::Required, parallel: false, answer: None };
    let lark = format.grammar(&rules, &tokenizer).unwrap().unwrap();
    let mut all = Vec::new();
    for _ in 0..8 {
        let Some(text) = generate(&tokenizer, &lark, rng) else { continue };
        let (answer, pieces) = parsed(&parser, &text, 3);
        let calls = ToolCallPiece::join(&pieces);
        assert_eq!((answer.as_str(), calls.len()), ("", 1), "{}: {text}", family.name);
        assert!(calls[0].arguments.is_object(), "{}: {text:?} is {calls:?}", family.name);
        all.push(calls[0].arguments.clone());
    }
    assert!(!all.is_empty(), "{}: no answer ended\n{lark}", family.name);
    all
}

#[test]
fn texts_between_tags_have_no_quotes() {
    let seed = 5;
    let mut rng = Rng::new(seed);
    let cities = ["Bern".into(), "Basel".into(), Value::Null];
    let is_city = |value: &Value| cities.contains(value);
    let is_short =
        |value: &Value| value.is_null() || value.as_str().is_some_and(|text| text.chars().count() <= 3);
    let is_at_most =
        |most: usize, value: &Value| value.as_str().is_some_and(|text| text.chars().count() <= most);
    type Check<'a> = &'a dyn Fn(&Value) -> bool;
    let matches = |pattern: &str, value: &Value| {
        let expression = regex::Regex::new(pattern).unwrap();
        value.as_str().is_some_and(|text| expression.is_match(text))
    };
    let date = r"^[0-9]{4}-[01][0-9]-[0-3][0-9]$";
    let cases: [(Value, Check<'_>); 17] = [
        (json!({ "anyOf": [{ "type": "string", "enum": ["Bern", "Basel"] }, { "type": "null" }] }), &is_city),
        (json!({ "type": ["string", "null"], "enum": ["Bern", "Basel", null] }), &is_city),
        (json!({ "const": "Bern", "description": "d" }), &|value| value == "Bern"),
        (json!({ "$ref": "#/$defs/City" }), &|value| value == "Bern"),
        (json!({ "anyOf": [{ "$ref": "#/$defs/City" }, { "type": "null" }], "default": null }), &is_city),
        (json!({ "enum": ["Bern", 5, true] }), &|value| {
            [json!("Bern"), json!(5), json!(true)].contains(value)
        }),
        (json!({ "type": "string", "maxLength": 3, "minLength": 2 }), &|value| {
            value.as_str().is_some_and(|text| (2..=3).contains(&text.chars().count()))
        }),
        (json!({ "anyOf": [{ "type": "string", "maxLength": 3 }, { "type": "null" }] }), &is_short),
        (
            json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "boolean" } }] }),
            &|value| {
                let is_flags = |list: &Vec<Value>| list.iter().all(Value::is_boolean);
                value.is_string() || value.as_array().is_some_and(is_flags)
            },
        ),
        (json!({ "type": "string", "pattern": "^[a-c]{2,4}$" }), &|value| matches("^[a-c]{2,4}$", value)),
        (json!({ "type": "string", "pattern": "^(x/|y)[0-9]", "maxLength": 6 }), &|value| {
            matches("^(x/|y)[0-9]", value) && is_at_most(6, value)
        }),
        (json!({ "type": "string", "allOf": [{ "pattern": "^[a-c]+$" }, { "maxLength": 3 }] }), &|value| {
            matches("^[a-c]{1,3}$", value)
        }),
        (json!({ "type": "string", "pattern": "7$", "maxLength": 3 }), &|value| matches("7$", value)),
        (json!({ "type": "string", "format": "date" }), &|value| matches(date, value)),
        (json!({ "anyOf": [{ "type": "string", "format": "date" }, { "type": "null" }] }), &|value| {
            value.is_null() || matches(date, value)
        }),
        (
            json!({ "anyOf": [{ "const": "auto" }, { "type": "string", "pattern": "^[0-9]{1,3}px$" }] }),
            &|value| matches("^(auto|[0-9]{1,3}px)$", value),
        ),
        (json!({ "type": "string", "pattern": "^(a|b)*$", "minLength": 1, "maxLength": 5 }), &|value| {
            matches("^[ab]{1,5}$", value)
        }),
    ];
    for family in families(&["qwen_coder", "glm45", "deepseek_v32"]) {
        for (schema, is_valid) in &cases {
            for arguments in generated(family, &tool(json!({ "city": schema })), &mut rng) {
                let at = format!("{} of seed {seed}: {schema} gives {arguments}", family.name);
                assert!(is_valid(&arguments["city"]), "{at}");
            }
        }
    }
}

/// An anchor within a pattern depends on what is around a text, which has no quotes here; and a text is of one kind.
#[test]
fn patterns_that_cannot_be_enforced_between_tags_are_refused_for_strict_tools() {
    for family in families(&["qwen_coder", "glm45"]) {
        let patterns = [r"\bBern\b", "(^a|b)c", "a(b$|c)"].map(|pattern| json!({ "pattern": pattern }));
        let nested = json!({ "allOf": [{ "pattern": "(^a|b)c" }] });
        let formats = json!({ "anyOf": [{ "format": "ipv4" }, { "format": "ipv6" }] });
        for mut schema in patterns.into_iter().chain([nested, formats, json!({ "$ref": "#/$defs/City" })]) {
            schema["type"] = json!("string");
            let strict = tool(json!({ "city": schema }));
            let lax: Arc<[Tool]> = strict.iter().map(|tool| Tool { strict: false, ..tool.clone() }).collect();
            let grammar = |tools: &[Tool]| {
                let rules = ToolRules { tools, choice: ToolChoice::Required, parallel: false, answer: None };
                format(family).grammar(&rules, &tokenizer(family))
            };
            let reason = grammar(&strict).unwrap_err();
            let is_told = reason.contains("anchor") || reason.contains("alternatives");
            assert!(reason.contains("city of f") && is_told, "{schema}: {reason}");
            assert!(grammar(&lax).unwrap().is_some(), "{schema}");
        }
    }
}

/// What models write for each kind of schema.
#[test]
fn values_between_tags_are_read_as_the_schema_says() {
    let family = families(&["qwen_coder"]).next().unwrap();
    let optional = json!({ "anyOf": [{ "type": "string" }, { "type": "null" }] });
    let city = json!({ "anyOf": [{ "type": "string", "enum": ["Bern", "5"] }, { "type": "null" }] });
    let number = json!({ "type": ["string", "integer"], "minimum": 3 });
    let any = json!({ "description": "d" });
    for (schema, text, wanted) in [
        (&optional, "Bern", json!("Bern")),
        (&optional, "null", Value::Null),
        (&optional, "5", json!("5")),
        (&city, "Bern", json!("Bern")),
        (&city, "\"Bern\"", json!("Bern")),
        (&city, "5", json!("5")),
        (&city, "null", Value::Null),
        (&number, "5", json!(5)),
        (&number, "2", json!("2")),
        (&number, "\"5\"", json!("\"5\"")),
        (&any, "\"Bern\"", json!("Bern")),
        (&any, "Bern", json!("Bern")),
        (&any, "[1]", json!([1])),
        (&json!({ "type": "string" }), "\"Bern\"", json!("\"Bern\"")),
    ] {
        let parser = ToolCallParser::new(Arc::new(format(family)), tool(json!({ "city": schema })));
        let output = format!(
            "<tool_call>\n<function=f>\n<parameter=city>\n{text}\n</parameter>\n</function>\n</tool_call>"
        );
        for size in [1, 1000] {
            let calls = ToolCallPiece::join(&parsed(&parser, &output, size).1);
            assert_eq!(calls[0].arguments, json!({ "city": wanted }), "{schema}: {text}");
        }
    }
}

#[test]
fn names_of_python_arguments_may_be_any_text() {
    let seed = 6;
    let mut rng = Rng::new(seed);
    for family in families(&["lfm2", "llama4_pythonic"]) {
        for names in
            [&["my-param"][..], &["a", "my-param"], &["$top", "@id"], &["a.b", "a"], &["x y", "x"], &["é=,"]]
        {
            let properties =
                names.iter().map(|name| ((*name).to_owned(), json!({ "enum": [6, 7] }))).collect();
            for arguments in generated(family, &tool(Value::Object(properties)), &mut rng) {
                let found: Vec<&String> = arguments.as_object().unwrap().keys().collect();
                assert_eq!(found, names, "{} of seed {seed}", family.name);
            }
        }
    }
}

#[test]
fn numbers_out_of_range_stay_as_they_are() {
    let number = tool(json!({ "n": { "type": "number" } }));
    for (family, output) in [
        ("lfm2", "<|tool_call_start|>[f(n=7e2069)]<|tool_call_end|>"),
        ("llama4_pythonic", "[f(n=7e2069)]"),
        (
            "qwen_coder",
            "<tool_call>\n<function=f>\n<parameter=n>\n7e2069\n</parameter>\n</function>\n</tool_call>",
        ),
        ("hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 7e2069}}\n</tool_call>"),
    ] {
        let family = families(&[family]).next().unwrap();
        let parser = ToolCallParser::new(Arc::new(format(family)), Arc::clone(&number));
        for parser in [parser.clone(), parser.with_certain_calls()] {
            let (answer, pieces) = parsed(&parser, output, 3);
            let arguments: String = pieces.iter().map(|piece| piece.arguments.as_str()).collect();
            assert_eq!((answer.as_str(), arguments.as_str()), ("", "{\"n\": 7e2069}"), "{}", family.name);
        }
    }
}

/// What is given away of a call that turns out to be none is a whole call all the same.
#[test]
fn half_a_call_is_never_given_away() {
    let family = families(&["lfm2"]).next().unwrap();
    let tools = tool(json!({ "a": { "type": "integer" } }));
    let parser = ToolCallParser::new(Arc::new(format(family)), tools).with_certain_calls();
    for (text, wanted) in [("[f(a=1, b=)]", json!({ "a": 1 })), ("[f(=)]", json!({}))] {
        let (_, pieces) = parsed(&parser, &format!("<|tool_call_start|>{text}<|tool_call_end|>"), 1);
        assert_eq!(ToolCallPiece::join(&pieces)[0].arguments, wanted, "{text}");
    }
}
