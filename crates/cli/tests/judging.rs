//! `perplexity`, `compare`, `imatrix` and `embed`: what would be a wrong result without a word is an error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_models::importance::ImportanceMatrix;
use serde_json::Value;

use crate::common::{CommandOutput, Fixture, output, quadriga};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(arguments: &[&str]) -> CommandOutput {
    output(&mut quadriga(arguments))
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&output(quadriga(arguments).args(["-q", "--json"])).success().out).unwrap()
}

/// A text of several chunks of 64 tokens beside the model: a byte is a token.
fn text_file(fixture: &Fixture) -> PathBuf {
    let path = fixture.path("text.txt");
    let lines: Vec<String> =
        (0..12).map(|line| format!("Line {line} is about the number {}.\n", line * line)).collect();
    fs::write(&path, lines.concat()).unwrap();
    path
}

/// A copy of a model with other metadata.
fn changed(
    fixture: &Fixture,
    name: &str,
    change: impl Fn(&str, OwnedValue) -> Option<OwnedValue>,
) -> PathBuf {
    let path = fixture.path(name);
    let file = File::open(&fixture.model).unwrap();
    let mut writer = Writer::new();
    for (key, value) in file.metadata() {
        if let Some(value) = change(key, OwnedValue::from(value)) {
            writer.set(key, value).unwrap();
        }
    }
    for tensor in file.tensors() {
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
    }
    writer.write(&path).unwrap();
    path
}

#[test]
fn a_template_that_cannot_be_parsed_stops_only_what_renders_it() {
    let fixture = Fixture::with_template("{% for message in messages %}{{ message.content }");
    let (model, file) = (text(&fixture.model), text_file(&fixture));
    let (file, matrix) = (text(&file), fixture.path("matrix.gguf"));
    for line in [
        &["perplexity", "-q", model, "-f", file, "-c", "64"][..],
        &["imatrix", "-q", model, "-f", file, "-c", "64", "-o", text(&matrix)],
        &["compare", "-q", model, model],
        &["embed", "-q", "-m", model, "hi"],
        &["bench", "-q", model, "-p", "8", "-n", "2", "-r", "1"],
        &["run", "-q", "--raw", "-m", model, "-n", "2", "hi"],
    ] {
        let found = run(line).success();
        assert!(!found.err.contains("template"), "{line:?}: {found:?}");
    }
    for line in [&["run", "-q", "-m", model, "-n", "2", "hi"][..], &["chat", "-q", "-m", model]] {
        run(line).failed(1, &["chat template failed", "--raw"]);
    }
    // One that is given in its place is used.
    let own = ["--chat-template", "{{ messages[0].content }}"];
    output(quadriga(["run", "-q", "-m", model, "-n", "2", "hi"]).args(own)).success();
}

#[test]
fn a_resumed_matrix_goes_on_where_the_first_run_ended() {
    let fixture = Fixture::new(&[]);
    let file = text_file(&fixture);
    let [whole, resumed, added] = ["whole.gguf", "resumed.gguf", "added.gguf"].map(|name| fixture.path(name));
    let imatrix = |out: &Path, flags: &[&str]| {
        let line =
            ["imatrix", "-q", "-m", text(&fixture.model), "-f", text(&file), "-c", "64", "-o", text(out)];
        output(quadriga(line).args(flags))
    };
    imatrix(&whole, &["--from-chunk", "999999"]).failed(2, &["--from-chunk 999999", "chunks"]);
    imatrix(&whole, &["--from-chunk", "2"]).success();
    imatrix(&resumed, &["--from-chunk", "2", "--chunks", "1"]).success();
    let before = fs::read(&resumed).unwrap();
    imatrix(&resumed, &["--resume", "--from-chunk", "1"])
        .failed(1, &["resumed.gguf", "--from-chunk 2", "not from 1"]);
    assert_eq!(fs::read(&resumed).unwrap(), before);
    imatrix(&resumed, &["--resume"]).success();
    let (all, other) = (ImportanceMatrix::read(&whole).unwrap(), ImportanceMatrix::read(&resumed).unwrap());
    assert_eq!((other.chunk_count, other.text_start), (all.chunk_count, Some(2)));
    assert!(all.chunk_count >= 3, "{}", all.chunk_count);
    for (name, entry) in &all.entries {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * a.abs();
        assert!(entry.sums.iter().zip(&other.entries[name].sums).all(near), "{name}");
    }
    // Files of other programs do not say with which chunk they begin.
    let unknown = ImportanceMatrix { text: None, text_chunks: 0, text_start: None, ..all.clone() };
    unknown.write(&resumed).unwrap();
    imatrix(&resumed, &["--resume"]).failed(1, &["resumed.gguf", "--from-chunk N"]);
    // A matrix that the first run did not add is not dropped in silence.
    ImportanceMatrix { datasets: vec!["other.txt".to_owned()], ..all.clone() }.write(&added).unwrap();
    all.write(&resumed).unwrap();
    imatrix(&resumed, &["--resume", "--in-file", text(&added)])
        .failed(2, &["added.gguf", "other.txt", "--resume"]);
}

