//! Device memory, and page-locked (pinned) host memory for transfers.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_graph::Data;
use quadriga_runtime::{BackendError, Buffer, HostMemory, Region, Usage, check_range};

use crate::context::Context;

/// Memory on the device.
pub(crate) struct DeviceBuffer {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
    usage: Usage,
}

/// Adds the requested size to the driver's out-of-memory error.
fn with_requested<T>(result: Result<T, BackendError>, bytes: usize) -> Result<T, BackendError> {
    result.map_err(|error| match error {
        BackendError::OutOfMemory { backend, free, .. } => {
            BackendError::OutOfMemory { backend, requested: bytes as u64, free }
        }
        other => other,
    })
}

impl DeviceBuffer {
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: usize,
        usage: Usage,
    ) -> Result<DeviceBuffer, BackendError> {
        context.bind()?;
        let mut address = 0;
        // The driver rejects an allocation of zero bytes; one byte gives every buffer an address of its own.
        // SAFETY: writes the address it is given.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        with_requested(context.check("cuMemAlloc", code), bytes)?;
        Ok(DeviceBuffer { context: Arc::clone(context), address, bytes, usage })
    }

    pub(crate) fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits for the null stream, which blocking copies use: the queues' streams are not ordered after it.
    fn synchronize(&self) -> Result<(), BackendError> {
        // SAFETY: the null stream always exists.
        self.context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by `new` and freed only here; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

impl Buffer for DeviceBuffer {
    fn backend(&self) -> &str {
        &self.context.name
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_host(&self) -> bool {
        false
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        self.context.bind()?;
        let from = self.address + offset as u64;
        // SAFETY: the range lies in this buffer, and the host slice has the same length.
        let code = unsafe { sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast::<c_void>(), from, into.len()) };
        self.context.check("cuMemcpyDtoH", code)
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        check_range(self, offset, from.len())?;
        self.context.bind()?;
        let to = self.address + offset as u64;
        // SAFETY: the range lies in this buffer, and the host slice has the same length.
        let code = unsafe { sys::cuMemcpyHtoD_v2(to, from.as_ptr().cast::<c_void>(), from.len()) };
        self.context.check("cuMemcpyHtoD", code)?;
        // From pageable memory the call may return before the bytes have arrived on the device.
        self.synchronize()
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        self.context.bind()?;
        // SAFETY: the range lies in this buffer.
        let code = unsafe { sys::cuMemsetD8_v2(self.address + offset as u64, 0, len) };
        self.context.check("cuMemsetD8", code)?;
        self.synchronize()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Page-locked host memory, which the device's copy engines access by DMA.
pub(crate) struct PinnedBuffer {
    context: Arc<Context>,
    address: *mut u8,
    bytes: usize,
    lock: std::sync::RwLock<()>,
}

// SAFETY: the memory belongs to this value alone; the host touches it under the lock, and the device only through
// queues, whose users order the two with events as `Buffer` asks.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedBuffer, BackendError> {
        context.bind()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: writes the address it is given; portable memory is pinned for every context.
        let code = unsafe { sys::cuMemHostAlloc(&mut address, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        with_requested(context.check("cuMemHostAlloc", code), bytes)?;
        // SAFETY: the memory was just allocated with at least this size.
        unsafe { address.cast::<u8>().write_bytes(0, bytes.max(1)) };
        Ok(PinnedBuffer {
            context: Arc::clone(context),
            address: address.cast(),
            bytes,
            lock: Default::default(),
        })
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by `new` and freed only here.
            let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
        }
    }
}

impl Buffer for PinnedBuffer {
    fn backend(&self) -> &str {
        &self.context.name
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn usage(&self) -> Usage {
        Usage::Staging
    }

    fn is_host(&self) -> bool {
        true
    }

    fn address(&self) -> u64 {
        self.address.addr() as u64
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        let _guard = self.lock.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: the range lies in this buffer; a host slice cannot overlap memory that only this type hands out.
        unsafe { std::ptr::copy_nonoverlapping(self.address.add(offset), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        check_range(self, offset, from.len())?;
        let _guard = self.lock.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: as in `read`, and the lock keeps other host access away.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.address.add(offset), from.len()) };
        Ok(())
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        let _guard = self.lock.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: as in `write`.
        unsafe { self.address.add(offset).write_bytes(0, len) };
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Where the pinned form of host bytes is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PinnedAt {
    /// At this offset of the bytes themselves.
    Locked(usize),
    /// At this offset of the copies of both edges.
    Edge(usize),
}

/// Cuts a range of `len` bytes at the borders of its locked part. The copy of the edge after the locked part follows
/// that of the edge before it.
fn pinned_parts(range: &Range<usize>, locked: &Range<usize>, len: usize) -> Vec<(Range<usize>, PinnedAt)> {
    let cut = |from: usize, to: usize| range.start.max(from)..range.end.min(to);
    let parts = [cut(0, locked.start), cut(locked.start, locked.end), cut(locked.end, len)];
    let held = parts.map(|part| match part.start {
        at if at < locked.start => (part, PinnedAt::Edge(at)),
        at if at < locked.end => (part, PinnedAt::Locked(at)),
        at => (part, PinnedAt::Edge(at - locked.len())),
    });
    held.into_iter().filter(|(part, _)| !part.is_empty()).collect()
}

/// Read-only host bytes, such as a file map, whose whole pages are locked so that the device reads them by DMA.
pub(crate) struct HostPages {
    context: Arc<Context>,
    /// Keeps the bytes.
    _data: Data,
    /// The bytes as they were given: an owner may answer differently when it is asked again.
    address: *const u8,
    len: usize,
    /// The locked part, from the start of the bytes; empty where the driver does not lock such memory.
    locked: Range<usize>,
    /// Copies of the bytes before and after the locked part: parts of pages, which cannot be locked.
    edges: Option<PinnedBuffer>,
}

// SAFETY: the address is that of immutable bytes, which `_data` keeps.
unsafe impl Send for HostPages {}
// SAFETY: as above.
unsafe impl Sync for HostPages {}

/// The smallest page size: locked ranges start and end at multiples of it.
const PAGE: usize = 4096;

impl HostPages {
    /// Locks the pages that lie wholly inside the bytes: a page at an edge may hold bytes of another range, which is
    /// locked by itself.
    /// `bytes` are those of `data`.
    pub(crate) fn new(context: &Arc<Context>, data: &Data, bytes: &[u8]) -> Result<HostPages, BackendError> {
        context.bind()?;
        let start = bytes.as_ptr().addr();
        let first = start.next_multiple_of(PAGE);
        let len = (start + bytes.len()).saturating_sub(first) / PAGE * PAGE;
        let mut locked = first - start..first - start + len;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        if let Some(pages) = bytes.get(locked.clone()).filter(|pages| !pages.is_empty()) {
            // SAFETY: the pages are mapped as long as `data` is kept, which is until they are unlocked; the device only
            // reads them.
            let code =
                unsafe { sys::cuMemHostRegister_v2(pages.as_ptr().cast_mut().cast(), pages.len(), flags) };
            if code != sys::CUresult::CUDA_SUCCESS {
                locked = 0..0;
            }
        } else {
            locked = 0..0;
        }
        let (address, len) = (bytes.as_ptr(), bytes.len());
        let pages = HostPages {
            context: Arc::clone(context),
            _data: data.clone(),
            address,
            len,
            locked,
            edges: None,
        };
        pages.with_edges(bytes)
    }

    fn failed(&self, what: &'static str, reason: &str) -> BackendError {
        BackendError::Failed { backend: self.context.name.clone(), what, reason: reason.into() }
    }

    fn read_only(&self) -> BackendError {
        self.failed("writing", "the bytes are read-only")
    }

    /// Copies the unlocked edges into pinned memory, if there is a locked part between them.
    fn with_edges(mut self, bytes: &[u8]) -> Result<HostPages, BackendError> {
        let Range { start, end } = self.locked;
        if start < end {
            let (before, behind) =
                (bytes.get(..start).unwrap_or_default(), bytes.get(end..).unwrap_or_default());
            let edges = PinnedBuffer::new(&self.context, before.len() + behind.len())?;
            edges.write(0, before)?;
            edges.write(before.len(), behind)?;
            self.edges = Some(edges);
        }
        Ok(self)
    }

    /// The borders of the locked part, and the addresses of the bytes before, inside and after it, each less the offset of
    /// its first byte: byte `n` is at one of them plus `n`. `None` if the bytes are not locked.
    pub(crate) fn pinned_spans(&self) -> Option<([usize; 2], [*const u8; 3])> {
        let edges = self.edges.as_ref()?.address().cast_const();
        let after = edges.wrapping_sub(self.locked.len());
        Some(([self.locked.start, self.locked.end], [edges, self.address, after]))
    }

    /// The pinned addresses of a range, in order; empty if the bytes are not locked.
    pub(crate) fn pinned(&self, range: Range<usize>) -> Vec<(Range<usize>, *const u8)> {
        let Some(edges) = &self.edges else { return Vec::new() };
        let address = |(part, at): (Range<usize>, PinnedAt)| match at {
            PinnedAt::Locked(at) => (part, self.address.wrapping_add(at)),
            PinnedAt::Edge(at) => (part, edges.address().cast_const().wrapping_add(at)),
        };
        pinned_parts(&range, &self.locked, self.len).into_iter().map(address).collect()
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        if !self.locked.is_empty() && self.context.bind().is_ok() {
            let pages = self.address.wrapping_add(self.locked.start);
            // SAFETY: locked by `new`, unlocked only here.
            let _ = unsafe { sys::cuMemHostUnregister(pages.cast_mut().cast()) };
        }
    }
}

/// Another backend's host memory, page-locked so that the device accesses it by DMA.
pub(crate) struct RegisteredMemory {
    context: Arc<Context>,
    /// Kept until it is unlocked.
    memory: HostMemory,
}

impl RegisteredMemory {
    /// `None` if the driver cannot lock the memory.
    pub(crate) fn new(context: &Arc<Context>, memory: HostMemory) -> Option<RegisteredMemory> {
        context.bind().ok()?;
        let (address, len) = (memory.pointer().cast(), memory.bytes());
        // SAFETY: the memory is allocated as long as `memory` is kept, which is until it is unlocked.
        let code = unsafe { sys::cuMemHostRegister_v2(address, len, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        let context = Arc::clone(context);
        (code == sys::CUresult::CUDA_SUCCESS).then_some(RegisteredMemory { context, memory })
    }

    /// The address of `len` bytes from `offset` on, if they are inside the memory.
    pub(crate) fn address(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.memory.bytes());
        inside.then(|| self.memory.pointer().wrapping_add(offset))
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: locked by `new`, unlocked only here.
            let _ = unsafe { sys::cuMemHostUnregister(self.memory.pointer().cast()) };
        }
    }
}

impl Buffer for HostPages {
    fn backend(&self) -> &str {
        &self.context.name
    }

    fn bytes(&self) -> usize {
        self.len
    }

    fn usage(&self) -> Usage {
        Usage::Weights
    }

    fn is_host(&self) -> bool {
        true
    }

    fn address(&self) -> u64 {
        self.address.addr() as u64
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        // SAFETY: the range lies in the bytes, which `_data` keeps and nobody writes; a host slice cannot overlap them.
        unsafe {
            std::ptr::copy_nonoverlapping(self.address.wrapping_add(offset), into.as_mut_ptr(), into.len());
        }
        Ok(())
    }

    fn write(&self, _: usize, _: &[u8]) -> Result<(), BackendError> {
        Err(self.read_only())
    }

    fn clear(&self, _: usize, _: usize) -> Result<(), BackendError> {
        Err(self.read_only())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The address of a region, which must lie inside a buffer of this context's device memory.
pub(crate) fn device_address(context: &Arc<Context>, region: &Region) -> Result<u64, BackendError> {
    let buffer = region.buffer.as_any().downcast_ref::<DeviceBuffer>();
    let Some(buffer) = buffer.filter(|buffer| buffer.is_of(context)) else {
        return Err(BackendError::Foreign { backend: context.name.clone(), what: "buffer" });
    };
    check_range(buffer, region.offset, region.bytes)?;
    Ok(buffer.address() + region.offset as u64)
}

/// Whether two address ranges have bytes in common.
pub(crate) fn overlap(a: u64, a_bytes: usize, b: u64, b_bytes: usize) -> bool {
    a < b + b_bytes as u64 && b < a + a_bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_at_the_borders_of_the_locked_pages() {
        // 10 bytes before the locked pages, 20 locked, 5 after.
        let of = |range: Range<usize>| pinned_parts(&range, &(10..30), 35);
        let all = [(0..10, PinnedAt::Edge(0)), (10..30, PinnedAt::Locked(10)), (30..35, PinnedAt::Edge(10))];
        assert_eq!(of(0..35), all);
        assert_eq!(of(4..12), [(4..10, PinnedAt::Edge(4)), (10..12, PinnedAt::Locked(10))]);
        assert_eq!(of(12..20), [(12..20, PinnedAt::Locked(12))]);
        assert_eq!(of(29..33), [(29..30, PinnedAt::Locked(29)), (30..33, PinnedAt::Edge(10))]);
        assert_eq!(of(32..35), [(32..35, PinnedAt::Edge(12))]);
        assert_eq!(pinned_parts(&(0..8), &(0..8), 8), [(0..8, PinnedAt::Locked(0))], "no edges");
    }

    #[test]
    fn ranges_overlap_if_they_share_a_byte() {
        for (b, bytes, shared) in
            [(0, 100, false), (0, 101, true), (149, 1, true), (150, 9, false), (120, 5, true)]
        {
            assert_eq!(overlap(100, 50, b, bytes), shared, "{bytes} bytes at {b}");
            assert_eq!(overlap(b, bytes, 100, 50), shared, "{bytes} bytes at {b}");
        }
    }
}
