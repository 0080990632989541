//! Reasoning in a model's output: told from the answer while it is streamed.
//!
//! Models write their reasoning between markers, `<think>` and `</think>`, or in a channel of its own, as OpenAI's
//! harmony format does. Markers can be control tokens or text, in one token or in several; the template may have written
//! the first one at the end of the prompt.
//!
//! ```
//! use quadriga_llm::reasoning::{ReasoningFormat, ReasoningSplitter};
//!
//! let mut splitter = ReasoningSplitter::new(Some(ReasoningFormat::think()), false);
//! let parts: Vec<_> = ["<th", "ink>\nLet me see.\n</", "think>\n\nFour."].map(|text| splitter.push(text)).into();
//! assert_eq!((parts[1].reasoning.as_str(), parts[1].answer.as_str()), ("Let me see.", ""));
//! assert_eq!((parts[2].reasoning.as_str(), parts[2].answer.as_str()), ("", "Four."));
//! ```

use std::borrow::Cow;

/// Markers of reasoning that published models use.
const PAIRS: &[(&str, &str)] = &[
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
];

/// The markers of OpenAI's harmony format.
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const END: &str = "<|end|>";
/// The channel of reasoning.
const ANALYSIS: &str = "analysis";

/// How a model tells its reasoning from its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Reasoning is at the beginning, between two markers.
    Markers {
        /// The marker before it.
        open: Cow<'static, str>,
        /// The marker after it.
        close: Cow<'static, str>,
    },
    /// Messages in channels, of which `analysis` is the one of reasoning.
    Harmony,
}

impl ReasoningFormat {
    /// `<think>` and `</think>`.
    pub fn think() -> ReasoningFormat {
        ReasoningFormat::Markers { open: Cow::Borrowed("<think>"), close: Cow::Borrowed("</think>") }
    }

    /// The format that a chat template writes and reads, if it knows one.
    pub fn of_template(source: &str) -> Option<ReasoningFormat> {
        if source.contains(CHANNEL) && source.contains(MESSAGE) {
            return Some(ReasoningFormat::Harmony);
        }
        let pair = PAIRS.iter().find(|(_, close)| source.contains(close));
        pair.map(|&(open, close)| ReasoningFormat::Markers { open: open.into(), close: close.into() })
    }

    /// Whether a text of a control token is a marker, or the beginning of one.
    pub(crate) fn is_marker(&self, text: &str) -> bool {
        match self {
            ReasoningFormat::Markers { open, close } => {
                !text.is_empty() && (open.starts_with(text) || close.starts_with(text))
            }
            ReasoningFormat::Harmony => [CHANNEL, MESSAGE, START, END, "<|constrain|>"].contains(&text),
        }
    }

    /// Whether the answer to a prompt with this end begins with reasoning, since the template has opened it.
    pub fn is_open(&self, prompt: &str) -> bool {
        match self {
            ReasoningFormat::Markers { open, .. } => prompt.trim_end().ends_with(open.as_ref()),
            ReasoningFormat::Harmony => false,
        }
    }
}

/// Text that was told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitText {
    /// Reasoning, without the white space around it.
    pub reasoning: String,
    /// Answer; after reasoning, without the white space before it.
    pub answer: String,
}

/// The position in the output.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Position {
    /// Before anything but white space.
    Start,
    Reasoning,
    Answer,
    /// Between a marker and `<|message|>`.
    Header,
}

/// Tells reasoning from answer in streamed text. Text that may be the start of a marker is held back.
#[derive(Clone, Debug)]
pub struct ReasoningSplitter {
    format: Option<ReasoningFormat>,
    position: Position,
    held: String,
    /// White space after reasoning, which is part of it only if more follows.
    spaces: String,
    /// Whether there was reasoning, or a marker of it.
    reasoned: bool,
    /// Whether the answer has begun.
    answered: bool,
    /// Whether the reasoning has begun.
    begun: bool,
}

impl ReasoningSplitter {
    /// A splitter at the beginning of an answer. With `open`, the prompt ends within reasoning. Without a format,
    /// everything is answer.
    pub fn new(format: Option<ReasoningFormat>, open: bool) -> ReasoningSplitter {
        let position = match &format {
            Some(ReasoningFormat::Markers { .. }) if open => Position::Reasoning,
            Some(ReasoningFormat::Markers { .. }) => Position::Start,
            Some(ReasoningFormat::Harmony) | None => Position::Answer,
        };
        ReasoningSplitter {
            format,
            position,
            held: String::new(),
            spaces: String::new(),
            reasoned: open,
            answered: false,
            begun: false,
        }
    }

