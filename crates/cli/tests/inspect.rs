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
