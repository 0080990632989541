//! The forms in which a request says what its answer is to be like.

/// What an answer must be.
///
/// ```
/// use quadriga_llm::constraint::Grammar;
/// use serde_json::json;
///
/// let date = Grammar::Regex(r"\d{4}-\d{2}-\d{2}".into());
/// let list = Grammar::Gbnf("root ::= (\"- \" [^\\n]+ \"\\n\")+".into());
/// let verdict = Grammar::Choices(vec!["yes".into(), "no".into()]);
/// let person = Grammar::JsonSchema(json!({
///     "type": "object",
///     "properties": { "name": { "type": "string" } },
///     "required": ["name"],
/// }));
/// # assert!([date, list, verdict, person].iter().all(|grammar| !grammar.name().is_empty()));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON that satisfies a schema. Properties come in the order of the schema. `oneOf` is taken as `anyOf` where its options
    /// may overlap, and of formats those of [`unknown_format`](super::unknown_format) and a few others are no constraint; other
    /// keywords that are not supported are an error.
    JsonSchema(serde_json::Value),
    /// A JSON object.
    JsonObject,
    /// A JSON value.
    Json,
    /// Text that matches a regular expression from its beginning to its end, in the syntax of Rust's `regex` without
    /// look-around and back-references.
    Regex(String),
    /// A grammar in the Lark syntax of `llguidance`; its start rule is `start`.
    Lark(String),
    /// A grammar in llama.cpp's GBNF syntax; its start rule is `root`. See [`gbnf`](super::gbnf).
    Gbnf(String),
    /// One of some texts.
    Choices(Vec<String>),
}

impl Grammar {
    /// The kind of grammar, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Grammar::JsonSchema(_) => "JSON schema",
            Grammar::JsonObject | Grammar::Json => "JSON grammar",
            Grammar::Regex(_) => "regular expression",
            Grammar::Lark(_) => "Lark grammar",
            Grammar::Gbnf(_) => "GBNF grammar",
            Grammar::Choices(_) => "list of choices",
        }
    }
}
