//! What a connection is doing, as its socket and its requests both need to know it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::http::Version;

/// What a connection is doing.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    /// Whether a request has come.
    begun: AtomicBool,
    /// Answers that are not complete.
    answers: AtomicUsize,
    /// Whether the latest request's client understands an answer before the answer.
    interim: AtomicBool,
    /// Whether something was sent since the latest request.
    sent: AtomicBool,
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

impl Exchange {
    /// Notes that a request has come.
    pub(crate) fn begin(self: &Arc<Self>, version: Version) -> OpenAnswer {
        self.answers.fetch_add(1, Ordering::AcqRel);
        self.interim.store(version == Version::HTTP_11, Ordering::Release);
        self.sent.store(false, Ordering::Release);
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

    /// Whether something was sent since the latest request.
    pub(crate) fn has_sent(&self) -> bool {
        self.sent.load(Ordering::Acquire)
    }

    /// Whether a handler waits for more of a request's body.
    pub(crate) fn awaits_body(&self) -> bool {
        self.awaits_body.load(Ordering::Acquire)
    }

    /// Notes whether a handler waits for more of a request's body.
    pub(crate) fn note_awaits_body(&self, awaits: bool) {
        self.awaits_body.store(awaits, Ordering::Release);
    }

    /// Notes that something was sent.
    pub(crate) fn note_sent(&self) {
        self.sent.store(true, Ordering::Release);
    }
}
