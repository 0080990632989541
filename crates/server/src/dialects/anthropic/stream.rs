//! A message as a stream of events. One block is open at a time; blocks are numbered from 0.

use serde_json::{Value, json};

use super::answer::{message, stop_reason, tool_use_id, usage};
use crate::call::RequestId;
use crate::dialects::Dialect;
use crate::generation::{AnswerPart, Delta, Done, GenerationEvent, ToolCallPiece};
use crate::stream::{StreamBuffer, StreamEncoder};

/// Writes the events of a message.
pub(super) struct MessageStream {
    id: String,
    /// What identifies the request, for errors.
    request: RequestId,
    model: String,
    prompt: usize,
    begun: bool,
    /// The block that is open.
    open: Option<OpenBlock>,
    /// Blocks so far.
    blocks: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    /// With the number of the call.
    ToolUse(usize),
}

impl MessageStream {
    pub(super) fn new(id: String, request: RequestId, model: String, prompt: usize) -> MessageStream {
        MessageStream { id, request, model, prompt, begun: false, open: None, blocks: 0 }
    }

    /// The first event. It says how much of the prompt was cached, and so waits until that is known.
    fn begin_with(&mut self, cached: usize, out: &mut StreamBuffer) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let counted = usage(self.prompt, cached, 0);
        let message = message(&self.id, &self.model, Vec::new(), None, &counted);
        out.named("message_start", &json!({ "type": "message_start", "message": message }));
    }

    fn open(&mut self, kind: OpenBlock, block: &Value, out: &mut StreamBuffer) {
        if self.open == Some(kind) {
            return;
        }
        self.close(out);
        self.open = Some(kind);
        let event = json!({ "type": "content_block_start", "index": self.blocks, "content_block": block });
        out.named("content_block_start", &event);
        self.blocks += 1;
    }

    fn close(&mut self, out: &mut StreamBuffer) {
        let Some(kind) = self.open else { return };
        if kind == OpenBlock::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": "" }), out);
        }
        self.open = None;
        let event = json!({ "type": "content_block_stop", "index": self.blocks.saturating_sub(1) });
        out.named("content_block_stop", &event);
    }

    fn delta(&self, delta: &Value, out: &mut StreamBuffer) {
        let index = self.blocks.saturating_sub(1);
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        out.named("content_block_delta", &event);
    }

    fn token(&mut self, delta: &Delta, out: &mut StreamBuffer) {
        for part in delta.parts() {
            match part {
                AnswerPart::Reasoning(text) => {
                    let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                    self.open(OpenBlock::Thinking, &block, out);
                    self.delta(&json!({ "type": "thinking_delta", "thinking": text }), out);
                }
                AnswerPart::Text(text) => {
                    self.open(OpenBlock::Text, &json!({ "type": "text", "text": "" }), out);
                    self.delta(&json!({ "type": "text_delta", "text": text }), out);
                }
                AnswerPart::ToolCall(piece) => self.tool_call(piece, out),
            }
        }
    }

    fn tool_call(&mut self, piece: ToolCallPiece, out: &mut StreamBuffer) {
        let kind = OpenBlock::ToolUse(piece.index);
        if let Some((id, name)) = piece.head {
            let id = tool_use_id(&id);
            self.open(kind, &json!({ "type": "tool_use", "id": id, "name": name, "input": {} }), out);
        }
        if self.open == Some(kind) && !piece.arguments.is_empty() {
            self.delta(&json!({ "type": "input_json_delta", "partial_json": piece.arguments }), out);
        }
    }

    fn done(&mut self, done: &Done, out: &mut StreamBuffer) {
        self.close(out);
        let (reason, sequence) = stop_reason(&done.finish);
        let event = json!({
            "type": "message_delta",
            "delta": { "stop_reason": reason, "stop_sequence": sequence },
            "usage": usage(done.counts.prompt, done.counts.cached, done.counts.answer),
        });
        out.named("message_delta", &event);
    }
}

impl StreamEncoder for MessageStream {
    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer) {
        match event {
            GenerationEvent::Progress { cached, .. } => self.begin_with(cached, out),
            GenerationEvent::Delta(delta) => {
                self.begin_with(0, out);
                self.token(&delta, out);
            }
            GenerationEvent::Done(done) => {
                self.begin_with(done.counts.cached, out);
                self.done(&done, out);
            }
            GenerationEvent::Failed(error) => {
                out.named("error", &Dialect::Anthropic.error_body(&error, Some(&self.request.0)));
            }
            GenerationEvent::PromptLogprobs { .. } => {}
        }
    }

    fn end(&mut self, out: &mut StreamBuffer) {
        out.named("message_stop", &json!({ "type": "message_stop" }));
    }

    /// Before the first event, a comment: that event must be `message_start`.
    fn ping(&self, out: &mut StreamBuffer) {
        match self.begun {
            true => out.named("ping", &json!({ "type": "ping" })),
            false => out.comment("ping"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::stream::StreamFormat;

    fn delta(reasoning: &str, text: &str, call: Option<(usize, bool, &str)>) -> GenerationEvent {
        let piece = |(index, begins, arguments): (usize, bool, &str)| ToolCallPiece {
            index,
            head: begins.then(|| (format!("call_{index}"), "f".to_owned())),
            arguments: arguments.to_owned(),
        };
        GenerationEvent::Delta(Delta {
            choice: 0,
            token: 0,
            text: text.to_owned(),
            reasoning: reasoning.to_owned(),
            tool_calls: call.map(piece).into_iter().collect(),
            tokens: Vec::new(),
            slot: 0,
        })
    }

    #[test]
    fn one_block_is_open_at_a_time() {
        let mut stream =
            MessageStream::new("msg_1".to_owned(), RequestId("req_1".to_owned()), "m".to_owned(), 10);
        let mut out = StreamBuffer::new(StreamFormat::Events);
        let events = [
            GenerationEvent::Progress { choice: 0, cached: 4, computed: 10, slot: 0 },
            delta("why", "", None),
            delta("", "so", None),
            delta("", " it is", None),
            delta("", "", Some((0, true, ""))),
            delta("", "", Some((0, false, "{}"))),
            delta("", "", Some((1, true, "{\"x\":1}"))),
        ];
        events.into_iter().for_each(|event| stream.event(event, &mut out));
        stream.close(&mut out);
        let text = out.into_text();
        let names: Vec<String> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(|data| {
                let data: Value = serde_json::from_str(data).unwrap();
                let kind = data["type"].as_str().unwrap().trim_start_matches("content_block_");
                let inner = data["content_block"]["type"].as_str().or(data["delta"]["type"].as_str());
                format!("{kind} {} {}", data["index"], inner.unwrap_or_default())
            })
            .collect();
        let wanted = [
            "message_start null ",
            "start 0 thinking",
            "delta 0 thinking_delta",
            "delta 0 signature_delta",
            "stop 0 ",
            "start 1 text",
            "delta 1 text_delta",
            "delta 1 text_delta",
            "stop 1 ",
            "start 2 tool_use",
            "delta 2 input_json_delta",
            "stop 2 ",
            "start 3 tool_use",
            "delta 3 input_json_delta",
            "stop 3 ",
        ];
        assert_eq!(names, wanted);
        assert!(text.contains(r#""id":"toolu_0""#) && text.contains(r#""id":"toolu_1""#), "{text}");
        assert!(text.contains(r#""input":{}"#) && text.contains(r#""cache_read_input_tokens":4"#));
        assert!(text.contains(r#""input_tokens":6"#), "{text}");
    }
}