    /// The format.
    pub fn format(&self) -> Option<&ReasoningFormat> {
        self.format.as_ref()
    }

    /// Adds text, and returns the text whose kind is certain.
    pub fn push(&mut self, text: &str) -> SplitText {
        let mut split = SplitText::default();
        let Some(format) = self.format.take() else {
            text.clone_into(&mut split.answer);
            return split;
        };
        self.held.push_str(text);
        match &format {
            ReasoningFormat::Markers { open, close } => self.split_markers(open, close, &mut split),
            ReasoningFormat::Harmony => self.split_channels(&mut split),
        }
        self.format = Some(format);
        split
    }

    /// The rest at the end of the stream.
    pub fn finish(&mut self) -> SplitText {
        let mut split = SplitText::default();
        let held = std::mem::take(&mut self.held);
        match self.position {
            Position::Reasoning => self.reason(&held, &mut split),
            Position::Start | Position::Answer => self.answer(&held, &mut split),
            Position::Header => {}
        }
        split
    }

    fn split_markers(&mut self, open: &str, close: &str, split: &mut SplitText) {
        if self.position == Position::Start {
            let begun = self.held.trim_start();
            if let Some(rest) = begun.strip_prefix(open) {
                self.held = rest.to_owned();
                self.position = Position::Reasoning;
                self.reasoned = true;
            } else if open.starts_with(begun) {
                return; // It may become the marker.
            } else {
                self.position = Position::Answer;
            }
        }
        if self.position == Position::Reasoning {
            let found =
                self.held.split_once(close).map(|(before, after)| (before.to_owned(), after.to_owned()));
            if let Some((before, after)) = found {
                self.reason(&before, split);
                self.held = after;
                self.position = Position::Answer;
            } else {
                let certain = self.take_certain(&[close]);
                self.reason(&certain, split);
            }
        }
        if self.position == Position::Answer {
            let held = std::mem::take(&mut self.held);
            self.answer(&held, split);
        }
    }

    fn split_channels(&mut self, split: &mut SplitText) {
        const MARKERS: [&str; 4] = [CHANNEL, MESSAGE, START, END];
        loop {
            let found = MARKERS.iter().filter_map(|marker| Some((self.held.find(marker)?, *marker))).min();
            let Some((at, marker)) = found else { break };
            let after = self.held.split_off(at + marker.len());
            let mut before = std::mem::replace(&mut self.held, after);
            before.truncate(at);
            self.emit(&before, split);
            self.position = match marker {
                MESSAGE if self.position == Position::Header && before.trim_start().starts_with(ANALYSIS) => {
                    self.reasoned = true;
                    Position::Reasoning
                }
                MESSAGE | END => Position::Answer,
                _ => Position::Header,
            };
        }
        if self.position != Position::Header {
            let certain = self.take_certain(&MARKERS);
            self.emit(&certain, split);
        }
    }

    fn emit(&mut self, text: &str, split: &mut SplitText) {
        match self.position {
            Position::Reasoning => self.reason(text, split),
            Position::Start | Position::Answer => self.answer(text, split),
            Position::Header => {}
        }
    }

    /// Takes the held text but for an end that may be the start of a marker.
    fn take_certain(&mut self, markers: &[&str]) -> String {
        let is_start = |at: &usize| {
            self.held.get(*at..).is_some_and(|end| markers.iter().any(|marker| marker.starts_with(end)))
        };
        let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let at = (from..self.held.len()).filter(|at| self.held.is_char_boundary(*at)).find(is_start);
        let rest = self.held.split_off(at.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    fn reason(&mut self, text: &str, split: &mut SplitText) {
        let text = if self.begun { text } else { text.trim_start() };
        let kept = text.trim_end();
        if !kept.is_empty() {
            self.begun = true;
            split.reasoning.push_str(&std::mem::take(&mut self.spaces));
            split.reasoning.push_str(kept);
        }
        if self.begun {
            self.spaces.push_str(text.get(kept.len()..).unwrap_or_default());
        }
    }

    fn answer(&mut self, text: &str, split: &mut SplitText) {
        let text = if self.reasoned && !self.answered { text.trim_start() } else { text };
        self.answered |= !text.is_empty();
        split.answer.push_str(text);
    }
}
