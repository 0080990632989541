//! The form that an answer must have: a schema or grammar, and calls of tools.

use quadriga_llm::constraint::Grammar;
use serde_json::{Value, json};

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

impl From<&Grammar> for Constraint {
    fn from(grammar: &Grammar) -> Constraint {
        match grammar {
            Grammar::JsonSchema(schema) => Constraint::JsonSchema(schema.clone()),
            Grammar::JsonObject => Constraint::JsonObject,
            Grammar::Json => Constraint::JsonSchema(json!({})),
            Grammar::Regex(pattern) => Constraint::Regex(pattern.clone()),
            Grammar::Lark(source) => Constraint::Lark(source.clone()),
            Grammar::Gbnf(source) => Constraint::Gbnf(source.clone()),
            Grammar::Choices(choices) => Constraint::Choices(choices.clone()),
        }
    }
}

impl Constraint {
    /// The memory that it takes, roughly.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Constraint::None | Constraint::JsonObject => 0,
            Constraint::JsonSchema(schema) => value_bytes(schema),
            Constraint::Regex(text) | Constraint::Lark(text) | Constraint::Gbnf(text) => text.len(),
            Constraint::Choices(texts) => texts.iter().map(|text| size_of::<String>() + text.len()).sum(),
        }
    }
}

/// The memory of a value and those in it. Bodies are not nested deeply.
fn value_bytes(value: &Value) -> usize {
    let inner: usize = match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(value_bytes).sum(),
        Value::Object(object) => {
            object.iter().map(|(name, value)| size_of::<String>() + name.len() + value_bytes(value)).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    size_of::<Value>() + inner
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

impl ToolChoice {
    /// Whether an answer may have several calls if the request does not say so. A model that must call tends to go on calling.
    pub(crate) fn calls_several(&self) -> bool {
        !matches!(self, ToolChoice::Required | ToolChoice::Allowed { required: true, .. })
    }
}
