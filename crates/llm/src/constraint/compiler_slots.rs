//! How many grammars are compiled at once.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::cancellation::Cancellation;
use crate::Result;

/// Grammars that are compiled at once; others wait. Requests cannot take more of the machine than this.
pub const MAX_COMPILING: usize = 2;

/// How often whoever waits looks whether the work was cancelled.
pub(super) const CANCEL_INTERVAL: Duration = Duration::from_millis(20);

/// Counts grammars that are being compiled.
#[derive(Default)]
pub(super) struct CompilerSlots {
    counts: Mutex<CompilerCounts>,
    freed: Condvar,
}

#[derive(Default)]
struct CompilerCounts {
    /// Slots that are taken.
    taken: usize,
    /// Slots that were ever taken.
    started: u64,
}

/// A grammar that is being compiled, until it is dropped.
pub(super) struct CompilerSlot(Arc<CompilerSlots>);

impl CompilerSlots {
    /// Waits for a free slot.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled) if the work was cancelled before.
    pub(super) fn enter(self: &Arc<Self>, cancellation: &Cancellation) -> Result<CompilerSlot> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        cancellation.check()?;
        while counts.taken >= MAX_COMPILING {
            let waited = self.freed.wait_timeout(counts, CANCEL_INTERVAL);
            counts = waited.unwrap_or_else(PoisonError::into_inner).0;
            cancellation.check()?;
        }
        counts.taken += 1;
        counts.started += 1;
        Ok(CompilerSlot(Arc::clone(self)))
    }

    /// Slots that are taken, and slots that were ever taken.
    pub(super) fn counts(&self) -> (usize, u64) {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        (counts.taken, counts.started)
    }
}

impl Drop for CompilerSlot {
    fn drop(&mut self) {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner).taken -= 1;
        self.0.freed.notify_one();
    }
}
