//! Events: points in a queue's commands, with the time at which the queue reaches them.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use quadriga_runtime::{BackendError, Event};

use crate::inner::DeviceInner;
use crate::order::{VectorClock, host_joins};

/// Recordings are numbered; a wait refers to the latest recording at the time it was enqueued.
struct EventState {
    recorded: u64,
    passed: u64,
    /// The latest recording whose work failed, and the error.
    error: Option<(u64, BackendError)>,
    /// The times of the latest recordings: that of recording `n` at index `n % KEPT_TIMES`.
    seconds: [f64; KEPT_TIMES],
    /// What is known to be done once the latest recording is reached.
    clock: VectorClock,
}

/// How many recordings keep their time. Virtual clocks diverge by as many runs as are in flight.
const KEPT_TIMES: usize = 64;

impl Default for EventState {
    fn default() -> EventState {
        EventState {
            recorded: 0,
            passed: 0,
            error: None,
            seconds: [0.0; KEPT_TIMES],
            clock: VectorClock::default(),
        }
    }
}

impl EventState {
    fn at(&self, recording: u64) -> f64 {
        self.seconds.get(recording as usize % KEPT_TIMES).copied().unwrap_or(0.0)
    }
}

/// The recordings of an event, shared with the queues that record and wait for it.
#[derive(Default)]
pub(crate) struct EventInner {
    state: Mutex<EventState>,
    passed: Condvar,
}

/// An event of a simulated device.
#[derive(Clone)]
pub(crate) struct SimEvent {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) inner: Arc<EventInner>,
    pub(crate) timing: bool,
}

impl EventInner {
    /// Starts a new recording, at a queue's clock.
    pub(crate) fn record(&self, clock: &VectorClock) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.recorded += 1;
        state.clock.clone_from(clock);
        state.recorded
    }

    /// The number of the latest recording, and its clock.
    pub(crate) fn latest(&self) -> (u64, VectorClock) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.recorded, state.clock.clone())
    }

    /// Marks a recording as reached: the work before it is done, or failed.
    pub(crate) fn pass(&self, recording: u64, seconds: f64, error: Option<BackendError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if recording > state.passed {
            state.passed = recording;
            if let Some(error) = error {
                state.error = Some((recording, error));
            }
            if let Some(slot) = state.seconds.get_mut(recording as usize % KEPT_TIMES) {
                *slot = seconds;
            }
        }
        self.passed.notify_all();
    }

    /// Waits for a recording; returns its time, or the error of the work before it.
    pub(crate) fn wait_for(&self, recording: u64) -> Result<f64, BackendError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.passed < recording {
            state = self.passed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &state.error {
            Some((failed, error)) if *failed == recording => Err(error.clone()),
            _ => Ok(state.at(recording)),
        }
    }
}

impl Event for SimEvent {
    fn is_done(&self) -> Result<bool, BackendError> {
        if self.device.settings.timed_polls && self.device.settings.asynchronous {
            let (recording, clock) = self.inner.latest();
            let done = self.inner.wait_for(recording)? <= self.device.host_seconds();
            if done {
                host_joins(&clock);
            }
            return Ok(done);
        }
        let state = self.inner.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.error {
            Some((failed, error)) if *failed == state.recorded => Err(error.clone()),
            _ => {
                let done = state.passed >= state.recorded;
                if done {
                    host_joins(&state.clock);
                }
                Ok(done)
            }
        }
    }

    fn wait(&self) -> Result<(), BackendError> {
        let (recording, clock) = self.inner.latest();
        let result = self.inner.wait_for(recording);
        host_joins(&clock);
        result.map(|seconds| self.device.host_reaches(seconds))
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Option<f64> {
        let earlier = earlier.as_any().downcast_ref::<SimEvent>()?;
        if !self.timing || !earlier.timing {
            return None;
        }
        let at = |event: &SimEvent| {
            let state = event.inner.state.lock().unwrap_or_else(PoisonError::into_inner);
            (state.passed >= state.recorded).then(|| state.at(state.recorded))
        };
        Some(at(self)? - at(earlier)?)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
