//! Why a request is refused or fails. Each dialect writes it in its own form.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use quadriga_llm::Error;

/// The kind of an [`ApiError`], which decides its status and its name in each dialect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// A field or the body is wrong: 400.
    Invalid,
    /// The prompt is longer than the context: 400.
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// The key is missing or unknown: 401.
    Authentication,
    /// A page of another origin: 403.
    Forbidden,
    /// There is no such route: 404.
    NotFound,
    /// There is no such model: 404.
    ModelNotFound,
    /// The route has another method: 405.
    Method,
    /// The body did not arrive in time: 408.
    Timeout,
    /// The body is too large: 413.
    TooLarge,
    /// A limit of the key, or too many requests wait: 429.
    TooMany,
    /// It failed through no fault of the caller's: 500.
    Internal,
    /// It is known, but not supported: 501.
    Unsupported,
    /// The server is starting, stopping, or out of memory: 503.
    Unavailable,
}

/// Why a request is refused or fails.
///
/// As a response it has no body yet: [`Dialect`](crate::dialects::Dialect) writes the body in the form of the route, so that
/// handlers and middleware alike can return it.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What kind of error it is.
    pub kind: ErrorKind,
    /// What is wrong, and the way out.
    pub message: String,
    /// The field that is wrong, such as `messages[0].role`.
    pub param: Option<String>,
    /// When the caller may try again.
    pub retry_after: Option<Duration>,
}

impl ErrorKind {
    /// The kind of an error that ends an answer which the engine has begun.
    pub(crate) fn of_failure(error: &Error) -> ErrorKind {
        match error {
            // A schema that can be compiled may still have no answer.
            Error::SamplingHook(_) | Error::ChangedLogits(_) => ErrorKind::Invalid,
            Error::Ranks { .. } => ErrorKind::Unsupported,
            // The model is loaded again, or the server is started again.
            Error::Cluster(_) | Error::ServiceStopped => ErrorKind::Unavailable,
            _ => ErrorKind::Internal,
        }
    }
}

