//! Keeps answers in the form that a request asks for.

use quadriga_llm::Model;
use quadriga_llm::sampling::SamplingHook;

use crate::constraint::{Constraint, ToolChoice};
use crate::error::{ApiError, ErrorKind};
use crate::generation::Generation;

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
