//! `quadriga pull`, `list`, `show`, `rm`, `convert` and `-hf`, against a server on loopback that behaves like the hub.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

#[path = "../../models/tests/common/fake_hub.rs"]
mod fake_hub;
#[path = "../../models/tests/common/fake_proxy.rs"]
mod fake_proxy;
#[path = "../../models/tests/common/model_folder.rs"]
mod model_folder;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::{CommandOutput, Fixture, output, quadriga};
use fake_hub::{FakeHub, Faults};
use fake_proxy::FakeProxy;
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
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            command.env_remove(name).env_remove(name.to_ascii_lowercase());
        }
        command.env_remove("no_proxy");
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        output(&mut self.command(arguments))
    }

    fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits until the storage was asked for a part of a file.
    fn wait_for_request(&self) {
        while !self.fake.requests().iter().any(|request| request.storage) {
            std::thread::yield_now();
        }
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
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
    // Neither is the default model downloaded then.
    let wanted = ["not in the cache", "nothing may be downloaded"];
    hub.run(&["run", "--offline", "hi"]).failed(1, &wanted);
    hub.run(&["pull", "--offline", "default"]).failed(1, &wanted);
    output(hub.command(&["inspect", "default"]).env("HF_HUB_OFFLINE", "1")).failed(1, &wanted);
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
    // What was downloaded takes space, and is removed by its name.
    let list = hub.run(&["list"]).success().out;
    assert!(list.contains("org/tiny (safetensors)"), "{list}");
    let json = hub.run(&["list", "--json"]).success().out;
    assert!(json.contains("org/tiny (safetensors)") && json.contains("model.safetensors"), "{json}");
    hub.run(&["rm", "org/tiny"]).success();
    assert!(hub.run(&["list"]).success().out.is_empty());
    hub.run(&["convert", REPOSITORY, "-o", output]).failed(1, &["no .safetensors"]);
    hub.run(&["convert", "no/such/folder", "-o", output]).failed(2, &["neither a folder"]);
}

#[test]
fn ctrl_c_does_not_wait_for_the_pause_of_a_server() {
    let hub = Hub::new();
    hub.fake.set_faults(Faults { status: (99, 429, "60"), ..Faults::default() });
    let child = hub.start(&["pull", "org/tiny-GGUF:Q4_0"]);
    hub.wait_for_request();
    signal(&child, "-INT");
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    // Whoever waits for the end of the pause asks again then.
    let again = hub.fake.requests();
    assert!(again.is_empty(), "{again:?}");
}

#[test]
fn a_terminated_pull_is_listed_and_continued() {
    let hub = Hub::new();
    hub.fake.set_faults(Faults { stall: (1, 700), ..Faults::default() });
    let child = hub.start(&["pull", "-q", "org/tiny-GGUF:Q4_0"]);
    let blobs = hub.cache.path().join("blobs");
    // What has arrived is saved while the connection stands still.
    let is_saved = || {
        let files = fs::read_dir(&blobs).into_iter().flatten().flatten();
        let mut states =
            files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "state"));
        states.any(|path| fs::read_to_string(path).unwrap_or_default().contains("[700]"))
    };
    while !is_saved() {
        std::thread::yield_now();
    }
    let busy = hub.run(&["list"]).success();
    assert!(busy.err.contains("downloading: tiny-Q4_0.gguf of org/tiny-GGUF"), "{busy:?}");
    signal(&child, "-TERM");
    assert!(!child.wait_with_output().unwrap().status.success());
    let list = hub.run(&["list"]).success();
    assert!(list.out.is_empty(), "{list:?}");
    for part in ["incomplete: tiny-Q4_0.gguf of org/tiny-GGUF", "700", "quadriga rm org/tiny-GGUF"] {
        assert!(list.err.contains(part), "{list:?}");
    }
    hub.fake.set_faults(Faults::default());
    hub.fake.requests();
    hub.run(&["pull", "-q", "org/tiny-GGUF:Q4_0"]).success();
    let requests = hub.fake.requests();
    let mut ranges = requests.iter().filter_map(|request| request.headers.get("range"));
    assert!(ranges.all(|range| range.starts_with("bytes=700-")), "{requests:?}");
    assert!(hub.run(&["list"]).success().err.is_empty());
}