impl ApiError {
    /// An error of a kind. A long message loses its middle.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> ApiError {
        ApiError { kind, message: shortened(message.into()), param: None, retry_after: None }
    }

    /// The error of an answer that the engine has begun.
    pub(crate) fn failed(error: &Error) -> ApiError {
        let message = match error {
            Error::SamplingHook(_) | Error::ChangedLogits(_) => in_words(error),
            error => format!("generation failed: {error}"),
        };
        ApiError::new(ErrorKind::of_failure(error), message)
    }

    /// What the log says of it: no text of the request, which is in messages about wrong values.
    pub(crate) fn logged(&self) -> &str {
        match self.kind {
            ErrorKind::Invalid => "invalid request",
            ErrorKind::Forbidden => "forbidden",
            ErrorKind::NotFound => "no such route",
            ErrorKind::ModelNotFound => "no such model",
            _ => &self.message,
        }
    }

    /// A field has a wrong value.
    pub fn field(param: impl Into<String>, problem: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        ApiError {
            param: Some(param.clone()),
            ..ApiError::new(ErrorKind::Invalid, format!("{param} {problem}"))
        }
    }

    /// The request is wrong as a whole.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(ErrorKind::Invalid, message)
    }

    /// There is no such model.
    pub fn model_not_found(name: &str) -> ApiError {
        let error = ApiError::new(ErrorKind::ModelNotFound, format!("model '{}' not found", beginning(name)));
        ApiError { param: Some("model".to_owned()), ..error }
    }

    /// With the field that is to blame, if none is named yet.
    #[must_use]
    pub fn at(mut self, param: &str) -> ApiError {
        self.param.get_or_insert_with(|| param.to_owned());
        self
    }

    /// With the time after which the caller may try again.
    #[must_use]
    pub fn retry_after(mut self, time: Duration) -> ApiError {
        self.retry_after = Some(time);
        self
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self.kind {
            ErrorKind::Invalid | ErrorKind::ContextLength { .. } => StatusCode::BAD_REQUEST,
            ErrorKind::Authentication => StatusCode::UNAUTHORIZED,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ErrorKind::NotFound | ErrorKind::ModelNotFound => StatusCode::NOT_FOUND,
            ErrorKind::Method => StatusCode::METHOD_NOT_ALLOWED,
            ErrorKind::Timeout => StatusCode::REQUEST_TIMEOUT,
            ErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorKind::TooMany => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// Characters of a value of the request that errors show.
const SHOWN: usize = 64;

/// Characters of a message; texts that others write, such as those of templates and schemas, can be long.
const LONGEST: usize = 1_600;

/// A value of the request in quotation marks, as errors show it: its beginning, if it is long.
pub(crate) fn quoted(value: &str) -> String {
    format!("{:?}", beginning(value))
}

fn beginning(value: &str) -> String {
    match value.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", value.get(..end).unwrap_or_default()),
        None => value.to_owned(),
    }
}

/// A message without the middle of a long one: what is wrong is often at the end.
fn shortened(message: String) -> String {
    let count = message.chars().count();
    if count <= LONGEST {
        return message;
    }
    let half = LONGEST / 2;
    message.chars().take(half).chain(" … ".chars()).chain(message.chars().skip(count - half)).collect()
}

/// Errors of sampling by the fields that they come from.
fn in_words(error: &Error) -> String {
    match error {
        Error::SamplingHook(reason) => reason.to_string(),
        Error::ChangedLogits(reason) => {
            format!("logit_bias, penalties or the form of the answer leave no token to sample: {reason}")
        }
        error => error.to_string(),
    }
}

/// What clients of several libraries match when a prompt is too long: the code and the words of OpenAI, those of llama-server.
fn context_message(prompt: usize, context: usize) -> String {
    format!(
        "This model's maximum context length is {context} tokens. However, your request has {prompt} tokens \
         (context_length_exceeded): the request exceeds the available context size. Shorten the prompt, or start the server \
         with a larger context (-c)."
    )
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        let message = in_words(&error);
        match error {
            Error::ContextFull { wanted, used, context } => {
                let kind = ErrorKind::ContextLength { prompt: wanted + used, context };
                ApiError::new(kind, context_message(wanted + used, context))
            }
            Error::QueueFull { .. } => {
                ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(1))
            }
            Error::ServiceStopped => ApiError::new(ErrorKind::Unavailable, "the model was unloaded"),
            // The model is loaded again, or the server is started again.
            Error::Cluster(_) => {
                ApiError::new(ErrorKind::Unavailable, message).retry_after(Duration::from_secs(10))
            }
            Error::Ranks { .. } => ApiError::new(ErrorKind::Unsupported, message),
            Error::SamplingOption { name, value, wanted } => {
                ApiError::field(name.replace('-', "_"), format!("is {value}; it must be {wanted}"))
            }
            Error::EmptyPrompt
            | Error::Token { .. }
            | Error::Template { .. }
            | Error::NoVocabulary
            | Error::Encoder { .. }
            | Error::NoClassificationHead
            | Error::Option { .. }
            | Error::Grammar { .. }
            | Error::SamplingHook(_)
            | Error::ChangedLogits(_) => ApiError::invalid(message),
            _ => ApiError::new(ErrorKind::Internal, message),
        }
    }
}

impl IntoResponse for ApiError {
    /// The status and headers; the body follows in [`Dialect`](crate::dialects::Dialect)'s form.
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        let headers = response.headers_mut();
        if let Some(time) = self.retry_after {
            let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if matches!(self.kind, ErrorKind::Internal | ErrorKind::Unsupported) {
            // It would fail again, and cost as much. Clients repeat whatever has a status of 500 or more.
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response.extensions_mut().insert(self);
        response
    }
}
