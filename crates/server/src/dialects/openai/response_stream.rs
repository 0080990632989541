//! A response as a stream of events. One item is open at a time; each event has the next number.

use std::sync::Arc;

use serde_json::{Value, json};

use super::logprobs;
use super::response_items::ResponseItem;
use super::response_object::{ResponseObject, is_cut};
use super::usage::Usage;
use crate::call::new_id;
use crate::generation::{AnswerPart, Delta, Done, GenerationEvent, ToolCallPiece, WholeToolCall};
use crate::model::ServedModel;
use crate::running::Running;
use crate::stream::{StreamBuffer, StreamEncoder};

/// Writes the events of a response.
pub(crate) struct ResponseStream {
    object: ResponseObject,
    served: Arc<ServedModel>,
    usage: Usage,
    sequence: usize,
    /// All items so far; the last may be open.
    items: Vec<ResponseItem>,
    is_open: bool,
    /// The number of the call that is open.
    open_call: Option<usize>,
}

impl ResponseStream {
    pub(crate) fn new(object: ResponseObject, running: &Running) -> ResponseStream {
        ResponseStream {
            object,
            served: Arc::clone(running.served()),
            usage: Usage::new(running.prompt_tokens(), 1),
            sequence: 0,
            items: Vec::new(),
            is_open: false,
            open_call: None,
        }
    }

    fn send(&mut self, kind: &str, mut event: Value, out: &mut StreamBuffer) {
        if let Some(object) = event.as_object_mut() {
            object.insert("type".to_owned(), kind.into());
            object.insert("sequence_number".to_owned(), self.sequence.into());
        }
        self.sequence += 1;
        out.named(kind, &event);
    }

    /// An event of the open item.
    fn send_item(&mut self, kind: &str, more: Value, out: &mut StreamBuffer) {
        let Some(item) = self.items.last() else { return };
        let mut event = match item {
            ResponseItem::Call { .. } => json!({}),
            ResponseItem::Reasoning { .. } | ResponseItem::Message { .. } => json!({ "content_index": 0 }),
        };
        let place = json!({ "item_id": item.id(), "output_index": self.items.len() - 1 });
        if let (Some(event), Value::Object(place), Value::Object(more)) = (event.as_object_mut(), place, more)
        {
            event.extend(place);
            event.extend(more);
        }
        self.send(kind, event, out);
    }

    /// Opens an item, after the one that is open.
    fn open(&mut self, item: ResponseItem, out: &mut StreamBuffer) {
        self.close("completed", out);
        let (announced, part) = (item.announced(), item.part());
        self.items.push(item);
        self.is_open = true;
        let index = self.items.len() - 1;
        self.send("response.output_item.added", json!({ "output_index": index, "item": announced }), out);
        if let Some(part) = part {
            self.send_item("response.content_part.added", json!({ "part": part }), out);
        }
    }

    /// Closes the open item.
    fn close(&mut self, status: &str, out: &mut StreamBuffer) {
        let Some(item) = self.items.last().filter(|_| self.is_open).cloned() else { return };
        (self.is_open, self.open_call) = (false, None);
        match &item {
            ResponseItem::Reasoning { text, .. } => {
                self.send_item("response.reasoning_text.done", json!({ "text": text }), out);
            }
            ResponseItem::Message { text, logprobs, .. } => {
                self.send_item(
                    "response.output_text.done",
                    json!({ "text": text, "logprobs": logprobs }),
                    out,
                );
            }
            ResponseItem::Call { call, .. } => {
                let done = json!({ "name": call.name, "arguments": call.arguments });
                self.send_item("response.function_call_arguments.done", done, out);
            }
        }
        if let Some(part) = item.part() {
            self.send_item("response.content_part.done", json!({ "part": part }), out);
        }
        let index = self.items.len() - 1;
        let done = json!({ "output_index": index, "item": item.json(status) });
        self.send("response.output_item.done", done, out);
    }

    fn delta(&mut self, delta: &Delta, out: &mut StreamBuffer) {
        for part in delta.parts() {
            match part {
                AnswerPart::Reasoning(text) => self.reasoning(&text, out),
                AnswerPart::Text(text) => {
                    self.text(&text, logprobs::of_text(&self.served, &delta.tokens), out);
                }
                AnswerPart::ToolCall(piece) => self.tool_call(piece, out),
            }
        }
    }

    fn reasoning(&mut self, new: &str, out: &mut StreamBuffer) {
        let open = self.items.last().filter(|_| self.is_open);
        if !matches!(open, Some(ResponseItem::Reasoning { .. })) {
            self.open(ResponseItem::Reasoning { id: new_id("rs_"), text: String::new() }, out);
        }
        if let Some(ResponseItem::Reasoning { text, .. }) = self.items.last_mut() {
            text.push_str(new);
        }
        self.send_item("response.reasoning_text.delta", json!({ "delta": new }), out);
    }

    fn text(&mut self, new: &str, found: Vec<Value>, out: &mut StreamBuffer) {
        let open = self.items.last().filter(|_| self.is_open);
        if !matches!(open, Some(ResponseItem::Message { .. })) {
            let item =
                ResponseItem::Message { id: new_id("msg_"), text: String::new(), logprobs: Vec::new() };
            self.open(item, out);
        }
        if let Some(ResponseItem::Message { text, logprobs, .. }) = self.items.last_mut() {
            text.push_str(new);
            logprobs.extend(found.clone());
        }
        self.send_item("response.output_text.delta", json!({ "delta": new, "logprobs": found }), out);
    }

    fn tool_call(&mut self, piece: ToolCallPiece, out: &mut StreamBuffer) {
        if let Some((id, name)) = piece.head {
            let call = WholeToolCall { id, name, arguments: String::new() };
            self.open(ResponseItem::Call { id: new_id("fc_"), call }, out);
            self.open_call = Some(piece.index);
        }
        if self.open_call != Some(piece.index) || piece.arguments.is_empty() {
            return;
        }
        if let Some(ResponseItem::Call { call, .. }) = self.items.last_mut() {
            call.arguments.push_str(&piece.arguments);
        }
        let delta = json!({ "delta": piece.arguments });
        self.send_item("response.function_call_arguments.delta", delta, out);
    }

    fn done(&mut self, done: &Done, out: &mut StreamBuffer) {
        // An answer without text has an empty one.
        if self.items.is_empty() {
            self.text("", Vec::new(), out);
        }
        self.usage.add(done);
        let (status, kind) = match is_cut(&done.finish) {
            true => ("incomplete", "response.incomplete"),
            false => ("completed", "response.completed"),
        };
        self.close(status, out);
        let response = self.object.finished(&done.finish, &self.items, &self.usage);
        self.send(kind, json!({ "response": response }), out);
    }
}

impl StreamEncoder for ResponseStream {
    fn begin(&mut self, out: &mut StreamBuffer) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.object.in_progress();
            self.send(kind, json!({ "response": response }), out);
        }
    }

    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer) {
        match event {
            GenerationEvent::Delta(delta) => self.delta(&delta, out),
            GenerationEvent::Done(done) => self.done(&done, out),
            GenerationEvent::Failed(error) => {
                let response = self.object.failed(&error, &self.items);
                self.send("response.failed", json!({ "response": response }), out);
            }
            GenerationEvent::PromptLogprobs { .. } | GenerationEvent::Progress { .. } => {}
        }
    }
}
