//! Sessions: memory, loaded weights and compiled splits; they run plans any number of times.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex};

use quadriga::runtime::Session;

use crate::arguments::{array, array_mut, give, required, text, too_small};
use crate::buffer::{BufferObject, qd_buffer};
use crate::graph::qd_graph;
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::plan::qd_plan;
use crate::scheduler::qd_scheduler;
use crate::status::{Failure, Outcome, QD_STATUS_NOT_FOUND, qd_error, qd_status};
use crate::tensor::qd_tensor_info;

/// Runs plans: it owns the memory, the compiled splits and the queues.
pub struct qd_session {
    _opaque: (),
}

impl Handle for qd_session {
    type Object = Mutex<Session>;
    const NAME: &'static str = "qd_session";
}

/// Does something with a session alone.
pub(crate) fn with<T>(
    session: *const qd_session,
    act: impl FnOnce(&mut Session) -> Outcome<T>,
) -> Outcome<T> {
    let object = handle::get(session)?;
    let mut session = exclusive(&object, "session")?;
    act(&mut session)
}

/// A session that runs a plan: allocates, loads weights, compiles.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_new(plan: *const qd_plan, error: Option<&mut qd_error>) -> *mut qd_session {
    guard::handle(error, || Ok(Mutex::new(handle::get(plan)?.session()?)))
}

/// A session without a plan, on the backends of a scheduler: qd_session_use_graph plans as it needs.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_empty(
    scheduler: *const qd_scheduler,
    error: Option<&mut qd_error>,
) -> *mut qd_session {
    guard::handle(error, || {
        let scheduler = handle::get(scheduler)?;
        let scheduler = exclusive(&scheduler, "scheduler")?.clone();
        Ok(Mutex::new(Session::new(&scheduler)?))
    })
}

/// Frees a session, with its memory. A call that is using it ends first.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_free(session: *mut qd_session) {
    guard::free(session);
}

/// Makes a graph the current one; one that was used before is found again, with its plan.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_use_graph(
    session: *mut qd_session,
    graph: *const qd_graph,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let graph = handle::get(graph)?;
        with(session, |session| Ok(session.use_graph(Arc::clone(&graph))?))
    })
}

/// Makes a plan of the same backends the current one.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_use_plan(
    session: *mut qd_session,
    plan: *const qd_plan,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let plan = handle::get(plan)?;
        with(session, |session| Ok(session.use_plan(&plan)?))
    })
}

/// The current plan of a session, to be freed.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_plan(session: *const qd_session, error: Option<&mut qd_error>) -> *mut qd_plan {
    guard::handle(error, || {
        with(session, |session| {
            let plan = session.plan().cloned();
            plan.ok_or_else(|| Failure::new(QD_STATUS_NOT_FOUND, "the session has no plan yet"))
        })
    })
}

/// Sets an input by name, as the bytes of its type. It keeps its value for later runs.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_set(
    session: *mut qd_session,
    name: *const c_char,
    data: *const c_void,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, data) = unsafe { (text(name, "name")?, array(data.cast::<u8>(), bytes, "data")?) };
        with(session, |session| Ok(session.set::<[u8]>(name, data)?))
    })
}

/// Sets a part of an input that was set as a whole before, from a byte on.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_set_at(
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
        with(session, |session| Ok(session.set_at::<[u8]>(name, offset, data)?))
    })
}

/// Sets an input from 32-bit floating point numbers, converted to its type.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_set_f32(
    session: *mut qd_session,
    name: *const c_char,
    values: *const f32,
    count: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, values) = unsafe { (text(name, "name")?, array(values, count, "values")?) };
        with(session, |session| Ok(session.set_from_f32(name, values)?))
    })
}

/// Sets the bytes of a weight that its graph has no data for. The session keeps a copy.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_set_weight(
    session: *mut qd_session,
    name: *const c_char,
    data: *const c_void,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, data) = unsafe { (text(name, "name")?, array(data.cast::<u8>(), bytes, "data")?) };
        with(session, |session| Ok(session.set_weight(name, data)?))
    })
}

