//! Answers under a JSON schema, JSON mode and choices; reasoning before them; and grammars that are wrong or hostile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(feature = "constraint")]

use std::sync::OnceLock;

use quadriga_conformance::Rng;
use quadriga_llm::constraint::{Constraint, ConstraintEngine, Grammar};
use quadriga_llm::reasoning::{ReasoningFormat, ReasoningSplitter};
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};
use serde_json::{Map, Value, json};

/// Every byte, some words, and control tokens, the last of which is the end.
fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), TokenType::Byte));
        let words = [
            "{\"", "\":", "\", \"", "true", "null", "12", "-3", "name", "}]", "[[", "  ", "\n\n", "ab", "</",
            "think",
        ];
        let words = words.map(|word| (word.to_owned(), TokenType::Normal));
        let control = [
            "<think>",
            "</think>",
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ];
        let control = control.map(|name| (name.to_owned(), TokenType::Control));
        let (tokens, types): (Vec<String>, Vec<TokenType>) = bytes.chain(words).chain(control).unzip();
        let count = tokens.len();
        let vocabulary = Vocabulary {
            model: "llama".into(),
            tokens,
            types,
            scores: vec![0.0; count],
            eos: Some(count as u32 - 1),
            ..Vocabulary::default()
        };
        Tokenizer::new(vocabulary).unwrap()
    })
}

fn engine() -> &'static ConstraintEngine {
    static ENGINE: OnceLock<ConstraintEngine> = OnceLock::new();
    ENGINE.get_or_init(|| ConstraintEngine::new(tokenizer()).unwrap())
}

fn token(text: &str) -> u32 {
    tokenizer().vocabulary().tokens.iter().position(|token| token == text).unwrap() as u32
}

/// What a random model answers that likes quotes, brackets and endings, so that its answers end.
fn answer(constraint: &Constraint, rng: &mut Rng) -> Option<String> {
    let brackets = b"\"}]".map(u32::from);
    answer_liking(
        &[&brackets[..], &tokenizer().end_tokens().collect::<Vec<_>>()].concat(),
        9.0,
        constraint,
        rng,
    )
}

/// What a random model answers that likes some tokens: its text with the names of control tokens, or nothing if it does not
/// end.
fn answer_liking(liked: &[u32], boost: f32, constraint: &Constraint, rng: &mut Rng) -> Option<String> {
    let mut hook = constraint.hook();
    let mut tokens: Vec<u32> = b"What?".iter().map(|byte| u32::from(*byte)).collect();
    let mut text = Vec::new();
    for _ in 0..400 {
        let mut logits: Vec<f32> = (0..tokenizer().token_count()).map(|_| rng.unit() as f32 * 8.0).collect();
        for liked in liked {
            logits[*liked as usize] += boost;
        }
        hook.apply(&tokens, &mut logits).unwrap();
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        assert!(*best.1 > f32::NEG_INFINITY);
        let token = best.0 as u32;
        if tokenizer().is_end(token) {
            return Some(String::from_utf8(text).expect("whole characters"));
        }
        tokens.push(token);
        hook.accepted(&tokens);
        match tokenizer().piece(token).unwrap() {
            [] => text.extend_from_slice(tokenizer().vocabulary().tokens[token as usize].as_bytes()),
            piece => text.extend_from_slice(piece),
        }
    }
    None
}

/// A slow and obvious check of a value against the schemas that are generated here.
fn satisfies(value: &Value, schema: &Value, root: &Value) -> bool {
    let Value::Object(schema) = schema else { return schema.as_bool().unwrap() };
    schema.iter().all(|(keyword, wanted)| match keyword.as_str() {
        "type" => match wanted {
            Value::Array(types) => types.iter().any(|wanted| has_type(value, wanted)),
            wanted => has_type(value, wanted),
        },
        "enum" => wanted.as_array().unwrap().contains(value),
        "const" => wanted == value,
        "anyOf" => wanted.as_array().unwrap().iter().any(|schema| satisfies(value, schema, root)),
        "allOf" => wanted.as_array().unwrap().iter().all(|schema| satisfies(value, schema, root)),
        "$ref" => satisfies(value, root.pointer(&wanted.as_str().unwrap()[1..]).unwrap(), root),
        "properties" => value.as_object().is_none_or(|fields| {
            fields
                .iter()
                .all(|(name, value)| wanted.get(name).is_none_or(|schema| satisfies(value, schema, root)))
        }),
        "required" => value.as_object().is_none_or(|fields| {
            wanted.as_array().unwrap().iter().all(|name| fields.contains_key(name.as_str().unwrap()))
        }),
        "additionalProperties" => value.as_object().is_none_or(|fields| {
            let known = |name: &str| schema.get("properties").is_some_and(|known| known.get(name).is_some());
            fields.iter().all(|(name, value)| known(name) || satisfies(value, wanted, root))
        }),
        "items" => {
            value.as_array().is_none_or(|items| items.iter().all(|item| satisfies(item, wanted, root)))
        }
        "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= wanted.as_u64().unwrap()),
        "maxItems" => value.as_array().is_none_or(|items| items.len() as u64 <= wanted.as_u64().unwrap()),
        "minLength" => {
            value.as_str().is_none_or(|text| text.chars().count() as u64 >= wanted.as_u64().unwrap())
        }
        "maxLength" => {
            value.as_str().is_none_or(|text| text.chars().count() as u64 <= wanted.as_u64().unwrap())
        }
        "minimum" => value.as_f64().is_none_or(|number| number >= wanted.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|number| number <= wanted.as_f64().unwrap()),
        "$defs" | "description" | "format" => true,
        other => panic!("{other}"),
    })
}

