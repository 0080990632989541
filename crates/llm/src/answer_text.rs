//! From the tokens of an answer to its text: whole characters, up to a stop string, apart from the reasoning.

use crate::Result;
use crate::reasoning::{ReasoningSplitter, SplitText};
use crate::stop::StopMatcher;
use crate::tokenizer::{Pending, Tokenizer};

/// The text of an answer so far, as far as it cannot be given away yet.
pub(crate) struct AnswerText {
    /// Bytes that are not a whole character yet.
    pending: Pending,
    stops: StopMatcher,
    splitter: ReasoningSplitter,
}

impl AnswerText {
    pub(crate) fn new(stops: Vec<String>, splitter: ReasoningSplitter) -> AnswerText {
        AnswerText { pending: Pending::default(), stops: StopMatcher::new(stops), splitter }
    }

    /// Adds a token that does not end the answer; returns the text that it completes, and whether a stop string was found.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<(SplitText, bool)> {
        let format = self.splitter.format();
        let marker =
            tokenizer.control_text(token).filter(|text| format.is_some_and(|format| format.is_marker(text)));
        let bytes = match marker {
            Some(marker) => marker.as_bytes(),
            None => tokenizer.piece(token)?,
        };
        let text = self.pending.push(bytes);
        let is_marker = format.is_some_and(|format| format.is_marker_token(tokenizer, token));
        let text = self.splitter.marked_text(&text, if is_marker { bytes.len() } else { 0 });
        let step = self.stops.push(&text);
        Ok((self.splitter.push(&step.text), step.stopped_by.is_some()))
    }

    /// The text that was held back: nothing of it after a stop string.
    pub(crate) fn finish(&mut self, stopped: bool) -> SplitText {
        let mut held = String::new();
        if !stopped {
            held = self.stops.push(&self.pending.finish()).text;
            held.push_str(&self.stops.finish());
        }
        let split = self.splitter.push(&held);
        let rest = self.splitter.finish();
        SplitText { answer: split.answer + &rest.answer, reasoning: split.reasoning + &rest.reasoning }
    }
}
