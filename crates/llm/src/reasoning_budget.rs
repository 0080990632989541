//! Ends reasoning that has become too long.

use std::time::Duration;

use crate::answer_text::AnswerText;
use crate::reasoning::{ReasoningFormat, ReasoningSplitter};
use crate::sampling_hook::{HookError, SamplingHook};
use crate::{Model, Result};

/// What ends reasoning in the harmony format and begins the answer.
const HARMONY_END: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";

/// Forces the end of reasoning after some tokens: while it does, no other token can be sampled.
pub(crate) struct ReasoningBudget {
    model: Model,
    text: AnswerText,
    /// Tokens that are left.
    left: usize,
    /// The tokens that end reasoning.
    end: Vec<u32>,
    /// How many of them were forced; `None` before.
    forced: Option<usize>,
    /// Tokens of the prompt and the answer that are known.
    seen: Option<usize>,
}

impl ReasoningBudget {
    /// A hook for an answer whose reasoning a splitter, at its beginning, tells. `None` if there is no reasoning.
    pub(crate) fn new(
        model: &Model,
        splitter: &ReasoningSplitter,
        budget: usize,
    ) -> Result<Option<ReasoningBudget>> {
        let Some(format) = splitter.format() else { return Ok(None) };
        let end = model.tokenizer()?.encode(&end_of_reasoning(format), true);
        let text = AnswerText::new(Vec::new(), splitter.clone(), None);
        Ok(Some(ReasoningBudget { model: model.clone(), text, left: budget, end, forced: None, seen: None }))
    }

    fn see(&mut self, token: u32) -> Result<()> {
        let was_open = self.text.is_reasoning();
        let tokenizer = self.model.tokenizer()?;
        if !tokenizer.is_end(token) {
            self.text.push(tokenizer, token, Duration::ZERO)?;
        }
        if let Some(forced) = &mut self.forced {
            *forced += 1;
        } else if was_open && self.text.is_reasoning() {
            self.left = self.left.saturating_sub(1);
        }
        if self.forced.is_some_and(|forced| forced >= self.end.len()) {
            self.forced = None;
        }
        Ok(())
    }
}

/// The text that ends reasoning.
pub(crate) fn end_of_reasoning(format: &ReasoningFormat) -> String {
    match format {
        ReasoningFormat::Markers { close, .. } => format!("\n{close}\n\n"),
        ReasoningFormat::Harmony => HARMONY_END.to_owned(),
    }
}

impl SamplingHook for ReasoningBudget {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> std::result::Result<(), HookError> {
        let new = self.seen.map_or(&[][..], |seen| tokens.get(seen..).unwrap_or_default());
        for token in new {
            self.see(*token)?;
        }
        self.seen = Some(tokens.len());
        if self.forced.is_none() && self.left == 0 && self.text.is_reasoning() {
            self.forced = Some(0);
        }
        let next = self.forced.and_then(|forced| self.end.get(forced)).copied();
        let Some(next) = next else { return Ok(()) };
        // A token that a grammar excludes cannot be forced: the answer has begun.
        if !logits.get(next as usize).is_some_and(|logit| logit.is_finite()) {
            self.forced = None;
            return Ok(());
        }
        for (token, logit) in logits.iter_mut().enumerate() {
            if token != next as usize {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}
