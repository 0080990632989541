//! Buffers: memory of backends.

use std::ffi::c_void;
use std::sync::Arc;

use quadriga::runtime::{Backend, Buffer, Region, Usage, copy_region};

use crate::arguments::{UserData, array, array_mut};
use crate::backend::qd_backend;
use crate::builder::qd_release_callback;
use crate::guard;
use crate::handle::{self, Handle};
use crate::status::{Failure, Outcome, QD_STATUS_UNSUPPORTED, qd_error, qd_status};

/// A range of a backend's memory. It is freed when its handle and everything that uses it are freed.
pub struct qd_buffer {
    _opaque: (),
}

/// A buffer, with the backend that it belongs to.
pub(crate) struct BufferObject {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) buffer: Arc<dyn Buffer>,
}

impl Handle for qd_buffer {
    type Object = BufferObject;
    const NAME: &'static str = "qd_buffer";
}

impl BufferObject {
    /// A part of it.
    pub(crate) fn region(&self, offset: usize, bytes: usize) -> Outcome<Region> {
        Ok(Region::new(Arc::clone(&self.buffer), offset, bytes)?)
    }
}

/// Parameters: written once, then only read.
pub const QD_USAGE_WEIGHTS: i32 = 0;
/// Tensors that outlive a run.
pub const QD_USAGE_STATE: i32 = 1;
/// Inputs, results and copies of one run.
pub const QD_USAGE_COMPUTE: i32 = 2;
/// Host memory that transfers go through.
pub const QD_USAGE_STAGING: i32 = 3;

fn usage(usage: i32) -> Outcome<Usage> {
    match usage {
        QD_USAGE_WEIGHTS => Ok(Usage::Weights),
        QD_USAGE_STATE => Ok(Usage::State),
        QD_USAGE_COMPUTE => Ok(Usage::Compute),
        QD_USAGE_STAGING => Ok(Usage::Staging),
        other => Err(Failure::argument(format!("there is no usage QD_USAGE_… {other}"))),
    }
}

/// The number of a use.
pub(crate) fn usage_code(usage: Usage) -> i32 {
    match usage {
        Usage::Weights => QD_USAGE_WEIGHTS,
        Usage::State => QD_USAGE_STATE,
        Usage::Compute => QD_USAGE_COMPUTE,
        Usage::Staging => QD_USAGE_STAGING,
    }
}

/// Allocates memory of a backend: QD_USAGE_…. Its bytes are zero.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_new(
    backend: *const qd_backend,
    bytes: usize,
    usage: i32,
    error: Option<&mut qd_error>,
) -> *mut qd_buffer {
    guard::handle(error, || {
        let backend = Arc::clone(&handle::get(backend)?.backend);
        let usage = self::usage(usage)?;
        let buffer = match usage {
            Usage::Staging => {
                let buffer = backend.staging(bytes)?;
                buffer.clear(0, bytes)?;
                buffer
            }
            _ => backend.allocate_zeroed(bytes, usage)?,
        };
        Ok(BufferObject { backend, buffer })
    })
}

/// A buffer of a CPU backend over memory of the caller, which is used in place. The caller keeps it until `release` is called, on
/// any thread, and does not access it while a run uses it. After an error `release` has been called, too.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_buffer_wrap(
    backend: *const qd_backend,
    memory: *mut c_void,
    bytes: usize,
    release: qd_release_callback,
    user_data: *mut c_void,
    error: Option<&mut qd_error>,
) -> *mut qd_buffer {
    let owner = Released { release, data: UserData(user_data) };
    guard::handle(error, move || {
        let object = handle::get(backend)?;
        let cpu = object.cpu.as_ref().ok_or_else(|| {
            let message =
                format!("{} cannot use memory of the caller: only the CPU can", object.backend.name());
            Failure::new(QD_STATUS_UNSUPPORTED, message)
        })?;
        // SAFETY: the rules of the header for arrays.
        let memory = unsafe { array_mut(memory.cast::<u8>(), bytes, "memory") }?;
        // SAFETY: the caller keeps the memory until the owner is dropped, which calls `release`, and keeps away from it
        // while a run uses it.
        let buffer = unsafe { cpu.wrap_pointer(memory.as_mut_ptr(), bytes, owner) };
        Ok(BufferObject { backend: Arc::clone(&object.backend), buffer })
    })
}

/// Tells the caller that memory is no longer used.
struct Released {
    release: qd_release_callback,
    data: UserData,
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            release(self.data.pointer());
        }
    }
}

/// Frees a buffer's handle.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_free(buffer: *mut qd_buffer) {
    guard::free(buffer);
}

/// The size of a buffer in bytes; 0 without one.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_bytes(buffer: *const qd_buffer) -> usize {
    guard::value(0, || Ok(handle::get(buffer)?.buffer.bytes()))
}

/// What a buffer is used for: QD_USAGE_…; -1 without one.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_usage(buffer: *const qd_buffer) -> i32 {
    guard::value(-1, || Ok(usage_code(handle::get(buffer)?.buffer.usage())))
}

/// The address of a buffer's first byte in its backend's address space. It may be followed only where the host can address
/// the memory (qd_buffer_is_host); 0 without a buffer.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_address(buffer: *const qd_buffer) -> u64 {
    guard::value(0, || Ok(handle::get(buffer)?.buffer.address()))
}

/// 1 if the host can address a buffer's memory.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_is_host(buffer: *const qd_buffer) -> i32 {
    guard::value(0, || Ok(handle::get(buffer)?.buffer.is_host().into()))
}

/// A handle on the backend of a buffer, to be freed.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_backend(
    buffer: *const qd_buffer,
    error: Option<&mut qd_error>,
) -> *mut qd_backend {
    guard::handle(error, || {
        let backend = Arc::clone(&handle::get(buffer)?.backend);
        Ok(crate::backend::BackendObject { backend, cpu: None })
    })
}

/// Copies bytes out of a buffer. The caller makes sure that no run that writes them is in flight.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_buffer_read(
    buffer: *const qd_buffer,
    offset: usize,
    data: *mut c_void,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(buffer)?;
        // SAFETY: the rules of the header for arrays.
        let data = unsafe { array_mut(data.cast::<u8>(), bytes, "data") }?;
        Ok(object.buffer.read(offset, data)?)
    })
}

/// Copies bytes into a buffer. The caller makes sure that no run that uses them is in flight.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_buffer_write(
    buffer: *mut qd_buffer,
    offset: usize,
    data: *const c_void,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(buffer)?;
        // SAFETY: the rules of the header for arrays.
        let data = unsafe { array(data.cast::<u8>(), bytes, "data") }?;
        Ok(object.buffer.write(offset, data)?)
    })
}

/// Sets bytes of a buffer to zero.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_clear(
    buffer: *mut qd_buffer,
    offset: usize,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || Ok(handle::get(buffer)?.buffer.clear(offset, bytes)?))
}

/// Copies bytes from one buffer to another, on the same backend or another one, and waits for the end.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_buffer_copy(
    from: *const qd_buffer,
    from_offset: usize,
    to: *mut qd_buffer,
    to_offset: usize,
    bytes: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let (from, to) = (handle::get(from)?, handle::get(to)?);
        let (source, target) = (from.region(from_offset, bytes)?, to.region(to_offset, bytes)?);
        copy_region((&*from.backend, &source), (&*to.backend, &target))?;
        Ok(())
    })
}
