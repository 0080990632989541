//! The functions of a backend, checked, and the context that its objects share.

use std::ffi::c_void;

use quadriga::runtime::BackendError;

use super::node::qd_node;
use super::table::qd_backend_table;
use crate::arguments::{optional_text, text};
use crate::backend::{QD_DEVICE_CPU, QD_DEVICE_GPU, QD_DEVICE_OTHER};
use crate::status::{
    Failure, Outcome, QD_STATUS_DEVICE_LOST, QD_STATUS_OK, QD_STATUS_OUT_OF_MEMORY, qd_error, qd_status,
};

/// The functions that every backend has.
pub(super) struct Functions {
    pub(super) allocate: extern "C" fn(*mut c_void, usize, i32, *mut qd_error) -> *mut c_void,
    pub(super) free: extern "C" fn(*mut c_void, *mut c_void),
    pub(super) write:
        extern "C" fn(*mut c_void, *mut c_void, usize, *const c_void, usize, *mut qd_error) -> qd_status,
    pub(super) read:
        extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, usize, *mut qd_error) -> qd_status,
    pub(super) supports: extern "C" fn(*mut c_void, *const qd_node, *mut qd_error) -> qd_status,
    pub(super) compute: Compute,
    /// Of backends whose queues go on working.
    pub(super) queues: Option<QueueFunctions>,
}

