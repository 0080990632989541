//! Answers of `/api/chat` and `/api/generate`.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::dialects::openai::logprobs;
use crate::dialects::time;
use crate::generation::{Choice, Done, FinishReason, WholeToolCall};
use crate::model::ServedModel;
use crate::partial_json;

/// Which of the two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AnswerForm {
    /// With a message.
    Chat,
    /// With a text.
    Generate {
        /// Whether the tokens of prompt and answer are returned, so that another request can go on with them.
        has_context: bool,
    },
}

/// What all objects of an answer have in common.
#[derive(Clone, Debug)]
pub(super) struct Head {
    model: String,
    started: Instant,
    /// From the request to the model being there.
    load: Duration,
    form: AnswerForm,
}

/// A part of an answer.
#[derive(Default)]
pub(super) struct Part {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) tool_calls: Vec<Value>,
    pub(super) logprobs: Vec<Value>,
}

impl Head {
    /// Of an answer whose model, by this name, is there now.
    pub(super) fn new(model: String, started: Instant, form: AnswerForm) -> Head {
        Head { model, started, load: started.elapsed(), form }
    }

    /// An object with a part of the answer.
    pub(super) fn part(&self, part: Part, done: bool) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("model".to_owned(), self.model.clone().into());
        object.insert("created_at".to_owned(), time::now().into());
        let mut content = match self.form {
            AnswerForm::Chat => Map::from_iter([
                ("role".to_owned(), "assistant".into()),
                ("content".to_owned(), part.text.into()),
            ]),
            AnswerForm::Generate { .. } => Map::from_iter([("response".to_owned(), part.text.into())]),
        };
        if !part.reasoning.is_empty() {
            content.insert("thinking".to_owned(), part.reasoning.into());
        }
        if !part.tool_calls.is_empty() {
            content.insert("tool_calls".to_owned(), part.tool_calls.into());
        }
        match self.form {
            AnswerForm::Chat => {
                object.insert("message".to_owned(), content.into());
            }
            AnswerForm::Generate { .. } => object.extend(content),
        }
        object.insert("done".to_owned(), done.into());
        if !part.logprobs.is_empty() {
            object.insert("logprobs".to_owned(), part.logprobs.into());
        }
        object
    }

    /// Adds how the answer ended; `tokens` are those of prompt and answer.
    pub(super) fn finish(&self, object: &mut Map<String, Value>, done: &Done, tokens: &[u32]) {
        let reason = match done.finish {
            FinishReason::Length | FinishReason::Context => "length",
            FinishReason::End
            | FinishReason::Stop(_)
            | FinishReason::StopToken(_)
            | FinishReason::ToolCalls => "stop",
        };
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let prompt = done.times.first_token.saturating_sub(done.times.queued);
        object.insert("done_reason".to_owned(), reason.into());
        let numbers = [
            ("total_duration", nanoseconds(self.started.elapsed())),
            ("load_duration", nanoseconds(self.load)),
            ("prompt_eval_count", done.counts.prompt as u64),
            ("prompt_eval_duration", nanoseconds(prompt)),
            ("eval_count", done.counts.answer as u64),
            ("eval_duration", nanoseconds(evaluation(done.counts.answer, prompt, done.times.decode))),
        ];
        object.extend(numbers.map(|(name, number)| (name.to_owned(), number.into())));
        if self.form == (AnswerForm::Generate { has_context: true }) {
            object.insert("context".to_owned(), tokens.into());
        }
    }

    /// A whole answer.
    pub(super) fn whole(&self, served: &ServedModel, choice: &Choice, prompt: &[u32]) -> Value {
        let part = Part {
            text: choice.text.clone(),
            reasoning: choice.reasoning.clone(),
            tool_calls: choice
                .tool_calls
                .iter()
                .enumerate()
                .map(|(index, call)| tool_call(index, call))
                .collect(),
            logprobs: logprobs::of_answer(served, &choice.tokens),
        };
        let mut object = self.part(part, true);
        let answer = choice.tokens.iter().map(|token| &token.token);
        let tokens: Vec<u32> = prompt.iter().chain(answer).copied().collect();
        self.finish(&mut object, &choice.done, &tokens);
        object.into()
    }

    /// The answer to a request without a prompt.
    pub(super) fn without_answer(&self, reason: &str) -> Value {
        let mut object = self.part(Part::default(), true);
        object.insert("done_reason".to_owned(), reason.into());
        object.into()
    }
}

/// The time of so many tokens, by which clients divide their number. Prefill gave the first of them, and has a time of its own: the
/// others stand for it, if there are any.
fn evaluation(tokens: usize, prefill: Duration, decode: Duration) -> Duration {
    let time = match tokens {
        0 => return Duration::ZERO,
        1 => prefill,
        tokens => decode.mul_f64(tokens as f64 / (tokens - 1) as f64),
    };
    time.max(Duration::from_nanos(1))
}

/// A whole call; its arguments are an object.
pub(super) fn tool_call(index: usize, call: &WholeToolCall) -> Value {
    let arguments = partial_json::object(&call.arguments);
    json!({ "id": call.id, "function": { "index": index, "name": call.name, "arguments": arguments } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_of_clients_are_those_of_the_decoded_tokens() {
        let milliseconds = Duration::from_millis;
        // A token every 10 ms, after a prefill of 70 ms.
        for tokens in [2, 3, 100] {
            let decode = milliseconds(10 * (tokens - 1));
            let time = evaluation(tokens as usize, milliseconds(70), decode);
            assert!(
                time.abs_diff(milliseconds(10 * tokens)) < Duration::from_micros(1),
                "{tokens}: {time:?}"
            );
        }
        assert_eq!(evaluation(1, milliseconds(70), Duration::ZERO), milliseconds(70));
        assert_eq!(evaluation(0, milliseconds(70), Duration::ZERO), Duration::ZERO);
        assert!(evaluation(1, Duration::ZERO, Duration::ZERO) > Duration::ZERO);
    }
}
