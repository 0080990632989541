//! Values and names between tags that have tags in them: they are read as they were meant, or refused.
#![cfg(feature = "constraint")]

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_llm::tools::{Tool, ToolCallParser, ToolCallPiece, ToolChoice, ToolRules};
use serde_json::{Value, json};

use crate::tool_calls::{FAMILIES, Family, format, generate, parsed, tokenizer};

/// Families with tags, and the tag that ends a value.
const TAGS: [(&str, &str); 3] =
    [("qwen_coder", "</parameter>"), ("glm45", "</arg_value>"), ("deepseek_v32", "</｜DSML｜parameter>")];

fn families() -> impl Iterator<Item = (&'static Family, &'static str)> {
    let find = |name: &str| FAMILIES.iter().find(|family| family.name == name).unwrap();
    TAGS.into_iter().map(move |(name, tag)| (find(name), tag))
}

fn tool(properties: &Value, required: &[&str], strict: bool) -> Arc<[Tool]> {
    let parameters = json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
    [Tool { name: "f".to_owned(), parameters, strict }].into()
}

fn grammar(family: &Family, tools: &[Tool]) -> Result<String, String> {
    let rules = ToolRules { tools, choice: ToolChoice::Required, parallel: false, answer: None };
    format(family).grammar(&rules, &tokenizer(family)).map(Option::unwrap)
}

/// The arguments of calls that a random model generates under the grammar, which arrive in pieces.
fn generated(family: &Family, tools: &Arc<[Tool]>, rng: &mut Rng) -> Vec<Value> {
    let lark = grammar(family, tools).unwrap_or_else(|error| panic!("{}: {error}", family.name));
    let parser = ToolCallParser::new(Arc::new(format(family)), Arc::clone(tools)).with_certain_calls();
    let texts: Vec<String> = (0..6).filter_map(|_| generate(&tokenizer(family), &lark, rng)).collect();
    assert!(!texts.is_empty(), "{}: no answer ended\n{lark}", family.name);
    let arguments = |text: &String| {
        let both = [1, 1000].map(|size| ToolCallPiece::join(&parsed(&parser, text, size).1));
        assert_eq!(both[0], both[1], "{}: {text}", family.name);
        assert_eq!(both[0].len(), 1, "{}: {text}", family.name);
        both[0][0].arguments.clone()
    };
    texts.iter().map(arguments).collect()
}

