//! Faults: the n-th thing of a kind fails, or takes the device with it.

use std::sync::{Mutex, PoisonError};

use quadriga_runtime::BackendError;

/// What can fail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum What {
    /// Getting memory.
    Allocation,
    /// Moving bytes to, from or within the device.
    Transfer,
    /// Preparing a split.
    Compile,
    /// Running a split.
    Run,
}

impl What {
    /// All of them.
    pub const ALL: [What; 4] = [What::Allocation, What::Transfer, What::Compile, What::Run];

    fn index(self) -> usize {
        self as usize
    }

    fn name(self) -> &'static str {
        match self {
            What::Allocation => "an allocation",
            What::Transfer => "a transfer",
            What::Compile => "compiling",
            What::Run => "a run",
        }
    }
}

/// How often each thing was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts([u64; 4]);

impl Counts {
    /// How often this was tried.
    pub fn of(&self, what: What) -> u64 {
        self.0.get(what.index()).copied().unwrap_or(0)
    }
}

#[derive(Default)]
struct State {
    counts: Counts,
    /// What fails, at which count, and whether the device goes with it.
    planned: Option<(What, u64, bool)>,
    lost: bool,
}

/// The faults of a device.
#[derive(Default)]
pub(crate) struct Faults {
    state: Mutex<State>,
}

impl Faults {
    pub(crate) fn plan(&self, what: What, after: u64, lose: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let at = state.counts.of(what) + after;
        state.planned = Some((what, at, lose));
    }

    pub(crate) fn clear(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.planned = None;
        state.lost = false;
    }

    pub(crate) fn counts(&self) -> Counts {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).counts
    }

    /// Counts something, and says whether it fails.
    pub(crate) fn check(&self, backend: &str, what: What) -> Result<(), BackendError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let count = state.counts.of(what);
        if let Some(counted) = state.counts.0.get_mut(what.index()) {
            *counted += 1;
        }
        let now = state.planned.filter(|(kind, at, _)| *kind == what && *at == count);
        if let Some((_, _, lose)) = now {
            state.planned = None;
            state.lost |= lose;
            if !lose {
                return Err(match what {
                    What::Allocation => {
                        BackendError::OutOfMemory { backend: backend.to_owned(), wanted: 0, free: None }
                    }
                    _ => BackendError::Failed {
                        backend: backend.to_owned(),
                        what: what.name(),
                        reason: format!("fault planned for number {count}"),
                    },
                });
            }
        }
        self.alive_in(&state, backend)
    }

    /// An error if the device is gone.
    pub(crate) fn alive(&self, backend: &str) -> Result<(), BackendError> {
        self.alive_in(&self.state.lock().unwrap_or_else(PoisonError::into_inner), backend)
    }

    fn alive_in(&self, state: &State, backend: &str) -> Result<(), BackendError> {
        if state.lost {
            let reason = "fault planned".to_owned();
            return Err(BackendError::Lost { backend: backend.to_owned(), reason });
        }
        Ok(())
    }
}