#[test]
fn a_chunk_of_one_token_scores_nothing() {
    let fixture = Fixture::new(&[]);
    let file = text_file(&fixture);
    run(&["perplexity", "-q", text(&fixture.model), "-f", text(&file), "-c", "1"])
        .failed(2, &["--chunk-size 1", "at least 2"]);
}

#[test]
fn vectors_of_tokens_are_not_compared_as_one() {
    let fixture = Fixture::new(&[]);
    for option in [&["--similarity"][..], &["--query", "a"]] {
        let line = ["embed", "-q", "-m", text(&fixture.model), "--pooling", "none", "a", "b"];
        output(quadriga(line).args(option)).failed(2, &[option[0], "--pooling none"]);
    }
    run(&["embed", "-q", "-m", text(&fixture.model), "--pooling", "mean", "--similarity", "a", "b"])
        .success();
}

#[test]
fn of_two_models_none_is_ignored() {
    let fixture = Fixture::new(&[]);
    let (model, file) = (text(&fixture.model), text_file(&fixture));
    let out = fixture.path("out.gguf");
    for command in [
        &["perplexity", "-f", text(&file)][..],
        &["imatrix", "-f", text(&file), "-o", text(&out)],
        &["bench"],
        &["plan"],
        &["chat"],
        &["run", "hi"],
        &["embed", "hi"],
    ] {
        for other in [["-m", model], ["-hf", "org/tiny-GGUF"]] {
            let (name, rest) = command.split_first().unwrap();
            let line = [&[*name, model], rest, &other].concat();
            let found = run(&line);
            assert_eq!(found.code, Some(2), "{line:?}: {found:?}");
            let names = |long: &str| found.err.contains(other[0]) || found.err.contains(long);
            assert!(names("--model") || names("--hf-repo"), "{line:?}: {found:?}");
        }
    }
    assert!(!out.exists());
}

#[test]
fn models_with_other_tokens_are_not_compared() {
    let fixture = Fixture::new(&[]);
    let (model, file) = (text(&fixture.model), text_file(&fixture));
    let swapped = changed(&fixture, "swapped.gguf", |key, value| match key {
        "tokenizer.ggml.tokens" => {
            let file = File::open(&fixture.model).unwrap();
            let mut tokens: Vec<String> =
                file.get::<Vec<&str>>(key).unwrap().into_iter().map(str::to_owned).collect();
            tokens.swap(100, 101);
            Some(tokens.into())
        }
        _ => Some(value),
    });
    for flags in [&[][..], &["-f", text(&file), "-c", "64"]] {
        let found = output(quadriga(["compare", "-q", model, text(&swapped)]).args(flags));
        found.failed(1, &["token 100", "cannot be compared"]);
    }
    let larger = Fixture::new(&["--vocab", "400"]);
    run(&["compare", "-q", model, text(&larger.model)]).failed(1, &["400 tokens", "cannot be compared"]);
    let without = Fixture::new(&["--no-vocab"]);
    run(&["compare", "-q", model, text(&without.model)]).failed(1, &["no vocabulary", "cannot be compared"]);
    // The same tokens, and no weight that could be compared.
    let none = fixture.path("none.gguf");
    let mut writer = Writer::new();
    for (key, value) in File::open(&fixture.model).unwrap().metadata() {
        writer.set(key, OwnedValue::from(value)).unwrap();
    }
    writer.tensor_bytes("other", quadriga_graph::DType::F32, [1], &[0; 4]).unwrap();
    writer.write(&none).unwrap();
    run(&["compare", "-q", model, text(&none)]).failed(1, &["no tensor", "-f TEXT"]);
}

#[test]
fn the_second_half_of_a_chunk_is_scored_as_llama_perplexity_does() {
    let fixture = Fixture::new(&[]);
    let (model, file) = (text(&fixture.model), text_file(&fixture));
    let found = |chunk: &str, flags: &[&str]| {
        let line = ["perplexity", model, "-f", text(&file), "-c", chunk, "--chunks", "1"];
        let found = json(&[&line[..], flags].concat());
        let (nll, tokens) = (found["nll"]["mean"].as_f64().unwrap(), found["tokens"].as_f64().unwrap());
        assert_eq!(found["chunk_size"].to_string(), chunk);
        (nll * tokens, tokens)
    };
    // Of 50 tokens, 26 to 49; 300 are more than are computed at once.
    for (chunk, half) in [("50", "26"), ("300", "151")] {
        let (all, begin, end) = (found(chunk, &[]), found(half, &[]), found(chunk, &["--second-half"]));
        assert_eq!(all.1, begin.1 + end.1);
        assert!((all.0 - begin.0 - end.0).abs() <= 1e-4 * all.0, "{all:?} {begin:?} {end:?}");
    }
    assert_eq!(found("2", &["--second-half"]).1, 1.0);
    let both = ["perplexity", model, "-f", text(&file), "-c", "64", "--chunk-size", "32"];
    run(&both).failed(2, &["-c 64", "--chunk-size 32"]);
}
