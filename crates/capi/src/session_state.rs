//! States of a session, between runs.

use std::ffi::{c_char, c_void};

use crate::arguments::{array, array_mut, give, text};
use crate::guard;
use crate::session::{qd_session, with};
use crate::status::{qd_error, qd_status};

/// Reads a part of a state, from a byte on; waits for the run in flight.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_read_state(
    session: *mut qd_session,
    name: *const c_char,
    offset: usize,
    data: *mut c_void,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, data) = unsafe { (text(name, "name")?, array_mut(data.cast::<u8>(), bytes, "data")?) };
        with(session, |session| Ok(session.read_state_at::<u8>(name, offset, data)?))
    })
}

/// Writes a part of a state, from a byte on; waits for the run in flight.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_write_state(
    session: *mut qd_session,
    name: *const c_char,
    offset: usize,
    data: *const c_void,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, data) = unsafe { (text(name, "name")?, array(data.cast::<u8>(), bytes, "data")?) };
        with(session, |session| Ok(session.write_state_at::<u8>(name, offset, data)?))
    })
}

/// Sets every state to zero.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_clear_state(
    session: *mut qd_session,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || with(session, |session| Ok(session.clear_state()?)))
}

/// All states as bytes.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_save(
    session: *mut qd_session,
    bytes: *mut u8,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let saved = with(session, |session| Ok(session.state_bytes()?))?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give(&saved, bytes, capacity, needed) }
    })
}

/// Restores all states from bytes of qd_session_save; on an error they are as they were.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_restore(
    session: *mut qd_session,
    bytes: *const u8,
    byte_count: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for arrays.
        let bytes = unsafe { array(bytes, byte_count, "bytes") }?;
        with(session, |session| Ok(session.restore_state(bytes)?))
    })
}

/// Writes all states to a file.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_save_file(
    session: *mut qd_session,
    path: *const c_char,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let path = unsafe { text(path, "path") }?;
        with(session, |session| Ok(session.save_state_file(path)?))
    })
}

/// Restores all states from a file of qd_session_save_file; on an error they are as they were.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_restore_file(
    session: *mut qd_session,
    path: *const c_char,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let path = unsafe { text(path, "path") }?;
        with(session, |session| Ok(session.restore_state_file(path)?))
    })
}
