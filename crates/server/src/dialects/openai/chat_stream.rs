//! Chat completions as a stream of chunks.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::answer_head::AnswerHead;
use super::request_fields::{ShownParts, StreamOptions};
use super::usage::{Usage, finish_name};
use super::vllm_answer::stop_reason;
use super::{FINGERPRINT, logprobs};
use crate::dialects::Dialect;
use crate::dialects::timings::{AnswerClock, timings};
use crate::generation::{Delta, Done, GenerationEvent, ToolCallPiece};
use crate::model::ServedModel;
use crate::running::Running;
use crate::stream::{StreamBuffer, StreamEncoder};

/// Writes the chunks of a chat completion.
pub(crate) struct ChatStream {
    head: AnswerHead,
    served: Arc<ServedModel>,
    choices: usize,
    options: StreamOptions,
    shown: ShownParts,
    prompt: Vec<u32>,
    /// Of each choice, tokens that no chunk has yet.
    unsent: Vec<Vec<u32>>,
    usage: Usage,
    clock: AnswerClock,
}

impl ChatStream {
    pub(crate) fn new(
        head: AnswerHead,
        running: &Running,
        options: StreamOptions,
        shown: ShownParts,
    ) -> ChatStream {
        ChatStream {
            head,
            served: Arc::clone(running.served()),
            choices: running.choices(),
            options,
            shown,
            prompt: running.prompts().first().cloned().unwrap_or_default(),
            unsent: vec![Vec::new(); running.choices()],
            usage: Usage::new(running.prompt_tokens(), running.choices()),
            clock: AnswerClock::new(running.prompt_tokens()),
        }
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut chunk = Map::new();
        chunk.insert("id".to_owned(), self.head.id.clone().into());
        chunk.insert("object".to_owned(), "chat.completion.chunk".into());
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

    /// The tokens of a choice that no chunk has yet, if they are shown.
    fn token_ids(&mut self, choice: usize) -> Option<(String, Value)> {
        let unsent = self.unsent.get_mut(choice).filter(|_| self.shown.token_ids)?;
        Some(("token_ids".to_owned(), std::mem::take(unsent).into()))
    }

    fn delta(&mut self, delta: Delta, out: &mut StreamBuffer) {
        self.clock.token();
        self.usage.note_token();
        if let Some(unsent) = self.unsent.get_mut(delta.choice).filter(|_| self.shown.token_ids) {
            unsent.push(delta.token);
        }
        let mut content = Map::new();
        let tokens = logprobs::of_text(&self.served, &delta.tokens);
        if !delta.reasoning.is_empty() && self.shown.reasoning {
            content.insert("reasoning_content".to_owned(), delta.reasoning.into());
        }
        if !delta.text.is_empty() {
            content.insert("content".to_owned(), delta.text.into());
        }
        if !delta.tool_calls.is_empty() {
            let calls: Vec<Value> = delta.tool_calls.into_iter().map(tool_call).collect();
            content.insert("tool_calls".to_owned(), calls.into());
        }
        if content.is_empty() {
            return;
        }
        let logprobs = (!tokens.is_empty()).then(|| json!({ "content": tokens, "refusal": null }));
        let mut choice = json!({
            "index": delta.choice,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": null,
        });
        let token_ids = self.token_ids(delta.choice);
        if let Some(object) = choice.as_object_mut() {
            object.extend(token_ids);
        }
        let mut chunk = self.chunk(json!([choice]));
        if self.options.timings {
            chunk.insert("timings".to_owned(), self.clock.timings());
        }
        out.json(&chunk);
    }

    fn done(&mut self, done: &Done, out: &mut StreamBuffer) {
        self.usage.add(done);
        let mut choice = json!({
            "index": done.choice,
            "delta": {},
            "logprobs": null,
            "finish_reason": finish_name(&done.finish),
            "stop_reason": stop_reason(&done.finish),
        });
        let token_ids = self.token_ids(done.choice);
        if let Some(object) = choice.as_object_mut() {
            object.extend(token_ids);
        }
        let mut chunk = self.chunk(json!([choice]));
        chunk.insert("timings".to_owned(), timings(done));
        if self.shown.slot {
            chunk.insert("id_slot".to_owned(), done.slot.into());
        }
        out.json(&chunk);
    }
}

fn tool_call(piece: ToolCallPiece) -> Value {
    match piece.head {
        Some((id, name)) => json!({
            "index": piece.index,
            "id": id,
            "type": "function",
            "function": { "name": name, "arguments": piece.arguments },
        }),
        None => json!({ "index": piece.index, "function": { "arguments": piece.arguments } }),
    }
}

impl StreamEncoder for ChatStream {
    fn begin(&mut self, out: &mut StreamBuffer) {
        for choice in 0..self.choices {
            let mut chunk = self.chunk(json!([{
                "index": choice,
                "delta": { "role": "assistant", "content": "" },
                "logprobs": null,
                "finish_reason": null,
            }]));
            if choice == 0 && self.shown.token_ids {
                chunk.insert("prompt_token_ids".to_owned(), self.prompt.clone().into());
            }
            out.json(&chunk);
        }
    }

    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer) {
        match event {
            GenerationEvent::Delta(delta) => self.delta(delta, out),
            GenerationEvent::Done(done) => self.done(&done, out),
            GenerationEvent::Failed(error) => out.json(&Dialect::OpenAi.error_body(&error, None)),
            GenerationEvent::Progress { choice, cached, computed, .. } => {
                let progress = self.clock.progress(cached, computed);
                if self.options.progress {
                    let nothing =
                        json!({ "index": choice, "delta": {}, "logprobs": null, "finish_reason": null });
                    let mut chunk = self.chunk(json!([nothing]));
                    chunk.insert("prompt_progress".to_owned(), progress);
                    out.json(&chunk);
                }
            }
            GenerationEvent::PromptLogprobs { .. } => {}
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
