//! What the tests of the command share: the built binary, and small models made by its own `synth`.
#![allow(dead_code, unreachable_pub, reason = "each test file uses some of it")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// The command, with an empty standard input and nothing of the user's settings.
pub fn quadriga<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quadriga"));
    command.args(arguments).stdin(Stdio::null());
    command.env_remove("QUADRIGA_CACHE").env_remove("QUADRIGA_PIP");
    command
}

/// What a command printed and how it ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        Ended {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    /// It went well.
    #[track_caller]
    pub fn well(self) -> Ended {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// It failed with this code and one line on standard error that has all of these parts.
    #[track_caller]
    pub fn failed(self, code: i32, parts: &[&str]) -> Ended {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.out, "", "{self:?}");
        assert_eq!(self.err.trim_end().lines().count(), 1, "{self:?}");
        assert!(self.err.starts_with("quadriga: "), "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is missing: {self:?}");
        }
        self
    }
}

impl Ended {
    /// The command line made no sense; the parser says why in lines of its own.
    #[track_caller]
    pub fn failed_usage(self) -> Ended {
        assert_eq!(self.code, Some(2), "{self:?}");
        self
    }
}

/// Runs the command to its end.
#[track_caller]
pub fn end(command: &mut Command) -> Ended {
    command.output().unwrap().into()
}

/// Runs the command to its end, with this on its standard input.
#[track_caller]
pub fn end_with_input(command: &mut Command, input: &[u8]) -> Ended {
    use std::io::Write;
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that fails early does not read what it is given.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap().into()
}

/// A folder with a small random model.
pub struct Stage {
    pub folder: TempDir,
    pub model: PathBuf,
}

impl Stage {
    /// A model of 2 layers, 64 wide, changed by these flags of `synth`.
    pub fn new(flags: &[&str]) -> Stage {
        let folder = TempDir::new().unwrap();
        let model = folder.path().join("tiny.gguf");
        end(quadriga(["synth", "-o"]).arg(&model).args(flags)).well();
        Stage { folder, model }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command with this stage's model.
    pub fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = quadriga([name]);
        command.arg("-m").arg(&self.model).args(flags);
        command
    }
}

/// The data that the tests of the language models share.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../llm/tests/data").join(name)
}
