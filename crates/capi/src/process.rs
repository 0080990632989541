//! Notices that the process is a fork of the one that made an object.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many forks there are between the process that loaded the library and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The process in which an object was made.
#[derive(Clone, Copy)]
pub(crate) struct ProcessMark(u64);

impl ProcessMark {
    /// This process.
    pub(crate) fn new() -> ProcessMark {
        count_forks();
        ProcessMark(FORKS.load(Ordering::SeqCst))
    }

    /// Whether this is still that process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::SeqCst)
    }
}

#[cfg(unix)]
fn count_forks() {
    use std::ffi::c_int;
    use std::sync::Once;

    type Handler = Option<unsafe extern "C" fn()>;
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }
    /// In the child of a fork, where only this may be done which a signal handler could do.
    unsafe extern "C" fn count_fork() {
        FORKS.fetch_add(1, Ordering::SeqCst);
    }
    static COUNTING: Once = Once::new();
    COUNTING.call_once(|| {
        // SAFETY: the handler is a function without state, which is forgotten when the library is unloaded. Without memory for
        // it forks are not noticed, and there is nothing else to do.
        unsafe { pthread_atfork(None, None, Some(count_fork)) };
    });
}

/// There are no forks.
#[cfg(not(unix))]
fn count_forks() {}
