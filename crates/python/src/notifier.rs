//! A thread that wakes event loops, so that the engine's thread never waits for the GIL.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use pyo3::prelude::*;

use crate::interpreter::attached;

/// Calls Python functions on a thread of its own, which starts with the first call.
#[derive(Clone, Default)]
pub(crate) struct Notifier {
    running: Arc<Mutex<NotifierState>>,
}

#[derive(Default)]
enum NotifierState {
    #[default]
    Unused,
    Running {
        calls: Sender<Py<PyAny>>,
        thread: JoinHandle<()>,
    },
    Stopped,
}

impl Notifier {
    /// Calls a function soon, without arguments.
    pub(crate) fn call(&self, function: Py<PyAny>) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*running, NotifierState::Unused) {
            *running = start();
        }
        if let NotifierState::Running { calls, .. } = &*running {
            // If the thread has ended, the interpreter is shutting down.
            let _ = calls.send(function);
        }
    }

    /// Ends the thread after the calls so far, and waits for it. The caller must not hold the GIL, which the thread may be waiting
    /// for. A function that the thread calls may be the end of the model, if it frees the last object that uses it: that is not
    /// waited for.
    pub(crate) fn stop(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let stopped = std::mem::replace(&mut *running, NotifierState::Stopped);
        drop(running);
        if let NotifierState::Running { calls, thread } = stopped {
            drop(calls);
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn start() -> NotifierState {
    let (calls, inbox) = channel::<Py<PyAny>>();
    let run = move || {
        for function in inbox {
            // An event loop that is closed needs no call; neither does one of an interpreter that is shutting down.
            let _ = attached(|py| function.call0(py).map(drop));
        }
    };
    match std::thread::Builder::new().name("quadriga-notify".to_owned()).spawn(run) {
        Ok(thread) => NotifierState::Running { calls, thread },
        Err(_) => NotifierState::Unused,
    }
}
