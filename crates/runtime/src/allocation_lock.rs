//! Sessions allocate one after another.
//!
//! A session that needs a larger arena may have to free the old one first. If the larger one is refused then, the old
//! size must be there again: no other session may take the memory in between.
//!
//! Arenas, weights and states take the lock. Staging memory, a [`TensorAllocator`](crate::memory::TensorAllocator) and a
//! caller's own [`Backend::allocate`](crate::Backend::allocate) do not: they may still come in between, and the arena is
//! then allocated by the next plan that needs it.

use std::sync::{Mutex, MutexGuard, PoisonError};

static LOCK: Mutex<()> = Mutex::new(());

/// Held while a session allocates an arena, weights or states on any device.
pub(crate) fn lock_allocation() -> MutexGuard<'static, ()> {
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
