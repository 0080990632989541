//! Status codes, and errors as the caller gets them.

use std::ffi::c_char;

use quadriga::gguf;
use quadriga::graph::BuildError;
use quadriga::llm;
use quadriga::models::hub::HubError;
use quadriga::models::lora::LoraError;
use quadriga::runtime::memory::AllocatorError;
use quadriga::runtime::{BackendError, RuntimeError};

use crate::callbacks::has_reason;

/// How a call ended: one of the constants QD_STATUS_….
pub type qd_status = i32;

/// Success.
pub const QD_STATUS_OK: qd_status = 0;
/// A stream has ended; not an error.
pub const QD_STATUS_END: qd_status = 1;
/// An argument is NULL, out of range, or not UTF-8.
pub const QD_STATUS_INVALID_ARGUMENT: qd_status = -1;
/// A handle is NULL, was freed, or is of another type.
pub const QD_STATUS_INVALID_HANDLE: qd_status = -2;
/// The caller's buffer is too small.
pub const QD_STATUS_BUFFER_TOO_SMALL: qd_status = -3;
/// Another call is using the object.
pub const QD_STATUS_BUSY: qd_status = -4;
/// A file, device, tensor or model of this name does not exist.
pub const QD_STATUS_NOT_FOUND: qd_status = -5;
/// Memory of a device or of the host does not suffice.
pub const QD_STATUS_OUT_OF_MEMORY: qd_status = -6;
/// An operation, a model or an option that is not supported.
pub const QD_STATUS_UNSUPPORTED: qd_status = -7;
/// A file cannot be read or written, or is malformed.
pub const QD_STATUS_FILE: qd_status = -8;
/// A model could not be downloaded.
pub const QD_STATUS_NETWORK: qd_status = -9;
/// A device failed.
pub const QD_STATUS_DEVICE: qd_status = -10;
/// A device is lost with everything on it.
pub const QD_STATUS_DEVICE_LOST: qd_status = -11;
/// A graph breaks a rule of its operations.
pub const QD_STATUS_GRAPH: qd_status = -12;
/// A prompt does not fit the context.
pub const QD_STATUS_CONTEXT_FULL: qd_status = -13;
/// A callback of the caller failed or asked for the end.
pub const QD_STATUS_CALLBACK: qd_status = -14;
/// Any other failure; the message says which.
pub const QD_STATUS_FAILED: qd_status = -15;
/// A bug of the library.
pub const QD_STATUS_INTERNAL: qd_status = -16;

/// Bytes of the message of an error, the NUL included.
pub const QD_ERROR_MESSAGE_BYTES: usize = 1020;

/// An error, in memory of the caller; it need not be initialized or freed.
#[repr(C)]
pub struct qd_error {
    /// One of QD_STATUS_….
    pub code: qd_status,
    /// What happened and what can be done, as UTF-8 with NUL at the end. Longer messages are cut.
    pub message: [c_char; QD_ERROR_MESSAGE_BYTES],
}

impl qd_error {
    /// No error, for callbacks to fill.
    pub(crate) fn empty() -> qd_error {
        qd_error { code: QD_STATUS_OK, message: [0; QD_ERROR_MESSAGE_BYTES] }
    }

    /// Writes code and message; a message that is too long is cut after a whole character.
    pub(crate) fn fill(&mut self, code: qd_status, message: &str) {
        self.code = code;
        let mut end = message.len().min(QD_ERROR_MESSAGE_BYTES - 1);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let bytes = message.bytes().take(end).filter(|byte| *byte != 0).chain([0]);
        for (to, from) in self.message.iter_mut().zip(bytes) {
            *to = from as c_char;
        }
    }

    /// The message that a callback has written; `otherwise` if there is none.
    pub(crate) fn text(&self, otherwise: &str) -> String {
        let bytes: Vec<u8> =
            self.message.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
        if bytes.is_empty() { otherwise.to_owned() } else { String::from_utf8_lossy(&bytes).into_owned() }
    }
}

/// A failure inside the library, before it becomes a [`qd_error`].
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: qd_status,
    pub(crate) message: String,
}

/// The result of the body of a function.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: qd_status, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Failure {
        Failure::new(QD_STATUS_INVALID_ARGUMENT, message)
    }

    pub(crate) fn null(name: &str) -> Failure {
        Failure::argument(format!("{name} is NULL"))
    }
}

fn backend_code(error: &BackendError) -> qd_status {
    match error {
        BackendError::OutOfMemory { .. } => QD_STATUS_OUT_OF_MEMORY,
        BackendError::OutOfBounds { .. }
        | BackendError::SizeMismatch { .. }
        | BackendError::Foreign { .. } => QD_STATUS_INVALID_ARGUMENT,
        BackendError::Unsupported { .. } => QD_STATUS_UNSUPPORTED,
        BackendError::Lost { .. } => QD_STATUS_DEVICE_LOST,
        BackendError::Node { reason, .. } if has_reason(reason) => QD_STATUS_CALLBACK,
        _ => QD_STATUS_DEVICE,
    }
}

