//! The form that an answer must have: a schema or grammar, and calls of tools.

use serde_json::Value;

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
    /// One of some texts.
    Choices(Vec<String>),
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
    /// One of these names; at least one if that is required.
    Allowed {
        /// The names.
        names: Vec<String>,
        /// Whether one must be called.
        required: bool,
    },
}
