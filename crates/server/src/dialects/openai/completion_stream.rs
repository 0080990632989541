//! Completions as a stream of chunks.

use std::sync::Arc;

use quadriga_llm::serving::TokenLogprobs;
use serde_json::{Map, Value, json};

use super::FINGERPRINT;
use super::answer_head::AnswerHead;
use super::completion_logprobs::CompletionLogprobs;
use super::request_fields::StreamOptions;
use super::usage::{Usage, finish_name};
use super::vllm_answer::stop_reason;
use crate::dialects::Dialect;
use crate::dialects::timings::{AnswerClock, timings};
use crate::generation::GenerationEvent;
use crate::model::ServedModel;
use crate::running::Running;
use crate::stream::{StreamBuffer, StreamEncoder};

/// Writes the chunks of a completion.
pub(crate) struct CompletionStream {
    head: AnswerHead,
    served: Arc<ServedModel>,
    prompts: Vec<Vec<u32>>,
    /// The texts with which answers begin, one for each prompt; none if they are not echoed.
    echoed: Vec<String>,
    /// Answers to each prompt.
    choices: usize,
    answers: Vec<StreamedAnswer>,
    options: StreamOptions,
    /// Whether chunks have the tokens of prompts and answers, by their numbers.
    token_ids: bool,
    usage: Usage,
    clock: AnswerClock,
}

#[derive(Clone)]
struct StreamedAnswer {
    logprobs: CompletionLogprobs,
    /// Whether its prompt was written.
    begun: bool,
    /// Tokens that no chunk has yet; those of the prompt before the first chunk.
    unsent: Vec<u32>,
    is_first: bool,
}

impl CompletionStream {
    pub(crate) fn new(
        head: AnswerHead,
        running: &Running,
        echoed: Vec<String>,
        choices: usize,
        (options, token_ids): (StreamOptions, bool),
    ) -> CompletionStream {
        let begun = echoed.is_empty();
        let answer = StreamedAnswer {
            logprobs: CompletionLogprobs::new(running.shows_control_text()),
            begun,
            unsent: Vec::new(),
            is_first: true,
        };
        CompletionStream {
            head,
            served: Arc::clone(running.served()),
            prompts: running.prompts().to_vec(),
            echoed,
            choices,
            answers: vec![answer; running.choices()],
            options,
            token_ids,
            usage: Usage::new(running.prompt_tokens(), choices),
            clock: AnswerClock::new(running.prompt_tokens()),
        }
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut chunk = Map::new();
        chunk.insert("id".to_owned(), self.head.id.clone().into());
        chunk.insert("object".to_owned(), "text_completion".into());
        chunk.insert("created".to_owned(), self.head.created.into());
        chunk.insert("model".to_owned(), self.head.model.clone().into());
        chunk.insert("system_fingerprint".to_owned(), FINGERPRINT.into());
        chunk.insert("choices".to_owned(), choices);
        if self.options.usage {
            let usage = if self.options.continuous { self.usage.json() } else { Value::Null };
            chunk.insert("usage".to_owned(), usage);
        }
        chunk
    }

    /// A chunk with text and the log-probabilities that came since the last one.
    fn text(&mut self, choice: usize, text: &str, finish: Option<&str>) -> Map<String, Value> {
        let answer = self.answers.get_mut(choice).filter(|answer| !answer.logprobs.is_empty());
        let logprobs = answer.map(|answer| answer.logprobs.take());
        let mut value =
            json!({ "index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish });
        if let Some(object) = value.as_object_mut().filter(|_| self.token_ids)
            && let Some(answer) = self.answers.get_mut(choice)
        {
            if std::mem::take(&mut answer.is_first) {
                let prompt = self.prompts.get(choice / self.choices.max(1)).cloned().unwrap_or_default();
                object.insert("prompt_token_ids".to_owned(), prompt.into());
            }
            object.insert("token_ids".to_owned(), std::mem::take(&mut answer.unsent).into());
        }
        self.chunk(json!([value]))
    }

    /// Writes the prompt of an answer, if that is to come first and has not yet.
    fn begin_answer(&mut self, choice: usize, logprobs: Option<&[TokenLogprobs]>, out: &mut StreamBuffer) {
        let prompt = choice / self.choices.max(1);
        let Some(answer) = self.answers.get_mut(choice).filter(|answer| !answer.begun) else { return };
        answer.begun = true;
        if let (Some(logprobs), Some(tokens)) = (logprobs, self.prompts.get(prompt)) {
            answer.logprobs.add_prompt(&self.served, tokens, logprobs);
        }
        let text = self.echoed.get(prompt).cloned().unwrap_or_default();
        let chunk = self.text(choice, &text, None);
        out.json(&chunk);
    }
}

impl StreamEncoder for CompletionStream {
    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer) {
        match event {
            GenerationEvent::Progress { choice, cached, computed, .. } => {
                let progress = self.clock.progress(cached, computed);
                if self.options.progress {
                    let mut chunk = self.text(choice, "", None);
                    chunk.insert("prompt_progress".to_owned(), progress);
                    out.json(&chunk);
                }
            }
            GenerationEvent::PromptLogprobs { choice, logprobs } => {
                for choice in choice..choice + self.choices {
                    self.begin_answer(choice, Some(&logprobs), out);
                }
            }
            GenerationEvent::Delta(delta) => {
                self.begin_answer(delta.choice, None, out);
                if let Some(answer) = self.answers.get_mut(delta.choice) {
                    answer.logprobs.add_answer(&self.served, &delta.tokens);
                    answer.unsent.extend(self.token_ids.then_some(delta.token));
                }
                self.clock.token();
                self.usage.note_token();
                if !delta.text.is_empty() {
                    let mut chunk = self.text(delta.choice, &delta.text, None);
                    if self.options.timings {
                        chunk.insert("timings".to_owned(), self.clock.timings());
                    }
                    out.json(&chunk);
                }
            }
            GenerationEvent::Done(done) => {
                self.begin_answer(done.choice, None, out);
                self.usage.add(&done);
                if let Some(answer) = self.answers.get_mut(done.choice) {
                    answer.logprobs.add_answer(&self.served, &done.tokens);
                }
                let mut chunk = self.text(done.choice, "", Some(finish_name(&done.finish)));
                let choice = chunk.get_mut("choices").and_then(|choices| choices.get_mut(0));
                if let Some(choice) = choice.and_then(Value::as_object_mut) {
                    choice.insert("stop_reason".to_owned(), stop_reason(&done.finish));
                }
                chunk.insert("timings".to_owned(), timings(&done));
                out.json(&chunk);
            }
            GenerationEvent::Failed(error) => out.json(&Dialect::OpenAi.error_body(&error, None)),
        }
    }

    fn end(&mut self, out: &mut StreamBuffer) {
        if self.options.usage {
            let mut chunk = self.chunk(json!([]));
            chunk.insert("usage".to_owned(), self.usage.json());
            out.json(&chunk);
        }
        out.text("[DONE]");
    }
}
