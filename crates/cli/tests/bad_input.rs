//! Invalid input: an error of one line with a remedy, and the right exit code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::Read;
use std::process::Stdio;

use crate::common::{Fixture, output, output_with_input, quadriga};
use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::DType;

#[test]
fn a_model_that_is_not_there_or_not_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["run", "bench", "plan"] {
        let prompt: &[&str] = if command == "run" { &["hi"] } else { &[] };
        let missing = folder.path().join("missing.gguf");
        output(quadriga([command, "-m"]).arg(&missing).args(prompt))
            .failed(1, &["missing.gguf", "No such file"]);
        output(quadriga([command, "-m"]).arg(folder.path()).args(prompt)).failed(1, &["not a regular file"]);
    }
}

#[test]
fn a_file_that_is_truncated_or_not_a_model() {
    let fixture = Fixture::new(&[]);
    let bytes = std::fs::read(&fixture.model).unwrap();
    for len in [0, 3, 20, 2000, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&fixture.model, &bytes[..len]).unwrap();
        output(&mut fixture.command("run", &["hi"])).failed(1, &["tiny.gguf"]);
    }
    std::fs::write(&fixture.model, "A poem about models.").unwrap();
    let poem = output(&mut fixture.command("run", &["hi"])).failed(1, &["tiny.gguf", "not a GGUF file"]);
    assert!(!poem.err.contains("0x") && !poem.err.contains('['), "{poem:?}");
    std::fs::write(&fixture.model, b"\x40\x01\0\0\0\0\0\0{\"__metadata__\"").unwrap();
    output(&mut fixture.command("run", &["hi"])).failed(1, &["safetensors", "quadriga convert"]);
    output(quadriga(["inspect"]).arg(&fixture.model)).failed(1, &["safetensors"]);
}

/// Writes a copy of the model with changed metadata and tensors.
fn rewritten(
    fixture: &Fixture,
    name: &str,
    value: impl Fn(&str, OwnedValue) -> Option<OwnedValue>,
    tensor: impl Fn(&str, DType) -> Option<DType>,
) {
    let file = File::open(&fixture.model).unwrap();
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
    writer.write(fixture.path(name)).unwrap();
}

#[test]
fn errors_of_unsupported_models_name_the_key_or_tensor() {
    let fixture = Fixture::new(&["--width", "256"]);
    let fails = |name: &str, parts: &[&str]| {
        output(quadriga(["run", "hi", "-m"]).arg(fixture.path(name))).failed(1, &[&[name], parts].concat());
    };
    let keep = |_: &str, dtype| Some(dtype);
    rewritten(
        &fixture,
        "a.gguf",
        |key, old| Some(if key == "general.architecture" { "abacus".into() } else { old }),
        keep,
    );
    fails("a.gguf", &["architecture", "abacus", "not supported yet", "bert, command-r, deepseek2"]);
    let same = |_: &str, old| Some(old);
    let unknown = |name: &str, dtype| Some(if name == "blk.1.ffn_up.weight" { DType::Q8_K } else { dtype });
    rewritten(&fixture, "b.gguf", same, unknown);
    fails("b.gguf", &["blk.1.ffn_up.weight", "Q8_K", "another quantization"]);
    rewritten(&fixture, "c.gguf", same, |name, dtype| (name != "blk.0.attn_k.weight").then_some(dtype));
    fails("c.gguf", &["blk.0.attn_k.weight"]);
    rewritten(&fixture, "d.gguf", |key, old| (key != "llama.block_count").then_some(old), keep);
    fails("d.gguf", &["llama.block_count"]);
    rewritten(
        &fixture,
        "e.gguf",
        |key, old| Some(if key == "llama.attention.head_count" { 0u32.into() } else { old }),
        keep,
    );
    fails("e.gguf", &["llama.attention.head_count"]);
    let none = Fixture::new(&["--no-vocab"]);
    output(&mut none.command("run", &["hi"])).failed(1, &["no vocabulary"]);
}

