//! Calls of tools: how a model writes them, found in its chat template; parsed from its output while it is streamed; and
//! enforced by a grammar.
//!
//! A [`ToolFormat`] is found by rendering the template with calls whose names and arguments are known, and looking at the text
//! around them; a short table has the templates that do not render calls. A [`ToolCallParser`] tells calls from text. What
//! cannot be parsed is text. [`ToolFormat::grammar`] describes the calls that a request allows, with the schemas of their
//! arguments, so that a call that has begun can only be completed as a valid one.
//!
//! ```
//! use quadriga_llm::template::ChatTemplate;
//! use quadriga_llm::tools::{ToolCallParser, ToolFormat};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}\
//!     <call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}";
//! let format = ToolFormat::of_template(&ChatTemplate::new(source, "", "")?, &[]);
//! let mut parser = ToolCallParser::new(format.into(), [].into());
//! let first = parser.push("Let me see. <ca");
//! assert_eq!((first.text.as_str(), first.calls.len()), ("Let me see.", 0));
//! let rest = parser.push("ll>{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}</call>");
//! assert_eq!(rest.calls[0].name.as_deref(), Some("weather"));
//! assert_eq!(rest.calls[0].arguments, r#"{"city": "Bern"}"#);
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

mod atoms;
mod call_reader;
mod conversation;
mod format;
#[cfg(feature = "constraint")]
mod grammar;
mod json_extent;
mod known;
mod literal;
mod parser;
mod probe;
mod python;
mod tagged;
mod text_patterns;
mod tool;
mod value_end;
#[cfg(feature = "constraint")]
mod writable;

pub use format::{CallSyntax, TemplateSupport, ToolFormat};
#[cfg(feature = "constraint")]
pub use grammar::{MAX_CALLS, ToolRules};
pub use parser::{ToolCallParser, ToolCallPiece, ToolText};
pub use tool::{Tool, ToolChoice};
