//! Faults of a device: the n-th operation of a kind fails, or the device is lost with it; and after an access that the
//! happens-before checker refused, every operation fails.

use std::sync::{Mutex, PoisonError};

use quadriga_runtime::BackendError;

/// An operation at which a fault can be injected.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultPoint {
    /// An allocation of memory.
    Allocation,
    /// A transfer to, from or within the device.
    Transfer,
    /// The compilation of a split.
    Compile,
    /// The run of a split.
    Run,
}

impl FaultPoint {
    /// Every fault point.
    pub const ALL: [FaultPoint; 4] =
        [FaultPoint::Allocation, FaultPoint::Transfer, FaultPoint::Compile, FaultPoint::Run];

    fn index(self) -> usize {
        self as usize
    }

    fn name(self) -> &'static str {
        match self {
            FaultPoint::Allocation => "an allocation",
            FaultPoint::Transfer => "a transfer",
            FaultPoint::Compile => "compiling",
            FaultPoint::Run => "a run",
        }
    }
}

/// The number of attempted operations per fault point.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultCounts([u64; 4]);

impl FaultCounts {
    /// The number of attempts at this point.
    pub fn of(&self, point: FaultPoint) -> u64 {
        self.0.get(point.index()).copied().unwrap_or(0)
    }
}

#[derive(Default)]
struct FaultState {
    counts: FaultCounts,
    /// The injected fault: where, at which attempt, and whether the device is lost.
    planned: Option<(FaultPoint, u64, bool)>,
    lost: bool,
    /// The first access that the happens-before checker refused.
    unordered: Option<String>,
}

/// The faults of a device.
#[derive(Default)]
pub(crate) struct DeviceFaults {
    state: Mutex<FaultState>,
}

impl DeviceFaults {
    pub(crate) fn plan(&self, point: FaultPoint, after: u64, lose: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let at = state.counts.of(point) + after;
        state.planned = Some((point, at, lose));
    }

    /// Removes injected faults. A refused access stays: it is a mistake of whoever uses the device, not a fault of the device.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.planned = None;
        state.lost = false;
    }

    pub(crate) fn counts(&self) -> FaultCounts {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).counts
    }

    /// Notes an access that the happens-before checker refused. From now on every operation fails with it: a caller that tries
    /// again after an error has waited for the device by then, and would find nothing wrong.
    pub(crate) fn note_unordered(&self, reason: String) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.unordered.get_or_insert(reason);
    }

    /// The first access that the happens-before checker refused.
    pub(crate) fn unordered(&self) -> Option<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).unordered.clone()
    }

    /// Counts an attempt; an error if it fails or the device is lost.
    pub(crate) fn check(&self, backend: &str, point: FaultPoint) -> Result<(), BackendError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let count = state.counts.of(point);
        if let Some(counted) = state.counts.0.get_mut(point.index()) {
            *counted += 1;
        }
        let now = state.planned.filter(|(planned, at, _)| *planned == point && *at == count);
        if let Some((_, _, lose)) = now {
            state.planned = None;
            state.lost |= lose;
            if !lose {
                return Err(match point {
                    FaultPoint::Allocation => {
                        BackendError::OutOfMemory { backend: backend.to_owned(), requested: 0, free: None }
                    }
                    _ => BackendError::Failed {
                        backend: backend.to_owned(),
                        what: point.name(),
                        reason: format!("fault injected at number {count}"),
                    },
                });
            }
        }
        alive(&state, backend)
    }

    /// An error if the device is lost, or an access was refused.
    pub(crate) fn alive(&self, backend: &str) -> Result<(), BackendError> {
        alive(&self.state.lock().unwrap_or_else(PoisonError::into_inner), backend)
    }
}

/// The error of an access that the happens-before checker refused.
pub(crate) fn unordered(backend: &str, reason: String) -> BackendError {
    BackendError::Failed { backend: backend.to_owned(), what: "ordering accesses to memory", reason }
}

fn alive(state: &FaultState, backend: &str) -> Result<(), BackendError> {
    if let Some(reason) = &state.unordered {
        return Err(unordered(backend, reason.clone()));
    }
    if state.lost {
        let reason = "fault injected".to_owned();
        return Err(BackendError::Lost { backend: backend.to_owned(), reason });
    }
    Ok(())
}
