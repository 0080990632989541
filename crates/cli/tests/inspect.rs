//! Output of `quadriga inspect`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::{
    path::Path,
    process::{Command, Output},
};

use quadriga_gguf::Writer;
use quadriga_graph::DType;

fn inspect(path: &Path, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quadriga")).arg("inspect").arg(path).args(flags).output().unwrap()
}

fn model(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("tiny.gguf");
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap().set("general.name", "Tiny").unwrap();
    writer.set("llama.context_length", 8192u32).unwrap().set("llama.rope.freq_base", 0.1f32).unwrap();
    writer.set("tokenizer.ggml.model", "gpt2").unwrap().set("tokenizer.ggml.tokens", ["a", "b"]).unwrap();
    writer.set("not.a.number", f32::NAN).unwrap();
    writer.tensor_bytes("token_embd.weight", DType::Q8_0, [2, 32], &[0; 68]).unwrap();
    writer.write(&path).unwrap();
    path
}

#[test]
fn a_summary_is_printed_and_tensors_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let text = |flags: &[&str]| {
        let output = inspect(&path, flags);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let summary = text(&[]);
    for part in ["llama", "Tiny", "8192", "gpt2, 2 tokens", "Q8_0", "8.50 bits"] {
        assert!(summary.contains(part), "{part:?} is not in\n{summary}");
    }
    assert!(!summary.contains("token_embd.weight"));
    let table = text(&["--tensors"]);
    let row = table.lines().find(|line| line.starts_with("token_embd.weight")).unwrap();
    assert!(row.contains("Q8_0") && row.contains("[2, 32]") && row.contains("68"), "{row}");
}

#[test]
fn what_is_special_and_whether_it_is_supported_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let of = |architecture: &str| {
        let line = ["synth", "--arch", architecture, "--layers", "4", "-o"];
        let synth = Command::new(env!("CARGO_BIN_EXE_quadriga")).args(line).arg(&path).output().unwrap();
        assert!(synth.status.success(), "{synth:?}");
        let shown = String::from_utf8(inspect(&path, &[]).stdout).unwrap();
        assert!(shown.contains("supported        yes"), "{shown}");
        shown
    };
    for (architecture, part) in [
        ("bert", "pooling          mean"),
        ("gpt-oss", "sliding window   128 tokens in 2 of 4 layers"),
        ("qwen3moe", "experts          2 of 4 of width 64, in 4 of 4 layers"),
        ("deepseek2", "latent attention rank 32, 16 rotated elements, cached as one vector"),
        ("qwen35", "recurrent        3 of 4 layers, a state of "),
    ] {
        let shown = of(architecture);
        assert!(shown.contains(part), "{part:?} is not in\n{shown}");
    }
    let mut writer = Writer::new();
    writer.set("general.architecture", "abacus").unwrap();
    writer.write(&path).unwrap();
    let shown = String::from_utf8(inspect(&path, &[]).stdout).unwrap();
    assert!(shown.contains("no: architecture \"abacus\" is not supported yet"), "{shown}");
    let list =
        Command::new(env!("CARGO_BIN_EXE_quadriga")).args(["inspect", "--architectures"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let names: Vec<&str> = list.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.is_sorted() && names.len() == quadriga_llm::models::architectures().count(), "{list}");
    assert!(list.contains("bert           all-MiniLM, bge, e5"), "{list}");
    // The README lists the same.
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).unwrap();
    for name in names {
        assert!(readme.contains(&format!("`{name}`")), "README.md lacks {name}");
    }
}

#[test]
fn everything_is_printed_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let output = inspect(&model(folder.path()), &["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(json["metadata"]["llama.context_length"], 8192);
    assert_eq!(json["metadata"]["llama.rope.freq_base"], 0.1);
    assert_eq!(json["metadata"]["tokenizer.ggml.tokens"][1], "b");
    assert!(json["metadata"]["not.a.number"].is_null());
    assert_eq!(json["types"]["Q8_0"]["bytes"], 68);
    assert_eq!(json["tensors"][0]["shape"], serde_json::json!([2, 32]));
}

#[test]
fn a_file_that_is_not_gguf_is_an_error_on_stderr() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.gguf");
    std::fs::write(&path, "just some text").unwrap();
    let output = inspect(&path, &[]);
    assert!(!output.status.success() && output.stdout.is_empty());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("text.gguf: magic at byte 0: not a GGUF file"), "{message}");
}
