//! llama.cpp's grammar format GBNF, translated to the Lark syntax of the compiler.
//!
//! A GBNF grammar is a set of rules over characters. The compiler's grammars are over terminals, which a lexer finds: the
//! longest text that matches. Parts of a grammar that are regular become terminals where the longest match is the only one
//! that can be continued, and all else is translated character by character, so that exactly the same texts are accepted.
//!
//! ```
//! use quadriga_llm::constraint::gbnf;
//!
//! assert!(gbnf::to_lark("root ::= \"yes\" | \"no\" # an answer").is_ok());
//! let error = gbnf::to_lark("root ::= item+\nitem ::= \"- \" [^\\n").unwrap_err();
//! assert_eq!((error.line, error.column), (2, 19));
//! ```

mod characters;
mod flow;
mod lark;
mod nodes;
mod parse;
mod terminals;

/// The reason why a text is no GBNF grammar, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {reason}")]
pub struct GbnfError {
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// What is wrong there.
    pub reason: String,
}

/// A Lark grammar of the same texts.
///
/// # Errors
/// The text is no GBNF grammar.
pub fn to_lark(source: &str) -> Result<String, GbnfError> {
    to_lark_with(source, &|_| None)
}

/// As [`to_lark`], with the numbers of tokens whose names a grammar has.
pub(super) fn to_lark_with(source: &str, token: &dyn Fn(&str) -> Option<u32>) -> Result<String, GbnfError> {
    let grammar = parse::parse(source, token)?;
    let flow = flow::Flow::new(&grammar);
    let terminals = terminals::choose(&grammar, &flow);
    Ok(lark::print(&grammar, &flow, &terminals))
}
