//! Reasoning in a model's output: told from the answer while it is streamed.
//!
//! Models write their reasoning between markers, `<think>` and `</think>`, or in a channel of its own, as OpenAI's
//! harmony format does. Where the vocabulary has tokens for the markers, and always in the harmony format, only those tokens
//! count; otherwise markers are text, in one token or in several. The template may have written the first one at the end of
//! the prompt.
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

use crate::marks::{HARMONY_BETWEEN, HARMONY_CLOSE, HARMONY_OPEN};
use crate::tokenizer::{TokenType, Tokenizer};

/// Stands before the text of a token that is a marker. It is a noncharacter, which texts do not have.
const MARK: char = '\u{fdd0}';

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
/// Before the name of a function in a header of that format.
const RECIPIENT: &str = "to=functions.";
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

    /// Whether a token is a marker: its text is one, and it is special.
    pub(crate) fn is_marker_token(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        let vocabulary = tokenizer.vocabulary();
        matches!(vocabulary.token_type(token), TokenType::Control | TokenType::UserDefined)
            && vocabulary.tokens.get(token as usize).is_some_and(|text| self.is_marker(text))
    }

    /// Whether only tokens are markers, and their text is not.
    pub(crate) fn uses_tokens(&self, tokenizer: &Tokenizer) -> bool {
        let ReasoningFormat::Markers { open, close } = self else { return true };
        let vocabulary = tokenizer.vocabulary();
        let special =
            |token: u32| matches!(vocabulary.token_type(token), TokenType::Control | TokenType::UserDefined);
        // The first marker may be a token and text after it.
        let has = |is: &dyn Fn(&str) -> bool| {
            (0u32..).zip(&vocabulary.tokens).any(|(token, text)| is(text) && special(token))
        };
        has(&|text| text == close) && has(&|text| !text.is_empty() && open.starts_with(text))
    }

    /// Whether the answer to a prompt with this end begins with reasoning, since the template has opened it.
    pub fn is_open(&self, prompt: &str) -> bool {
        match self {
            ReasoningFormat::Markers { open, .. } => prompt.trim_end().ends_with(open.as_ref()),
            ReasoningFormat::Harmony => false,
        }
    }

    /// Whether a prompt with this end has closed the reasoning: the template has written an empty one.
    pub fn is_closed(&self, prompt: &str) -> bool {
        match self {
            ReasoningFormat::Markers { close, .. } => prompt.trim_end().ends_with(close.as_ref()),
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

impl SplitText {
    /// Marks whose token is no marker here are not text.
    fn without_marks(self) -> SplitText {
        match self.reasoning.contains(MARK) || self.answer.contains(MARK) {
            true => SplitText {
                reasoning: self.reasoning.replace(MARK, ""),
                answer: self.answer.replace(MARK, ""),
            },
            false => self,
        }
    }
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
    /// Arguments of a call of a tool.
    Call,
}

/// The function that a header of the harmony format calls.
fn recipient(header: &str) -> Option<&str> {
    let (_, name) = header.split_once(RECIPIENT)?;
    let end = name.find(|letter: char| letter.is_whitespace() || letter == '<' || letter == MARK);
    name.get(..end.unwrap_or(name.len())).filter(|name| !name.is_empty())
}

/// Tells reasoning from answer in streamed text. Text that may be the start of a marker is held back.
#[derive(Clone, Debug)]
pub struct ReasoningSplitter {
    format: Option<ReasoningFormat>,
    /// Whether markers have a mark before them.
    marked: bool,
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
    /// Whether calls of tools in the harmony format are told from other messages.
    tells_calls: bool,
    /// The function that the header calls.
    recipient: Option<String>,
    /// Whether the prompt asks for no reasoning, so that a constrained answer has none.
    skipped: bool,
    /// Whether text is held that is reasoning only if its end comes.
    doubtful: bool,
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
            marked: false,
            position,
            held: String::new(),
            spaces: String::new(),
            reasoned: open,
            answered: false,
            begun: false,
            tells_calls: false,
            recipient: None,
            skipped: false,
            doubtful: false,
        }
    }

    /// The same, after a prompt that asks for no reasoning and has not closed it. The model may open it all the same, and it is told
    /// from the answer then; but only once it is closed, as text that begins with the marker may be the answer. A constraint holds
    /// from the first token.
    #[must_use]
    pub fn without_reasoning(self) -> ReasoningSplitter {
        ReasoningSplitter { skipped: true, ..self }
    }

    /// Whether a constrained answer has no reasoning before it, although there is a format of it.
    pub fn skips_reasoning(&self) -> bool {
        self.skipped
    }

    /// The same, with markers that only [`ReasoningSplitter::push_marker`] adds: those in text are text.
    #[must_use]
    pub fn with_marked_markers(self) -> ReasoningSplitter {
        ReasoningSplitter { marked: true, ..self }
    }

    /// The same, with calls of tools in the harmony format written into the answer between marks.
    #[must_use]
    pub(crate) fn with_tool_calls(self) -> ReasoningSplitter {
        ReasoningSplitter { tells_calls: true, ..self }
    }

    /// The text to push for some text of which the last `marker` bytes are a token that is a marker. Marks in the text itself
    /// are replaced.
    pub(crate) fn marked_text(&self, text: &str, marker: usize) -> String {
        if !self.marked {
            return text.to_owned();
        }
        let (text, marker) = text.split_at_checked(text.len().saturating_sub(marker)).unwrap_or((text, ""));
        let mut marked = text.replace(MARK, "\u{fffd}");
        if !marker.is_empty() {
            marked.push(MARK);
            marked.push_str(marker);
        }
        marked
    }

    /// Whether a character of such a text is no text but a mark.
    pub(crate) fn is_mark(&self, letter: char) -> bool {
        self.marked && letter == MARK
    }

    /// Adds a token that is a marker, and returns the text whose kind is certain.
    pub fn push_marker(&mut self, marker: &str) -> SplitText {
        let text = self.marked_text(marker, marker.len());
        self.push(&text)
    }

    /// The text with which the output may begin reasoning, if it is not a token of its own.
    #[cfg(feature = "constraint")]
    pub(crate) fn text_marker(&self, tokenizer: &Tokenizer) -> Option<&str> {
        let format = self.format.as_ref().filter(|_| !self.skipped && !self.is_open())?;
        match format {
            ReasoningFormat::Markers { open, .. } if !format.uses_tokens(tokenizer) => Some(open),
            ReasoningFormat::Markers { .. } | ReasoningFormat::Harmony => None,
        }
    }

    /// Whether it is within reasoning, as far as is known: what is not asked for may still turn out to be the answer.
    pub fn is_open(&self) -> bool {
        self.position == Position::Reasoning || self.doubtful
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
        let marked = |marker: &str| if self.marked { format!("{MARK}{marker}") } else { marker.to_owned() };
        match &format {
            ReasoningFormat::Markers { open, close } => {
                let [open, close] = [open, close].map(|marker| marked(marker));
                self.split_markers(&open, &close, &mut split);
            }
            ReasoningFormat::Harmony => {
                let markers = [CHANNEL, MESSAGE, START, END].map(|marker| (marker, marked(marker)));
                self.split_channels(&markers, &mut split);
            }
        }
        self.format = Some(format);
        split.without_marks()
    }

    /// The rest at the end of the stream.
    pub fn finish(&mut self) -> SplitText {
        let mut split = SplitText::default();
        self.doubtful = false;
        let held = std::mem::take(&mut self.held);
        match self.position {
            Position::Reasoning => self.reason(&held, &mut split),
            // The header of a call, perhaps, that was cut.
            Position::Header if self.tells_calls => {}
            // A header without its message is all that there is.
            Position::Start | Position::Answer | Position::Header | Position::Call => {
                self.answer(&held, &mut split);
            }
        }
        split.without_marks()
    }

    fn split_markers(&mut self, open: &str, close: &str, split: &mut SplitText) {
        if self.position == Position::Start {
            let begun = self.held.trim_start();
            if let Some(rest) = begun.strip_prefix(open) {
                // Without its end, what was not asked for is text.
                self.doubtful = self.skipped && !rest.contains(close);
                if self.doubtful {
                    return;
                }
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

    /// The markers are given with the texts that are found in place of them.
    fn split_channels(&mut self, markers: &[(&str, String)], split: &mut SplitText) {
        loop {
            let found = markers
                .iter()
                .filter_map(|(marker, text)| Some((self.held.find(text)?, *marker, text)))
                .min();
            let Some((at, marker, text)) = found else { break };
            let after = self.held.split_off(at + text.len());
            let mut before = std::mem::replace(&mut self.held, after);
            before.truncate(at);
            let is_header = self.position == Position::Header || self.begins_call(&before);
            if let Some(name) = recipient(&before).filter(|_| is_header && self.tells_calls) {
                self.recipient = Some(name.to_owned());
            } else {
                self.emit(&before, split);
            }
            if self.position == Position::Call {
                split.answer.push(HARMONY_CLOSE);
            }
            let name = self.recipient.take_if(|_| matches!(marker, MESSAGE | END | START));
            self.position = match marker {
                MESSAGE if name.is_some() => {
                    let name = name.unwrap_or_default();
                    split.answer.extend([HARMONY_OPEN.to_string(), name, HARMONY_BETWEEN.to_string()]);
                    self.answered = true;
                    Position::Call
                }
                MESSAGE if self.position == Position::Header && before.trim_start().starts_with(ANALYSIS) => {
                    self.reasoned = true;
                    Position::Reasoning
                }
                MESSAGE | END => Position::Answer,
                _ => Position::Header,
            };
        }
        if self.position != Position::Header && !self.begins_call(&self.held) {
            let texts: Vec<&str> = markers.iter().map(|(_, text)| text.as_str()).collect();
            let certain = self.take_certain(&texts);
            self.emit(&certain, split);
        }
    }

    /// Whether an output begins with the name of a function, which belongs to the header that the prompt ends with.
    fn begins_call(&self, text: &str) -> bool {
        let text = text.trim_start();
        let begins = text.starts_with(RECIPIENT) || RECIPIENT.starts_with(text);
        self.tells_calls && self.position == Position::Answer && !self.answered && !self.reasoned && begins
    }

    fn emit(&mut self, text: &str, split: &mut SplitText) {
        match self.position {
            Position::Reasoning => self.reason(text, split),
            Position::Start | Position::Answer | Position::Call => self.answer(text, split),
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