#[test]
fn parts_whose_others_are_missing_are_listed_and_removed() {
    let hub = Hub::new();
    let (first, second) = ("big-Q6_K-00001-of-00002.gguf", "big-Q6_K-00002-of-00002.gguf");
    hub.fake.add(REPOSITORY, first, &[1; 1000]);
    hub.fake.add(REPOSITORY, second, &[2; 1000]);
    hub.run(&["pull", "-q", "org/tiny-GGUF:Q6_K"]).success();
    // As if the second part had not come.
    let found = walk(hub.cache.path()).into_iter().find(|path| path.ends_with(second)).unwrap();
    fs::remove_file(found).unwrap();
    let list = hub.run(&["list"]).success();
    assert!(list.out.is_empty(), "{list:?}");
    for part in ["incomplete: 1 of 2 parts of org/tiny-GGUF:Q6_K", "1000", "quadriga rm org/tiny-GGUF:Q6_K"] {
        assert!(list.err.contains(part), "{list:?}");
    }
    hub.run(&["rm", "org/tiny-GGUF:Q6_K"]).success();
    let list = hub.run(&["list"]).success();
    assert!(list.err.contains("no models"), "{list:?}");
    assert!(!walk(hub.cache.path()).iter().any(|path| path.ends_with(first)));
}

/// The files below a folder.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn several_processes_pull_one_model() {
    let hub = Hub::new();
    let children: Vec<Child> = (0..4).map(|_| hub.start(&["pull", "-q", "org/tiny-GGUF:Q8_0"])).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    hub.run(&["show", "org/tiny-GGUF:Q8_0"]).success();
}

#[test]
fn the_environment_names_the_proxy() {
    let (hub, proxy) = (Hub::new(), FakeProxy::new(200));
    let address = format!("http://{}", proxy.address);
    let pull = |variables: &[(&str, &str)]| {
        let folder = TempDir::new().unwrap();
        let mut command = hub.command(&["pull", "-q", "org/tiny-GGUF:Q4_0", "--cache-dir"]);
        command.arg(folder.path()).env_remove("NO_PROXY").envs(variables.iter().copied());
        output(&mut command)
    };
    for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        pull(&[(name, &address)]).success();
        assert!(!proxy.tunnels().is_empty(), "{name}");
        for exception in ["NO_PROXY", "no_proxy"] {
            pull(&[(name, &address), (exception, "localhost,127.0.0.1")]).success();
            assert!(proxy.tunnels().is_empty(), "{name} {exception}");
        }
    }
    // That is for another scheme.
    for name in ["HTTPS_PROXY", "https_proxy"] {
        pull(&[(name, &address)]).success();
        assert!(proxy.tunnels().is_empty(), "{name}");
        let refused = pull(&[(name, &address), ("HF_ENDPOINT", "https://127.0.0.1:1")]);
        refused.failed(1, &[&proxy.address, "502", "NO_PROXY"]);
        assert_eq!(proxy.tunnels().len(), 1, "{name}");
    }
    pull(&[("ALL_PROXY", "socks5://127.0.0.1:1")]).failed(2, &["ALL_PROXY", "SOCKS"]);
}

#[test]
fn a_revision_is_removed_shown_and_used_by_its_name() {
    const FIRST: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    let hub = Hub::new();
    let other = fs::read(&Fixture::new(&["--type", "q4_0", "--layers", "1"]).model).unwrap();
    hub.fake.add("org/first", "tiny-Q4_0.gguf", &other);
    hub.fake.add_revision(REPOSITORY, "v1", FIRST, "org/first");
    hub.run(&["pull", "-q", "org/tiny-GGUF:Q4_0", "--revision", "v1"]).success();
    // Main is another one, which is not there.
    hub.run(&["show", "org/tiny-GGUF:Q4_0"]).failed(1, &["no model org/tiny-GGUF:Q4_0"]);
    hub.run(&["run", "--offline", "-hf", REPOSITORY, "hi"]).failed(1, &["not in the cache", "offline"]);
    hub.run(&["pull", "-q", "org/tiny-GGUF:Q4_0"]).success();
    let shown = |name: &str| hub.run(&["show", name]).success().out;
    assert!(shown("org/tiny-GGUF@v1").contains(FIRST) && !shown(REPOSITORY).contains(FIRST));
    let list = hub.run(&["list"]).success().out;
    assert!(list.contains("org/tiny-GGUF:Q4_0 ") && list.contains("org/tiny-GGUF@v1:Q4_0 "), "{list}");
    hub.run(&["pull", "org/tiny-GGUF@v1", "--revision", "v2"]).failed(2, &["@v1", "--revision v2"]);
    hub.run(&["rm", "org/tiny-GGUF@aaaaaaaa"]).success();
    assert!(shown(REPOSITORY).contains("sha256"));
    hub.run(&["show", "org/tiny-GGUF@v1"]).failed(1, &["org/tiny-GGUF@v1"]);
    hub.run(&["run", "-q", "-hf", REPOSITORY, "--offline", "-n", "2", "hi"]).success();
}

