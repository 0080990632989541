//! Readers that are woken one after another.
//!
//! A step of the engine gives an event to each of many requests. If all their threads were woken at once, each but one would wait a
//! second time, for the GIL, and every such wait is two switches of threads on processors that compute the next step. So the engine
//! wakes one reader, and each wakes the next as soon as it has the GIL: by the time that one runs, the GIL is likely to be free.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a thread waits at.
pub(crate) trait Wakes: Send + Sync {
    /// Wakes a thread that waits, if there still is one. It takes the turn.
    fn wake_reader(&self) -> bool;
}

/// Queues whose readers are to be woken, in the order of their events.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<TurnsState>,
}

#[derive(Default)]
struct TurnsState {
    waiting: VecDeque<Arc<dyn Wakes>>,
    /// A reader was woken that has not passed the turn on. If nobody was, nobody waits.
    is_taken: bool,
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, TurnsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader of the queue is to be woken: now, or when those before it have had their turns.
    pub(crate) fn add(&self, queue: Arc<dyn Wakes>) {
        let mut state = self.lock();
        state.waiting.push_back(queue);
        if !state.is_taken {
            Self::wake_next(&mut state);
        }
    }

    /// A reader that was woken has the GIL: the next one may be woken.
    pub(crate) fn pass(&self) {
        Self::wake_next(&mut self.lock());
    }

    fn wake_next(state: &mut TurnsState) {
        state.is_taken = false;
        // One that no longer waits passes nothing on.
        while let Some(queue) = state.waiting.pop_front() {
            if queue.wake_reader() {
                state.is_taken = true;
                return;
            }
        }
    }
}
