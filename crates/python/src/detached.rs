//! Work without the GIL, and the wait for it at the end of the interpreter.
//!
//! A thread that asks for the GIL while the interpreter shuts down is ended by CPython on the spot, with frames of Rust on its
//! stack. So the interpreter waits for threads that are here before it goes: `quadriga` registers [`settle`] with `atexit`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// Threads that work without the GIL, or wait for it afterwards.
static DETACHED: AtomicUsize = AtomicUsize::new(0);

/// How often [`settle`] looks.
const INTERVAL: Duration = Duration::from_millis(1);

/// Runs a function without the GIL.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    struct Count;
    impl Drop for Count {
        fn drop(&mut self) {
            DETACHED.fetch_sub(1, Ordering::SeqCst);
        }
    }
    DETACHED.fetch_add(1, Ordering::SeqCst);
    let _count = Count;
    py.detach(work)
}

/// Waits until no thread works without the GIL, at most so many seconds. Returns whether that is so.
#[pyfunction]
pub(crate) fn settle(py: Python<'_>, seconds: f64) -> bool {
    let end = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
    py.detach(|| {
        while DETACHED.load(Ordering::SeqCst) > 0 {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(INTERVAL);
        }
        true
    })
}
