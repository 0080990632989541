//! Calls of tools in the formats of many families of models: found in their templates, parsed however they arrive, and
//! enforced by grammars.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(feature = "constraint")]

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_llm::constraint::{ConstraintEngine, Grammar};
use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments, ToolCall};
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};
use quadriga_llm::tools::{
    MAX_CALLS, Tool, ToolCallParser, ToolCallPiece, ToolChoice, ToolFormat, ToolRules,
};
use serde_json::{Value, json};

/// A family: its template, how it writes two calls (one, if it cannot write more), and its control tokens.
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) template: &'static str,
    pub(crate) output: &'static str,
    pub(crate) calls: usize,
    pub(crate) control: &'static [&'static str],
}

macro_rules! template {
    ($name:literal) => {
        include_str!(concat!("data/tool_templates/", $name, ".jinja"))
    };
}

pub(crate) const FAMILIES: &[Family] = &[
    Family {
        name: "hermes",
        template: template!("hermes"),
        output: "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>",
        calls: 2,
        control: &["<|im_start|>", "<|im_end|>"],
    },
    Family {
        name: "qwen_coder",
        template: template!("qwen_coder"),
        output: "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
                 </function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        calls: 2,
        control: &["<|im_start|>", "<|im_end|>"],
    },
    Family {
        name: "llama3",
        template: template!("llama3"),
        output: "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern\", \"days\": 2}}",
        calls: 1,
        control: &[
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|python_tag|>",
            "<|eot_id|>",
        ],
    },
    Family {
        name: "mistral",
        template: template!("mistral"),
        output: "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}, \
                 {\"name\": \"time\", \"arguments\": {}}]",
        calls: 2,
        control: &["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"],
    },
    Family {
        name: "mistral_args",
        template: template!("mistral_args"),
        output: "[TOOL_CALLS]weather[ARGS]{\"city\": \"Bern\", \"days\": 2}[TOOL_CALLS]time[ARGS]{}",
        calls: 2,
        control: &["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "</s>"],
    },
    Family {
        name: "deepseek_v3",
        template: template!("deepseek_v3"),
        output: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n\
                 {\"city\": \"Bern\", \"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n\
                 ```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls: 2,
        control: &[
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜end▁of▁sentence｜>",
        ],
    },
    Family {
        name: "deepseek_v31",
        template: template!("deepseek_v31"),
        output: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Bern\", \"days\": 2}\
                 <｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls: 2,
        control: &["<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>"],
    },
    Family {
        name: "deepseek_v32",
        template: template!("deepseek_v32"),
        output: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">\
                 Bern</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n\
                 </｜DSML｜invoke>\n<｜DSML｜invoke name=\"time\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        calls: 2,
        control: &["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
    },
    Family {
        name: "kimi_k2",
        template: template!("kimi_k2"),
        output: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
                 {\"city\": \"Bern\", \"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.time:1\
                 <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        calls: 2,
        control: &[
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_system|>",
            "<|im_middle|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|im_end|>",
        ],
    },
    Family {
        name: "lfm2",
        template: template!("lfm2"),
        output: "<|tool_call_start|>[weather(city=\"Bern\", days=2), time()]<|tool_call_end|>",
        calls: 2,
        control: &[
            "<|startoftext|>",
            "<|im_start|>",
            "<|tool_list_start|>",
            "<|tool_list_end|>",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            "<|im_end|>",
        ],
    },
    Family {
        name: "llama4_pythonic",
        template: template!("llama4_pythonic"),
        output: "[weather(city=\"Bern\", days=2), time()]",
        calls: 2,
        control: &[
            "<|begin_of_text|>",
            "<|header_start|>",
            "<|header_end|>",
            "<|python_start|>",
            "<|python_end|>",
            "<|eot|>",
        ],
    },
    Family {
        name: "glm45",
        template: template!("glm45"),
        output: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
                 <arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        calls: 2,
        control: &["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>"],
    },
    Family {
        name: "glm4",
        template: template!("glm4"),
        output: "weather\n{\"city\": \"Bern\", \"days\": 2}",
        calls: 1,
        control: &["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>"],
    },
    Family {
        name: "granite3",
        template: template!("granite3"),
        output: "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}, \
                 {\"name\": \"time\", \"arguments\": {}}]",
        calls: 2,
        control: &["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"],
    },
    Family {
        name: "phi4",
        template: template!("phi4"),
        output: "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}, \
                 {\"name\": \"time\", \"arguments\": {}}]<|/tool_call|>",
        calls: 2,
        control: &[
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|tool|>",
            "<|/tool|>",
            "<|tool_call|>",
            "<|/tool_call|>",
            "<|end|>",
        ],
    },
    Family {
        name: "command_r7b",
        template: template!("command_r7b"),
        output: "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \"Bern\", \
                 \"days\": 2}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"time\", \"parameters\": {}}\n]<|END_ACTION|>",
        calls: 2,
        control: &["<|START_OF_TURN_TOKEN|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|END_OF_TURN_TOKEN|>"],
    },
    Family {
        name: "gemma",
        template: template!("gemma"),
        output: "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>",
        calls: 2,
        control: &["<bos>", "<start_of_turn>", "<end_of_turn>"],
    },
];

pub(crate) fn definitions() -> Vec<Value> {
    let city = json!({ "type": "string" });
    let weather = json!({
        "type": "object",
        "properties": { "city": city, "days": { "type": "integer" } },
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let time = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    [("weather", weather), ("time", time)]
        .map(|(name, parameters)| {
            json!({ "type": "function", "function": { "name": name, "description": "d", "parameters": parameters } })
        })
        .to_vec()
}

pub(crate) fn tools() -> Arc<[Tool]> {
    definitions().iter().map(|definition| Tool::from_json(definition).unwrap()).collect()
}

/// Every byte, and control tokens, the last of which is the end.
pub(crate) fn tokenizer(family: &Family) -> Tokenizer {
    let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), TokenType::Byte));
    let control = family.control.iter().map(|name| ((*name).to_owned(), TokenType::Control));
    let (tokens, types): (Vec<String>, Vec<TokenType>) = bytes.chain(control).unzip();
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
}

/// The tokens of a text: control tokens and bytes.
fn encoded(family: &Family, text: &str) -> Vec<u32> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    while let Some(byte) = rest.bytes().next() {
        let control = family.control.iter().position(|control| rest.starts_with(control));
        match control {
            Some(number) => {
                tokens.push(256 + number as u32);
                rest = &rest[family.control[number].len()..];
            }
            None if rest.is_char_boundary(1) => {
                tokens.push(u32::from(byte));
                rest = &rest[1..];
            }
            None => {
                let letter = rest.chars().next().unwrap();
                tokens.extend(rest.bytes().take(letter.len_utf8()).map(u32::from));
                rest = &rest[letter.len_utf8()..];
            }
        }
    }
    tokens
}

pub(crate) fn template(family: &Family) -> ChatTemplate {
    ChatTemplate::new(family.template, "", "").unwrap()
}

pub(crate) fn format(family: &Family) -> ToolFormat {
    ToolFormat::of_template(&template(family), &[family.control.last().unwrap()])
}

pub(crate) fn calls(number: usize) -> Vec<ToolCall> {
    let weather = ToolCall::new("weather", json!({ "city": "Bern", "days": 2 }));
    [weather, ToolCall::new("time", json!({}))].into_iter().take(number).collect()
}

/// Parses a text in pieces of so many characters.
pub(crate) fn parsed(parser: &ToolCallParser, text: &str, size: usize) -> (String, Vec<ToolCallPiece>) {
    let mut parser = parser.clone();
    let letters: Vec<char> = text.chars().collect();
    let (mut answer, mut pieces) = (String::new(), Vec::new());
    let mut add = |part: quadriga_llm::tools::ToolText| {
        answer.push_str(&part.text);
        pieces.extend(part.calls);
    };
    for part in letters.chunks(size) {
        add(parser.push(&part.iter().collect::<String>()));
    }
    add(parser.finish());
    (answer, pieces)
}

#[test]
fn every_family_is_parsed_however_it_arrives() {
    for family in FAMILIES {
        let format = Arc::new(format(family));
        for certain in [false, true] {
            let mut parser = ToolCallParser::new(Arc::clone(&format), tools());
            if certain {
                parser = parser.with_certain_calls();
            }
            for size in [1, 2, 3, 7, 1000] {
                for before in ["", "Let me see."] {
                    // Calls without any text before them begin an answer.
                    if !before.is_empty() && ["llama3", "glm4", "llama4_pythonic"].contains(&family.name) {
                        continue;
                    }
                    let text =
                        format!("{before}{}{}", if before.is_empty() { "" } else { "\n" }, family.output);
                    let (answer, pieces) = parsed(&parser, &text, size);
                    let at = format!("{} in pieces of {size}, {certain}: {format:?}", family.name);
                    assert_eq!(answer, before, "{at}");
                    assert_eq!(ToolCallPiece::join(&pieces), calls(family.calls), "{at}");
                    assert!(
                        pieces.iter().filter(|piece| piece.name.is_some()).count() == family.calls,
                        "{at}"
                    );
                }
            }
        }
    }
}

/// The text of an answer is what the template adds to the prompt.
#[test]
fn calls_that_a_template_writes_are_parsed_again() {
    for family in FAMILIES {
        let (template, format) = (template(family), Arc::new(format(family)));
        let mut variables = serde_json::Map::new();
        variables.insert("tools".to_owned(), definitions().into());
        let render = |messages: &[Message], add_generation_prompt| {
            let messages = format.conversation(messages, &definitions());
            let arguments = TemplateArguments { add_generation_prompt, variables: variables.clone() };
            template.render_with(&messages, &arguments).unwrap()
        };
        let question = Message::new("user", "How is the weather?");
        let call = Message { tool_calls: calls(family.calls), ..Message::new("assistant", "") };
        let prompt = render(std::slice::from_ref(&question), true);
        let whole = render(&[question.clone(), call.clone()], false);
        for tool in ["weather", "time"] {
            assert!(prompt.contains(tool), "{}: the model is told of {tool}: {prompt}", family.name);
        }
        let end = family.control.last().unwrap();
        let added = whole
            .strip_prefix(prompt.trim_end())
            .unwrap_or_else(|| panic!("{}:\n{prompt}\n{whole}", family.name));
        let added = added.trim().strip_prefix("<think></think>").unwrap_or(added).trim();
        let added = added.strip_suffix(end).unwrap_or(added);
        let parser = ToolCallParser::new(Arc::clone(&format), tools());
        let (text, pieces) = parsed(&parser, added, 3);
        assert_eq!(
            (text.as_str(), ToolCallPiece::join(&pieces)),
            ("", calls(family.calls)),
            "{}: {added}",
            family.name
        );
        // And a result after it.
        let result = Message {
            tool_call_id: Some("x".into()),
            name: Some("weather".into()),
            ..Message::new("tool", "rain")
        };
        let prompt = render(&[question, call, result], true);
        assert!(prompt.contains("rain"), "{}: {prompt}", family.name);
    }
}

#[test]
fn what_is_almost_a_call_is_text() {
    let texts = [
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": }}\n</tool_call>",
        "<tool_call>\n{\"name\": \"weather\"",
        "<tool_call>",
        "<tool_ca",
        "<tool_call>\n[1]\n</tool_call> and more",
        "{\"name\": \"weather\"}",
        "[TOOL_CALLS] and [TOOL_CALLS] [ x",
        "{\"name\": 7, \"parameters\": {}}",
        "weather\nis nice",
        "<|tool_call|>[{]",
        "[weather(city=",
        "[weather(city=Bern)] and [time(",
        "<|tool_call_start|>[weather(3)]",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0 {}",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\"",
        "plain text\n",
    ];
    for family in FAMILIES {
        let parser = ToolCallParser::new(Arc::new(format(family)), tools());
        for text in texts {
            for size in [1, 4, 1000] {
                let (answer, pieces) = parsed(&parser, text, size);
                assert_eq!((answer.as_str(), pieces.len()), (text, 0), "{} in pieces of {size}", family.name);
            }
        }
    }
}

#[test]
fn random_output_never_breaks_a_parser() {
    let seed = 7;
    let mut rng = Rng::new(seed);
    for family in FAMILIES {
        let parser = ToolCallParser::new(Arc::new(format(family)), tools());
        let letters: Vec<char> = family.output.chars().collect();
        for _ in 0..300 {
            // A call with some characters dropped, doubled or replaced.
            let mut text = String::from("Well. ");
            for letter in &letters {
                match rng.below(60) {
                    0 => {}
                    1 => text.extend([*letter, *letter]),
                    2 => text.push(['{', '"', '<', 'é', '\n'][rng.below(5)]),
                    _ => text.push(*letter),
                }
            }
            let whole = parsed(&parser, &text, 10_000);
            let parts = parsed(&parser, &text, 1 + rng.below(5));
            let at = format!("{} of seed {seed}: {text}", family.name);
            assert_eq!(
                (&parts.0, ToolCallPiece::join(&parts.1)),
                (&whole.0, ToolCallPiece::join(&whole.1)),
                "{at}"
            );
        }
    }
}

/// A random model under a grammar; it likes the quotes, brackets and endings by which answers end.
pub(crate) fn generate(tokenizer: &Tokenizer, lark: &str, rng: &mut Rng) -> Option<String> {
    let engine = ConstraintEngine::new(tokenizer).unwrap();
    let constraint =
        engine.compile(&Grammar::Lark(lark.to_owned())).unwrap_or_else(|error| panic!("{error}\n{lark}"));
    let mut hook = constraint.hook();
    let mut tokens: Vec<u32> = vec![65];
    let mut text = Vec::new();
    for _ in 0..2000 {
        let mut logits: Vec<f32> = (0..tokenizer.token_count()).map(|_| rng.unit() as f32 * 8.0).collect();
        for byte in b"\"}]<\n/" {
            logits[usize::from(*byte)] += 5.0;
        }
        // Control tokens close what is open, and the end is better than another call.
        logits.iter_mut().skip(256).for_each(|logit| *logit += 12.0);
        for end in tokenizer.end_tokens() {
            logits[end as usize] += 10.0;
        }
        if lark.contains("\")\"") {
            logits[usize::from(b')')] += 5.0;
        }
        // It also likes to end what is between tags.
        for close in [&b"\n</parameter>"[..], b"</arg_value>", "</｜DSML｜parameter>".as_bytes()] {
            if !lark.contains(std::str::from_utf8(close).unwrap().trim()) {
                continue;
            }
            let begun = (0..close.len()).rev().find(|length| text.ends_with(&close[..*length])).unwrap_or(0);
            logits[usize::from(close[begun])] += if begun > 0 { 20.0 } else { 4.0 };
        }
        hook.apply(&tokens, &mut logits)
            .unwrap_or_else(|error| panic!("{error}\n{lark}\n{}", String::from_utf8_lossy(&text)));
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
        if tokenizer.is_end(best) {
            return Some(String::from_utf8(text).expect("whole characters"));
        }
        tokens.push(best);
        hook.accepted(&tokens);
        match tokenizer.piece(best).unwrap() {
            [] => text.extend_from_slice(tokenizer.vocabulary().tokens[best as usize].as_bytes()),
            piece => text.extend_from_slice(piece),
        }
    }
    None
}

/// Whether a call is one of the tools' with arguments of its schema.
fn is_valid(call: &ToolCall) -> bool {
    let Some(arguments) = call.arguments.as_object() else { return false };
    match call.name.as_str() {
        "weather" => {
            arguments.len() == 2
                && arguments["city"].is_string()
                && arguments["days"].as_f64().is_some_and(|days| days.fract() == 0.0)
        }
        "time" => arguments.is_empty(),
        _ => false,
    }
}

#[test]
fn grammars_give_valid_calls_and_only_those() {
    let seed = 11;
    let mut rng = Rng::new(seed);
    let tools = tools();
    for family in FAMILIES {
        let (tokenizer, format) = (tokenizer(family), Arc::new(format(family)));
        let parser = ToolCallParser::new(Arc::clone(&format), Arc::clone(&tools)).with_certain_calls();
        let named = ToolChoice::Named("weather".to_owned());
        for (choice, parallel) in [(ToolChoice::Required, true), (ToolChoice::Required, false), (named, true)]
        {
            let rules = ToolRules { tools: &tools, choice: choice.clone(), parallel, answer: None };
            let lark = format.grammar(&rules, &tokenizer).unwrap().unwrap();
            let mut ended = 0;
            for _ in 0..6 {
                let Some(text) = generate(&tokenizer, &lark, &mut rng) else { continue };
                ended += 1;
                let (answer, pieces) = parsed(&parser, &text, 5);
                let calls = ToolCallPiece::join(&pieces);
                let at = format!("{}, {choice:?}, seed {seed}: {text:?}", family.name);
                assert_eq!(answer, "", "{at}");
                assert!(!calls.is_empty() && calls.iter().all(is_valid), "{at}: {calls:?}");
                assert!(calls.len() <= if parallel { MAX_CALLS } else { 1 }, "{at}");
                if let ToolChoice::Named(name) = &choice {
                    assert_eq!((calls.len(), &calls[0].name), (1, name), "{at}");
                }
            }
            assert!(ended > 0, "{}: no answer ended\n{lark}", family.name);
        }
    }
}

/// With `auto` any text is allowed, and a call that has begun can only be completed.
#[test]
fn a_call_that_has_begun_is_completed() {
    let tools = tools();
    for family in FAMILIES {
        let (tokenizer, format) = (tokenizer(family), format(family));
        let rules = ToolRules { tools: &tools, choice: ToolChoice::Auto, parallel: true, answer: None };
        let Some(lark) = format.grammar(&rules, &tokenizer).unwrap() else {
            assert!(
                ["glm4", "llama4_pythonic"].contains(&family.name),
                "only a name begins the calls of {}",
                family.name
            );
            continue;
        };
        let engine = ConstraintEngine::new(&tokenizer).unwrap();
        let constraint = engine.compile(&Grammar::Lark(lark.clone())).unwrap();
        let allowed = |text: &str| -> bool {
            let mut hook = constraint.hook();
            let mut tokens = vec![65u32];
            for token in encoded(family, text).into_iter().chain(tokenizer.end_tokens().next()) {
                let mut logits = vec![0f32; tokenizer.token_count()];
                hook.apply(&tokens, &mut logits).unwrap();
                if logits[token as usize] == f32::NEG_INFINITY {
                    return false;
                }
                tokens.push(token);
            }
            true
        };
        assert!(allowed("Good morning! 1 < 2, [x], {y}"), "{}", family.name);
        assert!(allowed(family.output), "{}\n{lark}", family.name);
        let wrong = family.output.replace("weather", "wether");
        assert!(!allowed(&wrong), "{}: an unknown tool\n{lark}", family.name);
        let wrong =
            family.output.replace("Bern\", \"days\": 2", "Bern\", \"days\": \"x\"").replace(">2<", ">x<");
        let wrong = wrong.replace("\n2\n</parameter>", "\nx\n</parameter>").replace("days=2", "days=x");
        assert!(!allowed(&wrong), "{}: a wrong argument", family.name);
        let cut: String = family.output.chars().take(family.output.chars().count() / 2).collect();
        assert!(!allowed(&cut), "{}: half a call", family.name);
    }
}

/// Wherever the output is cut, the arguments so far are those of a call, and nothing of it is text.
#[test]
fn calls_that_are_cut_are_no_text() {
    let all = |pieces: &[ToolCallPiece]| {
        let mut calls: Vec<(String, String)> = Vec::new();
        for piece in pieces {
            match &piece.name {
                Some(name) => calls.push((name.clone(), piece.arguments.clone())),
                None => calls.last_mut().unwrap().1.push_str(&piece.arguments),
            }
        }
        calls
    };
    for family in FAMILIES {
        let parser = ToolCallParser::new(Arc::new(format(family)), tools()).with_certain_calls();
        let whole = all(&parsed(&parser, family.output, 1).1);
        let letters: Vec<char> = family.output.chars().collect();
        for end in 0..letters.len() {
            let text: String = letters[..end].iter().collect();
            for size in [1, 3, 1000] {
                let (answer, pieces) = parsed(&parser, &text, size);
                let at = format!("{}: {text:?} in pieces of {size}", family.name);
                assert!(answer.len() < 3 && text.starts_with(&answer), "{at}: {answer:?}");
                for (found, wanted) in all(&pieces).iter().zip(&whole) {
                    assert_eq!(found.0, wanted.0, "{at}");
                    assert!(wanted.1.starts_with(&found.1), "{at}: {found:?}");
                }
            }
        }
    }
    let hermes = ToolCallParser::new(Arc::new(format(&FAMILIES[0])), tools()).with_certain_calls();
    let cut = |text: &str| all(&parsed(&hermes, text, 2).1);
    let begun = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Be";
    assert_eq!(cut(begun), [("weather".to_owned(), "{\"city\": \"Be".to_owned())]);
    assert_eq!(cut("<tool_call>\n{\"name\": \"weath"), [], "its name is not complete");
}

#[test]
fn python_tags_are_calls_too() {
    let family = FAMILIES.iter().find(|family| family.name == "llama3").unwrap();
    let parser = ToolCallParser::new(Arc::new(format(family)), tools());
    let call = |text: &str| ToolCallPiece::join(&parsed(&parser, text, 2).1);
    let wanted = vec![ToolCall::new("brave_search", json!({ "query": "rain, in (Bern)" }))];
    assert_eq!(call("<|python_tag|>brave_search.call(query=\"rain, in (Bern)\")"), wanted);
    assert_eq!(
        call("<|python_tag|>{\"name\": \"time\", \"parameters\": {}}"),
        vec![ToolCall::new("time", json!({}))]
    );
    let text = "<|python_tag|>print(1)";
    assert_eq!(parsed(&parser, text, 2), (text.to_owned(), Vec::new()), "there is no tool for programs");
}

/// Python has more ways to write a value than JSON.
#[test]
fn values_of_python_are_values_of_json() {
    let family = FAMILIES.iter().find(|family| family.name == "llama4_pythonic").unwrap();
    let parser = ToolCallParser::new(Arc::new(format(family)), tools());
    let wanted = vec![ToolCall::new(
        "weather",
        json!({ "city": "St. Mary's", "days": 2, "units": ["C", null], "wind": true }),
    )];
    for text in [
        "[weather(city='St. Mary\\'s', days=2, units=['C', None], wind=True)]",
        "[weather(city=\"St. Mary's\",days=2,units=(\"C\", null),wind=true)]",
        "<|python_start|>[weather(city=\"St. Mary's\", days = 2, units=[\"C\", None,], wind=True)]",
    ] {
        for size in [1, 3, 1000] {
            let (answer, pieces) = parsed(&parser, text, size);
            assert_eq!((answer.as_str(), ToolCallPiece::join(&pieces)), ("", wanted.clone()), "{text}");
        }
    }
    // A function that nobody defined is no call, and neither is one without names of arguments.
    for text in ["[rain(city='Bern')]", "[weather('Bern')]"] {
        assert_eq!(parsed(&parser, text, 2), (text.to_owned(), Vec::new()));
    }
}

/// Kimi's template writes identifiers, and results refer to them.
#[test]
fn identifiers_are_those_that_the_model_writes() {
    let family = FAMILIES.iter().find(|family| family.name == "kimi_k2").unwrap();
    let format = format(family);
    let called = |ids: [&str; 2]| {
        let calls =
            calls(2).into_iter().zip(ids).map(|(call, id)| ToolCall { id: Some(id.to_owned()), ..call });
        Message { tool_calls: calls.collect(), ..Message::new("assistant", "") }
    };
    let result = |id: &str| Message { tool_call_id: Some(id.to_owned()), ..Message::new("tool", "rain") };
    let messages =
        [called(["call_a", "call_b"]), result("call_b"), called(["call_a", "call_c"]), result("call_a")];
    let written = format.conversation(&messages, &definitions());
    let id = |message: usize, call: usize| written[message].tool_calls[call].id.clone().unwrap();
    assert_eq!([id(0, 0), id(0, 1)], ["functions.weather:0", "functions.time:1"]);
    assert_eq!([id(2, 0), id(2, 1)], ["functions.weather:2", "functions.time:3"]);
    assert_eq!(written[1].tool_call_id.as_deref(), Some("functions.time:1"));
    assert_eq!(written[3].tool_call_id.as_deref(), Some("functions.weather:2"));
}
