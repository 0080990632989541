//! The interpreter as other threads see it: calls of Python code from them, and its end.
//!
//! A thread that asks for the GIL while the interpreter shuts down is ended by CPython on the spot, with frames of Rust on its
//! stack. So at the interpreter's end `quadriga` calls, by way of `atexit`, [`refuse`] and then [`settle`]: new work is an error,
//! the interpreter waits for what runs, and afterwards no thread asks for the GIL any more. Work that takes too long is left
//! behind, and its thread stays where it is until the process ends; Python code that is running is waited for.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// Threads that work without the GIL. Counts may only be wrong in a fork, where [`forget_threads`] sets them right.
pub(crate) static WORKING: AtomicIsize = AtomicIsize::new(0);
/// Threads that run Python code for the engine, or wait for the GIL after their work.
pub(crate) static INSIDE: AtomicIsize = AtomicIsize::new(0);
/// No new work is begun.
static REFUSING: AtomicBool = AtomicBool::new(false);
/// No thread asks for the GIL any more.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// The thread that runs signal handlers, by Python's number.
static MAIN: AtomicU64 = AtomicU64::new(0);

/// How often [`settle`] looks.
const INTERVAL: Duration = Duration::from_millis(1);
/// How often [`settle`] looks at signals, in looks.
const LOOKS: usize = 50;

/// Counts a thread while it lives.
pub(crate) struct Counted(&'static AtomicIsize);

impl Counted {
    /// Begins to count this thread.
    pub(crate) fn new(count: &'static AtomicIsize) -> Counted {
        count.fetch_add(1, Ordering::SeqCst);
        Counted(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Leave to use the interpreter; `None` once it is gone. The order matters: [`settle`] closes first and looks at the count then.
pub(crate) fn enter() -> Option<Counted> {
    let inside = Counted::new(&INSIDE);
    (!CLOSED.load(Ordering::SeqCst)).then_some(inside)
}

/// Whether no new work is begun.
pub(crate) fn is_refusing() -> bool {
    REFUSING.load(Ordering::SeqCst)
}

/// Runs Python code on a thread of the engine; `None` at the end of the interpreter.
pub(crate) fn attached<T>(work: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _inside = enter()?;
    Python::try_attach(work)
}

/// From now on, new work is an error.
#[pyfunction]
pub(crate) fn refuse() {
    REFUSING.store(true, Ordering::SeqCst);
}

/// Waits until no thread works without the GIL, at most so many seconds, and until none runs Python code. Afterwards none asks
/// for the GIL. Returns whether all work has ended.
#[pyfunction]
pub(crate) fn settle(py: Python<'_>, seconds: f64) -> PyResult<bool> {
    let end = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
    let idle = |count: &AtomicIsize| count.load(Ordering::SeqCst) <= 0;
    let mut ended = true;
    for look in 1_usize.. {
        let has_ended = idle(&WORKING) && idle(&INSIDE);
        if has_ended || (CLOSED.load(Ordering::SeqCst) && idle(&INSIDE)) {
            break;
        }
        if Instant::now() > end {
            ended = false;
            CLOSED.store(true, Ordering::SeqCst);
        }
        py.detach(|| std::thread::sleep(INTERVAL));
        if look % LOOKS == 0 {
            py.check_signals()?;
        }
    }
    CLOSED.store(true, Ordering::SeqCst);
    // A thread may have entered between the last look and this.
    while !idle(&INSIDE) {
        py.detach(|| std::thread::sleep(INTERVAL));
    }
    Ok(ended)
}

/// Which thread runs signal handlers, by Python's number.
#[pyfunction]
pub(crate) fn set_main_thread(number: u64) {
    MAIN.store(number, Ordering::SeqCst);
}

thread_local! {
    /// Python's number of this thread, once it was asked for. A fork does not change it.
    static NUMBER: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Whether signal handlers run on this thread. No Python code runs here: at the end of the interpreter it would not return.
pub(crate) fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let number = match NUMBER.get() {
        Some(number) => number,
        None => py.import("_thread")?.getattr("get_ident")?.call0()?.extract()?,
    };
    NUMBER.set(Some(number));
    Ok(number == MAIN.load(Ordering::SeqCst))
}

/// In a fork: the threads that were counted do not exist.
#[pyfunction]
pub(crate) fn forget_threads() {
    WORKING.store(0, Ordering::SeqCst);
    INSIDE.store(0, Ordering::SeqCst);
}
