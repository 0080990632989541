//! Text for a terminal: control characters are shown, not sent.
//!
//! Names, metadata and error messages come from files, answers from models; a control sequence in them could change a
//! terminal's title, its colours or the clipboard. Everything that is printed for people goes through here. Answers are
//! left as they are where standard output is not a terminal.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

/// Whether a character is shown instead of printed: control characters except line feed and tab, and characters that
/// change the direction of text.
fn is_unsafe(letter: char) -> bool {
    let direction = matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (letter.is_control() && letter != '\n' && letter != '\t') || direction
}

/// A text without characters that a terminal acts on: as `\u{1b}`.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if is_unsafe(letter) { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    Cow::Owned(shown)
}

/// JSON whose strings have no characters that a terminal acts on: what JSON allows as it is becomes `\u009b`.
pub(crate) fn json(value: &impl std::fmt::Display) -> String {
    let mut escaped = String::new();
    for letter in value.to_string().chars() {
        if is_unsafe(letter) {
            escaped.push_str(&format!("\\u{:04x}", u32::from(letter)));
        } else {
            escaped.push(letter);
        }
    }
    escaped
}

/// Whether answers are escaped: where standard output is a terminal.
pub(crate) fn escapes_answers() -> bool {
    io::stdout().is_terminal()
}

/// An answer as it is printed.
pub(crate) fn answer(text: &str, terminal: bool) -> Cow<'_, str> {
    if terminal { escaped(text) } else { Cow::Borrowed(text) }
}

/// A writer that escapes the texts written to it, each of which must be whole characters.
pub(crate) struct Escaping<W>(pub(crate) W);

impl<W: Write> Write for Escaping<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(escaped(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::{answer, escaped, json};

    #[test]
    fn control_characters_are_shown() {
        assert_eq!(escaped("a\tb\nc é 漢 🦀"), "a\tb\nc é 漢 🦀");
        assert_eq!(escaped("\u{1b}]0;x\u{7}\r\u{9b}31m"), "\\u{1b}]0;x\\u{7}\\r\\u{9b}31m");
        assert_eq!(escaped("\u{202e}abc\u{2066}\u{7f}"), "\\u{202e}abc\\u{2066}\\u{7f}");
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({ "é\u{9b}": "\u{1b}[31m\n\t\u{7f}\u{85}\u{202e}\u{2066}\u{2028} 🦀" });
        for text in [json(&value), json(&serde_json::to_string_pretty(&value).unwrap())] {
            assert!(
                text.chars()
                    .all(|letter| letter == '\n' || escaped(&letter.to_string()).chars().eq([letter]))
            );
            assert!(text.contains("\\u009b") && text.contains("\\u202e") && text.contains('🦀'), "{text}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        }
    }

    #[test]
    fn answers_are_left_alone_without_a_terminal() {
        assert_eq!(answer("\u{1b}[31m", false), "\u{1b}[31m");
        assert_eq!(answer("\u{1b}[31m", true), "\\u{1b}[31m");
    }
}
