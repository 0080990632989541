//! Answers of a model that writes a script, token by token, as far as the grammar of a request lets it: calls whose marks are
//! tokens, reasoning, stop strings over both, and answers that are cut.
#![cfg(feature = "constraint")]

use std::sync::Arc;

use quadriga_llm::sampling::{HookError, SamplingHook};
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request};
use quadriga_llm::template::{Message, ToolCall};
use quadriga_llm::tools::{Tool, ToolCallPiece, ToolChoice, ToolRules};
use quadriga_llm::{EngineOptions, GeneratorOptions, Model};
use quadriga_runtime::Scheduler;

use crate::common::{Recipe, cpu};
use crate::tool_calls::{FAMILIES, Family, calls, tools};

/// Types of tokens in model files.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// A model with a token for every byte and these special ones, the last of which ends answers.
fn model(template: &str, special: &[(&str, i32)]) -> Model {
    let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 6));
    let special = special.iter().map(|(name, kind)| ((*name).to_owned(), *kind));
    let (tokens, types): (Vec<String>, Vec<i32>) = bytes.chain(special).unzip();
    let count = tokens.len();
    let recipe = Recipe { vocabulary: count, context: 2048, seed: 3, ..Recipe::new("llama") };
    let mut parts = recipe.parts();
    parts.set("tokenizer.ggml.model", "llama");
    parts.set("tokenizer.ggml.tokens", tokens.iter().map(String::as_str).collect::<Vec<_>>());
    parts.set("tokenizer.ggml.token_type", types);
    parts.set("tokenizer.ggml.scores", vec![0f32; count]);
    parts.set("tokenizer.ggml.eos_token_id", count as u32 - 1);
    parts.set("tokenizer.ggml.add_bos_token", false);
    parts.set("tokenizer.chat_template", template);
    parts.model().unwrap()
}

/// Within the name of a special token in a script, where it is text.
const SPELLED: char = '\u{1}';

/// The tokens of a text, special ones where it names them, and the end.
fn script(special: &[(&str, i32)], text: &str) -> Vec<u32> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    while let Some(letter) = rest.chars().next() {
        let number = special.iter().position(|(name, _)| rest.starts_with(name));
        let length = match number {
            Some(number) => special[number].0.len(),
            None => letter.len_utf8(),
        };
        match number {
            Some(number) => tokens.push(256 + number as u32),
            None if letter == SPELLED => {}
            None => tokens.extend(rest.bytes().take(length).map(u32::from)),
        }
        rest = &rest[length..];
    }
    tokens.push(255 + special.len() as u32);
    tokens
}

/// Forces the tokens of a script; one that a grammar excludes is an error.
struct Script {
    tokens: Vec<u32>,
    prompt: Option<usize>,
}

impl SamplingHook for Script {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        let at = tokens.len() - *self.prompt.get_or_insert(tokens.len());
        let next = self.tokens[at] as usize;
        if logits[next] == f32::NEG_INFINITY {
            return Err(format!("token {next} at {at} is excluded").into());
        }
        logits.fill(f32::NEG_INFINITY);
        logits[next] = 0.0;
        Ok(())
    }
}

#[derive(Debug, Default, PartialEq)]
struct Scripted {
    text: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

impl Scripted {
    fn joined(&self) -> Vec<ToolCall> {
        let pieces = self.calls.iter().enumerate().map(|(index, (name, arguments))| ToolCallPiece {
            index,
            name: Some(name.clone()),
            arguments: arguments.clone(),
        });
        ToolCallPiece::join(&pieces.collect::<Vec<_>>())
    }
}

/// How a script is run.
struct Run<'a> {
    special: &'a [(&'a str, i32)],
    /// Whether a grammar keeps calls valid.
    constrained: bool,
    stop: Option<&'a str>,
    max_tokens: Option<usize>,
}

