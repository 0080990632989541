//! What a connection is doing, as its socket and its requests both need to know it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::Version;
use tokio::sync::Notify;

/// Asks a stream to send something at once, whatever it has: only then does the system of a client that is gone say so.
pub(crate) type StreamProbe = Arc<Notify>;

/// How far the answer to the latest request is.
#[derive(Clone, Debug, Default)]
pub(crate) enum Reply {
    /// Nothing of it was sent.
    #[default]
    None,
    /// It is being sent as a whole.
    Whole,
    /// It is being sent as it is generated.
    Stream(StreamProbe),
}

/// What a connection is doing.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    /// Whether a request has come.
    begun: AtomicBool,
    /// Answers that are not complete.
    answers: AtomicUsize,
    /// Whether the latest request's client understands an answer before the answer.
    interim: AtomicBool,
    reply: Mutex<Reply>,
    /// Whether a handler waits for more of a request's body.
    awaits_body: AtomicBool,
}

/// An answer that is not complete, until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenAnswer(Arc<Exchange>);

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        self.0.answers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl OpenAnswer {
    /// Notes that it is about to be sent: as a stream, if it has a probe.
    pub(crate) fn note_reply(&self, probe: Option<StreamProbe>) {
        self.0.set_reply(probe.map_or(Reply::Whole, Reply::Stream));
    }
}

impl Exchange {
    /// Notes that a request has come.
    pub(crate) fn begin(self: &Arc<Self>, version: Version) -> OpenAnswer {
        self.answers.fetch_add(1, Ordering::AcqRel);
        self.interim.store(version == Version::HTTP_11, Ordering::Release);
        self.set_reply(Reply::None);
        self.begun.store(true, Ordering::Release);
        OpenAnswer(Arc::clone(self))
    }

    /// Whether a request has come.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Whether an answer is not complete.
    pub(crate) fn is_answering(&self) -> bool {
        self.answers.load(Ordering::Acquire) > 0
    }

    /// Whether the latest request's client understands an answer before the answer.
    pub(crate) fn has_interim(&self) -> bool {
        self.interim.load(Ordering::Acquire)
    }

    /// How far the answer to the latest request is.
    pub(crate) fn reply(&self) -> Reply {
        self.reply.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_reply(&self, reply: Reply) {
        *self.reply.lock().unwrap_or_else(PoisonError::into_inner) = reply;
    }

    /// Whether a handler waits for more of a request's body.
    pub(crate) fn awaits_body(&self) -> bool {
        self.awaits_body.load(Ordering::Acquire)
    }

    /// Notes whether a handler waits for more of a request's body.
    pub(crate) fn note_awaits_body(&self, awaits: bool) {
        self.awaits_body.store(awaits, Ordering::Release);
    }
}
