//! How a command ends when it does not end well, and the exit code of each way.

use std::io;
use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong: what, why, and what to do. Exit code 1.
    Message(String),
    /// The command line asks for something that makes no sense. Exit code 2.
    Usage(String),
    /// Ctrl-C. Exit code 130.
    Interrupted,
    /// Whoever was reading the results has seen enough: no failure. Exit code 0.
    ClosedOutput,
}

/// What a command returns.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure to do something with a file.
    pub(crate) fn file(action: &str, path: &std::path::Path, error: &io::Error) -> Failure {
        Failure::Message(format!("cannot {action} {}: {error}", path.display()))
    }

    /// Says what went wrong, in one line on standard error, and gives the exit code.
    pub(crate) fn report(self) -> ExitCode {
        let (text, code) = match self {
            Failure::Message(text) => (text, 1),
            Failure::Usage(text) => (text, 2),
            Failure::Interrupted => return ExitCode::from(crate::interrupt::EXIT_CODE),
            Failure::ClosedOutput => return ExitCode::SUCCESS,
        };
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        note!("quadriga: {}", lines.join(" · "));
        ExitCode::from(code)
    }
}

/// Only printing fails with a bare input/output error; files go through [`Failure::file`].
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ClosedOutput,
            _ => Failure::Message(format!("cannot print the results: {error}")),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        io::Error::from(error).into()
    }
}

impl From<quadriga_gguf::Error> for Failure {
    fn from(error: quadriga_gguf::Error) -> Failure {
        Failure::Message(error.to_string())
    }
}

impl From<quadriga_llm::Error> for Failure {
    fn from(error: quadriga_llm::Error) -> Failure {
        match error {
            quadriga_llm::Error::FetchCancelled => Failure::Interrupted,
            other => Failure::Message(other.to_string()),
        }
    }
}

impl From<quadriga_cpu::Error> for Failure {
    fn from(error: quadriga_cpu::Error) -> Failure {
        Failure::Message(error.to_string())
    }
}
