//! Embeddings: an encoder computes them on a thread of its own. Of a model that generates text, each text is a request of the
//! engine, computed in parts beside the tokens of answers, so that a long text holds up no stream.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::response::Response;
use bytes::Bytes;
use quadriga_llm::Pooling;
use quadriga_llm::serving::{Event, EventSink, Request, RequestId, Service};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::embedding::EmbeddingTask;
use crate::error::{ApiError, ErrorKind};
use crate::held_answers;
use crate::model::{InFlightGuard, ServedModel};
use crate::operation::caller::CallerUse;
use crate::operation::memory_room::MemoryRoom;
use crate::whole_answers::held_response;

/// The most texts of one request that are computed at a time, and the part of the engine's sequences that they may take: the
/// rest stays for others.
const MAX_AT_ONCE: usize = 16;
const PART: usize = 4;

/// Something that happened to a text.
enum Note {
    Submitted(Result<Vec<RequestId>, quadriga_llm::Error>),
    Happened(Event),
    /// The engine has forgotten it: it has ended or was refused, or else the engine's thread is gone.
    Forgotten,
}

/// Where the events of a text go. The channel is never closed while texts wait: what is dropped says so itself.
struct TextSink {
    number: usize,
    notes: UnboundedSender<(usize, Note)>,
}

impl TextSink {
    /// Whether somebody still wants the event.
    fn send(&self, event: Event) -> bool {
        self.notes.send((self.number, Note::Happened(event))).is_ok()
    }
}

impl Drop for TextSink {
    fn drop(&mut self) {
        // Nobody waits any more if this fails.
        let _ = self.notes.send((self.number, Note::Forgotten));
    }
}

/// Texts that are being embedded. Dropping it cancels what has not ended.
struct Texts<'s> {
    served: &'s ServedModel,
    service: &'s Service,
    client: u64,
    usage: &'s CallerUse,
    pooling: Pooling,
    keeps_length: bool,
    sender: UnboundedSender<(usize, Note)>,
    notes: UnboundedReceiver<(usize, Note)>,
    /// Those that have not ended, by number. They have an id once they were accepted.
    running: HashMap<usize, (Option<RequestId>, InFlightGuard)>,
    vectors: Vec<Vec<f32>>,
}

/// The vectors of texts, with the memory that they take.
#[derive(Default)]
pub struct Embedded {
    vectors: Vec<Vec<f32>>,
    room: Option<MemoryRoom>,
}

impl Embedded {
    /// Writes an answer with them, which takes their memory until it is sent.
    pub(crate) fn written(self, answer: &Value) -> Response {
        let Embedded { vectors, room } = self;
        drop(vectors);
        let text = Bytes::from(answer.to_string());
        if let Some(room) = &room {
            room.shrink(room.bytes().saturating_sub(text.len()));
        }
        held_response(text, room)
    }
}

impl Deref for Embedded {
    type Target = Vec<Vec<f32>>;

    fn deref(&self) -> &Vec<Vec<f32>> {
        &self.vectors
    }
}

impl DerefMut for Embedded {
    fn deref_mut(&mut self) -> &mut Vec<Vec<f32>> {
        &mut self.vectors
    }
}

impl ServedModel {
    /// Computes embeddings of texts, or how well documents answer queries, for their tokens. `client` is whose share of the
    /// engine they use; `usage` is charged with what is computed, also if nobody waits for the end of it.
    pub async fn embed(
        &self,
        task: EmbeddingTask,
        texts: Vec<Vec<u32>>,
        client: u64,
        usage: CallerUse,
    ) -> Result<Embedded, ApiError> {
        let tokens = texts.iter().map(Vec::len).sum();
        let numbers = match (task, self.pooling()) {
            (EmbeddingTask::Rank, _) => texts.len(),
            (_, Pooling::None) => self.model.hyperparameters().width.saturating_mul(tokens),
            _ => self.model.hyperparameters().width.saturating_mul(texts.len()),
        };
        let room = Some(held_answers::reserve_numbers(usage.answer_memory(), numbers)?);
        let vectors = match (self.encoder_service(), task) {
            (Some(encoder), _) => encoder.compute(task, texts, usage).await,
            (None, EmbeddingTask::Embed) => embed_beside(self, &texts, client, &usage, false).await,
            (None, EmbeddingTask::EmbedUnscaled) => embed_beside(self, &texts, client, &usage, true).await,
            (None, EmbeddingTask::Rank) => Err(quadriga_llm::Error::NoClassificationHead.into()),
        }?;
        self.metrics.note_embedded(tokens);
        Ok(Embedded { vectors, room })
    }
}

