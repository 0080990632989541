//! Answers as lines. Calls of tools come whole.

use std::sync::Arc;

use serde_json::Value;

use super::answer::{Head, Part, tool_call};
use crate::dialects::Dialect;
use crate::dialects::openai::logprobs;
use crate::generation::{Delta, GenerationEvent, WholeToolCall};
use crate::model::ServedModel;
use crate::stream::{StreamBuffer, StreamEncoder};

/// Writes the lines of an answer.
pub(super) struct AnswerStream {
    head: Head,
    served: Arc<ServedModel>,
    /// Those of the prompt and the answer so far.
    tokens: Vec<u32>,
    calls: Vec<WholeToolCall>,
    /// Calls that are written.
    written: usize,
    /// Those that come with the next text.
    logprobs: Vec<Value>,
}

impl AnswerStream {
    pub(super) fn new(head: Head, served: Arc<ServedModel>, prompt: Vec<u32>) -> AnswerStream {
        AnswerStream { head, served, tokens: prompt, calls: Vec::new(), written: 0, logprobs: Vec::new() }
    }

    fn token(&mut self, delta: Delta, out: &mut StreamBuffer) {
        self.tokens.extend(delta.tokens.iter().map(|token| token.token));
        self.logprobs.extend(logprobs::of_answer(&self.served, &delta.tokens));
        WholeToolCall::add(&mut self.calls, delta.tool_calls);
        // A call is whole when another one begins.
        let tool_calls = self.whole_calls(self.calls.len().saturating_sub(1));
        if delta.text.is_empty() && delta.reasoning.is_empty() && tool_calls.is_empty() {
            return;
        }
        let logprobs = std::mem::take(&mut self.logprobs);
        let part = Part { text: delta.text, reasoning: delta.reasoning, tool_calls, logprobs };
        out.json(&self.head.part(part, false));
    }

    /// The calls before a number that are not written yet.
    fn whole_calls(&mut self, end: usize) -> Vec<Value> {
        let new = self.calls.iter().enumerate().take(end).skip(self.written);
        let calls: Vec<Value> = new.map(|(index, call)| tool_call(index, call)).collect();
        self.written = self.written.max(end);
        calls
    }
}

impl StreamEncoder for AnswerStream {
    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer) {
        match event {
            GenerationEvent::Delta(delta) => self.token(delta, out),
            GenerationEvent::Done(done) => {
                let tool_calls = self.whole_calls(self.calls.len());
                if !tool_calls.is_empty() {
                    out.json(&self.head.part(Part { tool_calls, ..Part::default() }, false));
                }
                self.tokens.extend(done.tokens.iter().map(|token| token.token));
                self.logprobs.extend(logprobs::of_answer(&self.served, &done.tokens));
                let logprobs = std::mem::take(&mut self.logprobs);
                let mut last = self.head.part(Part { logprobs, ..Part::default() }, true);
                self.head.finish(&mut last, &done, &self.tokens);
                out.json(&last);
            }
            GenerationEvent::Failed(error) => out.json(&Dialect::Ollama.error_body(&error, None)),
            GenerationEvent::PromptLogprobs { .. } | GenerationEvent::Progress { .. } => {}
        }
    }
}
