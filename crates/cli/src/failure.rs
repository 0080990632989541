//! Errors of commands, their exit codes, and the command-line options that help against errors of the library.

use std::io;

use quadriga_cpu::{Error as CpuError, PoolError};
use quadriga_llm::{Error as LlmError, StateError};
use quadriga_models::hub::HubError;
use quadriga_runtime::{BackendError, RuntimeError};

/// Why a command ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error, with its cause and what to do about it. Exit code 1.
    Message(String),
    /// An invalid command line or option value. Exit code 2.
    Usage(String),
    /// Ctrl-C, exit code 130, or SIGTERM, exit code 143.
    Interrupted,
    /// The reader of standard output closed it, as `head` does. Exit code 0.
    ClosedOutput,
    /// A rank was lost while the model was served: a supervisor starts the ranks again. Exit code 75, as `sysexits.h` has it for
    /// what may succeed later.
    Lost(String),
    /// A rank after the first has done its part. Exit code 0.
    Followed,
}

/// The exit code of [`Failure::Message`].
pub(crate) const FAILURE: u8 = 1;

/// The exit code of [`Failure::Usage`].
pub(crate) const USAGE: u8 = 2;

/// The exit code of [`Failure::Lost`].
pub(crate) const LOST: u8 = 75;

/// The result of a command.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// An I/O error of a file.
    pub(crate) fn file(action: &str, path: &std::path::Path, error: &io::Error) -> Failure {
        Failure::Message(format!("cannot {action} {}: {error}", path.display()))
    }

    /// What went wrong, in words.
    pub(crate) fn text(&self) -> &str {
        match self {
            Failure::Message(text) | Failure::Usage(text) | Failure::Lost(text) => text,
            Failure::Interrupted => "interrupted",
            Failure::ClosedOutput => "the output was closed",
            Failure::Followed => "the first rank has ended",
        }
    }

    /// Prints the error as one line on standard error and returns the exit code.
    pub(crate) fn report(self) -> u8 {
        let (text, code) = match self {
            Failure::Message(text) => (text, FAILURE),
            Failure::Usage(text) => (text, USAGE),
            Failure::Lost(text) => (text, LOST),
            Failure::Interrupted => return crate::interrupt::exit_code(),
            Failure::ClosedOutput | Failure::Followed => return 0,
        };
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        crate::notes::failure(&lines.join(" · "));
        code
    }
}

/// Only printing returns a bare I/O error; files go through [`Failure::file`].
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ClosedOutput,
            _ => Failure::Message(format!("cannot write to standard output: {error}")),
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

impl From<quadriga_models::Error> for Failure {
    fn from(error: quadriga_models::Error) -> Failure {
        match error {
            quadriga_models::Error::Model(error) => error.into(),
            quadriga_models::Error::Output(error) => error.into(),
            error => Failure::Message(error.to_string()),
        }
    }
}

impl From<quadriga_models::OutputIsInput> for Failure {
    fn from(error: quadriga_models::OutputIsInput) -> Failure {
        Failure::Usage(error.to_string())
    }
}

impl From<LlmError> for Failure {
    fn from(error: LlmError) -> Failure {
        let text = match advice(&error) {
            Some(advice) => format!("{error}; {advice}"),
            None => error.to_string(),
        };
        match error {
            LlmError::FetchCancelled => Failure::Interrupted,
            LlmError::Option { .. }
            | LlmError::SamplingOption { .. }
            | LlmError::Token { .. }
            | LlmError::CacheBlocks { .. }
            | LlmError::TensorOverride { .. }
            | LlmError::EmptyPrompt
            | LlmError::Grammar { .. }
            | LlmError::Cpu(CpuError::Isa(_) | CpuError::Pool(PoolError::Count(_))) => Failure::Usage(text),
            _ => Failure::Message(text),
        }
    }
}

/// The option that helps against an error of the library.
fn advice(error: &LlmError) -> Option<&'static str> {
    Some(match error {
        LlmError::ContextFull { .. } => "use a larger context (-c) or a shorter prompt",
        LlmError::Option { name: "the context", .. } => "-c is the context size",
        LlmError::TensorOverride { .. } => "-ot takes REGEX=DEVICE[,REGEX=DEVICE…]",
        LlmError::CacheBlocks { .. } => "use --cache-type f16 or f32",
        LlmError::Template { .. } => "--raw sends the prompt without the template",
        LlmError::Fetch { .. } => "-m FILE uses another model",
        LlmError::Cpu(CpuError::Isa(_)) => "QUADRIGA_ISA names it",
        LlmError::Cpu(CpuError::Pool(PoolError::Count(_))) => "-t is the number of threads",
        LlmError::Runtime(RuntimeError::Device { error, .. })
            if matches!(**error, BackendError::OutOfMemory { .. }) =>
        {
            "a smaller context (-c) or batch (-b), --cache-type q8_0, or fewer layers on the GPU (-ngl) need less"
        }
        LlmError::Runtime(RuntimeError::OverBudget(_)) => {
            "use fewer layers on the GPU (-ngl) or a larger --vram-budget"
        }
        LlmError::SavedState { source: StateError::OtherModel | StateError::CacheType { .. }, .. } => {
            "delete the file, or name another one"
        }
        LlmError::SavedState { source: StateError::TooLong { .. }, .. } => "-c N gives a larger context",
        LlmError::NoCacheFolder => "--cache-dir FOLDER names one, -m FILE uses another model",
        _ => return None,
    })
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        match error {
            HubError::Cancelled => Failure::Interrupted,
            HubError::Name { .. } | HubError::Setting { .. } => Failure::Usage(error.to_string()),
            _ => Failure::Message(error.to_string()),
        }
    }
}

impl From<CpuError> for Failure {
    fn from(error: CpuError) -> Failure {
        LlmError::from(error).into()
    }
}
