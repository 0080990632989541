//! Errors in the form of each dialect.

use serde_json::{Value, json};

use super::Dialect;
use crate::error::{ApiError, ErrorKind};

impl Dialect {
    /// The name of the schema of error bodies, as `/openapi.json` has it.
    pub fn error_schema(self) -> &'static str {
        match self {
            Dialect::OpenAi => "OpenAiError",
            Dialect::Anthropic => "AnthropicError",
            Dialect::Ollama => "OllamaError",
            Dialect::LlamaServer => "LlamaServerError",
        }
    }

    /// The body of an error.
    pub fn error_body(self, error: &ApiError, request_id: Option<&str>) -> Value {
        match self {
            Dialect::OpenAi => openai(error),
            Dialect::Anthropic => anthropic(error, request_id),
            Dialect::Ollama => json!({ "error": error.message }),
            Dialect::LlamaServer => llama_server(error),
        }
    }
}

fn openai(error: &ApiError) -> Value {
    let (kind, code) = match error.kind {
        ErrorKind::Invalid | ErrorKind::Timeout | ErrorKind::TooLarge | ErrorKind::Method => {
            ("invalid_request_error", None)
        }
        ErrorKind::NotFound => ("invalid_request_error", Some("unknown_url")),
        ErrorKind::ContextLength { .. } => ("invalid_request_error", Some("context_length_exceeded")),
        ErrorKind::Authentication => ("authentication_error", Some("invalid_api_key")),
        ErrorKind::Forbidden => ("permission_error", Some("origin_not_allowed")),
        ErrorKind::ModelNotFound => ("invalid_request_error", Some("model_not_found")),
        ErrorKind::TooMany => ("rate_limit_error", Some("rate_limit_exceeded")),
        ErrorKind::Internal => ("server_error", None),
        ErrorKind::Unsupported => ("not_supported_error", Some("not_supported")),
        ErrorKind::Unavailable => ("unavailable_error", Some("unavailable")),
    };
    let mut body = json!({ "message": error.message, "type": kind, "param": error.param, "code": code });
    add_context(error, &mut body);
    json!({ "error": body })
}

fn anthropic(error: &ApiError, request_id: Option<&str>) -> Value {
    let kind = match error.kind {
        ErrorKind::Invalid
        | ErrorKind::ContextLength { .. }
        | ErrorKind::Timeout
        | ErrorKind::Method
        | ErrorKind::Unsupported => "invalid_request_error",
        ErrorKind::TooLarge => "request_too_large",
        ErrorKind::Authentication => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::NotFound | ErrorKind::ModelNotFound => "not_found_error",
        ErrorKind::TooMany => "rate_limit_error",
        ErrorKind::Internal => "api_error",
        ErrorKind::Unavailable => "overloaded_error",
    };
    let message = match error.kind {
        // Anthropic's words, by which its clients know that they have to shorten the conversation.
        ErrorKind::ContextLength { prompt, context } => {
            format!("prompt is too long: {prompt} tokens > {context} maximum. {}", error.message)
        }
        _ => error.message.clone(),
    };
    json!({ "type": "error", "error": { "type": kind, "message": message }, "request_id": request_id })
}

fn llama_server(error: &ApiError) -> Value {
    let kind = match error.kind {
        ErrorKind::Invalid | ErrorKind::Timeout | ErrorKind::TooLarge | ErrorKind::Method => {
            "invalid_request_error"
        }
        ErrorKind::ContextLength { .. } => "exceed_context_size_error",
        ErrorKind::Authentication => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::NotFound | ErrorKind::ModelNotFound => "not_found_error",
        ErrorKind::TooMany | ErrorKind::Unavailable => "unavailable_error",
        ErrorKind::Internal => "server_error",
        ErrorKind::Unsupported => "not_supported_error",
    };
    let mut body = json!({ "code": error.status().as_u16(), "message": error.message, "type": kind });
    add_context(error, &mut body);
    json!({ "error": body })
}

/// Adds the sizes that clients of llama-server read.
fn add_context(error: &ApiError, body: &mut Value) {
    if let (ErrorKind::ContextLength { prompt, context }, Some(object)) = (error.kind, body.as_object_mut()) {
        object.insert("n_prompt_tokens".to_owned(), prompt.into());
        object.insert("n_ctx".to_owned(), context.into());
    }
}