#[test]
fn certificates_that_cannot_be_read_are_an_error_where_the_hub_is_asked() {
    let hub = Hub::new();
    let missing = hub.cache.path().join("missing.pem");
    let run = |arguments: &[&str]| output(hub.command(arguments).env("SSL_CERT_FILE", &missing));
    run(&["pull", "-q", "org/tiny-GGUF:Q4_0"]).failed(2, &["SSL_CERT_FILE", "missing.pem", "cannot be read"]);
    run(&["list"]).success();
    hub.run(&["pull", "-q", "org/tiny-GGUF:Q4_0"]).success();
    run(&["pull", "--offline", "-q", "org/tiny-GGUF:Q4_0"]).success();
}

#[test]
fn a_list_has_no_characters_that_a_terminal_acts_on() {
    let hub = Hub::new();
    let snapshot = hub.cache.path().join("none/hub/models--org--evil/snapshots").join("a".repeat(40));
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("\u{1b}[2Jname.gguf"), "x").unwrap();
    let list = hub.run(&["list"]).success().out;
    assert!(list.contains("org/evil") && list.contains("name"), "{list:?}");
    assert!(!list.contains('\u{1b}'), "{list:?}");
}

#[test]
fn commands_that_make_files_take_models_of_the_hub() {
    let hub = Hub::new();
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (out, other) = (path("out.gguf"), path("other.gguf"));
    let name = "org/tiny-GGUF:F16";
    hub.run(&["quantize", "-q", "-hf", name, &out, "Q8_0"]).success();
    assert!(hub.run(&["list"]).success().out.contains(name));
    // What is written has its name: in the folder of the command where none is given.
    let mut here = hub.command(&["quantize", "-q", "--offline", "-hf", name, "Q6_K"]);
    output(here.current_dir(folder.path())).success();
    assert!(folder.path().join("ggml-model-Q6_K.gguf").is_file());
    hub.run(&["quantize", "-q", "--fit", "1G", "--offline", "-hf", name, &other]).success();
    hub.run(&["quantize", "-q", "-hf", name, "a.gguf", &out, "Q8_0", "2"])
        .failed(2, &["-hf names the model"]);
    let compared = hub.run(&["compare", "--offline", "-hf", name, &out]).success().out;
    assert!(compared.contains("RMS error of all weights"), "{compared}");
    let text = path("text.txt");
    fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(8)).unwrap();
    let compared =
        hub.run(&["compare", "-q", "--offline", "-hf", name, &out, "-f", &text, "-c", "32"]).success().out;
    // Only the reference is the model of the hub: the other one differs.
    assert!(compared.contains("KL divergence") && !compared.contains("mean          0.000000"), "{compared}");
    hub.run(&["compare", "-hf", name, &out, &out]).failed(2, &["-hf names the reference"]);
    let prefix = path("part");
    let split = ["split", "--offline", "-hf", name, &prefix, "--split-max-tensors", "9"];
    let written = hub.run(&split).success().err;
    let first = written.lines().next().unwrap().strip_prefix("wrote ").unwrap();
    hub.run(&["merge", first, &path("merged.gguf")]).success();
    let parts = hub.run(&["merge", "--offline", "-hf", name, &path("merged.gguf")]);
    parts.failed(1, &["nothing to merge"]);
    hub.run(&["split", "-hf", name, "a.gguf", &prefix]).failed(2, &["-hf names the model"]);
    // An adapter is looked at after the model.
    hub.run(&["lora", "--offline", "-hf", name, "--lora", &out, "-o", &other]).failed(1, &["out.gguf"]);
    hub.run(&["lora", "-m", &out, "-hf", name, "--lora", &out, "-o", &other]).failed_usage();
}
