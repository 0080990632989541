//! Events: points in a queue's work, with the time at which they are passed.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use quadriga_runtime::{BackendError, Event};

use crate::device;

/// Recordings are numbered: a wait is for the one that was latest when the wait was given.
struct State {
    recorded: u64,
    passed: u64,
    /// The latest recording that failed, and how.
    error: Option<(u64, BackendError)>,
    /// When the latest recordings were passed: the time of recording `n` stands at `n % PAST`.
    seconds: [f64; PAST],
}

/// How many recordings keep their time. Virtual clocks run apart by as many runs as are under way.
const PAST: usize = 64;

impl Default for State {
    fn default() -> State {
        State { recorded: 0, passed: 0, error: None, seconds: [0.0; PAST] }
    }
}

impl State {
    fn at(&self, recording: u64) -> f64 {
        self.seconds.get(recording as usize % PAST).copied().unwrap_or(0.0)
    }
}

#[derive(Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    passed: Condvar,
}

/// An event of a simulated device.
#[derive(Clone)]
pub(crate) struct SimEvent {
    pub(crate) device: Arc<device::Shared>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) timing: bool,
}

impl Shared {
    /// A new recording.
    pub(crate) fn record(&self) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.recorded += 1;
        state.recorded
    }

    /// The latest recording.
    pub(crate) fn latest(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).recorded
    }

    /// The work before a recording is done, or failed.
    pub(crate) fn pass(&self, recording: u64, seconds: f64, error: Option<BackendError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if recording > state.passed {
            state.passed = recording;
            if let Some(error) = error {
                state.error = Some((recording, error));
            }
            if let Some(slot) = state.seconds.get_mut(recording as usize % PAST) {
                *slot = seconds;
            }
        }
        self.passed.notify_all();
    }

    /// Waits for a recording: the time at which it is passed, or what failed.
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
        let state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.error {
            Some((failed, error)) if *failed == state.recorded => Err(error.clone()),
            _ => Ok(state.passed >= state.recorded),
        }
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.shared.wait_for(self.shared.latest()).map(|_| ())
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Option<f64> {
        let earlier = earlier.as_any().downcast_ref::<SimEvent>()?;
        if !self.timing || !earlier.timing {
            return None;
        }
        let at = |event: &SimEvent| {
            let state = event.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
            (state.passed >= state.recorded).then(|| state.at(state.recorded))
        };
        Some(at(self)? - at(earlier)?)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
