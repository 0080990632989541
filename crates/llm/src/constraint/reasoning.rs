//! The grammar of the reasoning before a constrained answer.

use std::fmt::Write;

use llguidance::regex_to_lark;

use super::source::ANSWER;
use crate::reasoning::{ReasoningFormat, ReasoningSplitter};
use crate::tokenizer::{TokenType, Tokenizer};

/// White space between the end of the reasoning and the answer.
const SPACE: &str = r"/[ \t\r\n]{1,8}/";

/// Any text.
const TEXT: &str = r"/(?s:.+)/";

/// A Lark grammar of reasoning and an answer after it, for what a splitter at the beginning of an output expects. `None` if
/// there is no reasoning. If the answer `is_text`, which may begin with white space, so may reasoning between texts: otherwise a
/// model that begins with white space would have to reason.
pub(super) fn before_answer(
    splitter: &ReasoningSplitter,
    tokenizer: &Tokenizer,
    is_text: bool,
) -> Option<String> {
    let format = splitter.format().filter(|_| !splitter.skips_reasoning())?;
    let grammar = match format {
        ReasoningFormat::Markers { open, close } if format.uses_tokens(tokenizer) => {
            let (open, close) = (first_token(tokenizer, open)?, token(tokenizer, close)?);
            let rest = "reasoning: TEXT? ";
            match splitter.is_open() {
                true => format!("start: reasoning SPACE? @{ANSWER}\n{rest}{close}\n"),
                false => format!("start: ({open} reasoning SPACE?)? @{ANSWER}\n{rest}{close}\n"),
            }
        }
        ReasoningFormat::Markers { open, close } => {
            let reasoning = format!("reasoning[suffix={}]: {}\n", quoted(close), r"/(?s:.*)/");
            match splitter.is_open() {
                true => format!("start: reasoning SPACE? @{ANSWER}\n{reasoning}"),
                false => {
                    let space = if is_text { r"[ \t\r\n]{0,8}" } else { "" };
                    let open = format!("OPEN: /{space}{}/\n", regex_to_lark(&regex::escape(open), ""));
                    format!("start: (OPEN reasoning SPACE?)? @{ANSWER}\n{open}{reasoning}")
                }
            }
        }
        ReasoningFormat::Harmony => harmony(tokenizer)?,
    };
    Some(format!("{grammar}SPACE: {SPACE}\nTEXT: {TEXT}\n"))
}

/// Messages in the channels of reasoning and of remarks, then one in the final channel.
fn harmony(tokenizer: &Tokenizer) -> Option<String> {
    let [channel, message, start, end] = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"];
    let [channel, message, start, end] = [
        token(tokenizer, channel)?,
        token(tokenizer, message)?,
        token(tokenizer, start)?,
        token(tokenizer, end)?,
    ];
    let mut grammar = format!("start: aside* {channel} FINAL constrain? {message} @{ANSWER}\n");
    let _ = writeln!(grammar, "aside: {channel} ASIDE {message} TEXT? {end} {start} \"assistant\"");
    let constrain = token(tokenizer, "<|constrain|>");
    let _ = writeln!(
        grammar,
        "constrain: {}",
        constrain.map_or(String::from("\" \""), |token| format!("{token} \"json\""))
    );
    grammar.push_str("FINAL: /final ?/\nASIDE: \"analysis\" | \"commentary\"\n");
    Some(grammar)
}

/// A token with this text, in Lark.
fn token(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    special(tokenizer, |other| other == text).map(|(token, _)| format!("<[{token}]>"))
}

/// The longest token that a text begins with, and the rest of the text.
fn first_token(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let (token, own) = special(tokenizer, |other| !other.is_empty() && text.starts_with(other))?;
    match text.get(own.len()..) {
        None | Some("") => Some(format!("<[{token}]>")),
        Some(rest) => Some(format!("<[{token}]> {}", quoted(rest))),
    }
}

fn special(tokenizer: &Tokenizer, is: impl Fn(&str) -> bool) -> Option<(u32, &str)> {
    let vocabulary = tokenizer.vocabulary();
    let is_special =
        |token| matches!(vocabulary.token_type(token), TokenType::Control | TokenType::UserDefined);
    let tokens = (0u32..).zip(vocabulary.tokens.iter().map(String::as_str));
    tokens.filter(|(token, text)| is(text) && is_special(*token)).max_by_key(|(_, text)| text.len())
}

/// A literal of Lark, which is one of JSON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