/// The functions of queues and events.
#[derive(Clone, Copy)]
pub(super) struct QueueFunctions {
    pub(super) new: extern "C" fn(*mut c_void, *mut qd_error) -> *mut c_void,
    pub(super) free: extern "C" fn(*mut c_void, *mut c_void),
    pub(super) write: extern "C" fn(
        *mut c_void,
        *mut c_void,
        *mut c_void,
        usize,
        *const c_void,
        usize,
        *mut qd_error,
    ) -> qd_status,
    pub(super) read: extern "C" fn(
        *mut c_void,
        *mut c_void,
        *const c_void,
        usize,
        *mut c_void,
        usize,
        *mut qd_error,
    ) -> qd_status,
    pub(super) copy: extern "C" fn(
        *mut c_void,
        *mut c_void,
        *const c_void,
        usize,
        *mut c_void,
        usize,
        usize,
        *mut qd_error,
    ) -> qd_status,
    pub(super) run: extern "C" fn(*mut c_void, *mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    pub(super) synchronize: extern "C" fn(*mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    pub(super) event_new: extern "C" fn(*mut c_void, *mut qd_error) -> *mut c_void,
    pub(super) event_free: extern "C" fn(*mut c_void, *mut c_void),
    pub(super) event_record: extern "C" fn(*mut c_void, *mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    pub(super) event_wait: extern "C" fn(*mut c_void, *mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    pub(super) event_synchronize: extern "C" fn(*mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    pub(super) event_query: extern "C" fn(*mut c_void, *mut c_void, *mut qd_error) -> qd_status,
}

/// How nodes are computed.
#[derive(Clone, Copy)]
pub(super) enum Compute {
    Programs {
        compile: extern "C" fn(*mut c_void, *const *const qd_node, usize, *mut qd_error) -> *mut c_void,
        run: extern "C" fn(*mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    },
    Nodes(extern "C" fn(*mut c_void, *const qd_node, *mut qd_error) -> qd_status),
}

/// What a backend, its buffers and its programs share; the context is destroyed with the last of them.
pub(super) struct Shared {
    pub(super) table: qd_backend_table,
    pub(super) functions: Functions,
    pub(super) name: String,
    pub(super) description: String,
}

// SAFETY: the caller's functions may be called from any thread; the context is only given to them.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.destroy {
            destroy(self.table.context);
        }
    }
}

impl Shared {
    /// Calls a function that returns a status.
    pub(super) fn call(
        &self,
        what: &'static str,
        function: impl FnOnce(*mut c_void, *mut qd_error) -> qd_status,
    ) -> Result<(), BackendError> {
        let mut error = qd_error::empty();
        match function(self.table.context, &raw mut error) {
            QD_STATUS_OK => Ok(()),
            status => Err(self.failed(what, status, &error, 0)),
        }
    }

    /// A failure of the caller's function.
    pub(super) fn failed(
        &self,
        what: &'static str,
        status: qd_status,
        error: &qd_error,
        requested: usize,
    ) -> BackendError {
        let backend = self.name.clone();
        let reason = error.text(&format!("it returned {status}"));
        match status {
            QD_STATUS_OUT_OF_MEMORY => {
                BackendError::OutOfMemory { backend, requested: requested as u64, free: None }
            }
            QD_STATUS_DEVICE_LOST => BackendError::Lost { backend, reason },
            _ => BackendError::Failed { backend, what, reason },
        }
    }
}

/// The functions of a table, its name and its description, if it can be used.
///
/// # Safety
/// The addresses in the table obey the rules of the header.
pub(super) unsafe fn functions(table: &qd_backend_table) -> Outcome<(Functions, String, String)> {
    // SAFETY: the caller's promise.
    let (name, description) =
        unsafe { (text(table.name, "name")?, optional_text(table.description, "description")?) };
    if name.is_empty() || name.eq_ignore_ascii_case("cpu") {
        return Err(Failure::argument(format!("a backend cannot be called \"{name}\"")));
    }
    if !table.alignment.is_power_of_two() {
        return Err(Failure::argument(format!("alignment {} is not a power of two", table.alignment)));
    }
    if ![QD_DEVICE_CPU, QD_DEVICE_GPU, QD_DEVICE_OTHER].contains(&table.kind) {
        return Err(Failure::argument(format!("there is no kind QD_DEVICE_… {}", table.kind)));
    }
    let compute = match (table.compile, table.run, table.run_node) {
        (Some(compile), Some(run), _) => Compute::Programs { compile, run },
        (None, None, Some(node)) => Compute::Nodes(node),
        _ => return Err(Failure::argument("a backend has both compile and run, or run_node")),
    };
    let functions = Functions {
        allocate: table.allocate.ok_or_else(|| Failure::null("allocate"))?,
        free: table.free.ok_or_else(|| Failure::null("free"))?,
        write: table.write.ok_or_else(|| Failure::null("write"))?,
        read: table.read.ok_or_else(|| Failure::null("read"))?,
        supports: table.supports.ok_or_else(|| Failure::null("supports"))?,
        compute,
        queues: queues(table, compute)?,
    };
    Ok((functions, name.to_owned(), description.unwrap_or(name).to_owned()))
}

/// The functions of queues: all of them, or none.
fn queues(table: &qd_backend_table, compute: Compute) -> Outcome<Option<QueueFunctions>> {
    let Some(new) = table.queue_new else { return Ok(None) };
    if matches!(compute, Compute::Nodes(_)) {
        return Err(Failure::argument("a backend with queues has compile and run, not run_node"));
    }
    fn needed<T>(function: Option<T>, name: &str) -> Outcome<T> {
        function.ok_or_else(|| Failure::null(name))
    }
    Ok(Some(QueueFunctions {
        new,
        free: needed(table.queue_free, "queue_free")?,
        write: needed(table.queue_write, "queue_write")?,
        read: needed(table.queue_read, "queue_read")?,
        copy: needed(table.queue_copy, "queue_copy")?,
        run: needed(table.queue_run, "queue_run")?,
        synchronize: needed(table.queue_synchronize, "queue_synchronize")?,
        event_new: needed(table.event_new, "event_new")?,
        event_free: needed(table.event_free, "event_free")?,
        event_record: needed(table.event_record, "event_record")?,
        event_wait: needed(table.event_wait, "event_wait")?,
        event_synchronize: needed(table.event_synchronize, "event_synchronize")?,
        event_query: needed(table.event_query, "event_query")?,
    }))
}
