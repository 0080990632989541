//! Sessions allocate one after another.
//!
//! A session that needs a larger arena may have to free the old one first. If the larger one is refused then, the old
//! size must be there again: no other session may take the memory in between.

use std::sync::{Mutex, MutexGuard, PoisonError};

static LOCK: Mutex<()> = Mutex::new(());

/// Held while a session allocates memory of any device.
pub(crate) fn lock_allocation() -> MutexGuard<'static, ()> {
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
