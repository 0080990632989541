//! Answers that are collected until they are complete, and then written at once.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use quadriga_llm::serving::TokenLogprobs;
use serde_json::Value;

use crate::answer_tokens::{AnswerToken, TokenPart};
use crate::error::{ApiError, ErrorKind};
use crate::generation::{AnswerSection, Choice, Delta, Done, GenerationEvent, WholeToolCall};
use crate::held_answers::HeldAnswers;

/// Bytes of answers from which they are written on a thread of their own.
const LONG_ANSWERS: usize = 1 << 20;

/// Complete answers, with the memory that they take.
pub struct WholeAnswers {
    choices: Vec<Choice>,
    held: Arc<HeldAnswers>,
}

impl WholeAnswers {
    /// The answers.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Writes them as JSON. Those that take long are written beside the threads that serve connections.
    pub(crate) async fn written(
        self,
        write: impl FnOnce(&[Choice]) -> Result<Value, ApiError> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let failed = |_| ApiError::new(ErrorKind::Internal, "the answer could not be written");
        let is_long = self.held.bytes() >= LONG_ANSWERS;
        let work = move || {
            let WholeAnswers { choices, held } = self;
            let value = write(&choices)?;
            drop(choices);
            let text = Bytes::from(value.to_string());
            drop(value);
            held.note_written(text.len());
            Ok(held_response(text, held))
        };
        if !is_long {
            return work();
        }
        tokio::task::spawn_blocking(work).await.map_err(failed)?
    }
}

/// An answer of JSON whose text takes its memory until it is sent.
pub(crate) fn held_response(text: Bytes, held: impl Send + Unpin + 'static) -> Response {
    let mut response = Response::new(Body::new(HeldBody { body: text.into(), _held: held }));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

struct HeldBody<H> {
    body: Body,
    _held: H,
}

impl<H: Unpin> http_body::Body for HeldBody<H> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Answers that are being collected.
pub(crate) struct Collection {
    parts: Vec<ChoiceParts>,
    held: Arc<HeldAnswers>,
}

impl Collection {
    /// For answers of which each has control tokens in its text or not.
    pub(crate) fn new(control_text: impl Iterator<Item = bool>, held: Arc<HeldAnswers>) -> Collection {
        let empty = |control_text| ChoiceParts { control_text, ..ChoiceParts::default() };
        Collection { parts: control_text.map(empty).collect(), held }
    }

    /// Adds an event.
    ///
    /// # Errors
    /// It is that the request failed.
    pub(crate) fn add(&mut self, event: GenerationEvent) -> Result<(), ApiError> {
        match event {
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Progress { .. } => {}
            GenerationEvent::PromptLogprobs { choice, logprobs } => {
                if let Some(part) = self.parts.get_mut(choice) {
                    part.prompt_logprobs = Some(logprobs);
                }
            }
            GenerationEvent::Delta(delta) => {
                if let Some(part) = self.parts.get_mut(delta.choice) {
                    part.add(delta);
                }
            }
            GenerationEvent::Done(done) => {
                if let Some(part) = self.parts.get_mut(done.choice) {
                    part.done = Some(done);
                }
            }
        }
        Ok(())
    }

    /// The answers, which are complete.
    pub(crate) fn finish(self) -> Result<WholeAnswers, ApiError> {
        let missing = || ApiError::new(ErrorKind::Internal, "an answer has no end");
        let choices = self.parts.into_iter().map(|part| part.choice().ok_or_else(missing));
        Ok(WholeAnswers { choices: choices.collect::<Result<_, _>>()?, held: self.held })
    }
}

/// An answer that is being collected.
#[derive(Default)]
struct ChoiceParts {
    text: String,
    reasoning: String,
    tool_calls: Vec<WholeToolCall>,
    sections: Vec<AnswerSection>,
    tokens: Vec<AnswerToken>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    generated: Vec<u32>,
    control_text: bool,
    done: Option<Done>,
}

impl ChoiceParts {
    fn add(&mut self, delta: Delta) {
        self.generated.push(delta.token);
        delta.parts().into_iter().for_each(|part| AnswerSection::add(&mut self.sections, part));
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        WholeToolCall::add(&mut self.tool_calls, delta.tool_calls);
        let new = delta.tokens.iter().filter(|token| token.part == TokenPart::Text).count();
        let text = self.sections.iter_mut().rev().find_map(|section| match section {
            AnswerSection::Text { tokens, .. } => Some(tokens),
            _ => None,
        });
        if let Some(tokens) = text {
            *tokens += new;
        }
        self.tokens.extend(delta.tokens);
    }

    fn choice(mut self) -> Option<Choice> {
        let mut done = self.done?;
        self.tokens.append(&mut done.tokens);
        Some(Choice {
            text: self.text,
            reasoning: self.reasoning,
            tool_calls: self.tool_calls,
            sections: self.sections,
            tokens: self.tokens,
            prompt_logprobs: self.prompt_logprobs,
            generated: self.generated,
            control_text: self.control_text,
            done,
        })
    }
}
