//! Chat templates: the model's format for conversations.
//!
//! Templates are Jinja programs from the model file, which is not trusted: instructions and output are limited.
//!
//! ```
//! use quadriga_llm::template::{ChatTemplate, Message};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}";
//! let template = ChatTemplate::new(source, "<s>", "</s>")?;
//! let prompt = template.render(&[Message::new("user", "Hi!")], true)?;
//! assert_eq!(prompt, "<user>Hi!</user>");
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};
use regex::Regex;
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Instructions that a template may execute: thousands of times what real templates need for a long conversation.
const MAX_INSTRUCTIONS: u64 = 10_000_000;
/// Bytes that a template may print in addition to twice the size of the messages.
const MAX_OUTPUT: usize = 4 << 20;
/// The largest source of a template in bytes; real ones have up to 20 KB.
const MAX_SOURCE: usize = 1 << 20;

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The role: `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }
}

/// A parsed chat template.
///
/// ```no_run
/// use quadriga_llm::Model;
/// use quadriga_llm::template::Message;
///
/// let model = Model::open("model.gguf")?;
/// if let Some(template) = model.template() {
///     let prompt = template.render(&[Message::new("user", "Why is the sky blue?")], true)?;
///     let tokens = model.tokenizer()?.encode_prompt(&prompt, true);
/// }
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

#[derive(Serialize)]
struct TemplateContext<'a> {
    messages: &'a [Message],
    bos_token: &'a str,
    eos_token: &'a str,
    add_generation_prompt: bool,
}

impl ChatTemplate {
    /// Parses a template. `bos` and `eos` are the texts of the vocabulary's beginning- and end-of-text tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        let failed = |error: minijinja::Error| Error::Template { reason: describe(&error) };
        if source.len() > MAX_SOURCE {
            let reason = format!("its source has {} bytes, more than {MAX_SOURCE}", source.len());
            return Err(Error::Template { reason });
        }
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        environment.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| date(&format, now()));
        environment.add_filter("tojson", to_json);
        environment.add_template_owned("chat", without_generation_tags(source)).map_err(failed)?;
        Ok(ChatTemplate { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The template of a model file, if it has one.
    pub fn from_file(file: &quadriga_gguf::File, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        let Some(source) = file.find::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        let vocabulary = tokenizer.vocabulary();
        let text = |token: Option<u32>| {
            token.and_then(|token| vocabulary.tokens.get(token as usize)).map_or("", String::as_str)
        };
        ChatTemplate::new(source, text(vocabulary.bos), text(vocabulary.eos)).map(Some)
    }

    /// Renders a conversation as a prompt. With `add_generation_prompt`, it ends with the header of the assistant's
    /// answer.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let failed = |error: minijinja::Error| Error::Template { reason: describe(&error) };
        let template = self.environment.get_template("chat").map_err(failed)?;
        let context =
            TemplateContext { messages, bos_token: &self.bos, eos_token: &self.eos, add_generation_prompt };
        let message_bytes: usize =
            messages.iter().map(|message| message.role.len() + message.content.len()).sum();
        let mut output =
            Limited { bytes: Vec::new(), left: message_bytes.saturating_mul(2).saturating_add(MAX_OUTPUT) };
        template.render_captured_to(Value::from(Serde(&context)), &mut output).map_err(failed)?;
        String::from_utf8(output.bytes).map_err(|error| Error::Template { reason: error.to_string() })
    }
}

/// Replaces the `generation` tags, which mark answers for training, by comments.
fn without_generation_tags(source: &str) -> String {
    let tag = Regex::new(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}");
    tag.map_or_else(|_| source.to_owned(), |tag| tag.replace_all(source, "{#$1 $2#}").into_owned())
}

/// A writer with a limit on its output.
struct Limited {
    bytes: Vec<u8>,
    left: usize,
}

impl io::Write for Limited {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.left =
            self.left.checked_sub(part.len()).ok_or_else(|| io::Error::other("its output is too long"))?;
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An error with its causes in one line.
fn describe(error: &minijinja::Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => format!("it did not end within {MAX_INSTRUCTIONS} instructions"),
        _ => error.to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text.replace('\n', " ")
}

/// JSON as Python formats it, which models were trained on: a space after `,` and `:`, no escapes for HTML.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

fn to_json(
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    let wrong = |message: String| minijinja::Error::new(ErrorKind::InvalidOperation, message);
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    // The other arguments of Python's `tojson` are accepted and ignored.
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _ = options.get::<Option<Value>>(known)?;
    }
    options.assert_all_used()?;
    let mut limited = Limited { bytes: Vec::new(), left: MAX_OUTPUT };
    let written = match indent {
        None => write_json(value, &mut limited, PythonFormatter),
        Some(0) => write_json(value, &mut limited, CompactFormatter),
        Some(spaces) => {
            let spaces = " ".repeat(spaces.min(16));
            write_json(value, &mut limited, PrettyFormatter::with_indent(spaces.as_bytes()))
        }
    };
    written.map_err(|error| wrong(error.to_string()))?;
    String::from_utf8(limited.bytes).map_err(|error| wrong(error.to_string()))
}

fn write_json(value: &Value, into: &mut Limited, formatter: impl Formatter) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(into, formatter))
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A date and time (UTC) in the format of C's `strftime`, as far as chat templates use it.
fn date(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let day_name = DAYS.get((days % 7) as usize).copied().unwrap_or_default();
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('Y') => text.push_str(&year.to_string()),
            Some('y') => text.push_str(&format!("{:02}", year % 100)),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('e') => text.push_str(&format!("{day:2}")),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(month_name.get(..3).unwrap_or_default()),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(day_name.get(..3).unwrap_or_default()),
            Some('H') => text.push_str(&format!("{hour:02}")),
            Some('M') => text.push_str(&format!("{minute:02}")),
            Some('S') => text.push_str(&format!("{second:02}")),
            Some('%') => text.push('%'),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

/// Year, month and day of a day counted from 1 January 1970.
fn civil(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    // The calendar repeats every 400 years, which have 146,097 days.
    let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_right() {
        assert_eq!(date("%A %d %B %Y %H:%M:%S", 0), "Thursday 01 January 1970 00:00:00");
        assert_eq!(date("%d %b %Y", 951_782_400), "29 Feb 2000");
        assert_eq!(date("%Y-%m-%d %a %e %y 100%% %q %", 1_735_689_599), "2024-12-31 Tue 31 24 100% %q %");
    }
}
