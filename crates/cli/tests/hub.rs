//! `quadriga pull`, `list`, `show`, `rm`, `convert` and `-hf`, against a server on loopback that behaves like the hub.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

#[path = "../../models/tests/common/fake_hub.rs"]
mod fake_hub;
#[path = "../../models/tests/common/model_folder.rs"]
mod model_folder;

use std::fs;
use std::process::Command;

use crate::common::{CommandOutput, Fixture, output, quadriga};
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
    // Whoever asks for a type that there is not gets the best, too, and is told so.
    for command in [
        &["pull", "-q", "org/tiny-GGUF:Q2_K"][..],
        &["run", "-q", "-hf", "org/tiny-GGUF:Q2_K", "-n", "2", "hi"],
    ] {
        let pulled = hub.run(command).success();
        for part in ["has no Q2_K, only F16, Q8_0, Q4_0", "Q8_0 is taken"] {
            assert!(pulled.err.contains(part), "{pulled:?}");
        }
    }
    hub.run(&["run", "--offline", "-hf", "org/tiny-GGUF:Q2_K", "hi"])
        .failed(1, &["in the cache has no Q2_K, only Q8_0", "HF_HUB_OFFLINE"]);
}

/// Keeps the first bytes of what is written, and counts all.
struct Beginning {
    bytes: Vec<u8>,
    len: u64,
}

impl std::io::Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let room = (1 << 20) - self.bytes.len();
        self.bytes.extend_from_slice(&bytes[..room.min(bytes.len())]);
        self.len += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_type_that_does_not_fit_is_passed_over() {
    let hub = Hub::new();
    // A feed-forward network of 2³⁰ neurons, of which there is the header.
    let fixture = Fixture::new(&[]);
    let file = quadriga_gguf::File::open(&fixture.model).unwrap();
    let zeros = vec![0; 1 << 24];
    let mut writer = quadriga_gguf::Writer::new();
    for (key, value) in file.metadata().filter(|(key, _)| *key != "llama.feed_forward_length") {
        writer.set(key, quadriga_gguf::OwnedValue::from(value)).unwrap();
    }
    writer.set("llama.feed_forward_length", 1u32 << 30).unwrap();
    for tensor in file.tensors() {
        let is_ffn = tensor.name().contains("ffn_up") || tensor.name().contains("ffn_gate.");
        let dims = match tensor.shape().dims() {
            [_, columns] if is_ffn => vec![1 << 30, *columns],
            [rows, _] if tensor.name().contains("ffn_down") => vec![*rows, 1 << 30],
            dims => dims.to_vec(),
        };
        let shape = quadriga_graph::Shape::new(&dims).unwrap();
        let bytes = tensor.dtype().row_bytes(shape.elements()).unwrap();
        let zeros = &zeros;
        let write = move |out: &mut dyn std::io::Write| {
            let mut left = bytes;
            while left > 0 {
                let piece = left.min(zeros.len());
                out.write_all(&zeros[..piece])?;
                left -= piece;
            }
            Ok(())
        };
        writer.tensor(tensor.name(), tensor.dtype(), shape, write).unwrap();
    }
    let mut header = Beginning { bytes: Vec::new(), len: 0 };
    writer.write_to(&mut header).unwrap();
    hub.fake.add_sparse("org/large-GGUF", "large-Q8_0.gguf", &header.bytes, header.len);
    let small = fs::read(&fixture.model).unwrap();
    hub.fake.add("org/large-GGUF", "small-Q4_0.gguf", &small);
    let pulled = hub.run(&["pull", "org/large-GGUF"]).success();
    assert!(pulled.out.trim().ends_with("small-Q4_0.gguf"), "{pulled:?}");
}

#[test]
fn a_repository_as_the_first_word_is_the_model() {
    let hub = Hub::new();
    let flags = ["-n", "3", "--temp", "0", "-q", "hi"];
    let by_option = hub.run(&[&["run", "-hf", "org/tiny-GGUF:Q4_0"][..], &flags].concat()).success().out;
    let by_word = hub.run(&[&["run", "org/tiny-GGUF:Q4_0"][..], &flags].concat()).success().out;
    assert_eq!(by_word, by_option);
    hub.run(&["run", "org/tiny", "What is gravity?"]).failed(2, &["org/tiny", "-hf ORG/REPO"]);
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
