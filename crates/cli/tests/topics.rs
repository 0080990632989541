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

/// The counters of a trace add up to what the cache says, and plans count its slots.
fn counters_are_in_the_trace(model: &Path) {
    let (model, trace) = (model.to_str().unwrap(), model.with_extension("json"));
    let place = ["-m", model, "--device", "sim", "-ngl", "all", "--cpu-moe", "--expert-cache", "600K"];
    let bench = ["bench", "-p", "0", "-n", "40", "-r", "1", "--topic", "20", "--json", "-q", "--trace"];
    let (ok, out, error) = quadriga(&[&bench[..], &[trace.to_str().unwrap()], &place].concat());
    assert!(ok, "{error}");
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    let events: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let of = |name: &str, key: &str| -> Vec<u64> {
        let events = events["traceEvents"].as_array().unwrap().iter();
        let named = events.filter(|event| event["ph"] == "C" && event["name"] == name);
        named.map(|event| event["args"][key].as_u64().unwrap()).collect()
    };
    let cache = &found["expert_cache"];
    let shares = of("expert cache: hits, %", "hits, %");
    // A warm-up round, and one that counts.
    assert_eq!(shares.len(), 80);
    let mean = shares.iter().sum::<u64>() as f64 / 80.0;
    let share = 100.0 * cache["hits"].as_f64().unwrap() / cache["lookups"].as_f64().unwrap();
    assert!((mean - share).abs() < 1.0, "{mean} in the trace, {share} in all");
    assert_eq!(of("expert cache: uploads", "experts").iter().sum::<u64>(), cache["uploads"]);
    assert_eq!(of("expert cache: uploaded bytes", "bytes").iter().sum::<u64>(), cache["bytes"]);
    let slots = found["memory"][0]["expert_slots"].as_u64().unwrap();
    assert!((500_000..620_000).contains(&slots), "{slots}");
    let (_, out, _) = quadriga(&[&["plan", "--json", "-c", "40"], &place[..]].concat());
    let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plan["placement"]["expert_cache"]["bytes"][0], slots);
    assert_eq!(plan["placement"]["expert_cache"]["slots"], cache["slots"]);
    let (_, text, _) = quadriga(&[&["plan", "-c", "40"], &place[..]].concat());
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("sim:0 ")).collect();
    assert!(text.contains("expert cache     compute") && lines[0].contains(" KiB "), "{text}");
}

/// `batch` uses the cache, too, and says so.
fn requests_of_a_batch_use_the_cache(model: &Path) {
    let input = model.with_extension("jsonl");
    let request = |n: usize| format!("{{\"prompt\": \"ab {n}\", \"max_tokens\": 12}}\n");
    std::fs::write(&input, (0..6).map(request).collect::<String>()).unwrap();
    let place = ["--device", "sim", "-ngl", "all", "--cpu-moe", "--expert-cache", "600K"];
    let batch = ["batch", input.to_str().unwrap(), "-o", "-", "-m", model.to_str().unwrap()];
    let rest = ["-c", "64", "--parallel", "3", "--raw"];
    let (ok, out, said) = quadriga(&[&batch[..], &place, &rest].concat());
    assert!(ok, "{said}");
    assert_eq!(out.lines().count(), 6, "{out}");
    let line =
        said.lines().find(|line| line.starts_with("expert cache: ")).unwrap_or_else(|| panic!("{said}"));
    assert!(!line.contains("expert cache: 0 slots") && !line.contains(" of 0 experts"), "{line}");
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
    counters_are_in_the_trace(&model);
    requests_of_a_batch_use_the_cache(&model);
    // What the cache takes is said, and where it has no effect.
    let run = |options: &[&str]| {
        let text =
            ["run", "-m", model.to_str().unwrap(), "--raw", "-p", "ab", "-n", "2", "--expert-cache", "600K"];
        quadriga(&[&text[..], options].concat())
    };
    let (ok, _, said) = run(&["--device", "sim", "-ngl", "all", "--cpu-moe"]);
    assert!(ok && said.contains("expert cache 5") && said.contains(" of it for "), "{said}");
    let (ok, _, said) = run(&["--device", "cpu"]);
    assert!(ok && said.contains("--expert-cache has no effect"), "{said}");
    let plain = folder.path().join("plain.gguf");
    quadriga(&["synth", "-o", plain.to_str().unwrap()]);
    let (ok, _, error) = quadriga(&["bench", "-m", plain.to_str().unwrap(), "--topic", "8"]);
    assert!(!ok && error.contains("--topics"), "{error}");
}
