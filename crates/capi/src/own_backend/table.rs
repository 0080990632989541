//! The functions of a backend, as the caller gives them.

use std::ffi::{c_char, c_void};

use super::node::qd_node;
use crate::arguments::Parameters;
use crate::backend::QD_DEVICE_OTHER;
use crate::status::{qd_error, qd_status};
use crate::tensor::qd_tensor_info;

/// A backend of the caller's own as a table of functions. Those that return a qd_status return QD_STATUS_OK, or another status and
/// a message in `*error`; QD_STATUS_OUT_OF_MEMORY and QD_STATUS_DEVICE_LOST are passed on as such.
///
/// The library calls the functions from any thread, several at the same time, but never two on one program or one queue.
/// Without `queue_new`, work is done when a function returns; with it, queues of the backend go on working, and the functions
/// that begin with `queue_` and `event_` are needed, too. Buffers, programs, queues, events and the context are only given
/// back to these functions.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_backend_table {
    /// The size of this structure.
    pub struct_size: usize,
    /// The name in plans and messages, such as "npu:0".
    pub name: *const c_char,
    /// The vendor's name of the device, or NULL.
    pub description: *const c_char,
    /// Its kind: QD_DEVICE_….
    pub kind: i32,
    /// Tensors start at multiples of this, a power of two.
    pub alignment: usize,
    /// The most bytes of one buffer; 0: no limit.
    pub max_buffer: usize,
    /// For the functions.
    pub context: *mut c_void,
    /// Called once, on any thread, when nothing uses the backend any more, or at once after an error; may be NULL.
    pub destroy: Option<extern "C" fn(context: *mut c_void)>,
    /// All bytes of memory and the free ones, where they are known (0 if not); may be NULL.
    pub memory: Option<extern "C" fn(context: *mut c_void, total: *mut u64, free: *mut u64)>,
    /// Allocates memory for QD_USAGE_…. NULL after an error.
    pub allocate: Option<
        extern "C" fn(context: *mut c_void, bytes: usize, usage: i32, error: *mut qd_error) -> *mut c_void,
    >,
    /// Frees a buffer.
    pub free: Option<extern "C" fn(context: *mut c_void, buffer: *mut c_void)>,
    /// Copies bytes of the host into a buffer. The library has checked the range.
    pub write: Option<
        extern "C" fn(
            context: *mut c_void,
            buffer: *mut c_void,
            offset: usize,
            data: *const c_void,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Copies bytes of a buffer to the host. The library has checked the range.
    pub read: Option<
        extern "C" fn(
            context: *mut c_void,
            buffer: *const c_void,
            offset: usize,
            data: *mut c_void,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Sets bytes of a buffer to zero; NULL: the library writes zeros.
    pub clear: Option<
        extern "C" fn(
            context: *mut c_void,
            buffer: *mut c_void,
            offset: usize,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Copies bytes within the backend's memory; NULL: through the host.
    pub copy: Option<
        extern "C" fn(
            context: *mut c_void,
            from: *const c_void,
            from_offset: usize,
            to: *mut c_void,
            to_offset: usize,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// The address of a buffer's first byte in the device's address space; NULL: 0.
    pub address: Option<extern "C" fn(context: *mut c_void, buffer: *const c_void) -> u64>,
    /// Bytes to allocate for a tensor, at least its own; NULL: its own.
    pub storage_bytes: Option<extern "C" fn(context: *mut c_void, tensor: *const qd_tensor_info) -> usize>,
    /// Called for each tensor when it has been given memory, before anything is written there; may be NULL.
    pub placed: Option<
        extern "C" fn(
            context: *mut c_void,
            buffer: *mut c_void,
            offset: usize,
            tensor: *const qd_tensor_info,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Called for each tensor before its memory is used for another or freed; may be NULL.
    pub released: Option<
        extern "C" fn(
            context: *mut c_void,
            buffer: *mut c_void,
            offset: usize,
            tensor: *const qd_tensor_info,
        ),
    >,
    /// QD_STATUS_OK if it computes a node; otherwise the reason is in `*error`, and another backend computes the node.
    pub supports:
        Option<extern "C" fn(context: *mut c_void, node: *const qd_node, error: *mut qd_error) -> qd_status>,
    /// Compiles nodes, in execution order, into a program that is run many times. What it needs of the nodes it copies; their
    /// buffers stay valid as long as the program. NULL after an error. With `run`, or both are NULL.
    pub compile: Option<
        extern "C" fn(
            context: *mut c_void,
            nodes: *const *const qd_node,
            node_count: usize,
            error: *mut qd_error,
        ) -> *mut c_void,
    >,
    /// Runs a program.
    pub run:
        Option<extern "C" fn(context: *mut c_void, program: *mut c_void, error: *mut qd_error) -> qd_status>,
    /// Frees a program; may be NULL.
    pub free_program: Option<extern "C" fn(context: *mut c_void, program: *mut c_void)>,
    /// Instead of `compile` and `run`: computes one node. Views are not passed.
    pub run_node:
        Option<extern "C" fn(context: *mut c_void, node: *const qd_node, error: *mut qd_error) -> qd_status>,
    /// A queue of commands, which are executed in order while the host goes on. NULL after an error.
    pub queue_new: Option<extern "C" fn(context: *mut c_void, error: *mut qd_error) -> *mut c_void>,
    /// Frees a queue whose commands are done.
    pub queue_free: Option<extern "C" fn(context: *mut c_void, queue: *mut c_void)>,
    /// Copies bytes of the host into a buffer; the bytes may be reused when it returns.
    pub queue_write: Option<
        extern "C" fn(
            context: *mut c_void,
            queue: *mut c_void,
            buffer: *mut c_void,
            offset: usize,
            data: *const c_void,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Copies bytes of a buffer to the host after all earlier commands of the queue, and returns when they are copied.
    pub queue_read: Option<
        extern "C" fn(
            context: *mut c_void,
            queue: *mut c_void,
            buffer: *const c_void,
            offset: usize,
            data: *mut c_void,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Copies bytes within the backend's memory.
    pub queue_copy: Option<
        extern "C" fn(
            context: *mut c_void,
            queue: *mut c_void,
            from: *const c_void,
            from_offset: usize,
            to: *mut c_void,
            to_offset: usize,
            bytes: usize,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Runs a program of `compile`, which it needs.
    pub queue_run: Option<
        extern "C" fn(
            context: *mut c_void,
            queue: *mut c_void,
            program: *mut c_void,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Waits until all commands of a queue are done; the status of the first that failed.
    pub queue_synchronize:
        Option<extern "C" fn(context: *mut c_void, queue: *mut c_void, error: *mut qd_error) -> qd_status>,
    /// An event: a point in a queue, which counts as done before it is recorded. NULL after an error.
    pub event_new: Option<extern "C" fn(context: *mut c_void, error: *mut qd_error) -> *mut c_void>,
    /// Frees an event.
    pub event_free: Option<extern "C" fn(context: *mut c_void, event: *mut c_void)>,
    /// Records this point of a queue in an event.
    pub event_record: Option<
        extern "C" fn(
            context: *mut c_void,
            queue: *mut c_void,
            event: *mut c_void,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Lets later commands of a queue wait for an event of this backend.
    pub event_wait: Option<
        extern "C" fn(
            context: *mut c_void,
            queue: *mut c_void,
            event: *mut c_void,
            error: *mut qd_error,
        ) -> qd_status,
    >,
    /// Waits, on the host, until the work before an event is done; a failed status if that work failed.
    pub event_synchronize:
        Option<extern "C" fn(context: *mut c_void, event: *mut c_void, error: *mut qd_error) -> qd_status>,
    /// QD_STATUS_END if the work before an event is done, QD_STATUS_OK if not yet.
    pub event_query:
        Option<extern "C" fn(context: *mut c_void, event: *mut c_void, error: *mut qd_error) -> qd_status>,
}

// SAFETY: numbers, addresses, and functions that may be NULL; the first field is the size.
unsafe impl Parameters for qd_backend_table {
    const NAME: &'static str = "qd_backend_table";

    fn defaults() -> qd_backend_table {
        qd_backend_table {
            struct_size: size_of::<qd_backend_table>(),
            name: std::ptr::null(),
            description: std::ptr::null(),
            kind: QD_DEVICE_OTHER,
            alignment: 64,
            max_buffer: 0,
            context: std::ptr::null_mut(),
            destroy: None,
            memory: None,
            allocate: None,
            free: None,
            write: None,
            read: None,
            clear: None,
            copy: None,
            address: None,
            storage_bytes: None,
            placed: None,
            released: None,
            supports: None,
            compile: None,
            run: None,
            free_program: None,
            run_node: None,
            queue_new: None,
            queue_free: None,
            queue_write: None,
            queue_read: None,
            queue_copy: None,
            queue_run: None,
            queue_synchronize: None,
            event_new: None,
            event_free: None,
            event_record: None,
            event_wait: None,
            event_synchronize: None,
            event_query: None,
        }
    }
}

/// A table without functions, to be filled in.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_backend_default_params() -> qd_backend_table {
    qd_backend_table::defaults()
}
