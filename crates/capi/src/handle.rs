//! Handles: numbers that stand for objects.
//!
//! A handle is never an address that is followed. It is looked up in a table, so that a handle that was freed, or one of another type, is
//! an error. Numbers are not used again. Whoever looks one up shares the object: it outlives a call that uses it, also
//! if another thread frees the handle meanwhile. In a fork, the handles of the parent are errors: threads do not survive it.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use crate::process::ProcessMark;
use crate::status::{Failure, Outcome, QD_STATUS_BUSY, QD_STATUS_INVALID_HANDLE};

/// A type of handles.
pub(crate) trait Handle: Sized + 'static {
    /// The object behind it.
    type Object: Any + Send + Sync;
    /// Its name in messages.
    const NAME: &'static str;
}

/// An object, the name of its type, and the process in which it was made.
struct Entry {
    name: &'static str,
    object: Arc<dyn Any + Send + Sync>,
    process: ProcessMark,
}

/// Objects of the parent process that a fork has freed. They are never dropped: that would wait for threads that do not exist.
static LEFT: Mutex<Vec<Arc<dyn Any + Send + Sync>>> = Mutex::new(Vec::new());

/// All live handles.
static TABLE: LazyLock<RwLock<HashMap<usize, Entry>>> = LazyLock::new(RwLock::default);
/// The next number. Handles are multiples of 8, as addresses are.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// A new handle on an object.
pub(crate) fn insert<H: Handle>(object: H::Object) -> *mut H {
    share(Arc::new(object))
}

/// A new handle on a shared object.
pub(crate) fn share<H: Handle>(object: Arc<H::Object>) -> *mut H {
    let number = NEXT.fetch_add(8, Ordering::Relaxed);
    let entry = Entry { name: H::NAME, object, process: ProcessMark::new() };
    TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(number, entry);
    std::ptr::without_provenance_mut(number)
}

/// The object of a handle.
pub(crate) fn get<H: Handle>(handle: *const H) -> Outcome<Arc<H::Object>> {
    let fail = |message| Err(Failure::new(QD_STATUS_INVALID_HANDLE, message));
    if handle.is_null() {
        return fail(format!("the {} is NULL", H::NAME));
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    let Some(entry) = table.get(&handle.addr()) else {
        return fail(format!("the {} was freed, or never was one", H::NAME));
    };
    if !entry.process.is_here() {
        return fail(format!(
            "the {} was made before this process was forked; make it after fork()",
            H::NAME
        ));
    }
    match Arc::clone(&entry.object).downcast() {
        Ok(object) if entry.name == H::NAME => Ok(object),
        _ => fail(format!("a {} was passed as a {}", entry.name, H::NAME)),
    }
}

/// The object of a handle that may be NULL.
pub(crate) fn get_optional<H: Handle>(handle: *const H) -> Outcome<Option<Arc<H::Object>>> {
    if handle.is_null() { Ok(None) } else { get(handle).map(Some) }
}

/// Ends a handle. The object is returned, so that it is dropped after the table is unlocked: dropping may call the caller's code.
pub(crate) fn remove<H: Handle>(handle: *mut H) -> Option<Arc<dyn Any + Send + Sync>> {
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    let is_own = table.get(&handle.addr()).is_some_and(|entry| entry.name == H::NAME);
    let entry = if is_own { table.remove(&handle.addr()) } else { None }?;
    drop(table);
    if entry.process.is_here() {
        return Some(entry.object);
    }
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(entry.object);
    None
}

/// How many handles there are.
pub(crate) fn count() -> usize {
    TABLE.read().unwrap_or_else(PoisonError::into_inner).len()
}

/// The object for this call alone; an error if another call is using it, also one further up the stack.
pub(crate) fn exclusive<'a, T>(object: &'a Mutex<T>, name: &str) -> Outcome<MutexGuard<'a, T>> {
    match object.try_lock() {
        Ok(guard) => Ok(guard),
        // A call that panicked has reported it; the object is what it left.
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            let message =
                format!("another call is using the {name}; use one of its own, or wait for that call");
            Err(Failure::new(QD_STATUS_BUSY, message))
        }
    }
}
