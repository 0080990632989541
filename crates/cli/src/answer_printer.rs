//! Prints an answer while it is generated, and the model's reasoning before it.

use std::io::{self, IsTerminal, Write};

use quadriga_llm::TextPiece;

use crate::terminal;

/// What becomes of the model's reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ReasoningOutput {
    /// Printed before the answer, dimmed; on stderr where stdout is not a terminal
    #[default]
    Auto,
    /// Printed before the answer: dimmed on a terminal, between <think> and </think> elsewhere
    #[value(alias = "on")]
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
            ReasoningOutput::Auto => "auto",
            ReasoningOutput::Show => "show",
            ReasoningOutput::Hide => "hide",
            ReasoningOutput::Off => "off",
        }
    }

    /// Where reasoning is printed, for the stdout and stderr of this process. Quiet commands print none on stderr.
    pub(crate) fn display(self, quiet: bool) -> ReasoningDisplay {
        self.display_for(io::stdout().is_terminal(), io::stderr().is_terminal(), quiet)
    }

    fn display_for(self, stdout: bool, stderr: bool, quiet: bool) -> ReasoningDisplay {
        match self {
            ReasoningOutput::Show => ReasoningDisplay::Inline,
            ReasoningOutput::Auto | ReasoningOutput::Off if stdout => ReasoningDisplay::Inline,
            ReasoningOutput::Auto | ReasoningOutput::Off if !quiet => {
                ReasoningDisplay::Aside { terminal: stderr }
            }
            _ => ReasoningDisplay::Hidden { indicator: stdout && stderr && !quiet },
        }
    }
}

/// Where reasoning is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReasoningDisplay {
    /// Before the answer.
    Inline,
    /// On stderr, which may be a terminal.
    Aside { terminal: bool },
    /// Nowhere; an indicator may say that the model is thinking.
    Hidden { indicator: bool },
}

/// Says on a terminal that hidden reasoning is generated, and removes that.
const INDICATOR: &str = "\x1b[2mthinking …\x1b[0m";
const CLEAR_LINE: &str = "\r\x1b[K";

/// Writes the pieces of an answer. On a terminal, control characters are escaped.
pub(crate) struct AnswerPrinter<'o> {
    out: &'o mut dyn Write,
    aside: &'o mut dyn Write,
    /// Whether the output is a terminal.
    terminal: bool,
    display: ReasoningDisplay,
    within_reasoning: bool,
}

