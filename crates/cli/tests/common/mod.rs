//! Shared by the tests of the command: running the binary, and small models written by `quadriga synth`.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// The command, with an empty stdin and without the user's environment variables.
pub fn quadriga<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quadriga"));
    command.args(arguments).stdin(Stdio::null());
    command.env_remove("QUADRIGA_CACHE").env_remove("QUADRIGA_PIP");
    command
}

/// The output and exit code of a command.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> CommandOutput {
        CommandOutput {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl CommandOutput {
    /// Asserts exit code 0.
    #[track_caller]
    pub fn success(self) -> CommandOutput {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Asserts this exit code and one line on stderr that contains all of these parts.
    #[track_caller]
    pub fn failed(self, code: i32, parts: &[&str]) -> CommandOutput {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.out, "", "{self:?}");
        assert_eq!(self.err.trim_end().lines().count(), 1, "{self:?}");
        assert!(self.err.starts_with("quadriga: "), "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is missing: {self:?}");
        }
        self
    }

    /// Without the line that says that the default model is downloaded, if it was.
    pub fn without_download(mut self) -> CommandOutput {
        if self.err.starts_with("quadriga: downloading the default model, ") {
            self.err = self.err.split_once('\n').map(|(_, rest)| rest.to_owned()).unwrap_or_default();
        }
        self
    }

    /// Asserts a usage error of the argument parser, which prints several lines.
    #[track_caller]
    pub fn failed_usage(self) -> CommandOutput {
        assert_eq!(self.code, Some(2), "{self:?}");
        self
    }
}

/// Runs the command to completion.
#[track_caller]
pub fn output(command: &mut Command) -> CommandOutput {
    command.output().unwrap().into()
}

/// Runs the command to completion with this stdin.
#[track_caller]
pub fn output_with_input(command: &mut Command, input: &[u8]) -> CommandOutput {
    use std::io::Write;
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that fails early does not read stdin.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap().into()
}

/// A folder with a small random model.
pub struct Fixture {
    pub folder: TempDir,
    pub model: PathBuf,
}

impl Fixture {
    /// Writes a model of 2 layers, 64 wide, changed by these options of `synth`.
    pub fn new(flags: &[&str]) -> Fixture {
        let folder = TempDir::new().unwrap();
        let model = folder.path().join("tiny.gguf");
        output(quadriga(["synth", "-o"]).arg(&model).args(flags)).success();
        Fixture { folder, model }
    }

    /// The same with a chat template.
    pub fn with_template(template: &str) -> Fixture {
        let fixture = Fixture::new(&[]);
        let old = fixture.path("old.gguf");
        std::fs::rename(&fixture.model, &old).unwrap();
        let file = quadriga_gguf::File::open(&old).unwrap();
        let mut writer = quadriga_gguf::Writer::new();
        for (key, value) in file.metadata() {
            writer.set(key, quadriga_gguf::OwnedValue::from(value)).unwrap();
        }
        writer.set("tokenizer.chat_template", template).unwrap();
        for tensor in file.tensors() {
            writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
        }
        writer.write(&fixture.model).unwrap();
        fixture
    }

    /// A small encoder with a classification head.
    pub fn reranker() -> Fixture {
        let fixture = Fixture::new(&["--arch", "bert", "--context", "64"]);
        let old = fixture.path("old.gguf");
        std::fs::rename(&fixture.model, &old).unwrap();
        let file = quadriga_gguf::File::open(&old).unwrap();
        let head: Vec<u8> =
            (0..64).flat_map(|i| (((i * 37 % 64) as f32) / 32.0 - 1.0).to_le_bytes()).collect();
        let mut writer = quadriga_gguf::Writer::new();
        for (key, value) in file.metadata().filter(|(key, _)| *key != "bert.pooling_type") {
            writer.set(key, quadriga_gguf::OwnedValue::from(value)).unwrap();
        }
        writer.set("bert.pooling_type", 4u32).unwrap();
        for tensor in file.tensors() {
            writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
        }
        writer.tensor_bytes("cls.output.weight", quadriga_graph::DType::F32, [1, 64], &head).unwrap();
        writer.write(&fixture.model).unwrap();
        fixture
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command with this model.
    pub fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = quadriga([name]);
        command.arg("-m").arg(&self.model).args(flags);
        command
    }
}

/// Prompts around the size of a window and far beyond it, of which some begin alike. The vocabulary has a token per byte.
pub fn windowed_prompts(window: usize) -> Vec<String> {
    let text = |length: usize, salt: usize| -> String {
        (0..length).map(|i| char::from(b'a' + ((i * i * 7 + i * salt + salt) % 26) as u8)).collect()
    };
    let shared = text(window + 150, 3);
    let tails = ["", "cat", "dogs and more"].map(|tail| format!("{shared}{tail}"));
    let others = [5, window - 3, window, 2 * window + 70].map(|length| text(length, length));
    tails.into_iter().chain(others).collect()
}

/// What `run` answers with 16 tokens, greedily.
#[track_caller]
pub fn answer_of_run(fixture: &Fixture, prompt: &str) -> serde_json::Value {
    let flags = ["--raw", "--temp", "0", "-n", "16", "--json", "-q", "-p", prompt];
    let done = output(&mut fixture.command("run", &flags)).success();
    serde_json::from_str::<serde_json::Value>(&done.out).unwrap()["text"].clone()
}

/// A data file of the tests of crates/llm.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../llm/tests/data").join(name)
}