/// Runs the current plan, and waits for the end.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_run(session: *mut qd_session, error: Option<&mut qd_error>) -> qd_status {
    guard::status(error, || with(session, |session| Ok(session.run(&[])?)))
}

/// Starts the current plan. Asynchronous devices go on working when this returns: inputs of the next run may be set
/// meanwhile.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_start(session: *mut qd_session, error: Option<&mut qd_error>) -> qd_status {
    guard::status(error, || with(session, |session| Ok(session.start()?)))
}

/// Waits until everything that was started is done.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_wait(session: *mut qd_session, error: Option<&mut qd_error>) -> qd_status {
    guard::status(error, || with(session, |session| Ok(session.wait()?)))
}

/// Stores 1 in `*done` if everything that was started is done, else 0.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_is_done(
    session: *mut qd_session,
    done: Option<&mut i32>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let done = required(done, "done")?;
        *done = with(session, |session| Ok(session.is_done()?))?.into();
        Ok(())
    })
}

/// Reads an output of the latest run by name, as the bytes of its type; waits for it.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_read(
    session: *mut qd_session,
    name: *const c_char,
    data: *mut c_void,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        with(session, |session| {
            let bytes = session.output(name)?.bytes;
            if let Some(needed) = needed {
                *needed = bytes;
            }
            if capacity < bytes {
                return Err(too_small(bytes, capacity));
            }
            // SAFETY: the rules of the header for arrays.
            Ok(session.read_into(name, unsafe { array_mut(data.cast::<u8>(), bytes, "data") }?)?)
        })
    })
}

/// Reads a part of an output of the latest run, from a byte on; waits for it.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_read_at(
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
        with(session, |session| Ok(session.read_at::<u8>(name, offset, data)?))
    })
}

/// Reads an output of the latest run, converted to 32-bit floating point; waits for it.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_read_f32(
    session: *mut qd_session,
    name: *const c_char,
    values: *mut f32,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let read = with(session, |session| Ok(session.read_as_f32(name)?))?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give(&read, values, capacity, needed) }
    })
}

/// Type and shape of an output of the current graph.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_output(
    session: *const qd_session,
    name: *const c_char,
    info: Option<&mut qd_tensor_info>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let into = required(info, "info")?;
        with(session, |session| {
            let id = session.output(name)?.id;
            if let Some(tensor) = session.plan().and_then(|plan| plan.graph().get(id)) {
                *into = qd_tensor_info::of(tensor);
            }
            Ok(())
        })
    })
}

/// The buffer in which a tensor of the current graph is, to be freed, and its offset there: an output, a leaf or any other
/// result, by name. The memory of results is reused by the next run.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_tensor(
    session: *const qd_session,
    name: *const c_char,
    offset: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> *mut qd_buffer {
    guard::handle(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let place = with(session, |session| Ok(session.tensor(name)?))?;
        let place = place.ok_or_else(|| {
            Failure::new(QD_STATUS_NOT_FOUND, format!("no tensor \"{name}\" is in the session's memory"))
        })?;
        if let Some(offset) = offset {
            *offset = place.region.offset;
        }
        Ok(BufferObject { backend: place.backend, buffer: place.region.buffer })
    })
}

/// Uses a buffer of the caller for the input or state of this name, in every graph that qd_session_use_graph makes the current
/// one afterwards. Plans that were made already do not use it.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_bind_leaf(
    session: *mut qd_session,
    name: *const c_char,
    buffer: *const qd_buffer,
    offset: usize,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let region = handle::get(buffer)?.region(offset, bytes)?;
        with(session, |session| Ok(session.bind_leaf(name, region)?))
    })
}

/// Uses a buffer of the caller for the output of this name, which must be computed, in every graph that qd_session_use_graph
/// makes the current one afterwards. Plans that were made already do not use it.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_session_bind_output(
    session: *mut qd_session,
    name: *const c_char,
    buffer: *const qd_buffer,
    offset: usize,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let region = handle::get(buffer)?.region(offset, bytes)?;
        with(session, |session| Ok(session.bind_output(name, region)?))
    })
}
