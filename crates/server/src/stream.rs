//! Answers as streams: server-sent events, or one JSON object a line.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use http_body::Frame;
use serde::Serialize;

use crate::generation::GenerationEvent;
use crate::operation::exchange::StreamProbe;
use crate::running::Running;

/// Bytes after which a chunk is sent even if more events are ready.
const CHUNK_BYTES: usize = 16 << 10;

/// The form of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamFormat {
    /// Server-sent events.
    Events,
    /// One JSON object a line.
    Lines,
}

/// Writes the events of a generation in the form of a dialect.
pub trait StreamEncoder: Send + 'static {
    /// What comes first, before anything is computed.
    fn begin(&mut self, _out: &mut StreamBuffer) {}

    /// An event.
    fn event(&mut self, event: GenerationEvent, out: &mut StreamBuffer);

    /// What comes last, if nothing failed.
    fn end(&mut self, _out: &mut StreamBuffer) {}

    /// Keeps a connection alive on which nothing happens. By default a comment, which only server-sent events have.
    fn ping(&self, out: &mut StreamBuffer) {
        out.comment("ping");
    }
}

/// The part of a stream that is sent next.
#[derive(Debug)]
pub struct StreamBuffer {
    format: StreamFormat,
    text: String,
}

impl StreamBuffer {
    pub(crate) fn new(format: StreamFormat) -> StreamBuffer {
        StreamBuffer { format, text: String::new() }
    }

    /// What is sent.
    #[cfg(test)]
    pub(crate) fn into_text(self) -> String {
        self.text
    }

    /// What is sent.
    pub(crate) fn into_bytes(self) -> Bytes {
        self.text.into()
    }

    /// An event with JSON for data; a line without server-sent events.
    pub fn json(&mut self, value: &impl Serialize) {
        self.push(None, &serde_json::to_string(value).unwrap_or_default());
    }

    /// An event with a name and JSON for data.
    pub fn named(&mut self, event: &str, value: &impl Serialize) {
        self.push(Some(event), &serde_json::to_string(value).unwrap_or_default());
    }

    /// An event whose data is a text without line breaks.
    pub fn text(&mut self, data: &str) {
        self.push(None, data);
    }

    /// A comment, which clients ignore; nothing without server-sent events.
    pub fn comment(&mut self, text: &str) {
        if self.format == StreamFormat::Events {
            let _ = write!(self.text, ": {text}\n\n");
        }
    }

    /// Something that clients ignore in any case: a space before the next line, where there are no comments.
    fn anything(&mut self) {
        match self.format {
            StreamFormat::Events => self.comment("ping"),
            StreamFormat::Lines => self.text.push(' '),
        }
    }

    fn push(&mut self, event: Option<&str>, data: &str) {
        // Writing to a string does not fail.
        let _ = match (self.format, event) {
            (StreamFormat::Events, Some(event)) => write!(self.text, "event: {event}\ndata: {data}\n\n"),
            (StreamFormat::Events, None) => write!(self.text, "data: {data}\n\n"),
            (StreamFormat::Lines, _) => writeln!(self.text, "{data}"),
        };
    }
}

/// Why a stream failed after it had begun, for the log: the answer has it for its extension.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamFailure(Arc<OnceLock<String>>);

impl StreamFailure {
    /// The reason, if it failed.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}

/// Streams a generation. When the client goes away, the generation is cancelled.
pub fn respond(
    running: Running,
    encoder: impl StreamEncoder,
    format: StreamFormat,
    ping: Duration,
) -> Response {
    let encoder = Box::new(encoder);
    let (failure, probe) = (StreamFailure::default(), StreamProbe::default());
    let state = StreamState {
        running,
        encoder,
        format,
        ping,
        failure: failure.clone(),
        probe: Arc::clone(&probe),
        begun: false,
        ended: false,
    };
    let mut response = streamed(state, format, probe);
    response.extensions_mut().insert(failure);
    response
}

/// An answer of chunks. The probe asks for one at once.
pub(crate) fn streamed(chunks: impl Chunks, format: StreamFormat, probe: StreamProbe) -> Response {
    let mut response = Response::new(Body::new(ChunkBody(Some(Box::pin(chunks.next())))));
    let headers = response.headers_mut();
    let content = match format {
        StreamFormat::Events => "text/event-stream",
        StreamFormat::Lines => "application/x-ndjson",
    };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.extensions_mut().insert(probe);
    response
}

/// Chunks that are made one after another.
pub(crate) trait Chunks: Sized + Send + 'static {
    /// The next chunk, and what makes those after it; `None` at the end.
    fn next(self) -> impl Future<Output = Option<(Bytes, Self)>> + Send;
}

struct StreamState {
    running: Running,
    encoder: Box<dyn StreamEncoder>,
    format: StreamFormat,
    ping: Duration,
    failure: StreamFailure,
    probe: StreamProbe,
    begun: bool,
    ended: bool,
}

impl Chunks for StreamState {
    async fn next(mut self) -> Option<(Bytes, StreamState)> {
        let mut out = StreamBuffer::new(self.format);
        if !self.begun {
            self.begun = true;
            self.encoder.begin(&mut out);
        }
        while out.text.is_empty() {
            if self.ended {
                return None;
            }
            tokio::select! {
                event = self.running.next() => self.take(event, &mut out),
                () = tokio::time::sleep(self.ping) => self.encoder.ping(&mut out),
                () = self.probe.notified() => out.anything(),
            }
            // Whatever is there already goes with it.
            while !self.ended && out.text.len() < CHUNK_BYTES {
                let Some(event) = self.running.try_next() else { break };
                self.take(Some(event), &mut out);
            }
        }
        Some((out.into_bytes(), self))
    }
}

impl StreamState {
    fn take(&mut self, event: Option<GenerationEvent>, out: &mut StreamBuffer) {
        match event {
            Some(event) => {
                if let GenerationEvent::Failed(error) = &event {
                    self.ended = true;
                    // Nothing was there before: this is the end.
                    let _ = self.failure.0.set(error.logged().to_owned());
                }
                self.encoder.event(event, out);
            }
            None => {
                self.encoder.end(out);
                self.ended = true;
            }
        }
    }
}

type NextChunk<C> = Pin<Box<dyn Future<Output = Option<(Bytes, C)>> + Send>>;

/// A body of chunks. It is all that holds what makes them: there is no task behind it.
struct ChunkBody<C>(Option<NextChunk<C>>);

impl<C: Chunks> http_body::Body for ChunkBody<C> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(next) = &mut self.0 else { return Poll::Ready(None) };
        match next.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => {
                self.0 = None;
                Poll::Ready(None)
            }
            Poll::Ready(Some((bytes, state))) => {
                self.0 = Some(Box::pin(state.next()));
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
        }
    }
}
