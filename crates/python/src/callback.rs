//! Python functions that are called in the middle of something: logits processors, observers, operations. What they are part
//! of waits for them, so they cannot wait for it: such a call is an error instead of a wait without end.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::failure::{Failure, Outcome};

/// What called the Python function that a thread runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// The engine of a model, by its number.
    Model(u64),
    /// A graph that is built, or that runs.
    Graph,
}

thread_local! {
    static CALLER: Cell<Option<Caller>> = const { Cell::new(None) };
}

/// A number for a model.
pub(crate) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Runs a Python function that something calls.
pub(crate) fn called_by<T>(caller: Caller, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<Caller>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CALLER.set(self.0);
        }
    }
    let _restore = Restore(CALLER.replace(Some(caller)));
    work()
}

/// Whether this thread runs a Python function that this has called.
pub(crate) fn is_called_by(caller: Caller) -> bool {
    CALLER.get() == Some(caller)
}

/// Whether this thread runs a Python function that anything here has called.
pub(crate) fn is_called() -> bool {
    CALLER.get().is_some()
}

/// An error in a logits processor of the model with this number.
pub(crate) fn check_model(number: u64) -> Outcome {
    if is_called_by(Caller::Model(number)) {
        let reason = "a logits processor cannot wait for its own model, which waits for the processor";
        return Err(Failure::invalid(format!("{reason}; use another model, or call it from another place")));
    }
    Ok(())
}

/// The error of an observer or operation that would wait for the graph or session that waits for it.
pub(crate) fn busy(what: &str) -> Failure {
    Failure::new("GraphError", format!("the {what} is in use by the call that this function is part of"))
}