impl<'o> AnswerPrinter<'o> {
    pub(crate) fn new(
        out: &'o mut dyn Write,
        aside: &'o mut dyn Write,
        terminal: bool,
        display: ReasoningDisplay,
    ) -> AnswerPrinter<'o> {
        AnswerPrinter { out, aside, terminal, display, within_reasoning: false }
    }

    pub(crate) fn print(&mut self, piece: &TextPiece) -> io::Result<()> {
        if !piece.reasoning.is_empty() {
            self.print_reasoning(&piece.reasoning)?;
        }
        if !piece.text.is_empty() {
            self.end_reasoning()?;
            self.out.write_all(terminal::answer(&piece.text, self.terminal).as_bytes())?;
        }
        self.out.flush()
    }

    fn print_reasoning(&mut self, text: &str) -> io::Result<()> {
        let begins = !std::mem::replace(&mut self.within_reasoning, true);
        let opening = |terminal: bool| if terminal { "\x1b[2m" } else { "<think>\n" };
        match self.display {
            ReasoningDisplay::Inline => {
                if begins {
                    self.out.write_all(opening(self.terminal).as_bytes())?;
                }
                self.out.write_all(terminal::answer(text, self.terminal).as_bytes())?;
            }
            // A closed stderr is no reason to stop.
            ReasoningDisplay::Aside { terminal } => {
                let opening = if begins { opening(terminal) } else { "" };
                let _ = write!(self.aside, "{opening}{}", terminal::escaped(text));
            }
            ReasoningDisplay::Hidden { indicator } => {
                if begins && indicator {
                    let _ = self.aside.write_all(INDICATOR.as_bytes());
                }
            }
        }
        Ok(())
    }

    /// Ends the reasoning, also that of an answer that was interrupted in it.
    pub(crate) fn end_reasoning(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.within_reasoning) {
            return Ok(());
        }
        let closing = |terminal: bool| if terminal { "\x1b[0m\n\n" } else { "\n</think>\n\n" };
        match self.display {
            ReasoningDisplay::Inline => self.out.write_all(closing(self.terminal).as_bytes())?,
            ReasoningDisplay::Aside { terminal } => {
                let _ = self.aside.write_all(closing(terminal).as_bytes());
            }
            ReasoningDisplay::Hidden { indicator: true } => {
                let _ = self.aside.write_all(CLEAR_LINE.as_bytes());
            }
            ReasoningDisplay::Hidden { indicator: false } => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is printed on stdout and on stderr.
    fn printed(terminal: bool, display: ReasoningDisplay, pieces: &[(&str, &str)]) -> (String, String) {
        let (mut out, mut aside) = (Vec::new(), Vec::new());
        let mut printer = AnswerPrinter::new(&mut out, &mut aside, terminal, display);
        for (reasoning, text) in pieces {
            let (reasoning, text) = ((*reasoning).to_owned(), (*text).to_owned());
            printer.print(&TextPiece { token: 0, text, reasoning, tool_calls: Vec::new() }).unwrap();
        }
        printer.end_reasoning().unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(aside).unwrap())
    }

    #[test]
    fn reasoning_is_dimmed_marked_aside_or_hidden() {
        use ReasoningDisplay::{Aside, Hidden, Inline};
        let pieces = [("Hm", ""), (".\u{1b}", ""), ("", "Yes"), ("", ".")];
        let both = |out: &str, aside: &str| (out.to_owned(), aside.to_owned());
        assert_eq!(printed(true, Inline, &pieces), both("\u{1b}[2mHm.\\u{1b}\u{1b}[0m\n\nYes.", ""));
        assert_eq!(printed(false, Inline, &pieces), both("<think>\nHm.\u{1b}\n</think>\n\nYes.", ""));
        assert_eq!(
            printed(false, Aside { terminal: false }, &pieces),
            both("Yes.", "<think>\nHm.\\u{1b}\n</think>\n\n")
        );
        assert_eq!(
            printed(false, Aside { terminal: true }, &pieces[..1]),
            both("", "\u{1b}[2mHm\u{1b}[0m\n\n")
        );
        assert_eq!(printed(true, Hidden { indicator: false }, &pieces), both("Yes.", ""));
        let (out, aside) = printed(true, Hidden { indicator: true }, &pieces);
        assert_eq!((out.as_str(), aside.matches("thinking").count()), ("Yes.", 1));
        assert!(aside.ends_with(CLEAR_LINE));
        assert_eq!(printed(false, Inline, &pieces[2..]), both("Yes.", ""));
        assert_eq!(printed(true, Inline, &pieces[..1]), both("\u{1b}[2mHm\u{1b}[0m\n\n", ""));
    }

    #[test]
    fn without_a_terminal_reasoning_stays_out_of_the_answer_unless_it_is_asked_for() {
        use ReasoningDisplay::{Aside, Hidden, Inline};
        for (output, stdout, quiet, display) in [
            (ReasoningOutput::Auto, true, false, Inline),
            (ReasoningOutput::Auto, false, false, Aside { terminal: true }),
            (ReasoningOutput::Auto, false, true, Hidden { indicator: false }),
            (ReasoningOutput::Show, false, true, Inline),
            (ReasoningOutput::Off, false, false, Aside { terminal: true }),
            (ReasoningOutput::Hide, true, false, Hidden { indicator: true }),
            (ReasoningOutput::Hide, false, false, Hidden { indicator: false }),
        ] {
            assert_eq!(output.display_for(stdout, true, quiet), display, "{output:?} {stdout} {quiet}");
        }
    }
}
