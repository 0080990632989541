//! The events of a request on their way from the engine's thread to Python.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use quadriga_llm::Error;
use quadriga_llm::serving::{Event, EventSink};

use crate::notifier::Notifier;
use crate::turns::{Turns, Wakes};

/// Events of a request. The engine's thread adds them and never waits for Python.
pub(crate) struct EventQueue {
    state: Mutex<QueueState>,
    added: Condvar,
    turns: Arc<Turns>,
}

#[derive(Default)]
struct QueueState {
    events: VecDeque<Event>,
    /// No more events are added.
    closed: bool,
    /// No more events are read: nobody may begin to wait for one.
    ended: bool,
    /// Threads that wait for an event.
    readers: usize,
    turn: Turn,
    /// Called at the next event, or at the end: event loops wait for it.
    wakers: Vec<Py<PyAny>>,
}

/// How a thread that waits comes to know of an event.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Turn {
    /// No thread is to be woken.
    #[default]
    None,
    /// One will be when it is the queue's turn.
    Queued,
    /// One was. It passes the turn on.
    Woken,
}

/// A turn that was taken: passed on when it is dropped.
pub(crate) struct TakenTurn<'a>(&'a Turns);

impl Drop for TakenTurn<'_> {
    fn drop(&mut self) {
        self.0.pass();
    }
}

impl EventQueue {
    /// A queue whose readers are woken by turns with those of others.
    pub(crate) fn new(turns: &Arc<Turns>) -> EventQueue {
        EventQueue { state: Mutex::default(), added: Condvar::new(), turns: Arc::clone(turns) }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next event, if it is there already. This waits for nothing but short work of the engine's thread, which never needs
    /// the GIL for that.
    pub(crate) fn try_next(&self) -> Option<Event> {
        self.lock().events.pop_front()
    }

    /// The next event, if it comes in this time, or whenever it comes; `None` at once if none will come, or if
    /// another thread took it. The turn, if the thread was
    /// woken for it, is to be dropped when the thread has the GIL.
    pub(crate) fn next(&self, wait: Option<Duration>) -> (Option<Event>, Option<TakenTurn<'_>>) {
        let mut state = self.lock();
        // Another thread may have taken the event that this one was woken for: it returns nonetheless, to pass the turn on.
        let is_open =
            |state: &mut QueueState| state.events.is_empty() && !state.closed && state.turn != Turn::Woken;
        state.readers += 1;
        let mut state = match wait {
            Some(wait) => {
                let waited = self.added.wait_timeout_while(state, wait, is_open);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.added.wait_while(state, is_open).unwrap_or_else(PoisonError::into_inner),
        };
        state.readers -= 1;
        let turn = std::mem::take(&mut state.turn);
        let event = state.events.pop_front();
        if state.readers > 0 && !state.events.is_empty() {
            self.added.notify_one();
        }
        drop(state);
        (event, (turn == Turn::Woken).then(|| TakenTurn(&self.turns)))
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
    pub(crate) fn refuse(self: &Arc<Self>, error: Error, notifier: &Notifier) {
        self.add(Event::Failed(Arc::new(error)), notifier);
        self.lock().closed = true;
    }

    /// Adds an event. Whether somebody still wants them.
    fn add(self: &Arc<Self>, event: Event, notifier: &Notifier) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.events.push_back(event);
        let wakes_reader = state.readers > 0 && state.turn == Turn::None;
        if wakes_reader {
            state.turn = Turn::Queued;
        }
        // All of them: whoever finds no event waits again, and one whose event loop is closed takes it from nobody.
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        if wakes_reader {
            self.turns.add(Arc::<Self>::clone(self));
        }
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

impl Wakes for EventQueue {
    fn wake_reader(&self) -> bool {
        let mut state = self.lock();
        if state.turn != Turn::Queued {
            return false;
        }
        state.turn = Turn::Woken;
        drop(state);
        self.added.notify_one();
        true
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
