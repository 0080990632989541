//! Devices and backends.

use std::ffi::c_char;
use std::sync::Arc;

use quadriga::Registry;
use quadriga::cpu;
use quadriga::runtime::{Backend, DeviceKind};

use crate::arguments::{give_text, required, text};
use crate::guard;
use crate::handle::{self, Handle};
use crate::status::{
    Failure, QD_STATUS_DEVICE, QD_STATUS_NOT_FOUND, QD_STATUS_UNSUPPORTED, qd_error, qd_status,
};

/// A device that owns memory and computes: the CPU, a GPU, or a backend of the caller's own.
pub struct qd_backend {
    _opaque: (),
}

/// A backend; the CPU's own type, too, where it is one.
pub(crate) struct BackendObject {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) cpu: Option<Arc<cpu::Backend>>,
}

impl Handle for qd_backend {
    type Object = BackendObject;
    const NAME: &'static str = "qd_backend";
}

/// The host's processor.
pub const QD_DEVICE_CPU: i32 = 0;
/// A graphics processor.
pub const QD_DEVICE_GPU: i32 = 1;
/// A device that is simulated, or any other.
pub const QD_DEVICE_OTHER: i32 = 2;

/// Facts about a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_device_info {
    /// Its kind: QD_DEVICE_….
    pub kind: i32,
    /// 1 if its queues return before their work is done.
    pub asynchronous: i32,
    /// 1 if the host can address its memory.
    pub host: i32,
    /// Tensors start at multiples of this.
    pub alignment: usize,
    /// The most bytes of one buffer; 0 if there is no limit.
    pub max_buffer: usize,
    /// All of its memory in bytes; 0 if not known.
    pub total_bytes: u64,
    /// Free bytes of it now; 0 if not known.
    pub free_bytes: u64,
}

/// The number of devices of this machine.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_device_count() -> usize {
    guard::value(0, || Ok(Registry::default().names().len()))
}

/// The name of a device, counted from 0: "cpu", "cuda:0" ….
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_device_name(
    index: usize,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let names = Registry::default().names();
        let name = names.get(index).ok_or_else(|| {
            Failure::new(
                QD_STATUS_NOT_FOUND,
                format!("there is no device {index}: this machine has {}", names.len()),
            )
        })?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(name, buffer, capacity, needed) }
    })
}

/// Opens a device by name: "cpu", "cuda:0".
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_backend_open(
    name: *const c_char,
    error: Option<&mut qd_error>,
) -> *mut qd_backend {
    guard::handle(error, || {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        if name.eq_ignore_ascii_case(cpu::NAME) {
            return open_cpu(0);
        }
        let opened = Registry::default().open(name).map_err(|error| {
            let code = match error {
                quadriga::OpenError::Unknown { .. } => QD_STATUS_NOT_FOUND,
                _ => QD_STATUS_DEVICE,
            };
            Failure::new(code, error.to_string())
        })?;
        Ok(BackendObject { backend: opened, cpu: None })
    })
}

/// Opens the CPU with this number of threads, the caller's included; 0: one for each core.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_backend_cpu(threads: usize, error: Option<&mut qd_error>) -> *mut qd_backend {
    guard::handle(error, || open_cpu(threads))
}

fn open_cpu(threads: usize) -> crate::status::Outcome<BackendObject> {
    let builder = cpu::Backend::builder();
    let builder = if threads == 0 { builder } else { builder.threads(threads) };
    let cpu = Arc::new(builder.build().map_err(|error| Failure::argument(error.to_string()))?);
    Ok(BackendObject { backend: Arc::clone(&cpu) as Arc<dyn Backend>, cpu: Some(cpu) })
}

/// Changes the number of threads of a CPU backend, once its current run is over.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_backend_set_threads(
    backend: *mut qd_backend,
    threads: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(backend)?;
        let cpu = object.cpu.as_ref().ok_or_else(|| {
            Failure::new(QD_STATUS_UNSUPPORTED, format!("{} is not a CPU backend", object.backend.name()))
        })?;
        cpu.set_threads(threads).map_err(|error| Failure::argument(error.to_string()))
    })
}

/// Frees a backend. Schedulers, plans, sessions and buffers of it stay usable.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_backend_free(backend: *mut qd_backend) {
    guard::free(backend);
}

/// The name of a backend in messages and plans.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_backend_name(
    backend: *const qd_backend,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(handle::get(backend)?.backend.name(), buffer, capacity, needed) }
    })
}

/// The vendor's name of a backend's device.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_backend_description(
    backend: *const qd_backend,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&handle::get(backend)?.backend.device().description, buffer, capacity, needed) }
    })
}

/// Facts about a backend's device.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_backend_device(
    backend: *const qd_backend,
    info: Option<&mut qd_device_info>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(backend)?;
        let (device, memory) = (object.backend.device(), object.backend.memory());
        *required(info, "info")? = qd_device_info {
            kind: match device.kind {
                DeviceKind::Cpu => QD_DEVICE_CPU,
                DeviceKind::Gpu => QD_DEVICE_GPU,
                DeviceKind::Simulated => QD_DEVICE_OTHER,
            },
            asynchronous: device.asynchronous.into(),
            host: memory.host.into(),
            alignment: memory.alignment,
            max_buffer: memory.max_buffer.unwrap_or(0),
            total_bytes: device.total_bytes.unwrap_or(0),
            free_bytes: device.free_bytes.unwrap_or(0),
        };
        Ok(())
    })
}
