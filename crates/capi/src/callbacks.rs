//! Callbacks of the caller that fail, or that would wait for what waits for them.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Reasons of custom operations that failed: errors of devices are texts, and these stand for a status of their own.
static REASONS: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());
/// How many are kept: more than runs that fail at the same time.
const KEPT: usize = 64;

/// Keeps the reason why a callback failed.
pub(crate) fn keep_reason(reason: &str) {
    let mut kept = REASONS.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push_back(reason.to_owned());
    if kept.len() > KEPT {
        kept.pop_front();
    }
}

/// Whether an error has the reason of a callback that failed, which is then forgotten.
pub(crate) fn has_reason(error: &str) -> bool {
    let mut kept = REASONS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = kept.iter().position(|reason| error.contains(reason.as_str()));
    found.is_some_and(|place| kept.remove(place).is_some())
}

thread_local! {
    /// The service whose callback this thread runs, as a number.
    static SERVICE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Runs a callback that a service calls.
pub(crate) fn called_by<T>(service: usize, callback: impl FnOnce() -> T) -> T {
    struct Restore(Option<usize>);
    impl Drop for Restore {
        fn drop(&mut self) {
            SERVICE.set(self.0);
        }
    }
    let _restore = Restore(SERVICE.replace(Some(service)));
    callback()
}

/// Whether this thread runs a callback that this service has called.
pub(crate) fn is_called_by(service: usize) -> bool {
    SERVICE.get() == Some(service)
}

/// Whether this thread runs a callback that a service has called.
pub(crate) fn is_called() -> bool {
    SERVICE.get().is_some()
}