#[test]
fn tags_within_json_do_not_end_a_value() {
    let seed = 21;
    let mut rng = Rng::new(seed);
    for (family, tag) in families() {
        let list =
            json!({ "type": "array", "items": { "const": format!("q{tag}") }, "minItems": 1, "maxItems": 1 });
        let object = json!({ "type": "object", "properties": { "a": { "enum": [tag] } }, "required": ["a"], "additionalProperties": false });
        let is_list = |value: &Value| *value == json!([format!("q{tag}")]);
        let is_object = |value: &Value| *value == json!({ "a": tag });
        type Check<'a> = &'a dyn Fn(&Value) -> bool;
        let cases: [(Value, Check<'_>); 6] = [
            (list.clone(), &is_list),
            (object.clone(), &is_object),
            (json!({ "enum": [{ "a": tag }] }), &is_object),
            (json!({ "anyOf": [list, { "type": "null" }] }), &|value| value.is_null() || is_list(value)),
            (json!({ "anyOf": [{ "const": "text" }, object] }), &|value| value == "text" || is_object(value)),
            // A text that is written as JSON.
            (json!({ "allOf": [{ "type": "string" }, { "enum": [format!("a{tag}b")] }] }), &|value| {
                *value == format!("a{tag}b")
            }),
        ];
        for (schema, is_valid) in cases {
            let tools = tool(&json!({ "x": schema, "z": { "const": 5 } }), &["x", "z"], true);
            for arguments in generated(family, &tools, &mut rng) {
                let at = format!("{} of seed {seed}: {schema} gives {arguments}", family.name);
                assert!(is_valid(&arguments["x"]) && arguments["z"] == 5, "{at}");
            }
        }
    }
}

#[test]
fn texts_between_tags_have_no_tags() {
    let seed = 22;
    let mut rng = Rng::new(seed);
    for (family, tag) in families() {
        let only = |schema: Value, required: &[&str], strict| tool(&json!({ "x": schema }), required, strict);
        // What is left of a pattern and of values without the tag.
        let pattern = json!({ "type": "string", "pattern": format!("^a({tag}|c)?b$") });
        for arguments in generated(family, &only(pattern, &["x"], true), &mut rng) {
            assert!(["ab", "acb"].map(Value::from).contains(&arguments["x"]), "{}: {arguments}", family.name);
        }
        let values = json!({ "enum": ["a", format!("a{tag}b"), tag] });
        for arguments in generated(family, &only(values.clone(), &["x"], false), &mut rng) {
            assert_eq!(arguments, json!({ "x": "a" }), "{}", family.name);
        }
        let refused = |tools: &[Tool], at: &Value| {
            let reason = grammar(family, tools).expect_err(&at.to_string());
            assert!(reason.contains("\"x\" of f") && reason.contains(tag), "{}: {at}: {reason}", family.name);
        };
        refused(&only(values.clone(), &["x"], true), &values);
        for schema in [
            json!({ "const": tag }),
            json!({ "type": "string", "pattern": format!("^a{tag}b$") }),
            json!({ "type": "string", "pattern": tag, "maxLength": 40 }),
        ] {
            for strict in [true, false] {
                refused(&only(schema.clone(), &["x"], strict), &schema);
            }
            // Nothing can be written for it.
            for arguments in generated(family, &only(schema.clone(), &[], false), &mut rng) {
                assert_eq!(arguments, json!({}), "{}: {schema}", family.name);
            }
        }
    }
}

/// A tag that is a token can be spelled in a text all the same.
#[test]
fn spelled_tags_end_no_text() {
    let seed = 23;
    let mut rng = Rng::new(seed);
    let (glm, _) = families().nth(1).unwrap();
    let control = &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|user|>"];
    let family =
        Family { name: glm.name, template: glm.template, output: glm.output, calls: glm.calls, control };
    let rule = json!({ "type": "string", "pattern": "^(</arg_value>|b)x$" });
    for arguments in generated(&family, &tool(&json!({ "x": rule }), &["x"], true), &mut rng) {
        assert_eq!(arguments, json!({ "x": "bx" }), "seed {seed}");
    }
    let free = tool(&json!({ "x": { "type": "string" }, "z": { "const": 5 } }), &["x", "z"], true);
    for arguments in generated(&family, &free, &mut rng) {
        assert!(arguments["x"].is_string() && arguments["z"] == 5, "seed {seed}: {arguments}");
    }
}

#[test]
fn names_are_written_as_they_are_or_refused() {
    let seed = 24;
    let mut rng = Rng::new(seed);
    let known = json!({ "enum": [1, 2] });
    for (family, tag) in families() {
        let (fine, own): (&[&str], &[&str]) = match family.name {
            "qwen_coder" => (&["a b", "a\"b", "=", "<a", "é"], &["a>b", ">", "<|im_end|>", "<parameter="]),
            "glm45" => {
                (&["a b", "a>b", "a\"b", "<a"], &["a</arg_key>b", "<arg_value>", "<|user|>", "<tool_call>"])
            }
            _ => (&["a b", "a>b", "a\"b", "a\" string="], &["a\" string=\"true\">", "<｜User｜>"]),
        };
        for name in fine {
            for arguments in generated(family, &tool(&json!({ *name: known }), &[name], true), &mut rng) {
                let names: Vec<&String> = arguments.as_object().unwrap().keys().collect();
                assert_eq!(names, [name], "{} of seed {seed}", family.name);
            }
        }
        for name in own.iter().chain(&[" a ", "a\n", tag]) {
            let properties = json!({ *name: known, "z": known });
            for tools in [tool(&properties, &[name, "z"], true), tool(&properties, &[name], false)] {
                let reason = grammar(family, &tools).unwrap_err();
                assert!(reason.contains(&format!("{name:?} of f")), "{}: {reason}", family.name);
            }
            for arguments in generated(family, &tool(&properties, &["z"], false), &mut rng) {
                let names: Vec<&String> = arguments.as_object().unwrap().keys().collect();
                assert_eq!(names, ["z"], "{} of seed {seed}: {name:?}", family.name);
            }
        }
    }
}

/// What looks like JSON and is not ends at the first tag, as before.
#[test]
fn what_is_no_json_ends_at_the_first_tag() {
    let (family, _) = families().next().unwrap();
    for (schema, text, wanted) in [
        (json!({ "type": "array" }), "[see here", json!("[see here")),
        (json!({ "type": "object" }), "{\"a\": \"b", json!("{\"a\": \"b")),
        (json!({ "type": "array" }), "\"a\" and \"b\"", json!("\"a\" and \"b\"")),
        (json!({ "type": "string" }), "[\"", json!("[\"")),
        (json!({ "type": "object" }), "{\"a\": \"</parameter>\"}", json!({ "a": "</parameter>" })),
        (json!({ "type": ["string", "array"] }), "[\"</parameter>\"]", json!(["</parameter>"])),
    ] {
        let tools = tool(&json!({ "x": schema }), &["x"], false);
        let parser = ToolCallParser::new(Arc::new(format(family)), tools);
        let output = format!(
            "<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        );
        for size in [1, 1000] {
            let calls = ToolCallPiece::join(&parsed(&parser, &output, size).1);
            assert_eq!(calls[0].arguments, json!({ "x": wanted }), "{schema}: {text}");
        }
    }
}
