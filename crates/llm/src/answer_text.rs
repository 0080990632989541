//! From the tokens of an answer to its text: whole characters, up to a stop string, apart from the reasoning and from calls of
//! tools.

use std::time::Duration;

use crate::Result;
use crate::answer_rules::AnswerRules;
use crate::line_rules::LineLimits;
use crate::marks::{MARKS, MarkPositions, TOKEN_MARK};
use crate::reasoning::{ReasoningSplitter, SplitText};
use crate::stop::{StopMatcher, StopStep};
use crate::tokenizer::{Pending, Tokenizer};
use crate::tools::{ToolCallParser, ToolCallPiece};

/// The text of an answer so far, as far as it cannot be given away yet.
pub(crate) struct AnswerText {
    /// Bytes that are not a whole character yet.
    pending: Pending,
    stops: StopMatcher,
    /// Marks in text that may become a stop string, in which they are not.
    marks: MarkPositions,
    splitter: ReasoningSplitter,
    tool_calls: Option<ToolCallParser>,
    /// Whether control tokens are written as they are named.
    control_text: bool,
    /// Tokens that are yet to come before a stop string counts.
    unstoppable: usize,
    lines: LineLimits,
}

/// What ends an answer by its text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TextStop {
    /// The stop string of this number was found.
    String(usize),
    /// One of its lines.
    Line,
}

/// How the tokens of an answer end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TextEnd {
    /// The model has ended it.
    Whole,
    /// It was cut after any token.
    Cut,
    /// It was cut before a stop string.
    Stopped,
}

/// Text that was completed.
#[derive(Default)]
pub(crate) struct AnswerParts {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) tool_calls: Vec<ToolCallPiece>,
}

impl AnswerParts {
    /// Adds what comes after it.
    pub(crate) fn extend(&mut self, rest: AnswerParts) {
        self.text.push_str(&rest.text);
        self.reasoning.push_str(&rest.reasoning);
        self.tool_calls.extend(rest.tool_calls);
    }
}

impl AnswerText {
    pub(crate) fn new(
        stops: Vec<String>,
        splitter: ReasoningSplitter,
        tool_calls: Option<ToolCallParser>,
    ) -> AnswerText {
        let splitter = match tool_calls.as_ref().is_some_and(|parser| parser.format().harmony) {
            true => splitter.with_tool_calls(),
            false => splitter,
        };
        AnswerText {
            pending: Pending::default(),
            stops: StopMatcher::new(stops),
            marks: MarkPositions::default(),
            splitter,
            tool_calls,
            control_text: false,
            unstoppable: 0,
            lines: LineLimits::default(),
        }
    }

    /// With the rules of the answer that concern its text.
    pub(crate) fn with_rules(self, rules: &AnswerRules) -> AnswerText {
        AnswerText {
            stops: self.stops.keeping_stop(rules.keep_stop),
            control_text: rules.control_text,
            unstoppable: rules.min_tokens,
            lines: LineLimits::new(rules.lines),
            ..self
        }
    }

    /// Whether it is within reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.splitter.is_open()
    }

    /// Adds a token that does not end the answer, sampled so long after the first one; returns the text that it completes, and
    /// what in it ends the answer.
    pub(crate) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        elapsed: Duration,
    ) -> Result<(AnswerParts, Option<TextStop>)> {
        let format = self.splitter.format();
        let parser = self.tool_calls.as_ref();
        let is_call_marker = parser.is_some_and(|parser| parser.format().is_marker(tokenizer, token));
        let is_shown = |text: &&str| {
            self.control_text || is_call_marker || format.is_some_and(|format| format.is_marker(text))
        };
        let bytes = match tokenizer.control_text(token).filter(is_shown) {
            Some(marker) => marker.as_bytes(),
            None => tokenizer.piece(token)?,
        };
        let mut text = self.pending.push(bytes);
        if parser.is_some() && text.contains(MARKS) {
            text = text.replace(MARKS, "\u{fffd}");
        }
        if is_call_marker {
            text.insert(text.len().saturating_sub(bytes.len()), TOKEN_MARK);
        }
        let is_marker = format.is_some_and(|format| format.is_marker_token(tokenizer, token));
        let text = self.splitter.marked_text(&text, if is_marker { bytes.len() } else { 0 });
        let is_mark = |letter| parser.is_some() && letter == TOKEN_MARK || self.splitter.is_mark(letter);
        let plain = self.marks.without(&text, is_mark);
        let step = match self.unstoppable.checked_sub(1) {
            Some(left) => {
                self.unstoppable = left;
                StopStep { text: self.stops.pass(&plain), stopped_by: None }
            }
            None => self.stops.push(&plain),
        };
        let split = self.splitter.push(&self.marks.with(&step.text));
        let mut parts = self.parsed(split);
        let ends = self.lines.limit(&mut parts.text, elapsed);
        Ok((parts, step.stopped_by.map(TextStop::String).or(ends.then_some(TextStop::Line))))
    }

    /// The text that was held back: nothing of it after a stop string.
    pub(crate) fn finish(&mut self, end: TextEnd) -> AnswerParts {
        let mut parts = AnswerParts::default();
        if end != TextEnd::Stopped {
            let held = self.marks.with(&self.stops.finish());
            let split = self.splitter.push(&held);
            parts.extend(self.parsed(split));
            // A character that was cut within a call is none of its text.
            let is_cut_call = self.tool_calls.as_ref().is_some_and(ToolCallParser::is_calling);
            let pending = self.pending.finish();
            if end == TextEnd::Whole || !is_cut_call {
                let split = self.splitter.push(&pending);
                parts.extend(self.parsed(split));
            }
        }
        let rest = self.splitter.finish();
        parts.extend(self.parsed(rest));
        if let Some(parser) = &mut self.tool_calls {
            let rest = if end == TextEnd::Whole { parser.finish() } else { parser.finish_cut() };
            parts.text.push_str(&rest.text);
            parts.tool_calls.extend(rest.calls);
        }
        // It ends in any case.
        self.lines.limit(&mut parts.text, Duration::ZERO);
        parts
    }

    /// Text without calls, and the calls.
    fn parsed(&mut self, split: SplitText) -> AnswerParts {
        let SplitText { mut reasoning, answer } = split;
        match &mut self.tool_calls {
            Some(parser) => {
                // The model may write the tokens of calls while it reasons.
                reasoning.retain(|letter| !MARKS.contains(&letter));
                let parsed = parser.push(&answer);
                AnswerParts { text: parsed.text, reasoning, tool_calls: parsed.calls }
            }
            None => AnswerParts { text: answer, reasoning, tool_calls: Vec::new() },
        }
    }
}
