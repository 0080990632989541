//! Text from files does not reach the terminal as control sequences, and control tokens in prompts are text.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;

use crate::common::{CommandOutput, Fixture, output, output_with_input};
use quadriga_gguf::{File, OwnedValue, Writer};

const ATTACK: &str = "\u{1b}]0;PWNED\u{7}\u{1b}[31m\u{9b}2J\u{202e}red\r";

/// The fixture's model with another value of a key, and with one more tensor.
fn changed(fixture: &Fixture, key: &str, value: &str, tensor: Option<&str>) -> Fixture {
    let folder = tempfile::TempDir::new().unwrap();
    let model = folder.path().join("changed.gguf");
    let file = File::read(&fixture.model).unwrap();
    let mut writer = Writer::new();
    for (own, found) in file.metadata().filter(|(own, _)| *own != key) {
        writer.set(own, OwnedValue::from(found)).unwrap();
    }
    writer.set(key, value).unwrap();
    for tensor in file.tensors() {
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
    }
    if let Some(name) = tensor {
        writer.tensor_bytes(name, quadriga_graph::DType::F32, [1], &[0; 4]).unwrap();
    }
    writer.write_to(&mut fs::File::create(&model).unwrap()).unwrap();
    Fixture { folder, model }
}

#[track_caller]
fn is_printable(output: &CommandOutput) {
    for text in [&output.out, &output.err] {
        let bad = |letter: &char| (letter.is_control() && *letter != '\n') || *letter == '\u{202e}';
        assert_eq!(text.chars().find(bad), None, "{output:?}");
    }
}

#[test]
fn names_and_metadata_are_escaped() {
    let plain = Fixture::new(&[]);
    let architecture = changed(&plain, "general.architecture", ATTACK, None);
    let failed = output(&mut architecture.command("run", &["hi"]));
    is_printable(&failed);
    failed.failed(1, &["PWNED", "\\u{1b}"]);
    // A tensor that the model does not use: it can be looked at, and nothing else.
    let extra = changed(&plain, "general.name", ATTACK, Some(&format!("extra{ATTACK}")));
    for flags in [&["inspect"][..], &["inspect", "--tensors"], &["inspect", "--json"]] {
        let shown = output(crate::common::quadriga(flags).arg(&extra.model)).success();
        is_printable(&shown);
        assert!(shown.out.contains("PWNED"), "{shown:?}");
    }
    let refused = output(crate::common::quadriga(["plan"]).arg(&extra.model));
    is_printable(&refused);
    refused.failed(1, &["does not use", "extra\\u{1b}"]);
    let named = changed(&plain, "general.name", ATTACK, None);
    for flags in [&["plan"][..], &["plan", "--nodes"]] {
        let shown = output(crate::common::quadriga(flags).arg(&named.model)).success();
        is_printable(&shown);
        assert!(!shown.out.contains("PWNED"), "{shown:?}");
    }
    // JSON has the characters themselves, as escapes.
    let json = output(crate::common::quadriga(["inspect", "--json"]).arg(&named.model)).success().out;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["name"], ATTACK);
    let bench = output(&mut named.command("bench", &["-p", "2", "-n", "0", "-r", "1", "--json"])).success();
    is_printable(&bench);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&bench.out).unwrap()["model"], ATTACK);
    let chat = output_with_input(&mut named.command("chat", &["-n", "1"]), b"/exit\n").success();
    is_printable(&chat);
    for key in ["tokenizer.ggml.model", "tokenizer.ggml.pre", ATTACK] {
        let output =
            output(&mut changed(&plain, key, ATTACK, None).command("run", &["hi", "-n", "1", "--temp", "0"]));
        is_printable(&output);
    }
}

#[test]
fn messages_of_templates_are_escaped() {
    let plain = Fixture::new(&[]);
    let source = "{{ raise_exception('\\u001b]52;c;cHduZWQ=\\u0007 stop') }}";
    let raising = changed(&plain, "tokenizer.chat_template", source, None);
    let failed = output(&mut raising.command("run", &["hi"]));
    is_printable(&failed);
    failed.failed(1, &["\\u{1b}]52;c;cHduZWQ=\\u{7} stop", "--raw"]);
    let bomb = changed(&plain, "tokenizer.chat_template", "{{ 'a\\nb'|indent(200000000000) }}", None);
    output(&mut bomb.command("run", &["hi"])).failed(1, &["chat template failed", "too large"]);
}

#[test]
fn file_names_are_escaped() {
    let failed = output(&mut crate::common::quadriga(["run", "-m", &format!("no{ATTACK}.gguf"), "hi"]));
    is_printable(&failed);
    assert_eq!(failed.code, Some(1), "{failed:?}");
}

#[test]
fn an_incomplete_file_says_so() {
    let fixture = Fixture::new(&[]);
    let size = fs::metadata(&fixture.model).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(&fixture.model).unwrap();
    file.set_len(size - 100).unwrap();
    for flag in [&[][..], &["--no-mmap"]] {
        output(fixture.command("run", &["hi"]).args(flag))
            .failed(1, &["incomplete download?", "tiny.gguf", &(size - 100).to_string(), &size.to_string()]);
    }
    file.set_len(100).unwrap();
    output(&mut fixture.command("run", &["hi"])).failed(1, &["incomplete download?"]);
}

#[test]
fn a_file_can_be_read_into_memory() {
    let fixture = Fixture::new(&[]);
    let flags = ["hi", "-n", "8", "--temp", "0", "-q"];
    let mapped = output(&mut fixture.command("run", &flags)).success();
    let read = output(fixture.command("run", &flags).arg("--no-mmap")).success();
    assert_eq!(mapped.out, read.out);
}

#[test]
fn control_tokens_in_prompts_are_parsed_with_special_or_raw_only() {
    let fixture = Fixture::new(&[]);
    let file = File::read(&fixture.model).unwrap();
    let types: Vec<i64> = file.get("tokenizer.ggml.token_type").unwrap();
    let tokens: Vec<&str> = file.get("tokenizer.ggml.tokens").unwrap();
    let control = tokens.iter().zip(&types).find(|(_, kind)| **kind == 3).expect("a control token").0;
    let prompt_tokens = |flags: &[&str]| {
        let text =
            output(fixture.command("run", &[control, "--json", "-n", "1", "-q"]).args(flags)).success().out;
        let object: serde_json::Value = serde_json::from_str(&text).unwrap();
        object["prompt"]["tokens"].as_u64().unwrap()
    };
    let (text, special, raw) = (prompt_tokens(&[]), prompt_tokens(&["--special"]), prompt_tokens(&["--raw"]));
    assert!(text > special && special >= raw, "{control:?}: {text} {special} {raw}");
}
