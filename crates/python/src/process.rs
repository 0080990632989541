//! Notices that the process is a fork of the one that made an object: threads do not survive a fork.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::failure::{Failure, Outcome};

/// How many forks there are between the process that loaded the library and this one. Every piece of an answer asks for it, so it
/// is counted: the number of the process would be a system call each time.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// In the child of a fork, where only this may be done which a signal handler could do.
extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// The process in which an object was made.
#[derive(Clone, Copy)]
pub(crate) struct ProcessMark(u64);

impl ProcessMark {
    /// This process.
    pub(crate) fn new() -> ProcessMark {
        static COUNTING: Once = Once::new();
        COUNTING.call_once(|| {
            // SAFETY: the handler is a function without state, and the interpreter never unloads this library. Without memory
            // for it forks are not noticed, and there is nothing else to do.
            unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        ProcessMark(FORKS.load(Ordering::SeqCst))
    }

    /// Whether this is still that process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::SeqCst)
    }

    /// An error in a fork.
    pub(crate) fn check(self, what: &str) -> Outcome {
        if self.is_here() {
            return Ok(());
        }
        let advice = "make it after os.fork(), or start processes with the method \"spawn\"";
        Err(Failure::new("Closed", format!("the {what} was made before this process was forked; {advice}")))
    }
}
