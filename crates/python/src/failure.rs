//! Errors of the library as Python's exceptions, whose classes are in `quadriga/errors.py`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use quadriga::OpenError;
use quadriga_graph::BuildError;
use quadriga_llm::Error as LlmError;
use quadriga_models::hub::HubError;
use quadriga_models::lora::LoraError;
use quadriga_runtime::{BackendError, RuntimeError};
use quadriga_server::error::{ApiError, ErrorKind};

use crate::interpreter::attached;

/// The result of a function that may raise.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Why a call fails, and the exception that says so.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An exception of `quadriga.errors`, by the name of its class.
    Library { class: &'static str, message: String },
    /// An exception that Python code raised: a logits processor, an operation, a signal handler.
    Python(PyErr),
}

impl Failure {
    /// An exception with a message.
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Failure {
        Failure::Library { class, message: message.into() }
    }

    /// An argument is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Failure {
        Failure::new("InvalidRequest", message)
    }

    /// The model or session was closed.
    pub(crate) fn closed(what: &str) -> Failure {
        Failure::new("Closed", format!("the {what} is closed; make a new one"))
    }

    /// The exception of an error that several owners share.
    pub(crate) fn of_llm(error: &LlmError) -> Failure {
        if let LlmError::SamplingHook(source) = error
            && let Some(raised) = source.downcast_ref::<PyErr>()
            && let Some(raised) = attached(|py| raised.clone_ref(py))
        {
            return Failure::Python(raised);
        }
        Failure::new(llm_class(error), error.to_string())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        let (class, message) = match failure {
            Failure::Python(raised) => return raised,
            Failure::Library { class, message } => (class, message),
        };
        Python::attach(|py| {
            let found = py.import("quadriga.errors").and_then(|module| module.getattr(class));
            match found.and_then(|class| class.call1((&message,))) {
                Ok(exception) => PyErr::from_value(exception),
                Err(_) => PyRuntimeError::new_err(message),
            }
        })
    }
}

impl From<PyErr> for Failure {
    fn from(raised: PyErr) -> Failure {
        Failure::Python(raised)
    }
}

impl From<LlmError> for Failure {
    fn from(error: LlmError) -> Failure {
        Failure::of_llm(&error)
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Failure {
        Failure::new(runtime_class(&error), error.to_string())
    }
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        let class = match error {
            HubError::Name { .. } | HubError::Setting { .. } => "InvalidRequest",
            HubError::NothingFits { .. } => "OutOfMemory",
            _ => "HubError",
        };
        Failure::new(class, error.to_string())
    }
}

impl From<LoraError> for Failure {
    fn from(error: LoraError) -> Failure {
        match error {
            LoraError::Model(error) => error.into(),
            other => Failure::new("ModelError", other.to_string()),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        let class = match error {
            OpenError::Unknown { .. } => "InvalidRequest",
            _ => "DeviceError",
        };
        Failure::new(class, error.to_string())
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Failure {
        let inputs = match error.inputs.is_empty() {
            true => String::new(),
            false => format!("; inputs: {}", error.inputs.join(", ")),
        };
        Failure::new("GraphError", format!("{}: {}{inputs}", error.operation, error.kind))
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        let class = match error.kind {
            ErrorKind::ContextLength { .. } => "ContextFull",
            ErrorKind::TooMany => "QueueFull",
            ErrorKind::Unavailable => "Closed",
            ErrorKind::Internal => "Error",
            _ => "InvalidRequest",
        };
        let message = match error.kind {
            // The server's words for this name its own options.
            ErrorKind::ContextLength { prompt, context } => {
                format!("the prompt has {prompt} tokens, the context {context}; shorten it, or raise n_ctx")
            }
            _ => error.message,
        };
        Failure::new(class, message)
    }
}

fn llm_class(error: &LlmError) -> &'static str {
    use LlmError::*;
    match error {
        Runtime(error) => runtime_class(error),
        ContextFull { .. } => "ContextFull",
        QueueFull { .. } => "QueueFull",
        ServiceStopped => "Closed",
        OutputMemory { .. } => "OutOfMemory",
        SavedState { .. } => "StateError",
        Device { .. } => "DeviceError",
        Fetch { .. } | FetchCancelled | NoCacheFolder => "HubError",
        Option { .. }
        | SamplingOption { .. }
        | SamplingNeedsModel { .. }
        | Token { .. }
        | EmptyPrompt
        | Grammar { .. }
        | ChangedLogits(_)
        | SamplingHook(_)
        | TensorOverride { .. }
        | CacheBlocks { .. }
        | Encoder { .. }
        | NoClassificationHead
        | Template { .. }
        | UnknownDevice { .. }
        | DuplicateDevice { .. } => "InvalidRequest",
        Adapter { .. }
        | File(_)
        | UnsupportedArchitecture { .. }
        | Hyperparameter { .. }
        | TensorShape { .. }
        | TensorType { .. }
        | TensorValue { .. }
        | TensorInteger { .. }
        | ForeignCounts { .. }
        | NoVocabulary
        | UnknownTokenizer { .. }
        | UnknownPreTokenizer { .. }
        | Vocabulary { .. }
        | Embedding { .. }
        | Logits(_) => "ModelError",
        _ => "Error",
    }
}

fn runtime_class(error: &RuntimeError) -> &'static str {
    match error {
        RuntimeError::OverBudget(_) | RuntimeError::Memory(_) => "OutOfMemory",
        RuntimeError::Device { error, .. } => match **error {
            BackendError::OutOfMemory { .. } => "OutOfMemory",
            BackendError::Node { .. } | BackendError::Unsupported { .. } => "GraphError",
            _ => "DeviceError",
        },
        RuntimeError::Snapshot(_) => "StateError",
        RuntimeError::Internal { .. } | RuntimeError::BadPlan(_) | RuntimeError::BadSchedule(_) => "Error",
        _ => "GraphError",
    }
}
