//! Outputs of the model commands: none is one of the inputs, whatever its name, and wrong ones are refused before the work.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::{CommandOutput, Fixture, output, quadriga};
use quadriga_gguf::{File, ValueType, Writer};
use quadriga_graph::DType;

fn run(arguments: &[&str]) -> CommandOutput {
    output(&mut quadriga(arguments))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A small model and a text.
fn fixture() -> (Fixture, PathBuf) {
    let fixture = Fixture::new(&["--type", "f16", "--width", "256", "--heads", "4", "--vocab", "300"]);
    let file = fixture.path("text.txt");
    fs::write(&file, "The quick brown fox jumps over the lazy dog. 0123456789\n".repeat(8)).unwrap();
    (fixture, file)
}

/// The names and contents of a folder.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    found.sort();
    found
}

#[test]
fn an_output_is_none_of_the_inputs() {
    let (fixture, file) = fixture();
    let model = text(&fixture.model);
    let (soft, hard, matrix) = (fixture.path("soft"), fixture.path("hard"), fixture.path("matrix.gguf"));
    symlink(&fixture.model, &soft).unwrap();
    fs::hard_link(&fixture.model, &hard).unwrap();
    run(&["imatrix", "-q", "-m", model, "-f", text(&file), "--chunk-size", "64", "-o", text(&matrix)])
        .success();
    run(&["split", "--split-max-tensors", "8", model, text(&fixture.path("part"))]).success();
    let parts = File::open(fixture.path("tiny.gguf")).unwrap().tensor_count().div_ceil(8);
    let part = |number: usize| fixture.path(&format!("part-{number:05}-of-{parts:05}.gguf"));
    let (first, second) = (part(1), part(2));
    let before = contents(fixture.folder.path());
    let (soft, hard, matrix) = (text(&soft), text(&hard), text(&matrix));
    let (first, second, file) = (text(&first), text(&second), text(&file));
    let whole = fixture.path("part.gguf");
    for line in [
        &["quantize", model, model, "Q4_0"][..],
        &["quantize", model, soft, "Q4_0"],
        &["quantize", model, hard, "Q4_0"],
        &["quantize", soft, model, "Q4_0"],
        &["quantize", first, second, "Q4_0"],
        &["quantize", "--keep-split", first, text(&whole), "Q4_0"],
        &["quantize", "--imatrix", matrix, model, matrix, "Q4_0"],
        &["quantize", "--check-text", file, model, file, "Q4_0"],
        &["quantize", "--fit", "1M", model, hard],
        &["imatrix", "-m", model, "-f", file, "-o", model],
        &["imatrix", "-m", model, "-f", file, "-o", file],
        &["imatrix", "-m", first, "-f", file, "-o", second],
        &["compare", "--html", model, model, hard],
        &["compare", "--html", file, "-f", file, model, hard],
    ] {
        run(line).failed(2, &["would be overwritten", "name another file"]);
        assert!(contents(fixture.folder.path()) == before, "{line:?} changed a file");
    }
    // Merging adapters and parts, too.
    let merged = run(&["merge", first, second]);
    merged.failed(1, &["would be overwritten"]);
    let adapter = fixture.path("adapter.gguf");
    write_adapter(&adapter, 1.0);
    for out in [model, text(&adapter)] {
        run(&["lora", "-m", model, "--lora", text(&adapter), "-o", out]).failed(2, &["would be overwritten"]);
    }
    // What cannot be read or written is told before the work.
    let none = fixture.path("none/x");
    run(&["imatrix", "-m", model, "-f", file, "-o", text(&none)]).failed(1, &["no folder"]);
    run(&["quantize", model, text(&none), "Q4_0"]).failed(1, &["no folder"]);
    run(&["quantize", "--check-text", text(&none), model, text(&fixture.path("o")), "Q4_0"])
        .failed(1, &["none/x"]);
    assert!(!fixture.path("o").exists());
}

/// A LoRA adapter of one matrix.
fn write_adapter(path: &Path, alpha: f32) {
    let values = vec![0; 4 * 256];
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap().set("general.type", "adapter").unwrap();
    writer.set("adapter.type", "lora").unwrap().set("adapter.lora.alpha", alpha).unwrap();
    writer.tensor_bytes("blk.0.attn_q.weight.lora_a", DType::F32, [1, 256], &values).unwrap();
    writer.tensor_bytes("blk.0.attn_q.weight.lora_b", DType::F32, [256, 1], &values).unwrap();
    writer.write(path).unwrap();
}

#[test]
fn an_adapter_whose_alpha_is_not_finite_is_refused() {
    let (fixture, _) = fixture();
    let (adapter, out) = (fixture.path("adapter.gguf"), fixture.path("out.gguf"));
    for alpha in [f32::NAN, f32::INFINITY] {
        write_adapter(&adapter, alpha);
        run(&["lora", "-m", text(&fixture.model), "--lora", text(&adapter), "-o", text(&out)])
            .failed(1, &["adapter.gguf", "alpha"]);
        assert!(!out.exists());
    }
    write_adapter(&adapter, 2.0);
    run(&["lora", "-q", "-m", text(&fixture.model), "--lora", text(&adapter), "-o", text(&out)]).success();
}