fn batcher(model: &Model) -> Batcher {
    let engine = EngineOptions { context: 2048, sequences: 1, batch: 128, ..EngineOptions::default() };
    let options = BatcherOptions { engine, token_time: None, ..BatcherOptions::default() };
    Batcher::new(model.clone(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).unwrap()
}

fn answer(batcher: &mut Batcher, model: &Model, text: &str, run: &Run<'_>) -> Scripted {
    let options = GeneratorOptions::default();
    let mut request = Request::chat(model, &options, &[Message::new("user", "x")]).unwrap();
    let tools = tools();
    if run.constrained {
        let rules = ToolRules { tools: &tools, choice: ToolChoice::Auto, parallel: true, answer: None };
        request.constrain_tools(model, &rules).unwrap();
    } else {
        request.tool_calls = Some(model.tool_call_parser(Arc::<[Tool]>::clone(&tools)).unwrap());
    }
    request.stops = run.stop.map(str::to_owned).into_iter().collect();
    request.max_tokens = run.max_tokens;
    request.add_hook(Box::new(Script { tokens: script(run.special, text), prompt: None }));
    batcher.submit(request).unwrap();
    let mut found = Scripted::default();
    while batcher.is_busy() {
        for (_, event) in batcher.step() {
            match event {
                Event::Token { piece, .. } => {
                    found.text.push_str(&piece.text);
                    found.reasoning.push_str(&piece.reasoning);
                    for call in piece.tool_calls {
                        match call.name {
                            Some(name) => found.calls.push((name, call.arguments)),
                            None => found.calls.last_mut().unwrap().1.push_str(&call.arguments),
                        }
                    }
                }
                Event::Failed(error) => panic!("{text:?}: {error}"),
                _ => {}
            }
        }
    }
    found
}

/// The control tokens of a family, and all tags of its calls.
fn special(family: &Family) -> Vec<(&'static str, i32)> {
    let mut all: Vec<&'static str> = Vec::new();
    let mut rest = family.output;
    while let Some(start) = rest.find("<|").into_iter().chain(rest.find("<｜")).min() {
        let tag = &rest[start..];
        let end = tag.find('>').unwrap() + 1;
        all.push(&tag[..end]);
        rest = &tag[end..];
    }
    all.retain(|tag| !tag.contains("DSML") && !family.control.contains(tag));
    all.sort_unstable();
    all.dedup();
    all.into_iter().chain(family.control.iter().copied()).map(|name| (name, CONTROL)).collect()
}

#[test]
fn calls_whose_marks_are_tokens_are_whole() {
    for family in FAMILIES {
        let special = special(family);
        let model = model(family.template, &special);
        let mut batcher = batcher(&model);
        let is_anchored = ["llama3", "glm4", "llama4_pythonic"].contains(&family.name);
        for constrained in [false, true] {
            for before in ["", "Hi.\n"] {
                // A stop string that is never found holds text back all the same.
                for stop in [None, Some("<|tool_call_begin|>x")] {
                    if is_anchored && !before.is_empty() {
                        continue;
                    }
                    let run = Run { special: &special, constrained, stop, max_tokens: None };
                    let found = answer(&mut batcher, &model, &format!("{before}{}", family.output), &run);
                    let at = format!("{}, {constrained}, {stop:?}: {found:?}", family.name);
                    assert_eq!(
                        (found.text.as_str(), found.joined()),
                        (before.trim_end(), calls(family.calls)),
                        "{at}"
                    );
                }
            }
        }
    }
}

#[test]
fn answers_that_are_cut_have_no_part_of_a_call() {
    for (name, constrained) in [("glm4", true), ("llama4_pythonic", true), ("deepseek_v32", true)] {
        let family = FAMILIES.iter().find(|family| family.name == name).unwrap();
        let special: Vec<(&str, i32)> = family.control.iter().map(|name| (*name, CONTROL)).collect();
        let model = model(family.template, &special);
        let mut batcher = batcher(&model);
        let run = |max_tokens| Run { special: &special, constrained, stop: None, max_tokens };
        let whole = answer(&mut batcher, &model, family.output, &run(None)).calls;
        let tokens = script(&special, family.output);
        for (end, next) in tokens.iter().enumerate().take(tokens.len() - 1).skip(1) {
            // Where most characters have one byte, those of several are cut.
            let is_cut = (128..256).contains(next) && next & 0xc0 == 0x80;
            if name == "deepseek_v32" && !is_cut {
                continue;
            }
            let found = answer(&mut batcher, &model, family.output, &run(Some(end)));
            let at = format!("{name}, {end} tokens: {found:?}");
            // Up to its end, a name alone is text.
            let is_text = found.text.len() < 3 || name == "glm4" && "weather".starts_with(&found.text);
            assert!(family.output.starts_with(&found.text) && is_text, "{at}");
            for (cut, whole) in found.calls.iter().zip(&whole) {
                assert!(cut.0 == whole.0 && whole.1.starts_with(&cut.1), "{at}");
            }
            let is_begun = family.output.find("Be").is_some_and(|begun| end > begun);
            assert!(!found.calls.is_empty() || !is_begun || name == "deepseek_v32", "{at}");
        }
    }
}

const HERMES: &str = include_str!("data/tool_templates/hermes.jinja");

#[test]
fn naming_a_call_while_thinking_calls_nothing() {
    let thinking = "Should I write <tool_call> here? No.";
    let call = "<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
    for kind in [None, Some(CONTROL), Some(USER_DEFINED)] {
        let marks = kind.map(|kind| [("<tool_call>", kind), ("</tool_call>", kind)]);
        let special: Vec<(&str, i32)> =
            marks.into_iter().flatten().chain([("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]).collect();
        let model = model(HERMES, &special);
        let mut batcher = batcher(&model);
        // A control token cannot be in reasoning, but its text can.
        let spelled = format!("<tool{SPELLED}_call>");
        let written = if kind == Some(CONTROL) {
            thinking.replace("<tool_call>", &spelled)
        } else {
            thinking.to_owned()
        };
        let run = Run { special: &special, constrained: true, stop: None, max_tokens: None };
        for before in ["", "\n"] {
            let reasoning = format!("{before}<think>\n{written}\n</think>\n\n");
            let found = answer(&mut batcher, &model, &format!("{reasoning}Done now"), &run);
            assert_eq!((found.reasoning.as_str(), found.text.as_str()), (thinking, "Done now"), "{kind:?}");
            let found = answer(&mut batcher, &model, &format!("{reasoning}{call}"), &run);
            assert_eq!((found.reasoning.as_str(), found.text.as_str()), (thinking, ""), "{kind:?}");
            assert_eq!(found.calls, [("time".to_owned(), "{}".to_owned())], "{kind:?}");
        }
        // Text that only begins like the mark is an answer, and so is what comes before a call.
        for text in ["<thi", "<thing> and more", "Hi <think>"] {
            let found = answer(&mut batcher, &model, text, &run);
            assert_eq!((found.reasoning.as_str(), found.text.as_str()), ("", text), "{kind:?}");
            let found = answer(&mut batcher, &model, &format!("{text}\n{call}"), &run);
            assert_eq!((found.text.as_str(), found.calls.len()), (text, 1), "{kind:?}");
        }
    }
}

#[test]
fn marks_of_calls_are_not_in_reasoning() {
    let special = [
        ("<think>", CONTROL),
        ("</think>", CONTROL),
        ("<tool_call>", CONTROL),
        ("<|im_start|>", CONTROL),
        ("<|im_end|>", CONTROL),
    ];
    let model = model(HERMES, &special);
    let run = Run { special: &special, constrained: false, stop: None, max_tokens: None };
    let text = "<think>\nShould I write <tool_call>? No.\n</think>\n\nDone";
    let found = answer(&mut batcher(&model), &model, text, &run);
    assert_eq!(found.reasoning, "Should I write <tool_call>? No.");
    assert_eq!(found.text, "Done");
}

#[test]
fn stop_strings_are_found_over_marks() {
    let text = "<think>\nhmm.\n</think>\n\nAnswer.\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
    for kind in [None, Some(CONTROL), Some(USER_DEFINED)] {
        let marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
        let marks = kind.map(|kind| marks.map(|mark| (mark, kind)));
        let special: Vec<(&str, i32)> =
            marks.into_iter().flatten().chain([("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]).collect();
        let model = model(HERMES, &special);
        let mut batcher = batcher(&model);
        for (stop, reasoning, answered, calls) in [
            ("</think>", "hmm.", "", 0),
            ("\n</think>", "hmm.", "", 0),
            (".\n</think>\n", "hmm", "", 0),
            ("</think>\n\nA", "hmm.", "", 0),
            ("\n<tool_call>", "hmm.", "Answer.", 0),
            ("<tool_call>", "hmm.", "Answer.", 0),
            (".\n<tool_call>\n{", "hmm.", "Answer", 0),
            ("}\n</tool_call>", "hmm.", "Answer.", 1),
            ("</tool_call>", "hmm.", "Answer.", 1),
            ("<|no|>", "hmm.", "Answer.", 1),
        ] {
            let run = Run { special: &special, constrained: true, stop: Some(stop), max_tokens: None };
            let found = answer(&mut batcher, &model, text, &run);
            let at = format!("{stop:?} with {kind:?}");
            assert_eq!((found.reasoning.as_str(), found.text.trim_end()), (reasoning, answered), "{at}");
            assert_eq!(found.calls.len(), calls, "{at}");
        }
    }
}