fn runtime_code(error: &RuntimeError) -> qd_status {
    match error {
        RuntimeError::Device { error, .. } => backend_code(error),
        RuntimeError::OverBudget(_) => QD_STATUS_OUT_OF_MEMORY,
        RuntimeError::NoBackendSupports { .. } => QD_STATUS_UNSUPPORTED,
        RuntimeError::UnknownName { .. } => QD_STATUS_NOT_FOUND,
        RuntimeError::Build(_) => QD_STATUS_GRAPH,
        RuntimeError::Snapshot(_) => QD_STATUS_FILE,
        RuntimeError::BadPlan(_) | RuntimeError::BadSchedule(_) | RuntimeError::Internal { .. } => {
            QD_STATUS_INTERNAL
        }
        RuntimeError::UnknownBackend { .. }
        | RuntimeError::UnknownPin { .. }
        | RuntimeError::WrongType { .. }
        | RuntimeError::WrongKind { .. }
        | RuntimeError::WrongSize { .. }
        | RuntimeError::WrongCount { .. } => QD_STATUS_INVALID_ARGUMENT,
        _ => QD_STATUS_FAILED,
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Failure {
        Failure::new(backend_code(&error), error.to_string())
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Failure {
        Failure::new(runtime_code(&error), error.to_string())
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Failure {
        // Without the line in this crate that called the builder.
        let BuildError { operation, kind, inputs, scope, .. } = error;
        let scope = if scope.is_empty() { scope } else { format!(" in {scope}") };
        let inputs =
            if inputs.is_empty() { String::new() } else { format!("; inputs: {}", inputs.join(", ")) };
        Failure::new(QD_STATUS_GRAPH, format!("{operation}{scope}: {kind}{inputs}"))
    }
}

impl From<AllocatorError> for Failure {
    fn from(error: AllocatorError) -> Failure {
        let code = match &error {
            AllocatorError::OutOfMemory { .. } => QD_STATUS_OUT_OF_MEMORY,
            AllocatorError::Backend(error) => backend_code(error),
            _ => QD_STATUS_INVALID_ARGUMENT,
        };
        Failure::new(code, error.to_string())
    }
}

impl From<llm::Error> for Failure {
    fn from(error: llm::Error) -> Failure {
        Failure::of_llm(&error)
    }
}

impl Failure {
    /// The failure of an error that several owners share.
    pub(crate) fn of_llm(error: &llm::Error) -> Failure {
        use llm::Error;
        let code = match error {
            Error::File(file) => file_code(file),
            Error::SavedState { source, .. } => file_code(source),
            Error::Runtime(runtime) => runtime_code(runtime),
            Error::UnsupportedArchitecture { .. } | Error::TensorType { .. } => QD_STATUS_UNSUPPORTED,
            Error::Encoder { .. } | Error::NoClassificationHead => QD_STATUS_UNSUPPORTED,
            Error::UnknownDevice { .. } => QD_STATUS_NOT_FOUND,
            Error::Device { .. } => QD_STATUS_DEVICE,
            Error::ContextFull { .. } => QD_STATUS_CONTEXT_FULL,
            Error::OutputMemory { .. } => QD_STATUS_OUT_OF_MEMORY,
            Error::QueueFull { .. } => QD_STATUS_BUSY,
            Error::EmptyPrompt
            | Error::Option { .. }
            | Error::SamplingOption { .. }
            | Error::SamplingNeedsModel { .. }
            | Error::Grammar { .. }
            | Error::Token { .. } => QD_STATUS_INVALID_ARGUMENT,
            Error::HookPanicked
            | Error::SamplingHook(_)
            | Error::ChangedLogits(_)
            | Error::ObserverStopped => QD_STATUS_CALLBACK,
            Error::Hyperparameter { .. } | Error::TensorShape { .. } | Error::TensorValue { .. } => {
                QD_STATUS_FILE
            }
            _ => QD_STATUS_FAILED,
        };
        Failure::new(code, error.to_string())
    }
}

fn file_code(error: &(dyn std::error::Error + 'static)) -> qd_status {
    let is_missing = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::NotFound)
    };
    let mut cause = Some(error);
    while let Some(error) = cause {
        if is_missing(error) {
            return QD_STATUS_NOT_FOUND;
        }
        cause = error.source();
    }
    QD_STATUS_FILE
}

/// A failure of a GGUF file.
pub(crate) fn file_failure(error: &gguf::Error) -> Failure {
    Failure::new(file_code(error), error.to_string())
}

impl From<LoraError> for Failure {
    fn from(error: LoraError) -> Failure {
        match error {
            LoraError::Model(error) => error.into(),
            LoraError::Gguf(error) => llm::Error::from(error).into(),
            other => Failure::new(QD_STATUS_FILE, other.to_string()),
        }
    }
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        let code = match &error {
            HubError::NotCached { .. } | HubError::NoModel { .. } | HubError::QuantNotCached { .. } => {
                QD_STATUS_NOT_FOUND
            }
            HubError::NothingFits { .. } => QD_STATUS_OUT_OF_MEMORY,
            HubError::Cancelled => QD_STATUS_CALLBACK,
            _ => QD_STATUS_NETWORK,
        };
        Failure::new(code, error.to_string())
    }
}
