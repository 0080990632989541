//! `/completion` as a stream of chunks.

use std::sync::Arc;

use serde_json::{Value, json};

use super::completion_answer::{ending, is_shown, probability, selected};
use super::completion_options::AnswerOptions;
use crate::answer_tokens::AnswerToken;
use crate::dialects::Dialect;
use crate::dialects::timings::AnswerClock;
use crate::generation::{Delta, GenerationEvent};
use crate::model::ServedModel;
use crate::running::Running;
use crate::stream::{StreamBuffer, StreamEncoder};

/// Writes the chunks of completions.
pub(super) struct CompletionStream {
    served: Arc<ServedModel>,
    options: AnswerOptions,
    answers: Vec<StreamedAnswer>,
}

struct StreamedAnswer {
    clock: AnswerClock,
    prompt: usize,
    has_new_line: bool,
    /// Tokens whose text is not complete.
    tokens: Vec<u32>,
    probabilities: Vec<Value>,
}

impl StreamedAnswer {
    fn add(&mut self, served: &ServedModel, tokens: &[AnswerToken]) {
        self.tokens.extend(tokens.iter().filter(|token| is_shown(token)).map(|token| token.token));
        self.probabilities.extend(tokens.iter().filter_map(|token| probability(served, token)));
    }
}

impl CompletionStream {
    pub(super) fn new(running: &Running, options: AnswerOptions) -> CompletionStream {
        let prompts = running.prompts();
        let answer = |number: usize| {
            let prompt = prompts.get(number / options.choices.max(1)).map_or(0, Vec::len);
            StreamedAnswer {
                clock: AnswerClock::new(prompt),
                prompt,
                has_new_line: false,
                tokens: Vec::new(),
                probabilities: Vec::new(),
            }
        };
        let answers = (0..running.choices()).map(answer).collect();
        CompletionStream { served: Arc::clone(running.served()), options, answers }
    }

    fn token(&mut self, delta: Delta, out: &mut StreamBuffer) {
        let Some(answer) = self.answers.get_mut(delta.choice) else { return };
        answer.clock.token();
        answer.add(&self.served, &delta.tokens);
        let text = delta.reasoning + &delta.text;
        // What is held back comes with the next text.
        if text.is_empty() {
            return;
        }
        answer.has_new_line |= text.contains('\n');
        let mut chunk = json!({
            "index": delta.choice,
            "content": text,
            "tokens": std::mem::take(&mut answer.tokens),
            "stop": false,
            "id_slot": delta.slot,
            "tokens_predicted": answer.clock.predicted(),
            "tokens_evaluated": answer.prompt,
        });
        if let Some(object) = chunk.as_object_mut() {
            if !answer.probabilities.is_empty() {
                let found = std::mem::take(&mut answer.probabilities);
                object.insert("completion_probabilities".to_owned(), found.into());
            }
            if self.options.timings_per_token {
                object.insert("timings".to_owned(), answer.clock.timings());
            }
        }
        out.json(&chunk);
    }

    fn progress(
        &mut self,
        choice: usize,
        slot: usize,
        (cached, computed): (usize, usize),
        out: &mut StreamBuffer,
    ) {
        let Some(answer) = self.answers.get_mut(choice) else { return };
        let progress = answer.clock.progress(cached, computed);
        if self.options.return_progress {
            out.json(&json!({
                "index": choice,
                "content": "",
                "tokens": [],
                "stop": false,
                "id_slot": slot,
                "tokens_predicted": 0,
                "tokens_evaluated": answer.prompt,
                "prompt_progress": progress,
            }));
        }
    }
}

impl StreamEncoder for CompletionStream {
    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer) {
        match event {
            GenerationEvent::Progress { choice, cached, computed, slot } => {
                self.progress(choice, slot, (cached, computed), out);
            }
            GenerationEvent::Delta(delta) => self.token(delta, out),
            GenerationEvent::Done(done) => {
                let answer = self.answers.get_mut(done.choice);
                let has_new_line = answer.as_ref().is_some_and(|answer| answer.has_new_line);
                let mut last = ending(&self.served, &done, &self.options, has_new_line);
                if let Some(answer) = answer {
                    answer.add(&self.served, &done.tokens);
                    last.insert("tokens".to_owned(), std::mem::take(&mut answer.tokens).into());
                    if !answer.probabilities.is_empty() {
                        let found = std::mem::take(&mut answer.probabilities);
                        last.insert("completion_probabilities".to_owned(), found.into());
                    }
                }
                out.json(&selected(last.into(), &self.options.response_fields));
            }
            GenerationEvent::Failed(error) => out.json(&Dialect::LlamaServer.error_body(&error, None)),
            GenerationEvent::PromptLogprobs { .. } => {}
        }
    }
}
