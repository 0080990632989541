//! What surrounds the body of every function: errors become codes, and no panic leaves the library.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::callbacks::is_called;
use crate::handle::{self, Handle};
use crate::status::{Failure, Outcome, QD_STATUS_INTERNAL, QD_STATUS_OK, qd_error, qd_status};

/// Runs a body; a panic is a failure.
fn caught<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    // Objects are behind locks, which report what a panic left half done.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(panicked(payload)))
}

/// A panic as a failure.
fn panicked(payload: Box<dyn Any + Send>) -> Failure {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    // Dropping a payload may panic, too.
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second);
    }
    Failure::new(QD_STATUS_INTERNAL, format!("a bug of the library: {text}"))
}

/// Writes a failure to the caller's error, and returns its code.
fn report(failure: &Failure, error: Option<&mut qd_error>) -> qd_status {
    if let Some(error) = error {
        error.fill(failure.code, &failure.message);
    }
    failure.code
}

/// The body of a function that returns a status.
pub(crate) fn status(error: Option<&mut qd_error>, body: impl FnOnce() -> Outcome<()>) -> qd_status {
    code(error, || body().map(|()| QD_STATUS_OK))
}

/// The body of a function that returns one of several codes.
pub(crate) fn code(error: Option<&mut qd_error>, body: impl FnOnce() -> Outcome<qd_status>) -> qd_status {
    caught(body).unwrap_or_else(|failure| report(&failure, error))
}

/// The body of a function that returns a new handle.
pub(crate) fn handle<H: Handle>(
    error: Option<&mut qd_error>,
    body: impl FnOnce() -> Outcome<H::Object>,
) -> *mut H {
    pointer(error, || body().map(handle::insert))
}

/// The body of a function that returns a handle.
pub(crate) fn pointer<H>(error: Option<&mut qd_error>, body: impl FnOnce() -> Outcome<*mut H>) -> *mut H {
    caught(body).unwrap_or_else(|failure| {
        report(&failure, error);
        std::ptr::null_mut()
    })
}

/// The body of a function without errors.
pub(crate) fn value<T>(otherwise: T, body: impl FnOnce() -> Outcome<T>) -> T {
    caught(body).unwrap_or(otherwise)
}

/// The body of a function that frees a handle. What dropping the object panics with is lost.
pub(crate) fn free<H: Handle>(handle: *mut H) {
    let _ = caught(|| {
        let Some(object) = handle::remove(handle) else { return Ok(()) };
        if is_called() {
            // It may be the end of the service whose thread this is, which that would wait for. Without another thread the object
            // is dropped here.
            let _ = std::thread::Builder::new().name("quadriga-free".to_owned()).spawn(move || {
                let _ = caught(|| {
                    drop(object);
                    Ok(())
                });
            });
        }
        Ok(())
    });
}
