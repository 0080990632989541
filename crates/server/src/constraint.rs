//! The form that an answer must have: a schema or grammar, and calls of tools.

use quadriga_llm::Model;
use quadriga_llm::sampling::SamplingHook;
use serde_json::Value;

use crate::error::{ApiError, ErrorKind};
use crate::generation::Generation;

/// The form that an answer must have.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum Constraint {
    /// Any text.
    #[default]
    None,
    /// A JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema(Value),
    /// Text that a regular expression matches.
    Regex(String),
    /// Text of a grammar in Lark's notation.
    Lark(String),
    /// Text of a grammar in GBNF.
    Gbnf(String),
}

/// Which of the tools may or must be called.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// None: the template is not given any.
    None,
    /// At least one.
    Required,
    /// The one of this name.
    Named(String),
}

/// The hooks that keep the answers of a request in form: one for each choice, or none at all.
pub(crate) fn hooks(_model: &Model, generation: &Generation) -> Result<Vec<Box<dyn SamplingHook>>, ApiError> {
    let unsupported =
        |what: &str| Err(ApiError::new(ErrorKind::Unsupported, format!("{what} is not supported")));
    match (&generation.constraint, &generation.tool_choice) {
        (Constraint::None, ToolChoice::Auto | ToolChoice::None) => Ok(Vec::new()),
        (Constraint::None, _) => unsupported("a required tool_choice"),
        _ => unsupported("structured output"),
    }
}
