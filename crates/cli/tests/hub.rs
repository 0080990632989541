//! `quadriga pull`, `list`, `show`, `rm`, `convert` and `-hf`, against a server on loopback that behaves like the hub.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

mod common;
#[path = "../../models/tests/common/fake_hub.rs"]
mod fake_hub;
#[path = "../../models/tests/common/model_folder.rs"]
mod model_folder;

use std::fs;
use std::process::Command;

use common::{CommandOutput, Fixture, output, quadriga};
use fake_hub::{FakeHub, Faults};
use tempfile::TempDir;

const REPOSITORY: &str = "org/tiny-GGUF";

/// A hub with a small model in two types, and an empty cache.
struct Hub {
    fake: FakeHub,
    cache: TempDir,
}

impl Hub {
    fn new() -> Hub {
        let small = Fixture::new(&["--type", "q4_0"]);
        let large = Fixture::new(&["--type", "q8_0"]);
        let full = Fixture::new(&["--type", "f16"]);
        let [small, large, full] = [small, large, full].map(|fixture| fs::read(&fixture.model).unwrap());
        let fake = FakeHub::new(&[
            (REPOSITORY, "tiny-Q4_0.gguf", &small),
            (REPOSITORY, "tiny-Q8_0.gguf", &large),
            (REPOSITORY, "tiny-F16.gguf", &full),
            (REPOSITORY, "README.md", b"# tiny"),
        ]);
        Hub { fake, cache: TempDir::new().unwrap() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = quadriga(arguments);
        command.env("HF_ENDPOINT", &self.fake.endpoint).env("QUADRIGA_CACHE", self.cache.path());
        command.env("HF_HOME", self.cache.path().join("none")).env("NO_PROXY", "127.0.0.1");
        for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        output(&mut self.command(arguments))
    }
}

#[test]
fn a_model_is_pulled_listed_run_shown_and_removed() {
    let hub = Hub::new();
    let pulled = hub.run(&["pull", "org/tiny-GGUF:q4_0"]).success();
    assert!(pulled.out.trim().ends_with("tiny-Q4_0.gguf"), "{pulled:?}");
    let list = hub.run(&["list"]).success().out;
    assert!(list.contains("org/tiny-GGUF:Q4_0") && !list.contains("Q8_0"), "{list}");
    let shown = hub.run(&["show", "org/tiny-GGUF:Q4_0"]).success().out;
    assert!(shown.contains("sha256") && shown.contains("llama"), "{shown}");
    let offline = output(hub.command(&["pull", "org/tiny-GGUF:q4_0"]).env("HF_HUB_OFFLINE", "1")).success();
    assert_eq!(offline.out, pulled.out);
    output(hub.command(&["pull", "org/other"]).env("HF_HUB_OFFLINE", "1")).failed(1, &["not in the cache"]);
    // What is in the cache needs no hub.
    hub.fake.requests();
    let flags = ["-n", "4", "--temp", "0", "-q", "hi"];
    let by_name =
        hub.run(&[&["run", "-hf", "org/tiny-GGUF:Q4_0", "--offline"][..], &flags].concat()).success().out;
    assert!(hub.fake.requests().is_empty());
    let by_path = output(quadriga(["run", "-m", pulled.out.trim()]).args(flags)).success().out;
    assert_eq!(by_name, by_path);
    hub.run(&["rm", "org/tiny-GGUF:Q4_0"]).success();
    assert_eq!(hub.run(&["list"]).success().out, "");
    hub.run(&["rm", "org/tiny-GGUF:Q4_0"]).failed(1, &["no model org/tiny-GGUF:Q4_0"]);
    hub.run(&["run", "-hf", "org/tiny-GGUF", "--offline", "hi"]).failed(1, &["not in the cache", "offline"]);
}

#[test]
fn without_a_type_the_best_that_fits_is_chosen_by_its_plan() {
    let hub = Hub::new();
    // Every machine has memory for the larger of the quantized ones.
    let run = hub.run(&["run", "-hf", REPOSITORY, "-n", "2", "--temp", "0", "hi"]).success();
    assert!(run.err.contains("Q8_0 is the best of F16, Q8_0, Q4_0"), "{run:?}");
    let pulled = hub.run(&["pull", "org/tiny-GGUF:Q2_K"]).success();
    assert!(pulled.err.contains("has no Q2_K") && pulled.out.contains("Q8_0"), "{pulled:?}");
}

#[test]
fn a_header_is_inspected_without_the_weights_and_a_draft_model_is_pulled() {
    let hub = Hub::new();
    let shown = hub.run(&["inspect", "-hf", "org/tiny-GGUF:Q4_0"]).success();
    assert!(shown.out.contains("llama") && shown.err.is_empty(), "{shown:?}");
    assert!(hub.fake.requests().iter().any(|request| request.path.contains("Q4_0")));
    assert_eq!(hub.run(&["list"]).success().out, "");
    let requests = hub.cache.path().join("requests.jsonl");
    fs::write(&requests, "{\"prompt\": \"hi\", \"max_tokens\": 6, \"temperature\": 0}\n").unwrap();
    let batch = |draft: &[&str]| {
        let line = ["batch", requests.to_str().unwrap(), "-q", "-hf", "org/tiny-GGUF:Q8_0"];
        hub.run(&[&line[..], draft].concat())
    };
    let answer = |text: &str| {
        let value: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        value["text"].as_str().unwrap().to_owned()
    };
    let (plain, drafted) = (batch(&[]).success().out, batch(&["-hfd", "org/tiny-GGUF:Q4_0"]).success().out);
    assert_eq!(answer(&plain), answer(&drafted));
    assert!(hub.run(&["list"]).success().out.contains("org/tiny-GGUF:Q4_0"));
    hub.run(&["inspect", "-hf", "org/tiny-GGUF:Q8_0", "--offline"]).success();
    hub.run(&["inspect", "-hf", "org/other", "--offline"]).failed(1, &["not in the cache", "offline"]);
    batch(&["-hfd", "org/none"]).failed(1, &["org/none"]);
}

#[test]
fn failures_of_the_hub_name_the_way_out() {
    let hub = Hub::new();
    hub.run(&["pull", "org/none"]).failed(1, &["org/none", "404"]);
    hub.run(&["pull", "nonsense"]).failed(2, &["ORG/REPO"]);
    hub.fake.set_faults(Faults { token: Some("secret"), ..Faults::default() });
    hub.run(&["pull", REPOSITORY]).failed(1, &["HF_TOKEN"]);
    output(hub.command(&["pull", "-q", REPOSITORY]).env("HF_TOKEN", "secret")).success();
    output(hub.command(&["pull", REPOSITORY]).env("HF_ENDPOINT", "ftp://x")).failed(2, &["HF_ENDPOINT"]);
}

#[test]
fn a_repository_of_safetensors_is_converted() {
    let hub = Hub::new();
    let folder = TempDir::new().unwrap();
    let source = folder.path().join("source");
    model_folder::write(&source, &model_folder::llama_config(), &model_folder::llama_tensors(), "BF16");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        hub.fake.add("org/tiny", name, &fs::read(source.join(name)).unwrap());
    }
    let output = folder.path().join("out.gguf");
    let output = output.to_str().unwrap();
    hub.run(&["convert", "org/tiny", "-o", output, "--type", "f16"]).success();
    let shown = hub.run(&["inspect", output]).success().out;
    assert!(shown.contains("llama") && shown.contains("tiny"), "{shown}");
    hub.run(&["convert", REPOSITORY, "-o", output]).failed(1, &["no .safetensors"]);
    hub.run(&["convert", "no/such/folder", "-o", output]).failed(2, &["neither a folder"]);
}
