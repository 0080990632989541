//! The interpreter as other threads see it: calls of Python code from them, and its end.
//!
//! A thread that asks for the GIL while the interpreter shuts down is ended by CPython on the spot, with frames of Rust on its
//! stack. So at the interpreter's end `quadriga` calls, by way of `atexit`, [`refuse`] and then [`settle`]: new work is an error,
//! the interpreter waits for what runs, and afterwards no thread asks for the GIL any more. What takes too long is left behind,
//! and its thread stays where it is until the process ends: work, and Python functions that do not return ([`call_function`]).

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Threads that work without the GIL. Counts may only be wrong in a fork, where [`forget_threads`] sets them right.
pub(crate) static WORKING: AtomicIsize = AtomicIsize::new(0);
/// Threads that run Python code for the engine, or wait for the GIL after their work.
pub(crate) static INSIDE: AtomicIsize = AtomicIsize::new(0);
/// Of those, the ones in a Python function that something here has called: it may not return.
static CALLING: AtomicIsize = AtomicIsize::new(0);
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

/// Keeps a thread where it is for ever, if CPython ends it while this lives.
struct HangThread;

impl Drop for HangThread {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

unsafe extern "C-unwind" {
    fn PyObject_CallObject(
        function: *mut pyo3::ffi::PyObject,
        arguments: *mut pyo3::ffi::PyObject,
    ) -> *mut pyo3::ffi::PyObject;
}

/// Calls a Python function that may not return before the end of the interpreter. If it asks for the GIL afterwards, CPython
/// before 3.14 unwinds its thread, which aborts the process where that meets frames of Rust: here it hangs, as in 3.14.
pub(crate) fn call_function<'py, A>(function: &Bound<'py, PyAny>, arguments: A) -> PyResult<Bound<'py, PyAny>>
where
    A: IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
{
    let arguments = arguments.into_pyobject(function.py())?;
    let calling = Counted::new(&CALLING);
    let guard = HangThread;
    // SAFETY: the GIL is held, both are objects that live during the call, and the second one is a tuple. The result is a new
    // reference, or null with an exception set.
    let result = unsafe {
        let result = PyObject_CallObject(function.as_ptr(), arguments.as_ptr());
        Bound::from_owned_ptr_or_err(function.py(), result)
    };
    std::mem::forget(guard);
    drop(calling);
    result
}

/// From now on, new work is an error.
#[pyfunction]
pub(crate) fn refuse() {
    REFUSING.store(true, Ordering::SeqCst);
}

/// Waits until no thread works without the GIL or runs Python code, at most so many seconds, or until a signal handler raises an
/// exception. Afterwards none asks for the GIL. Returns whether all work has ended.
#[pyfunction]
pub(crate) fn settle(py: Python<'_>, seconds: f64) -> PyResult<bool> {
    let end = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
    let is_idle = || WORKING.load(Ordering::SeqCst) <= 0 && INSIDE.load(Ordering::SeqCst) <= 0;
    let mut outcome = Ok(true);
    for look in 1_usize.. {
        if is_idle() {
            break;
        }
        if Instant::now() > end {
            outcome = Ok(false);
            break;
        }
        py.detach(|| std::thread::sleep(INTERVAL));
        if look % LOOKS == 0
            && let Err(raised) = py.check_signals()
        {
            outcome = Err(raised);
            break;
        }
    }
    CLOSED.store(true, Ordering::SeqCst);
    // Threads that have entered get the GIL, all but those in functions that do not return.
    while INSIDE.load(Ordering::SeqCst) > CALLING.load(Ordering::SeqCst) {
        py.detach(|| std::thread::sleep(INTERVAL));
    }
    outcome
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
    CALLING.store(0, Ordering::SeqCst);
}
