//! Host memory that devices access directly.
#![allow(unsafe_code, reason = "who makes one promises what a device relies on")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Memory of the host that a device may access by DMA, with the owner that keeps it.
///
/// A device trusts the address, so that only `unsafe` code can make one: a backend for its own buffers.
#[derive(Clone)]
pub struct HostMemory {
    pointer: *mut u8,
    bytes: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address and a number; who made it promised that the memory can be accessed from any thread.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// The `bytes` bytes from `pointer` on.
    ///
    /// # Safety
    /// Until `owner` is dropped the bytes are allocated, and may be read and written by any thread and device that is
    /// ordered with the others' accesses.
    pub unsafe fn new(pointer: *mut u8, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> HostMemory {
        HostMemory { pointer, bytes, _owner: owner }
    }

    /// The first byte.
    pub fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:?}", self.bytes, self.pointer)
    }
}
