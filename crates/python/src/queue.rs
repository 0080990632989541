//! The events of a request on their way from the engine's thread to Python.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use quadriga_llm::Error;
use quadriga_llm::serving::{Event, EventSink};

use crate::notifier::Notifier;

/// Events of a request. The engine's thread adds them and never waits for Python.
#[derive(Default)]
pub(crate) struct EventQueue {
    state: Mutex<QueueState>,
    added: Condvar,
}

#[derive(Default)]
struct QueueState {
    events: VecDeque<Event>,
    /// No more events are added.
    closed: bool,
    /// No more events are read: nobody may begin to wait for one.
    ended: bool,
    /// Called at the next event, or at the end: event loops wait for it.
    wakers: Vec<Py<PyAny>>,
}

impl EventQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next event, if it is there already. This waits for nothing but short work of the engine's thread, which never needs
    /// the GIL for that.
    pub(crate) fn try_next(&self) -> Option<Event> {
        self.lock().events.pop_front()
    }

    /// The next event, if it comes in this time, or whenever it comes; `None` at once if none will come.
    pub(crate) fn next(&self, wait: Option<Duration>) -> Option<Event> {
        let state = self.lock();
        let is_open = |state: &mut QueueState| state.events.is_empty() && !state.closed;
        let mut state = match wait {
            Some(wait) => {
                let waited = self.added.wait_timeout_while(state, wait, is_open);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.added.wait_while(state, is_open).unwrap_or_else(PoisonError::into_inner),
        };
        state.events.pop_front()
    }

    /// Has `waker` called at the next event, or at the end. Returns false if there is an event already, or none will be read.
    pub(crate) fn wake(&self, waker: Py<PyAny>) -> bool {
        let mut state = self.lock();
        if state.ended || !state.events.is_empty() {
            return false;
        }
        state.wakers.push(waker);
        true
    }

    /// Wants no more events. Threads that wait for one return. The caller calls the wakers, with the GIL: nobody else will.
    #[must_use]
    pub(crate) fn close(&self) -> Vec<Py<PyAny>> {
        let mut state = self.lock();
        state.closed = true;
        state.ended = true;
        state.events.clear();
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.added.notify_all();
        wakers
    }

    /// The request was refused: this is its last event.
    pub(crate) fn refuse(&self, error: Error, notifier: &Notifier) {
        self.add(Event::Failed(Arc::new(error)), notifier);
        self.lock().closed = true;
    }

    /// Adds an event. Whether somebody still wants them.
    fn add(&self, event: Event, notifier: &Notifier) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.events.push_back(event);
        // All of them: whoever finds no event waits again, and one whose event loop is closed takes it from nobody.
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.added.notify_one();
        for waker in wakers {
            notifier.call(waker);
        }
        true
    }

    /// What the engine gives the events to. If it is dropped before the last one, the service has stopped.
    pub(crate) fn sink(self: &Arc<Self>, notifier: Notifier) -> EventSink {
        let mut sender = EventSender { queue: Arc::clone(self), notifier, ended: false };
        Box::new(move |event| sender.send(event))
    }
}

struct EventSender {
    queue: Arc<EventQueue>,
    notifier: Notifier,
    ended: bool,
}

impl EventSender {
    fn send(&mut self, event: Event) -> bool {
        // Nobody in Python reads it, so nobody is woken: it is sent for the answer alone.
        if matches!(event, Event::Progress { .. }) {
            return !self.queue.lock().closed;
        }
        self.ended |= matches!(event, Event::Finished(_) | Event::Failed(_));
        self.queue.add(event, &self.notifier)
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        if !self.ended {
            self.queue.add(Event::Failed(Arc::new(Error::ServiceStopped)), &self.notifier);
        }
    }
}
