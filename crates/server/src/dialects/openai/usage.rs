//! Counted tokens.

use serde_json::{Value, json};

use crate::generation::{Done, FinishReason};

/// The tokens of a request: those of its prompts count once, however many answers there are.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt: usize,
    /// Of those, the ones found in the KV cache.
    pub cached: usize,
    /// Tokens of all answers.
    pub answer: usize,
    /// Of those, the ones of reasoning.
    pub reasoning: usize,
    /// Answers to each prompt.
    choices: usize,
    /// Tokens of a stream so far, whose answers are not complete.
    streamed: usize,
}

impl Usage {
    /// For prompts of so many tokens, with so many answers to each.
    pub fn new(prompt: usize, choices: usize) -> Usage {
        Usage { prompt, choices: choices.max(1), ..Usage::default() }
    }

    /// Counts a token of a stream, until its answer is added.
    pub fn note_token(&mut self) {
        self.streamed += 1;
    }

    /// Adds an answer.
    pub fn add(&mut self, done: &Done) {
        // Other choices find the whole prompt that the first has computed.
        if done.choice.is_multiple_of(self.choices.max(1)) {
            self.cached += done.counts.cached;
        }
        self.answer += done.counts.answer;
        self.streamed = self.streamed.saturating_sub(done.counts.answer);
        self.reasoning += done.reasoning_tokens;
    }

    /// As OpenAI has it.
    pub fn json(&self) -> Value {
        let answer = self.answer + self.streamed;
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": answer,
            "total_tokens": self.prompt + answer,
            "prompt_tokens_details": { "cached_tokens": self.cached },
            "completion_tokens_details": { "reasoning_tokens": self.reasoning },
        })
    }
}

/// The name of the reason why an answer ended.
pub fn finish_name(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::End | FinishReason::Stop(_) | FinishReason::StopToken(_) => "stop",
        FinishReason::Length | FinishReason::Context => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}
