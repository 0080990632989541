//! Input of a chat: messages and commands, from a line editor on a terminal, else from stdin line by line.

use std::io::{self, BufRead, IsTerminal};

use rustyline::error::ReadlineError;

use crate::failure::{Failure, Outcome};

/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// One entry of the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChatInput {
    /// A message to the model.
    Message(String),
    /// A command without its slash, and the rest of its line.
    Command(String, String),
}

/// Reads the user's entries.
pub(super) enum InputReader {
    /// Pasted text of several lines is one entry.
    Editor(Box<rustyline::DefaultEditor>),
    /// Each line is an entry.
    Lines(Box<dyn BufRead>),
    /// What a user at a terminal would do.
    #[cfg(test)]
    Script(std::vec::IntoIter<Line>),
}

/// A line of input, or what came instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// A line; several if they were pasted.
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// The end of the input.
    End,
}

impl InputReader {
    pub(super) fn new(stdin: io::Stdin) -> Outcome<InputReader> {
        if !stdin.is_terminal() {
            return Ok(InputReader::Lines(Box::new(io::BufReader::new(stdin))));
        }
        match rustyline::DefaultEditor::new() {
            Ok(editor) => Ok(InputReader::Editor(Box::new(editor))),
            Err(error) => Err(Failure::Message(format!("cannot use the terminal: {error}"))),
        }
    }

    /// The next entry; `None` at the end. Empty lines are skipped.
    pub(super) fn next(&mut self) -> Outcome<Option<ChatInput>> {
        loop {
            let line = match self.line("> ")? {
                Line::Text(line) => line,
                Line::Interrupted => {
                    // It may have been meant for an answer that ended just before.
                    note!("(Ctrl-D or /exit quits)");
                    continue;
                }
                Line::End => return Ok(None),
            };
            let text = line.trim();
            if text.is_empty() {
                continue;
            }
            if let Some(first) = text.strip_prefix(QUOTES) {
                match self.quoted(first)? {
                    Some(text) => return Ok(Some(ChatInput::Message(text))),
                    None => continue,
                }
            }
            // Pasted lines that begin with a slash, such as paths and comments, are no command.
            return Ok(Some(match text.strip_prefix('/') {
                Some(command) if !text.contains('\n') => {
                    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
                    ChatInput::Command(name.to_owned(), rest.trim().to_owned())
                }
                _ => ChatInput::Message(text.to_owned()),
            }));
        }
    }

    /// A message of several lines; the end of the input ends it, too. `None` if Ctrl-C drops it.
    fn quoted(&mut self, first: &str) -> Outcome<Option<String>> {
        let mut text = String::new();
        let mut line = first.to_owned();
        loop {
            let trimmed = line.trim_end();
            if let Some(last) = trimmed.strip_suffix(QUOTES) {
                text.push_str(last);
                break;
            }
            text.push_str(line.trim_end_matches(['\r', '\n']));
            text.push('\n');
            match self.line("… ")? {
                Line::Text(next) => line = next,
                Line::Interrupted => {
                    note!("(the message is dropped)");
                    return Ok(None);
                }
                Line::End => break,
            }
        }
        Ok(Some(text.trim_matches('\n').to_owned()))
    }

    fn line(&mut self, prompt: &str) -> Outcome<Line> {
        let unreadable = |reason: String| Err(Failure::Message(format!("cannot read the input: {reason}")));
        match self {
            InputReader::Editor(editor) => match editor.readline(prompt) {
                Ok(line) => {
                    // A missing history entry is no reason to stop.
                    let _ = editor.add_history_entry(&line);
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(error) => unreadable(error.to_string()),
            },
            #[cfg(test)]
            InputReader::Script(lines) => Ok(lines.next().unwrap_or(Line::End)),
            InputReader::Lines(input) => loop {
                let mut bytes = Vec::new();
                match input.read_until(b'\n', &mut bytes) {
                    Ok(0) => return Ok(Line::End),
                    Ok(_) => match String::from_utf8(bytes) {
                        Ok(line) => return Ok(Line::Text(line)),
                        Err(error) => note!(
                            "quadriga: left out a line that is not valid UTF-8: {}; convert the input, for example with iconv",
                            String::from_utf8_lossy(error.as_bytes()).trim_end()
                        ),
                    },
                    Err(error) => return unreadable(error.to_string()),
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(text: &'static str) -> Vec<ChatInput> {
        let mut reader = InputReader::Lines(Box::new(text.as_bytes()));
        std::iter::from_fn(|| reader.next().unwrap()).collect()
    }

    #[test]
    fn lines_are_messages_or_commands() {
        let message = |text: &str| ChatInput::Message(text.to_owned());
        let command = |name: &str, rest: &str| ChatInput::Command(name.to_owned(), rest.to_owned());
        assert_eq!(
            entries("hi \n\n  \n/set  temp 0.2 \n/undo\r\nlast"),
            [message("hi"), command("set", "temp 0.2"), command("undo", ""), message("last")]
        );
    }

    #[test]
    fn ctrl_c_drops_a_message_of_several_lines_and_the_chat_goes_on() {
        let message = |text: &str| Some(ChatInput::Message(text.to_owned()));
        let line = |text: &str| Line::Text(text.to_owned());
        let lines = [
            Line::Interrupted,
            line("one"),
            line("\"\"\"two"),
            line("three"),
            Line::Interrupted,
            line("four"),
            line("\"\"\"five"),
            line("six\"\"\""),
        ];
        let mut reader = InputReader::Script(Vec::from(lines).into_iter());
        let mut next = || reader.next().unwrap();
        assert_eq!(
            [next(), next(), next(), next()],
            [message("one"), message("four"), message("five\nsix"), None]
        );
    }

    #[test]
    fn quotes_join_lines() {
        let message = |text: &str| ChatInput::Message(text.to_owned());
        assert_eq!(
            entries(
                "\"\"\"\none\n  two\n\n/three\n\"\"\"\nfour\n\"\"\"five\"\"\"\n\"\"\"six\r\nseven \"\"\"\n"
            ),
            [message("one\n  two\n\n/three"), message("four"), message("five"), message("six\nseven ")]
        );
        assert_eq!(entries("\"\"\"no end\nat all"), [message("no end\nat all")]);
    }
}