#[test]
fn a_prompt_that_is_empty_too_long_or_not_text() {
    let fixture = Fixture::new(&[]);
    for prompt in ["", "  \n "] {
        output(&mut fixture.command("run", &["-p", prompt])).failed(2, &["the prompt is empty", "-f FILE"]);
    }
    output_with_input(&mut fixture.command("run", &[]), b"").failed(2, &["the prompt is empty"]);
    output(&mut fixture.command("run", &[])).failed(2, &["no prompt"]);
    let long = "word ".repeat(30);
    output(&mut fixture.command("run", &["-c", "64", &long])).failed(1, &["151 tokens", "64", "-c"]);
    output_with_input(&mut fixture.command("run", &[]), b"caf\xe9 au lait")
        .failed(1, &["stdin", "UTF-8", "byte 3"]);
    std::fs::write(fixture.path("latin"), b"\xff").unwrap();
    output(fixture.command("run", &["-f"]).arg(fixture.path("latin"))).failed(1, &["latin", "UTF-8"]);
    output(&mut fixture.command("run", &["-f", "/no/such/prompt"]))
        .failed(1, &["/no/such/prompt", "No such file"]);
    // A chat goes on with the next line.
    let flags = ["-q", "--temp", "0", "-n", "4"];
    let chat = |input: &[u8]| output_with_input(&mut fixture.command("chat", &flags), input).success();
    let (with, without) = (chat(b"caf\xe9\nhi\n"), chat(b"hi\n"));
    assert!(with.err.contains("not valid UTF-8") && with.err.contains("caf"), "{with:?}");
    assert_eq!((with.out, without.err.as_str()), (without.out, ""));
}

/// Asserts exit code 2, nothing on stdout, and these parts on stderr.
#[track_caller]
fn is_usage_error(command: &mut std::process::Command, parts: &[&str]) {
    let text = format!("{command:?}");
    let output = output(command);
    assert_eq!(output.code, Some(2), "{text}: {output:?}");
    assert_eq!(output.out, "", "{text}");
    for part in parts {
        assert!(output.err.contains(part), "{part:?} is missing: {text}: {output:?}");
    }
    for part in ["invalid digit", "invalid float", "panicked"] {
        assert!(!output.err.contains(part), "{text}: {output:?}");
    }
}

