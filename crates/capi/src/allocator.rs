//! The allocator of single tensors in one buffer, for callers without a graph to plan.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex};

use quadriga::runtime::memory::{TensorAllocation, TensorAllocator};

use crate::arguments::{required, text};
use crate::backend::qd_backend;
use crate::buffer::{BufferObject, qd_buffer};
use crate::graph::{qd_graph, tensor_id};
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::status::{Failure, QD_STATUS_NOT_FOUND, qd_error, qd_status};
use crate::tensor::qd_tensor;

/// Allocates tensors one at a time in one buffer: best fit over a free list, as ggml's tensor allocator does.
pub struct qd_allocator {
    _opaque: (),
}

/// An allocator, with its allocations by number.
pub(crate) struct Allocations {
    allocator: TensorAllocator,
    live: HashMap<u64, TensorAllocation>,
    next: u64,
}

impl Handle for qd_allocator {
    type Object = Mutex<Allocations>;
    const NAME: &'static str = "qd_allocator";
}

impl Allocations {
    fn object(allocator: TensorAllocator) -> Mutex<Allocations> {
        Mutex::new(Allocations { allocator, live: HashMap::new(), next: 1 })
    }
}

/// The memory of a tensor in an allocator.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct qd_allocation {
    /// Its number, for qd_allocator_release.
    pub id: u64,
    /// Bytes from the start of the buffer.
    pub offset: u64,
    /// Bytes taken, padding included.
    pub bytes: u64,
}

/// An allocator in a buffer.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_new(
    buffer: *const qd_buffer,
    error: Option<&mut qd_error>,
) -> *mut qd_allocator {
    guard::handle(error, || {
        let object = handle::get(buffer)?;
        let BufferObject { backend, buffer } = &*object;
        Ok(Allocations::object(TensorAllocator::over(backend, Arc::clone(buffer))?))
    })
}

/// An allocator without memory: it makes the same decisions, and its high-water mark is the size of the buffer to allocate.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_measure(
    backend: *const qd_backend,
    error: Option<&mut qd_error>,
) -> *mut qd_allocator {
    guard::handle(error, || {
        let object = handle::get(backend)?;
        Ok(Allocations::object(TensorAllocator::measuring_for(&object.backend)?))
    })
}

/// As qd_allocator_measure, for tensors that take their own bytes, with an alignment that is a power of two.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_measure_aligned(
    alignment: usize,
    error: Option<&mut qd_error>,
) -> *mut qd_allocator {
    guard::handle(error, || Ok(Allocations::object(TensorAllocator::measuring(alignment)?)))
}

/// Frees an allocator. Its buffer stays.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_free(allocator: *mut qd_allocator) {
    guard::free(allocator);
}

/// Allocates a tensor of a graph; `name` is for messages.
///
/// Threads: one at a time for each allocator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_allocator_allocate(
    allocator: *mut qd_allocator,
    graph: *const qd_graph,
    tensor: qd_tensor,
    name: *const c_char,
    allocation: Option<&mut qd_allocation>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let (object, graph) = (handle::get(allocator)?, handle::get(graph)?);
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let into = required(allocation, "allocation")?;
        let id = tensor_id(&graph, tensor)?;
        let Some(tensor) = graph.get(id) else { return Ok(()) };
        let mut allocations = exclusive(&object, "allocator")?;
        let made = allocations.allocator.allocate(name, tensor)?;
        *into = qd_allocation { id: allocations.next, offset: made.offset, bytes: made.bytes };
        let number = allocations.next;
        allocations.next += 1;
        allocations.live.insert(number, made);
        Ok(())
    })
}

/// Frees the memory of a tensor, by the number of its allocation.
///
/// Threads: one at a time for each allocator.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_release(
    allocator: *mut qd_allocator,
    id: u64,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(allocator)?;
        let mut allocations = exclusive(&object, "allocator")?;
        let Some(allocation) = allocations.live.remove(&id) else {
            let message = format!("the allocator has no allocation {id}: it was released, or never was one");
            return Err(Failure::new(QD_STATUS_NOT_FOUND, message));
        };
        allocations.allocator.free(&allocation)?;
        Ok(())
    })
}

/// Frees all tensors, and forgets the high-water mark.
///
/// Threads: one at a time for each allocator.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_reset(
    allocator: *mut qd_allocator,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(allocator)?;
        let mut allocations = exclusive(&object, "allocator")?;
        allocations.live.clear();
        allocations.allocator.reset();
        Ok(())
    })
}

/// The highest end of an allocation since the last reset, in bytes; 0 without an allocator.
///
/// Threads: one at a time for each allocator.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_high_water(allocator: *const qd_allocator) -> u64 {
    guard::value(0, || Ok(exclusive(&*handle::get(allocator)?, "allocator")?.allocator.high_water()))
}

/// Bytes that are allocated now; 0 without an allocator.
///
/// Threads: one at a time for each allocator.
#[unsafe(no_mangle)]
pub extern "C" fn qd_allocator_used(allocator: *const qd_allocator) -> u64 {
    guard::value(0, || Ok(exclusive(&*handle::get(allocator)?, "allocator")?.allocator.used()))
}
