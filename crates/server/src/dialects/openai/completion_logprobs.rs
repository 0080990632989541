//! Log-probabilities in the form of completions: lists of equal length.

use std::fmt::Write as _;

use quadriga_llm::serving::TokenLogprobs;
use serde_json::{Map, Value, json};

use super::logprobs::finite;
use crate::answer_tokens::{AnswerToken, TokenPart};
use crate::model::ServedModel;

/// The lists. Offsets go on from one chunk of a stream to the next.
#[derive(Clone, Debug, Default)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    logprobs: Vec<Option<f64>>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    offset: usize,
    /// Bytes of a character that is not complete yet.
    partial: Vec<u8>,
    /// Whether control tokens are in the text.
    control_text: bool,
}

impl CompletionLogprobs {
    /// No tokens yet, of an answer whose text has control tokens or not.
    pub(crate) fn new(control_text: bool) -> CompletionLogprobs {
        CompletionLogprobs { control_text, ..CompletionLogprobs::default() }
    }

    /// Adds a prompt. Nothing precedes its first token, which has no log-probability.
    pub(crate) fn add_prompt(&mut self, served: &ServedModel, prompt: &[u32], logprobs: &[TokenLogprobs]) {
        let found = std::iter::once(None).chain(logprobs.iter().map(Some));
        for (token, found) in prompt.iter().zip(found) {
            self.add(served, *token, found);
        }
    }

    /// Adds tokens of an answer: those of its text, and control tokens, which are not in it.
    pub(crate) fn add_answer(&mut self, served: &ServedModel, tokens: &[AnswerToken]) {
        for found in tokens.iter().filter(|token| token.part != TokenPart::Hidden) {
            if let Some(logprobs) = &found.logprobs {
                self.add(served, found.token, Some(logprobs));
            }
        }
    }

    /// Adds a token.
    pub(crate) fn add(&mut self, served: &ServedModel, token: u32, found: Option<&TokenLogprobs>) {
        let text = token_name(served, token);
        let mut top = Map::new();
        // The most probable come first; another token of the same text does not replace them.
        let own = found.map(|found| (token, found.logprob));
        for (token, logprob) in found.map_or(&[][..], |found| &found.top).iter().copied().chain(own) {
            top.entry(token_name(served, token)).or_insert_with(|| finite(logprob).into());
        }
        self.logprobs.push(found.map(|found| finite(found.logprob)));
        self.top.push(found.map_or(Value::Null, |_| top.into()));
        let offset = self.advance(&served.text_bytes(token, self.control_text));
        self.offsets.push(offset);
        self.tokens.push(text);
    }

    /// Moves the offset past the characters that a token's bytes complete, and returns the offset of the token: that of the
    /// first character that it has a byte of. Control tokens have none: they are not in the text.
    fn advance(&mut self, piece: &[u8]) -> usize {
        let earlier = self.partial.len();
        self.partial.extend_from_slice(piece);
        let broken = std::str::from_utf8(&self.partial).err().filter(|error| error.valid_up_to() == 0);
        // Bytes of earlier tokens that the token does not complete are a character of their own.
        let is_apart = broken.and_then(|error| error.error_len()).is_some_and(|length| length <= earlier);
        let start = self.offset + usize::from(is_apart && earlier > 0);
        while let Err(error) = std::str::from_utf8(&self.partial) {
            let valid = self.partial.get(..error.valid_up_to()).unwrap_or_default();
            self.offset += String::from_utf8_lossy(valid).chars().count();
            let Some(wrong) = error.error_len() else {
                // Its other bytes follow.
                self.partial.drain(..error.valid_up_to());
                return start;
            };
            self.partial.drain(..error.valid_up_to() + wrong);
            self.offset += 1;
        }
        self.offset += String::from_utf8_lossy(&self.partial).chars().count();
        self.partial.clear();
        start
    }

    /// Whether there is any.
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The lists as JSON.
    pub(crate) fn json(&self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        })
    }

    /// The lists as JSON; what follows begins new ones.
    pub(crate) fn take(&mut self) -> Value {
        let json = self.json();
        let partial = std::mem::take(&mut self.partial);
        let next = CompletionLogprobs::new(self.control_text);
        *self = CompletionLogprobs { offset: self.offset, partial, ..next };
        json
    }
}

/// The text of a token; bytes that are a part of a character are spelled out, as `bytes:\xe2\x80`.
fn token_name(served: &ServedModel, token: u32) -> String {
    let bytes = served.token_bytes(token);
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let mut name = "bytes:".to_owned();
        for byte in error.as_bytes() {
            let _ = write!(name, "\\x{byte:02x}");
        }
        name
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_count_characters_of_the_text() {
        let text = "aé日b";
        let mut logprobs = CompletionLogprobs::default();
        let mut offsets = Vec::new();
        // A token for each byte, and a control token.
        for byte in text.bytes().chain("c".bytes()) {
            logprobs.advance(&[byte]);
            logprobs.advance(&[]);
            offsets.push(logprobs.offset);
        }
        assert_eq!(offsets, [1, 1, 2, 2, 2, 3, 4, 5]);
        // What is no character takes the place of one, also across chunks of a stream.
        let mut logprobs = CompletionLogprobs::default();
        logprobs.advance(b"\xe6\x97");
        logprobs.take();
        logprobs.advance(b"x\xff");
        logprobs.advance("é".as_bytes());
        assert_eq!(logprobs.offset, 4);
    }

    #[test]
    fn a_token_begins_after_broken_bytes_before_it() {
        let mut logprobs = CompletionLogprobs::default();
        let tokens: [&[u8]; 7] = [b"ab", b"\xf0\x9f", b"cd", b"\xe6", b"\x97\xa5e", b"\xf0", b"\xff"];
        assert_eq!(tokens.map(|token| logprobs.advance(token)), [0, 2, 3, 5, 5, 7, 8]);
        let text = String::from_utf8_lossy(&tokens.concat()).into_owned();
        assert_eq!(
            (text.as_str(), logprobs.offset),
            ("ab\u{fffd}cd日e\u{fffd}\u{fffd}", text.chars().count())
        );
    }
}
