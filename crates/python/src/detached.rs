//! Work without the GIL.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::callback::is_called;
use crate::failure::{Failure, Outcome};
use crate::interpreter::{Counted, WORKING, enter, is_main_thread, is_refusing};

/// The longest wait of the main thread without a look at signals: how late Ctrl-C may be.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// How long this thread may wait without a look at signals. Other threads than the main one run no handlers.
pub(crate) fn signal_interval(py: Python<'_>) -> Outcome<Option<Duration>> {
    Ok(is_main_thread(py)?.then_some(SIGNAL_INTERVAL))
}

/// Runs a function without the GIL. An error at the end of the interpreter.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
    let working = Counted::new(&WORKING);
    if is_refusing() {
        return Err(Failure::new("Closed", "the interpreter is shutting down"));
    }
    let (done, _inside) = py.detach(move || {
        let done = work();
        let inside = enter();
        if inside.is_none() {
            loop {
                std::thread::park();
            }
        }
        drop(working);
        (done, inside)
    });
    done
}

/// As [`detached`], but on the main thread signals are looked at meanwhile. If a handler raises an exception, this returns at
/// once: the work sees that it is not wanted, or ends on its own thread.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&AtomicBool) -> Outcome<T> + Send + 'static,
) -> Outcome<T> {
    let unwanted = Arc::new(AtomicBool::new(false));
    if is_called() || !is_main_thread(py)? {
        return detached(py, move || work(&unwanted));
    }
    let (sender, receiver) = channel();
    // A receiver is not for several threads; here one has it at a time.
    let receiver = Mutex::new(receiver);
    let flag = Arc::clone(&unwanted);
    let run = move || {
        // Nobody waits for work that was interrupted.
        let _ = sender.send(work(&flag));
    };
    std::thread::Builder::new()
        .name("quadriga-work".to_owned())
        .spawn(run)
        .map_err(|error| Failure::new("Error", format!("a thread could not be started: {error}")))?;
    loop {
        let wait =
            || Ok(receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_INTERVAL));
        match detached(py, wait)? {
            Ok(done) => return done,
            Err(RecvTimeoutError::Timeout) => {
                if let Err(raised) = py.check_signals() {
                    unwanted.store(true, Ordering::SeqCst);
                    return Err(raised.into());
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new("Error", "a bug of the library: the work ended without a result"));
            }
        }
    }
}
