//! `synth --topics` and `bench --topic`: tokens of a topic use the same experts again, and an expert cache serves them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::path::Path;
use std::process::Command;

fn quadriga(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_quadriga")).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// The share of look-ups that the cache served, and its uploads.
fn served(model: &Path, options: &[&str]) -> (f64, u64) {
    let model = model.to_str().unwrap();
    let mut arguments = vec![
        "bench",
        "-m",
        model,
        "-p",
        "0",
        "-n",
        "48",
        "-r",
        "1",
        "--json",
        "-q",
        "--device",
        "sim",
        "-ngl",
        "all",
        "--cpu-moe",
        "--expert-cache",
        "600K",
    ];
    arguments.extend(options);
    let (ok, out, error) = quadriga(&arguments);
    assert!(ok, "{error}");
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    let cache = &found["expert_cache"];
    let number = |name: &str| cache[name].as_u64().unwrap_or_else(|| panic!("{name}: {cache}"));
    assert!(number("slots") > 0 && number("lookups") > 0, "{cache}");
    (number("hits") as f64 / number("lookups") as f64, number("uploads"))
}

#[test]
fn an_expert_cache_serves_a_text_that_stays_on_a_topic() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("topics.gguf");
    let (ok, _, error) = quadriga(&[
        "synth",
        "-o",
        model.to_str().unwrap(),
        "--arch",
        "qwen3moe",
        "--layers",
        "6",
        "--width",
        "64",
        "--heads",
        "2",
        "--experts",
        "32",
        "--experts-used",
        "4",
        "--ffn",
        "32",
        "--topics",
        "4",
        "--type",
        "q8_0",
    ]);
    assert!(ok, "{error}");
    let (mixed, _) = served(&model, &[]);
    let (on_topic, uploads) = served(&model, &["--topic", "48"]);
    assert!(on_topic > mixed + 0.2, "{on_topic:.2} on a topic, {mixed:.2} of all topics");
    assert!(uploads > 0);
    // What the cache takes is said, and where it has no effect.
    let run = |options: &[&str]| {
        let text =
            ["run", "-m", model.to_str().unwrap(), "--raw", "-p", "ab", "-n", "2", "--expert-cache", "600K"];
        quadriga(&[&text[..], options].concat())
    };
    let (ok, _, said) = run(&["--device", "sim", "-ngl", "all", "--cpu-moe"]);
    assert!(ok && said.contains("expert cache 5") && said.contains(" experts"), "{said}");
    let (ok, _, said) = run(&["--device", "cpu"]);
    assert!(ok && said.contains("--expert-cache has no effect"), "{said}");
    let plain = folder.path().join("plain.gguf");
    quadriga(&["synth", "-o", plain.to_str().unwrap()]);
    let (ok, _, error) = quadriga(&["bench", "-m", plain.to_str().unwrap(), "--topic", "8"]);
    assert!(!ok && error.contains("--topics"), "{error}");
}
