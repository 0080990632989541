//! Overlapping runs: the next run starts before the results of the latest one are at the host.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex};

use quadriga::runtime::{PendingRead, Session};

use crate::arguments::{array, array_mut, required, text, too_small};
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::session::{qd_session, with};
use crate::status::{Failure, Outcome, qd_error, qd_status};

/// Outputs on their way to the host. It keeps its session.
pub struct qd_read {
    _opaque: (),
}

/// The session, and the read until it is finished.
pub(crate) struct StartedRead {
    session: Arc<Mutex<Session>>,
    read: Mutex<Option<PendingRead>>,
    bytes: usize,
}

impl Handle for qd_read {
    type Object = StartedRead;
    const NAME: &'static str = "qd_read";
}

/// Makes an output of the latest run an input of the next one, without waiting for it: the bytes stay on their device. Stores
/// 1 in `*chained`, or 0, and nothing has happened, if the two are not on one device: then read the output and set the input.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_chain(
    session: *mut qd_session,
    output: *const c_char,
    input: *const c_char,
    chained: Option<&mut i32>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let chained = required(chained, "chained")?;
        // SAFETY: the rules of the header for texts.
        let (output, input) = unsafe { (text(output, "output")?, text(input, "input")?) };
        *chained = with(session, |session| Ok(session.chain(output, input)?))?.into();
        Ok(())
    })
}

/// Starts to read outputs of the latest run, without waiting: they are copied to the host when the run is done, and runs that
/// are started meanwhile do not change them. qd_read_finish waits for the bytes. Two reads of a session may be pending; a third
/// takes the place of the older one.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_read_start(
    session: *mut qd_session,
    outputs: *const *const c_char,
    output_count: usize,
    error: Option<&mut qd_error>,
) -> *mut qd_read {
    guard::handle(error, || {
        // SAFETY: the rules of the header for arrays and texts.
        let names = unsafe { array(outputs, output_count, "outputs") }?;
        // SAFETY: as above.
        let names = names.iter().map(|name| unsafe { text(*name, "the name of an output") });
        let names = names.collect::<Outcome<Vec<_>>>()?;
        let shared = handle::get(session)?;
        let mut session = exclusive(&shared, "session")?;
        let mut bytes = 0;
        for name in &names {
            bytes += session.output(*name)?.bytes;
        }
        let read = Mutex::new(Some(session.read_async(&names)?));
        drop(session);
        Ok(StartedRead { session: shared, read, bytes })
    })
}

/// Waits for outputs that are being read, and copies their bytes, one output after the other. A read is finished once; one whose
/// buffer was too small can be finished with another.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_read_finish(
    read: *mut qd_read,
    data: *mut c_void,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let started = handle::get(read)?;
        if let Some(needed) = needed {
            *needed = started.bytes;
        }
        if capacity < started.bytes {
            return Err(too_small(started.bytes, capacity));
        }
        // SAFETY: the rules of the header for arrays.
        let data = unsafe { array_mut(data.cast::<u8>(), started.bytes, "data") }?;
        let mut session = exclusive(&started.session, "session")?;
        let read = exclusive(&started.read, "read")?.take();
        let read = read.ok_or_else(|| Failure::argument("the read is finished; start another one"))?;
        Ok(session.finish_read(read, data)?)
    })
}

/// Frees a read. One that was not finished is abandoned.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_read_free(read: *mut qd_read) {
    guard::free(read);
}