#[test]
fn parts_are_replaced_together_and_named() {
    let (fixture, _) = fixture();
    run(&["split", "--split-max-tensors", "12", text(&fixture.model), text(&fixture.path("in"))]).success();
    let parts = File::open(&fixture.model).unwrap().tensor_count().div_ceil(12);
    let input = fixture.path(&format!("in-00001-of-{parts:05}.gguf"));
    let out = fixture.path("out.gguf");
    let done = run(&["quantize", "--keep-split", text(&input), text(&out), "Q8_0"]).success();
    for number in 1..=parts {
        let name = format!("out-{number:05}-of-{parts:05}.gguf");
        assert!(done.err.contains(&name) && fixture.path(&name).exists(), "{done:?}");
    }
    // A run that fails leaves the old parts, and nothing beside them.
    let before = contents(fixture.folder.path());
    let old = fixture.path(&format!("out-00001-of-{parts:05}.gguf"));
    run(&["quantize", "--keep-split", text(&old), text(&input), "Q4_0"]).failed(1, &["already Q8_0"]);
    damage(&fixture.path(&format!("in-{parts:05}-of-{parts:05}.gguf")));
    let damaged = contents(fixture.folder.path());
    run(&["quantize", "-q", "--keep-split", text(&input), text(&out), "Q4_0"]).failed(1, &["not finite"]);
    let after = contents(fixture.folder.path());
    assert!(after == damaged && after != before, "a part was replaced by a run that failed");
}

/// Makes the last values of a file's last tensor infinite.
fn damage(path: &Path) {
    let file = File::open(path.with_file_name("tiny.gguf")).unwrap();
    let matrix = file.tensors().filter(|tensor| tensor.dtype() == DType::F16).last().unwrap();
    let values = matrix.bytes().to_vec();
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.windows(values.len()).position(|window| window == values).unwrap();
    bytes[at..at + 2].copy_from_slice(&[0x00, 0x7c]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn keys_get_the_types_that_files_have() {
    let (fixture, _) = fixture();
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    let with = |value: &str| {
        run(&["quantize", "-q", "--no-check", "--override-kv", value, model, text(&out), "Q8_0"])
    };
    for (value, key, kind) in [
        ("x.a=int:7", "x.a", ValueType::U32),
        ("x.a=int:-7", "x.a", ValueType::I32),
        ("x.a=int:5000000000", "x.a", ValueType::I64),
        ("llama.block_count=int:2", "llama.block_count", ValueType::U32),
        ("llama.rope.freq_base=int:10000", "llama.rope.freq_base", ValueType::F32),
        ("general.alignment=int:64", "general.alignment", ValueType::U32),
    ] {
        with(value).success();
        let file = File::open(&out).unwrap();
        assert_eq!(file.value(key).unwrap().kind(), kind, "{value}");
    }
    assert_eq!(File::open(&out).unwrap().alignment(), 64);
    with("split.count=int:2").failed(2, &["split.count"]);
    with("llama.block_count=int:-1").failed(1, &["llama.block_count", "does not fit"]);
    with("llama.block_count=str:two").failed(1, &["llama.block_count", "does not fit"]);
}

#[test]
fn what_f16_cannot_hold_is_refused() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let (input, out) = (fixture.path("in.gguf"), fixture.path("out.gguf"));
    let file = File::open(&fixture.model).unwrap();
    let mut large = file.tensor("blk.1.ffn_up.weight").unwrap().bytes().to_vec();
    large[..4].copy_from_slice(&70_000f32.to_le_bytes());
    let mut writer = Writer::new();
    for (key, value) in file.metadata() {
        writer.set(key, value).unwrap();
    }
    for tensor in file.tensors() {
        let bytes = if tensor.name() == "blk.1.ffn_up.weight" { large.as_slice() } else { tensor.bytes() };
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), bytes).unwrap();
    }
    writer.write(&input).unwrap();
    run(&["quantize", "-q", text(&input), text(&out), "F16"])
        .failed(1, &["blk.1.ffn_up.weight", "BF16 and F32"]);
    assert!(!out.exists());
    run(&["quantize", "-q", text(&input), text(&out), "BF16"]).success();
}

#[test]
fn only_the_matrix_of_the_same_model_and_text_is_resumed() {
    let (fixture, file) = fixture();
    let (out, other_text) = (fixture.path("matrix.gguf"), fixture.path("other.txt"));
    fs::write(&other_text, "Another text about something else, in more words.\n".repeat(12)).unwrap();
    let imatrix = |model: &Path, file: &Path, flags: &[&str]| {
        let line = ["imatrix", "-q", "-m", text(model), "-f", text(file), "-o", text(&out)];
        output(quadriga(line).args(flags))
    };
    imatrix(&fixture.model, &file, &["--chunk-size", "64", "--chunks", "1"]).success();
    let before = fs::read(&out).unwrap();
    let resume = ["--resume", "--chunk-size", "64"];
    imatrix(&fixture.model, &other_text, &resume).failed(1, &["matrix.gguf", "text.txt", "other.txt"]);
    imatrix(&fixture.model, &file, &["--resume", "--chunk-size", "32"]).failed(1, &["64 tokens, not 32"]);
    let wide = Fixture::new(&["--type", "f16", "--width", "128", "--heads", "4", "--vocab", "300"]);
    imatrix(&wide.model, &file, &resume).failed(1, &["matrix.gguf", "another model"]);
    assert_eq!(fs::read(&out).unwrap(), before);
    // The same text under another name is the same text.
    fs::copy(&file, &other_text).unwrap();
    imatrix(&fixture.model, &other_text, &resume).success();
    assert_ne!(fs::read(&out).unwrap(), before);
}