/// Every wrong value is a usage error that names the value and the option.
#[test]
fn invalid_option_values_exit_with_code_2() {
    let fixture = Fixture::new(&[]);
    for (flags, parts) in [
        (&["--temp", "-1"][..], &["'-1'", "--temp", "0 or more"][..]),
        (&["--temp", "nan"], &["'nan'", "--temp", "number"]),
        (&["--temperature", "x"], &["'x'", "--temp", "number"]),
        (&["--top-p", "7"], &["'7'", "--top-p", "at most 1"]),
        (&["--top-p", "0"], &["'0'", "--top-p", "above 0"]),
        (&["--min-p", "-0.5"], &["'-0.5'", "--min-p", "from 0 to 1"]),
        (&["--top-k", "-3"], &["'-3'", "--top-k", "whole number"]),
        (&["--repeat-penalty", "0"], &["'0'", "--repeat-penalty", "above 0"]),
        (&["--dry-allowed-length", "-1"], &["'-1'", "--dry-allowed-length", "whole number"]),
        (&["--dry-multiplier", "-1"], &["'-1'", "--dry-multiplier", "0 or more"]),
        (&["--repeat-last-n", "-2"], &["'-2'", "--repeat-last-n", "-1 for all"]),
        (&["-s", "-2"], &["'-2'", "--seed", "-1 for a random one"]),
        (&["-n", "-5"], &["'-5'", "--predict", "-1 for no limit"]),
        (&["-n", "many"], &["'many'", "--predict", "number of tokens"]),
        (&["--stop", ""], &["--stop", "not be empty"]),
        (&["--stop="], &["--stop", "not be empty"]),
        (&["-b", "0"], &["'0'", "--batch-size", "at least 1"]),
        (&["-b", "x"], &["'x'", "--batch-size", "whole number"]),
        (&["-t", "0"], &["'0'", "--threads", "1 to 1024"]),
        (&["-t", "-4"], &["'-4'", "--threads", "1 to 1024"]),
        (&["-t", "100000"], &["100000", "-t", "1 to 1024"]),
        (&["-c", "x"], &["'x'", "--ctx-size", "whole number"]),
        (&["-c", "-1"], &["'-1'", "--ctx-size", "whole number"]),
        (&["-c", "99999999999999"], &["context", "99999999999999", "-c"]),
        (&["--device", "abacus"], &["abacus", "cpu"]),
        (&["--device", "cpu:3"], &["cpu:3"]),
        (&["--device", "cpu:0"], &["no device \"cpu:0\"", "this machine has cpu"]),
        (&["-ngl", "some"], &["'some'", "--gpu-layers", "all or auto"]),
        (&["-ngl", "-3"], &["'-3'", "--gpu-layers", "all or auto"]),
        (&["--vram-budget", "much"], &["'much'", "--vram-budget", "6G"]),
        (&["--vram-budget", "-1"], &["'-1'", "--vram-budget", "6G"]),
        (&["--cache-type", "q4_1"], &["'q4_1'", "--cache-type", "q8_0, q5_1 or q4_0"]),
        (&["-ctk", "q6_k"], &["'q6_k'", "--cache-type-k", "q8_0, q5_1 or q4_0"]),
        (&["--cache-type", "q8_0"], &["q8_0", "blocks of 32", "--cache-type f16"]),
        (&["-fa=maybe"], &["'maybe'", "--flash-attn"]),
        (&["-fa", "maybe"], &["-fa \"maybe\"", "on, off or auto"]),
        (&["--mirostat", "2"], &["--mirostat is not supported", "--top-p"]),
        (&["--samplers", "top_k"], &["--samplers is not supported"]),
        (&["--keep", "4"], &["--keep is not supported", "-c"]),
        (&["-hf", "owner/repo"], &["--model", "--hf-repo", "cannot be used with"]),
        (&["-m", ""], &["--model"]),
        (&["--no-such-flag"], &["--no-such-flag"]),
        (&["--temprature", "1"], &["--temprature", "similar", "--temp"]),
        (&["-nkvo"], &["-nkvo"]),
        (&["-nlg", "1"], &["-nlg", "similar: -ngl"]),
        (&["-p", "one"], &["two prompts", "hi", "-p"]),
        (&["--trace-ops"], &["--trace"]),
    ] {
        is_usage_error(fixture.command("run", flags).arg("hi"), parts);
    }
    for (command, flags, parts) in [
        ("bench", &["-p", "x"][..], &["'x'", "--n-prompt", "whole number"][..]),
        ("bench", &["-n", "-1"], &["'-1'", "--n-gen", "whole number"]),
        ("bench", &["-r", "0"], &["'0'", "--rounds", "at least 1"]),
        ("bench", &["-d", "x"], &["'x'", "--n-depth", "whole number"]),
        ("bench", &["-c", "5"], &["-c 5", "512 tokens"]),
        ("plan", &["--effort", "search"], &["--instance"]),
        ("plan", &["--capacity", "5"], &["--instance"]),
        ("plan", &["--effort", "high"], &["'high'", "--effort", "fast, search, exact"]),
        ("plan", &["--split", "x"], &["'x'", "--split", "whole number"]),
        ("plan", &["--split", "99"], &["--split 99", "splits 0 to"]),
        ("chat", &["-n", "-5"], &["'-5'", "--predict"]),
    ] {
        is_usage_error(&mut fixture.command(command, flags), parts);
    }
    // Options of other commands are named as they were given.
    for (command, flags, parts) in [
        ("run", &["-md", "x", "hi"][..], &["run has no option -md", "--draft", "serve"][..]),
        ("run", &["-np", "2", "hi"], &["run has no option -np", "--parallel"]),
        ("run", &["-cb", "hi"], &["run has no option -cb", "--cont-batching"]),
        ("chat", &["--max-num-seqs=2"], &["chat has no option --max-num-seqs", "--parallel"]),
        ("bench", &["-st"], &["bench has no option -st", "run, chat", "have it, as --single-turn"]),
    ] {
        is_usage_error(&mut fixture.command(command, flags), parts);
    }
    for (line, parts) in [
        (&["check", "--sample", "x"][..], &["'x'", "--sample", "at least 1"][..]),
        (&["check", "--part", "4/3"], &["'4/3'", "--part", "such as 2/8"]),
        (&["check", "--seed", "-1"], &["'-1'", "--seed", "whole number"]),
        (&["synth", "-o", "x", "--layers", "x"], &["'x'", "--layers", "whole number"]),
        (&["synth", "-o", "x", "--context", "0"], &["'0'", "--context", "from 1"]),
        (&["check", "-t", "100000"], &["'100000'", "--threads", "1 to 1024"]),
        (&["devices", "-t", "x"], &["'x'", "--threads", "1 to 1024"]),
        (&["check", "-ctk", "f16"], &["check has no option -ctk", "--cache-type-k"]),
        (&["check", "-ngl", "1"], &["check has no option -ngl", "--gpu-layers"]),
        (&["check", "-fa"], &["check has no option -fa", "--flash-attn"]),
        (&["no-such-command"], &["no-such-command"]),
    ] {
        is_usage_error(&mut quadriga(line), parts);
    }
    for (variable, value) in [
        ("QUADRIGA_FUSE", "x"),
        ("QUADRIGA_CHECK_PLANS", "on"),
        ("QUADRIGA_CUDA_FUSE", "no"),
        ("QUADRIGA_CUDA_BLAS", "2"),
        ("QUADRIGA_CUDA_GAPS", "yes"),
        ("QUADRIGA_CUDA_KERNELS", "nvcc"),
        ("QUADRIGA_ISA", "mmx"),
    ] {
        is_usage_error(fixture.command("run", &["hi"]).env(variable, value), &[variable, value]);
    }
}

#[test]
fn a_closed_output_ends_quietly() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.command("run", &["hi", "-q", "--temp", "0", "-c", "8192"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    // The pipe is closed here.
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
}