/// The vectors of texts, computed beside answers. `keeps_length`: they are not divided by their length.
async fn embed_beside(
    served: &ServedModel,
    texts: &[Vec<u32>],
    client: u64,
    usage: &CallerUse,
    keeps_length: bool,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let (sender, notes) = unbounded_channel();
    let mut own = Texts {
        served,
        service: served.service()?,
        client,
        usage,
        pooling: served.pooling(),
        keeps_length,
        sender,
        notes,
        running: HashMap::new(),
        vectors: texts.iter().map(|_| Vec::new()).collect(),
    };
    let most = (served.options.engine.sequences / PART).clamp(1, MAX_AT_ONCE);
    let mut left: Vec<(usize, &Vec<u32>)> = texts.iter().enumerate().rev().collect();
    let mut is_full = false;
    loop {
        while own.running.len() < most
            && !is_full
            && let Some((number, text)) = left.pop()
        {
            own.submit(number, text.clone())?;
        }
        if own.running.is_empty() {
            return Ok(std::mem::take(&mut own.vectors));
        }
        let (number, note) = own.notes.recv().await.ok_or(quadriga_llm::Error::ServiceStopped)?;
        match note {
            Note::Submitted(Ok(ids)) => own.note_accepted(number, &ids),
            // It is tried again when another one of these has ended.
            Note::Submitted(Err(quadriga_llm::Error::QueueFull { .. })) if own.running.len() > 1 => {
                own.running.remove(&number);
                left.extend(texts.get(number).map(|text| (number, text)));
                is_full = true;
            }
            Note::Submitted(Err(error)) => return Err(error.into()),
            Note::Happened(event) => is_full &= !own.take(number, event)?,
            Note::Forgotten if own.running.contains_key(&number) => return Err(served.note_stopped()),
            Note::Forgotten => {}
        }
    }
}

impl Texts<'_> {
    fn submit(&mut self, number: usize, text: Vec<u32>) -> Result<(), ApiError> {
        let flight = self.served.note_in_flight(text.len(), None, None);
        let (events, reply) = (TextSink { number, notes: self.sender.clone() }, self.sender.clone());
        let request = Request {
            embedding: Some(self.pooling),
            keeps_length: self.keeps_length,
            client: self.client,
            progress: true,
            ..Request::new(text)
        };
        let entry = Arc::clone(&flight.entry);
        let sink: EventSink = Box::new(move |event| match event {
            Event::Progress { computed, .. } => {
                entry.slot.begin();
                entry.computed.store(computed, Ordering::Relaxed);
                !events.notes.is_closed()
            }
            event => {
                if matches!(event, Event::Finished(_) | Event::Failed(_)) {
                    entry.slot.end();
                }
                events.send(event)
            }
        });
        let accepted = move |ids| reply.send((number, Note::Submitted(ids))).is_ok();
        let submitted = self.service.submit_to(vec![(request, sink)], accepted);
        submitted.map_err(|_| self.served.note_stopped())?;
        self.running.insert(number, (None, flight));
        Ok(())
    }

    fn note_accepted(&mut self, number: usize, ids: &[RequestId]) {
        if let Some((id, _)) = self.running.get_mut(&number) {
            *id = ids.first().copied();
        }
    }

    /// Notes that a text has ended, and counts what was computed of it. False if it had.
    fn end(&mut self, number: usize) -> bool {
        let ended = self.running.remove(&number);
        if let Some((_, flight)) = &ended {
            self.usage.charge(flight.entry.used());
        }
        ended.is_some()
    }

    /// Takes in what happened to a text; whether it has ended.
    fn take(&mut self, number: usize, event: Event) -> Result<bool, ApiError> {
        match event {
            Event::Embedding { vector } => {
                if let Some(place) = self.vectors.get_mut(number) {
                    *place = vector;
                }
                Ok(false)
            }
            Event::Finished(_) => Ok(self.end(number)),
            Event::Failed(error) => {
                self.end(number);
                self.served.note_failure(&error);
                let message = format!("text {number} cannot be embedded: {error}");
                Err(ApiError::new(ErrorKind::of_failure(&error), message))
            }
            Event::Progress { .. } | Event::Prompt { .. } | Event::Token { .. } => Ok(false),
        }
    }
}

impl Drop for Texts<'_> {
    fn drop(&mut self) {
        // Whatever is submitted after this finds nobody, and ends there.
        self.notes.close();
        while let Ok((number, note)) = self.notes.try_recv() {
            match note {
                Note::Submitted(Ok(ids)) => self.note_accepted(number, &ids),
                Note::Happened(Event::Finished(_) | Event::Failed(_)) => {
                    self.end(number);
                }
                _ => {}
            }
        }
        for (id, flight) in self.running.values() {
            if let Some(id) = id {
                self.service.cancel(*id);
            }
            self.usage.charge(flight.entry.used());
        }
    }
}
