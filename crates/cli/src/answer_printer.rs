//! Prints an answer while it is generated, and the model's reasoning before it.

use std::io::{self, Write};

use quadriga_llm::TextPiece;

use crate::terminal;

/// What becomes of the model's reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ReasoningOutput {
    /// Printed before the answer: dimmed on a terminal, between <think> and </think> elsewhere
    #[default]
    Show,
    /// Generated, but not printed
    Hide,
    /// Not generated, if the chat template can ask for that
    Off,
}

impl ReasoningOutput {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ReasoningOutput::Show => "show",
            ReasoningOutput::Hide => "hide",
            ReasoningOutput::Off => "off",
        }
    }
}

/// Writes the pieces of an answer. On a terminal, control characters are escaped.
pub(crate) struct AnswerPrinter<'o> {
    out: &'o mut dyn Write,
    /// Whether the output is a terminal.
    terminal: bool,
    shows_reasoning: bool,
    within_reasoning: bool,
}

impl<'o> AnswerPrinter<'o> {
    pub(crate) fn new(
        out: &'o mut dyn Write,
        terminal: bool,
        reasoning: ReasoningOutput,
    ) -> AnswerPrinter<'o> {
        let shows_reasoning = reasoning != ReasoningOutput::Hide;
        AnswerPrinter { out, terminal, shows_reasoning, within_reasoning: false }
    }

    pub(crate) fn print(&mut self, piece: &TextPiece) -> io::Result<()> {
        if self.shows_reasoning && !piece.reasoning.is_empty() {
            if !std::mem::replace(&mut self.within_reasoning, true) {
                self.out.write_all(if self.terminal { b"\x1b[2m" } else { b"<think>\n" })?;
            }
            self.out.write_all(terminal::answer(&piece.reasoning, self.terminal).as_bytes())?;
        }
        if !piece.text.is_empty() {
            self.end_reasoning()?;
            self.out.write_all(terminal::answer(&piece.text, self.terminal).as_bytes())?;
        }
        self.out.flush()
    }

    /// Ends the reasoning, also that of an answer that was interrupted in it.
    pub(crate) fn end_reasoning(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.within_reasoning) {
            self.out.write_all(if self.terminal { b"\x1b[0m\n\n" } else { b"\n</think>\n\n" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(terminal: bool, reasoning: ReasoningOutput, pieces: &[(&str, &str)]) -> String {
        let mut out = Vec::new();
        let mut printer = AnswerPrinter::new(&mut out, terminal, reasoning);
        for (reasoning, text) in pieces {
            let (reasoning, text) = ((*reasoning).to_owned(), (*text).to_owned());
            printer.print(&TextPiece { token: 0, text, reasoning }).unwrap();
        }
        printer.end_reasoning().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn reasoning_is_dimmed_marked_or_hidden() {
        let pieces = [("Hm", ""), (".\u{1b}", ""), ("", "Yes"), ("", ".")];
        assert_eq!(printed(true, ReasoningOutput::Show, &pieces), "\u{1b}[2mHm.\\u{1b}\u{1b}[0m\n\nYes.");
        assert_eq!(printed(false, ReasoningOutput::Off, &pieces), "<think>\nHm.\u{1b}\n</think>\n\nYes.");
        assert_eq!(printed(true, ReasoningOutput::Hide, &pieces), "Yes.");
        assert_eq!(printed(false, ReasoningOutput::Show, &pieces[2..]), "Yes.");
        assert_eq!(printed(true, ReasoningOutput::Show, &pieces[..1]), "\u{1b}[2mHm\u{1b}[0m\n\n");
    }
}
