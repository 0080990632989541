//! The memory of several models of `quadriga serve`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
#![cfg(target_os = "linux")]

use std::path::Path;

use serde_json::{Value, json};

use crate::common::{output, quadriga};
use crate::serve::Running;

fn server(folder: &Path, tokens: u64) -> Running {
    let tokens = tokens.to_string();
    let mut command = quadriga(["serve", "--port", "0", "-c", "64", "--kv-tokens", &tokens, "--models-dir"]);
    Running::start(command.arg(folder))
}

/// A KV cache that was not written to yet is not resident, but taken nevertheless.
#[test]
fn models_that_do_not_fit_together_are_not_loaded_together() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.gguf", "b.gguf"] {
        let path = folder.path().join(name);
        output(quadriga(["synth", "-o"]).arg(&path).args(["--layers", "24", "--width", "512"])).success();
    }
    let load = |server: &Running, name: &str| {
        server.ask("POST", "/models/load", "", &json!({ "model": name }).to_string())
    };
    // More than any machine has: the error says how much that is, and what there is.
    let most = 1 << 28;
    let (status, text) = load(&server(folder.path(), most), "a");
    assert_eq!(status, 503, "{text}");
    let before_unit = text.split(" MiB").filter_map(|part| part.rsplit(' ').next()?.parse::<u64>().ok());
    let [needed, free] = before_unit.collect::<Vec<u64>>().try_into().unwrap();
    assert!(needed > free && text.contains(&format!("{free} MiB are free")), "{text}");
    // Each takes six tenths of what is free.
    let server = server(folder.path(), most * free * 6 / 10 / needed);
    let (status, text) = load(&server, "a");
    assert_eq!(status, 200, "{text}");
    let (status, text) = load(&server, "b");
    assert_eq!(status, 200, "{text}");
    // The first one, which is idle, made room: both do not fit.
    let status: Value = serde_json::from_str(&server.ask("GET", "/status", "", "").1).unwrap();
    let loaded = status["models"].as_array().unwrap().iter().map(|model| &model["model"]);
    assert_eq!(loaded.collect::<Vec<_>>(), ["b"], "{status}");
}
