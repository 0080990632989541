//! Bad input of every sort: one line that says what is wrong and what to do, and the exit code for it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::io::Read;
use std::process::Stdio;

use common::{Stage, end, end_with_input, quadriga};
use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::DType;

#[test]
fn a_model_that_is_not_there_or_not_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["run", "bench", "plan"] {
        let prompt: &[&str] = if command == "run" { &["hi"] } else { &[] };
        let missing = folder.path().join("missing.gguf");
        end(quadriga([command, "-m"]).arg(&missing).args(prompt))
            .failed(1, &["missing.gguf", "No such file"]);
        end(quadriga([command, "-m"]).arg(folder.path()).args(prompt)).failed(1, &["not a regular file"]);
    }
}

#[test]
fn a_file_that_is_cut_short_or_no_model() {
    let stage = Stage::new(&[]);
    let bytes = std::fs::read(&stage.model).unwrap();
    for len in [0, 3, 20, 2000, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&stage.model, &bytes[..len]).unwrap();
        end(&mut stage.command("run", &["hi"])).failed(1, &["tiny.gguf"]);
    }
    std::fs::write(&stage.model, "A poem about models.").unwrap();
    end(&mut stage.command("run", &["hi"])).failed(1, &["tiny.gguf", "not a GGUF file"]);
}

/// A copy of a model with its metadata and tensors changed.
fn rewritten(
    stage: &Stage,
    name: &str,
    value: impl Fn(&str, OwnedValue) -> Option<OwnedValue>,
    tensor: impl Fn(&str, DType) -> Option<DType>,
) {
    let file = File::open(&stage.model).unwrap();
    let mut writer = Writer::new();
    for (key, old) in file.metadata() {
        if let Some(new) = value(key, old.into()) {
            writer.set(key, new).unwrap();
        }
    }
    for old in file.tensors() {
        if let Some(dtype) = tensor(old.name(), old.dtype()) {
            let shape = old.shape();
            let bytes = shape.dims().iter().product::<usize>() / dtype.block_len() * dtype.block_bytes();
            writer.tensor(old.name(), dtype, shape, move |out| out.write_all(&vec![0; bytes])).unwrap();
        }
    }
    writer.write(stage.path(name)).unwrap();
}

#[test]
fn a_model_that_cannot_be_run_is_refused_by_name_of_what_is_wrong() {
    let stage = Stage::new(&["--width", "256"]);
    let fails = |name: &str, parts: &[&str]| {
        end(quadriga(["run", "hi", "-m"]).arg(stage.path(name))).failed(1, &[&[name], parts].concat());
    };
    let keep = |_: &str, dtype| Some(dtype);
    rewritten(
        &stage,
        "a.gguf",
        |key, old| Some(if key == "general.architecture" { "abacus".into() } else { old }),
        keep,
    );
    fails("a.gguf", &["architecture", "abacus", "llama, qwen2, qwen3"]);
    let same = |_: &str, old| Some(old);
    let unknown =
        |name: &str, dtype| Some(if name == "blk.1.ffn_up.weight" { DType::IQ2_XXS } else { dtype });
    rewritten(&stage, "b.gguf", same, unknown);
    fails("b.gguf", &["blk.1.ffn_up.weight", "IQ2_XXS", "another quantization"]);
    rewritten(&stage, "c.gguf", same, |name, dtype| (name != "blk.0.attn_k.weight").then_some(dtype));
    fails("c.gguf", &["blk.0.attn_k.weight"]);
    rewritten(&stage, "d.gguf", |key, old| (key != "llama.block_count").then_some(old), keep);
    fails("d.gguf", &["llama.block_count"]);
    rewritten(
        &stage,
        "e.gguf",
        |key, old| Some(if key == "llama.attention.head_count" { 0u32.into() } else { old }),
        keep,
    );
    fails("e.gguf", &["llama.attention.head_count"]);
    let none = Stage::new(&["--no-vocab"]);
    end(&mut none.command("run", &["hi"])).failed(1, &["no vocabulary"]);
}

#[test]
fn a_prompt_that_is_empty_too_long_or_not_text() {
    let stage = Stage::new(&[]);
    for prompt in ["", "  \n "] {
        end(&mut stage.command("run", &["-p", prompt])).failed(1, &["the prompt is empty", "-f FILE"]);
    }
    end_with_input(&mut stage.command("run", &[]), b"").failed(1, &["the prompt is empty"]);
    let long = "word ".repeat(30);
    end(&mut stage.command("run", &["-c", "64", &long])).failed(1, &["151 tokens", "64", "-c"]);
    end_with_input(&mut stage.command("run", &[]), b"caf\xe9 au lait")
        .failed(1, &["standard input", "UTF-8", "byte 3"]);
    std::fs::write(stage.path("latin"), b"\xff").unwrap();
    end(stage.command("run", &["-f"]).arg(stage.path("latin"))).failed(1, &["latin", "UTF-8"]);
    end(&mut stage.command("run", &["-f", "/no/such/prompt"]))
        .failed(1, &["/no/such/prompt", "No such file"]);
    end_with_input(&mut stage.command("chat", &["-q"]), b"caf\xe9\n").failed(1, &["UTF-8"]);
}

#[test]
fn options_out_of_range() {
    let stage = Stage::new(&[]);
    for (flags, code, parts) in [
        (&["--temp", "-1"][..], 1, &["temperature", "0 or more"][..]),
        (&["--top-p", "7"], 1, &["top-p", "at most 1"]),
        (&["-b", "0"], 1, &["batch size", "at least 1"]),
        (&["-t", "0"], 1, &["threads"]),
        (&["--device", "abacus"], 2, &["abacus", "cpu"]),
        (&["-ngl", "some"], 2, &["all or auto"]),
        (&["--cache-type", "q4_0"], 2, &["f16, f32 and q8_0"]),
        (&["--cache-type", "q8_0"], 1, &["q8_0", "blocks of 32", "--cache-type f16"]),
        (&["--no-such-flag"], 2, &["--no-such-flag"]),
        (&["-c", "99999999999999"], 1, &["context"]),
    ] {
        let ended = end(stage.command("run", flags).arg("hi"));
        assert!(
            ended.code == Some(code) && parts.iter().all(|part| ended.err.contains(part)),
            "{flags:?}: {ended:?}"
        );
    }
}

#[test]
fn a_closed_output_ends_quietly() {
    let stage = Stage::new(&[]);
    let mut command = stage.command("run", &["hi", "-q", "--temp", "0", "-c", "8192"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    // The pipe is closed by now.
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
}
