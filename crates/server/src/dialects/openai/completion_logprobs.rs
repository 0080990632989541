//! Log-probabilities in the form of completions: lists of equal length.

use std::fmt::Write as _;

use quadriga_llm::serving::TokenLogprobs;
use serde_json::{Map, Value, json};

use super::logprobs::finite;
use crate::model::ServedModel;

/// The lists. Offsets go on from one chunk of a stream to the next.
#[derive(Clone, Debug, Default)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    logprobs: Vec<Option<f64>>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    offset: usize,
}

impl CompletionLogprobs {
    /// Adds a prompt. Nothing precedes its first token, which has no log-probability.
    pub(crate) fn add_prompt(&mut self, served: &ServedModel, prompt: &[u32], logprobs: &[TokenLogprobs]) {
        let found = std::iter::once(None).chain(logprobs.iter().map(Some));
        for (token, found) in prompt.iter().zip(found) {
            self.add(served, *token, found);
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
        self.offsets.push(self.offset);
        self.offset += text.chars().count();
        self.tokens.push(text);
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
        *self = CompletionLogprobs { offset: self.offset, ..CompletionLogprobs::default() };
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