fn has_type(value: &Value, wanted: &Value) -> bool {
    match (wanted.as_str().unwrap(), value) {
        ("integer", Value::Number(number)) => number.as_f64().unwrap().fract() == 0.0,
        ("number", Value::Number(_)) | ("string", Value::String(_)) | ("boolean", Value::Bool(_)) => true,
        ("null", Value::Null) | ("array", Value::Array(_)) | ("object", Value::Object(_)) => true,
        _ => false,
    }
}

fn random_schema(rng: &mut Rng, depth: usize) -> Value {
    let below = |rng: &mut Rng, count| rng.below(count) as u64;
    match rng.below(if depth == 0 { 6 } else { 10 }) {
        0 => {
            json!({ "type": "string", "minLength": below(rng, 3), "maxLength": 3 + below(rng, 5), "format": "mine" })
        }
        1 => json!({ "type": "integer", "minimum": -(below(rng, 50) as i64), "maximum": below(rng, 2000) }),
        2 => json!({ "type": "number", "minimum": 0.5, "maximum": 2.25, "description": "small" }),
        3 => json!({ "type": ["boolean", "null"] }),
        4 => {
            let values = [json!("a"), json!("ab"), json!(7), json!(null), json!(["x"]), json!({ "k": 1 })];
            json!({ "enum": values[..1 + rng.below(values.len())] })
        }
        5 => json!({ "const": *rng.pick(&["yes", "no \"quoted\"", "ü\n"]).unwrap() }),
        6 => {
            json!({ "type": "array", "items": random_schema(rng, depth - 1), "minItems": below(rng, 2), "maxItems": 1 + below(rng, 3) })
        }
        7 => json!({ "anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)] }),
        8 => json!({ "$ref": "#/$defs/list" }),
        _ => {
            let names = ["name", "b c", "q\"", "é"];
            let mut properties = Map::new();
            let mut required = Vec::new();
            for name in &names[..rng.below(5)] {
                properties.insert((*name).to_owned(), random_schema(rng, depth - 1));
                if rng.below(2) == 0 {
                    required.push(*name);
                }
            }
            let more: Value = if rng.below(4) == 0 { json!({ "type": "boolean" }) } else { json!(false) };
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": more })
        }
    }
}

#[test]
fn every_answer_of_a_random_model_satisfies_a_random_schema() {
    let (mut ended, mut total) = (0, 0);
    for seed in 0..150 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut schema = random_schema(&mut rng, 3);
        let list = json!({ "type": "object", "properties": { "next": { "anyOf": [{ "$ref": "#/$defs/list" }, { "type": "null" }] } }, "required": ["next"], "additionalProperties": false });
        schema["$defs"] = json!({ "list": list });
        let constraint = engine()
            .compile(&Grammar::JsonSchema(schema.clone()))
            .unwrap_or_else(|error| panic!("{schema}: {error}"));
        for _ in 0..4 {
            total += 1;
            let Some(text) = answer(&constraint, &mut rng) else { continue };
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{schema}: {text}: {error}"));
            assert!(satisfies(&value, &schema, &schema), "{schema}: {text}");
            ended += 1;
        }
    }
    assert!(ended * 10 > total * 9, "{ended} of {total}");
}

#[test]
fn json_mode_gives_an_object_or_any_value() {
    let mut rng = Rng::new(3);
    let (mut objects, mut others) = (0, 0);
    for _ in 0..30 {
        if let Some(text) = answer(&engine().compile(&Grammar::JsonObject).unwrap(), &mut rng) {
            assert!(serde_json::from_str::<Map<String, Value>>(&text).is_ok(), "{text}");
            objects += 1;
        }
        if let Some(text) = answer(&engine().compile(&Grammar::Json).unwrap(), &mut rng) {
            others += usize::from(!serde_json::from_str::<Value>(&text).unwrap().is_object());
        }
    }
    assert!(objects > 20 && others > 5, "{objects} {others}");
}

#[test]
fn a_choice_is_one_of_the_texts() {
    let choices = ["yes", "yes, but", "no", "a|b", "/x\\", "ü"].map(str::to_owned).to_vec();
    let constraint = engine().compile(&Grammar::Choices(choices.clone())).unwrap();
    let mut rng = Rng::new(1);
    let found: std::collections::BTreeSet<String> =
        (0..200).map(|_| answer_liking(&[], 0.0, &constraint, &mut rng).unwrap()).collect();
    assert_eq!(found, choices.into_iter().collect());
}

#[test]
fn anchors_around_a_regular_expression_say_nothing_new() {
    let mut rng = Rng::new(1);
    for (pattern, wanted) in [
        ("^ab$", "ab"),
        ("ab", "ab"),
        ("^a\\$", "a$"),
        ("", ""),
        ("^$", ""),
        ("a/b", "a/b"),
        ("a\nb", "a\nb"),
    ] {
        let constraint = engine().compile(&Grammar::Regex(pattern.into())).unwrap();
        assert_eq!(answer(&constraint, &mut rng).as_deref(), Some(wanted), "{pattern}");
    }
}

#[test]
fn tokens_are_part_of_lark_and_gbnf_grammars() {
    let mut rng = Rng::new(1);
    let id = token("<think>");
    for grammar in [
        Grammar::Lark("start: <think> /[ab]{2}/ </think>".into()),
        Grammar::Lark(format!("start: <[{id}]> /[ab]{{2}}/ </think>")),
        Grammar::Gbnf("root ::= <think> [ab]{2} </think>".into()),
        Grammar::Gbnf(format!("root ::= <[{id}]> [ab] [ab] </think>")),
    ] {
        let text = answer(&engine().compile(&grammar).unwrap(), &mut rng).unwrap();
        let inner = text.strip_prefix("<think>").and_then(|text| text.strip_suffix("</think>")).unwrap();
        assert!(inner.len() == 2 && inner.bytes().all(|byte| matches!(byte, b'a' | b'b')), "{text}");
    }
    // Any token but one.
    assert!(engine().compile(&Grammar::Gbnf("root ::= <think> !</think> </think>".into())).is_ok());
    for grammar in [Grammar::Lark("start: <nothing>".into()), Grammar::Gbnf("root ::= <nothing>".into())] {
        assert!(engine().compile(&grammar).err().unwrap().to_string().contains("nothing"));
    }
}

#[test]
fn a_constraint_begins_after_the_reasoning() {
    let think = || Some(ReasoningFormat::think());
    let verdict = Grammar::Choices(vec!["yes".into(), "no".into()]);
    let splitters = [
        ("open", ReasoningSplitter::new(think(), true).with_marked_markers()),
        ("possible", ReasoningSplitter::new(think(), false).with_marked_markers()),
        ("none", ReasoningSplitter::new(None, false)),
        ("harmony", ReasoningSplitter::new(Some(ReasoningFormat::Harmony), false).with_marked_markers()),
    ];
    for (name, splitter) in splitters {
        let constraint = engine().compile_answer(&verdict, &splitter, tokenizer()).unwrap();
        let mut rng = Rng::new(5);
        let (mut thought, mut ended) = (0, 0);
        for _ in 0..40 {
            let markers = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>"].map(token);
            let liked = if rng.chance(0.5) { &markers[..] } else { &markers[1..] };
            let Some(text) = answer_liking(liked, 6.0, &constraint, &mut rng) else { continue };
            ended += 1;
            let (before, verdict) = match name {
                "open" => text.split_once("</think>").unwrap(),
                "possible" => match text.strip_prefix("<think>") {
                    Some(text) => text.split_once("</think>").unwrap(),
                    None => ("", text.as_str()),
                },
                "harmony" => {
                    let (before, verdict) = text.rsplit_once("<|channel|>final").unwrap();
                    let verdict = verdict.trim_start_matches(' ').strip_prefix("<|message|>").unwrap();
                    assert!(before.is_empty() || before.ends_with("<|end|><|start|>assistant"), "{text}");
                    (before, verdict)
                }
                _ => ("", text.as_str()),
            };
            thought += usize::from(!before.is_empty());
            assert!(["yes", "no"].contains(&verdict.trim_start()), "{name}: {text:?}");
        }
        assert!(ended > 0 && (thought > 0) == (name != "none"), "{name}: {thought} of {ended}");
    }
}

#[test]
fn a_reasoning_marker_in_plain_text_ends_the_reasoning_where_there_is_no_token_for_it() {
    // Without the control tokens, markers are text in several tokens.
    let mut vocabulary = tokenizer().vocabulary().clone();
    for text in &mut vocabulary.tokens {
        if text.ends_with("think>") {
            *text = format!("{text}!");
        }
    }
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    let engine = ConstraintEngine::new(&tokenizer).unwrap();
    let splitter = ReasoningSplitter::new(Some(ReasoningFormat::think()), true);
    let constraint =
        engine.compile_answer(&Grammar::Choices(vec!["yes".into()]), &splitter, &tokenizer).unwrap();
    let mut hook = constraint.hook();
    let mut tokens = Vec::new();
    let allowed = |hook: &mut dyn quadriga_llm::sampling::SamplingHook, tokens: &[u32]| -> Vec<u32> {
        let mut logits = vec![0.0; tokenizer.token_count()];
        hook.apply(tokens, &mut logits).unwrap();
        (0u32..).zip(&logits).filter(|(_, logit)| **logit == 0.0).map(|(token, _)| token).collect()
    };
    assert!(allowed(&mut *hook, &tokens).len() > 150, "reasoning is free");
    tokens.extend(b"so </thin".map(u32::from));
    let free = allowed(&mut *hook, &tokens);
    assert!(free.len() > 150 && !free.contains(&tokenizer.vocabulary().eos.unwrap()));
    tokens.extend(b"k>".map(u32::from));
    let after = allowed(&mut *hook, &tokens);
    assert!(after.contains(&u32::from(b'y')) && !after.contains(&u32::from(b'n')), "{after:?}");
    tokens.extend(b"\nyes".map(u32::from));
    assert!(allowed(&mut *hook, &tokens).iter().all(|token| tokenizer.is_end(*token)));
}

#[test]
fn grammars_that_are_wrong_are_errors_that_say_why() {
    for (grammar, parts) in [
        (Grammar::JsonSchema(json!([])), &["JSON schema", "object or a boolean"][..]),
        (Grammar::JsonSchema(json!({ "type": "text" })), &["JSON schema", "text"]),
        (Grammar::JsonSchema(json!({ "type": "string", "pattern": "(" })), &["JSON schema", "regex"]),
        (Grammar::JsonSchema(json!({ "$ref": "#/$defs/none" })), &["JSON schema", "none"]),
        (
            Grammar::JsonSchema(json!({ "$ref": "https://example.com/schema" })),
            &["JSON schema", "example.com"],
        ),
        (
            Grammar::JsonSchema(json!({ "type": "array", "uniqueItems": true })),
            &["JSON schema", "uniqueItems"],
        ),
        (Grammar::JsonSchema(json!({ "not": { "type": "string" } })), &["JSON schema", "not"]),
        (Grammar::JsonSchema(json!({ "minimum": 3, "maximum": 2, "type": "integer" })), &["JSON schema"]),
        (Grammar::JsonSchema(json!(false)), &["JSON schema", "false"]),
        (
            Grammar::JsonSchema(json!({ "allOf": [{ "type": "string" }, { "type": "null" }] })),
            &["JSON schema"],
        ),
        (Grammar::Regex("(".into()), &["regular expression"]),
        (Grammar::Regex(r"(a)\1".into()), &["regular expression"]),
        (Grammar::Regex(r"a(?=b)".into()), &["regular expression"]),
        (Grammar::Lark("start: other".into()), &["Lark", "other"]),
        (Grammar::Lark("begin: \"a\"".into()), &["Lark", "start"]),
        (Grammar::Lark(String::new()), &["Lark"]),
        (Grammar::Gbnf("root ::= other".into()), &["GBNF", "line 1, column 10", "other"]),
        (Grammar::Gbnf("root ::= root \"a\"".into()), &["GBNF", "complete"]),
        (Grammar::Choices(Vec::new()), &["choices", "empty"]),
    ] {
        let Err(error) = engine().compile(&grammar) else { panic!("{grammar:?} is compiled") };
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{grammar:?}: {error}");
        assert!(!error.contains("backtrace") && error.len() < 2000, "{error}");
    }
}

/// A value within values.
fn nested(depth: usize, inner: Value, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(inner, |inner, _| wrap(inner))
}

#[test]
fn hostile_grammars_end_with_an_error_or_a_constraint() {
    let deep = |depth| nested(depth, json!({ "type": "null" }), |inner| json!({ "items": inner }));
    let chain: Map<String, Value> = (0..5000)
        .map(|at| (format!("d{at}"), json!({ "anyOf": [{ "$ref": format!("#/$defs/d{}", at + 1) }] })))
        .chain([("d5000".to_owned(), json!({}))])
        .collect();
    let doubling: Map<String, Value> = (0..60)
        .map(|at| {
            let next = json!({ "$ref": format!("#/$defs/d{}", at + 1) });
            (format!("d{at}"), json!({ "allOf": [{ "anyOf": [next, next] }, { "anyOf": [next, next] }] }))
        })
        .chain([("d60".to_owned(), json!({ "type": "object" }))])
        .collect();
    let many: Vec<String> = (0..50_000).map(|at| format!("value {at}")).collect();
    let crossed: Vec<Value> = (0..20)
        .map(|at| {
            let object =
                |name: String| json!({ "type": "object", "properties": { name: { "type": "string" } } });
            json!({ "anyOf": [object(format!("a{at}")), object(format!("b{at}")), object(format!("c{at}"))] })
        })
        .collect();
    let chain_of_rules: String = (0..8000).map(|at| format!("r{at}: r{}\n", at + 1)).collect();
    let chain_of_terminals: String = (0..8000).map(|at| format!("T{at}: T{} \"a\"\n", at + 1)).collect();
    let gbnf_chain: String = (0..20_000).map(|at| format!("r{at} ::= \"a\" r{}\n", at + 1)).collect();
    let refused = [
        Grammar::JsonSchema(deep(1000)),
        Grammar::JsonSchema(json!({ "$ref": "#/$defs/d0", "$defs": chain })),
        Grammar::JsonSchema(json!({ "allOf": crossed })),
        Grammar::Regex("(".repeat(100_000)),
        Grammar::Regex("a".repeat(2 << 20)),
        Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000))),
        Grammar::Gbnf(format!("root ::= {}", "(".repeat(100_000))),
        Grammar::Gbnf("root ::= ".to_owned() + &"[a-z]".repeat(200_000)),
        Grammar::Gbnf("root ::= \"a\"{100000}".into()),
    ];
    for grammar in refused {
        let text: String = format!("{grammar:?}").chars().take(100).collect();
        println!("{text}");
        let Err(error) = engine().compile(&grammar) else { panic!("{text} is compiled") };
        let error = error.to_string();
        assert!(error.len() < 4000, "{} …", error.chars().take(200).collect::<String>());
    }
    // These may be compiled or refused; each must come to an end, and so must its first mask.
    let others = [
        Grammar::JsonSchema(deep(100)),
        Grammar::JsonSchema(json!({ "$ref": "#/$defs/d0", "$defs": doubling })),
        Grammar::JsonSchema(json!({ "enum": many })),
        Grammar::JsonSchema(json!({ "$ref": "#" })),
        Grammar::JsonSchema(json!({ "type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}b" })),
        Grammar::JsonSchema(json!({ "allOf": [{ "$ref": "#" }] })),
        Grammar::JsonSchema(json!({ "properties": { "a": { "$ref": "#" } }, "required": ["a"] })),
        Grammar::JsonSchema(
            json!({ "type": "array", "minItems": 1_000_000_000, "items": { "type": "null" } }),
        ),
        Grammar::JsonSchema(json!({ "type": "string", "minLength": 1_000_000, "maxLength": 2_000_000 })),
        Grammar::JsonSchema(json!({ "type": "string", "pattern": "(a|aa)*b(c*c*c*)*d" })),
        Grammar::JsonSchema(json!({ "type": "number", "multipleOf": 1e-9, "minimum": -1e300 })),
        Grammar::Choices(many.clone()),
        Grammar::Regex("(a?){500}a{500}".into()),
        Grammar::Regex("(.*a){20}.{20}".into()),
        Grammar::Lark(format!("start: r0\n{chain_of_rules}r8000: \"a\"")),
        Grammar::Lark(format!("start: T0\n{chain_of_terminals}T8000: \"a\"")),
        Grammar::Gbnf(format!("root ::= r0\n{gbnf_chain}r20000 ::= \"b\"")),
        Grammar::Gbnf("root ::= root root | \"a\" | ".into()),
        Grammar::Gbnf("root ::= \"\"{10000}".into()),
    ];
    for grammar in others {
        let text = format!("{grammar:?}");
        println!("{}", text.chars().take(100).collect::<String>());
        if let Ok(constraint) = engine().compile(&grammar) {
            let mut logits = vec![0.0; tokenizer().token_count()];
            let _ = constraint.hook().apply(&[1], &mut logits);
        }
    }
}
