//! Synchronization primitives of the pool: the standard library's, or loom's when it is model-checked.

#[cfg(loom)]
pub(super) use loom::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    },
    thread::JoinHandle,
};
#[cfg(not(loom))]
pub(super) use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    },
    thread::JoinHandle,
};

use std::cell::Cell;
use std::sync::PoisonError;
use std::time::Duration;

use super::patience;

#[cfg(not(loom))]
thread_local! {
    /// Whether this thread is running a job of some pool.
    pub(super) static INSIDE_A_JOB: Cell<bool> = const { Cell::new(false) };
}

#[cfg(loom)]
loom::thread_local! {
    /// Whether this thread is running a job of some pool.
    pub(super) static INSIDE_A_JOB: Cell<bool> = Cell::new(false);
}

/// Locks, ignoring poison: no code of the pool panics while it holds a lock.
#[cfg(not(loom))]
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks, ignoring poison: no code of the pool panics while it holds a lock.
#[cfg(loom)]
pub(super) fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A counter that threads wait on: they poll for a while, then sleep until it changes.
#[derive(Debug)]
pub(super) struct Signal {
    value: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    pub(super) fn new(value: u32) -> Signal {
        Signal {
            value: AtomicU32::new(value),
            sleepers: AtomicU32::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    pub(super) fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Adds to the counter (wrapping), wakes sleeping threads, and returns the previous value.
    ///
    /// The caller's earlier writes are visible to a thread that sees the new value.
    pub(super) fn add(&self, amount: u32) -> u32 {
        let before = self.value.fetch_add(amount, Ordering::AcqRel);
        // Either this thread sees the sleeper's count, or the sleeper sees the new value before it sleeps.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(lock(&self.lock));
            self.changed.notify_all();
        }
        before
    }

    /// Sets the counter while no thread waits on it.
    pub(super) fn set_unwatched(&self, value: u32) {
        self.value.store(value, Ordering::Release);
    }

    /// Waits until `done(value)`, polling for at most `longest` before it sleeps.
    pub(super) fn wait(&self, longest: Duration, done: impl Fn(u32) -> bool) {
        // The model checker explores every order of events; polling would only add to them.
        if !cfg!(loom) && patience::poll(longest, || done(self.get())) {
            return;
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !done(self.get()) {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        drop(guard);
    }
}
