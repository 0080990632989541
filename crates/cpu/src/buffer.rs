//! Buffers: memory allocated by the backend, or borrowed bytes such as a file map, guarded against races.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use quadriga_graph::Data;
use quadriga_runtime::{BackendError, Buffer, HostMemory, Region, Usage, check_range};

use crate::NAME;
use crate::memory::HostBlock;

/// The memory behind a buffer.
enum BufferMemory {
    /// A block that the buffer owns.
    Owned(CountedBlock),
    /// Read-only bytes of another owner. The handle keeps them alive; the address is taken once, so that it stays the
    /// same whatever the owner returns later.
    Mapped { pointer: *const u8, _data: Data },
    /// Writable bytes of another owner, which is dropped with the buffer.
    Wrapped { pointer: *mut u8, _owner: BufferOwner },
}

/// The owner of wrapped bytes. They may be within the owner itself: a box that is moved claims its content for itself alone, and
/// pointers into that are no longer valid; a raw pointer does not.
struct BufferOwner(*mut (dyn Any + Send + Sync));

impl Drop for BufferOwner {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box, and nothing else frees it.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// A block, and the count of all allocated bytes that it is part of.
struct CountedBlock {
    block: HostBlock,
    allocated: Arc<AtomicUsize>,
}

impl Drop for CountedBlock {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.block.bytes(), Ordering::Relaxed);
    }
}

/// The current users of a buffer: any number of readers, or one writer.
#[derive(Default)]
struct BufferUsers {
    readers: usize,
    writing: bool,
    waiting_writers: usize,
}

/// A buffer of this backend.
///
/// Every use locks the buffer for reading (shared) or writing (exclusive), so that safe code cannot race on it. Sessions
/// that read the same weights never wait for each other.
pub(crate) struct HostBuffer {
    memory: BufferMemory,
    bytes: usize,
    usage: Usage,
    users: Mutex<BufferUsers>,
    changed: Condvar,
    /// Whether another device may have the memory, and its pages pinned.
    is_shared: AtomicBool,
}

// SAFETY: a mapped buffer points to bytes that `Data`, which is Send and Sync, keeps alive and that no one writes; a
// wrapped one to bytes of an owner that is Send and Sync, and that nothing else accesses.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; owned memory is only accessed by holders of the lock (see `BufferUsers`).
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// A buffer of this memory.
    pub(crate) fn new(block: HostBlock, usage: Usage, allocated: &Arc<AtomicUsize>) -> HostBuffer {
        let bytes = block.bytes();
        allocated.fetch_add(bytes, Ordering::Relaxed);
        let block = CountedBlock { block, allocated: Arc::clone(allocated) };
        HostBuffer::over(BufferMemory::Owned(block), bytes, usage)
    }

    /// The bytes of an owner, if they are in one piece and elements in them can be aligned. It is asked for them once.
    pub(crate) fn map(data: &Data) -> Option<HostBuffer> {
        let bytes = data.as_slice()?;
        let (pointer, len) = (bytes.as_ptr(), bytes.len());
        let memory = BufferMemory::Mapped { pointer, _data: data.clone() };
        pointer.addr().is_multiple_of(size_of::<u64>()).then(|| HostBuffer::over(memory, len, Usage::Weights))
    }

    /// A writable buffer over memory of another owner, which is dropped with it.
    ///
    /// # Safety
    /// The owner comes from [`Box::into_raw`], and nothing else accesses or drops it from now on. Until it is dropped, the bytes are
    /// allocated and initialised, and nothing else accesses them while a command or a program that uses the buffer is running.
    pub(crate) unsafe fn wrap(
        pointer: *mut u8,
        bytes: usize,
        owner: *mut (dyn Any + Send + Sync),
    ) -> HostBuffer {
        HostBuffer::over(BufferMemory::Wrapped { pointer, _owner: BufferOwner(owner) }, bytes, Usage::Compute)
    }

    fn over(memory: BufferMemory, bytes: usize, usage: Usage) -> HostBuffer {
        HostBuffer {
            memory,
            bytes,
            usage,
            users: Mutex::default(),
            changed: Condvar::new(),
            is_shared: AtomicBool::new(false),
        }
    }

    /// The buffer behind a region, if this backend made it.
    pub(crate) fn of(region: &Region) -> Option<&HostBuffer> {
        region.buffer.as_any().downcast_ref()
    }

    /// Moves it into huge pages: for memory of which much is read again and again.
    pub(crate) fn use_huge_pages(&self) {
        if let BufferMemory::Owned(block) = &self.memory {
            block.block.use_huge_pages();
        }
    }

    /// Whether nothing may be written to it.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.memory, BufferMemory::Mapped { .. })
    }

    /// Its first byte. Reading needs [`begin`](HostBuffer::begin), writing also that it is not read-only.
    pub(crate) fn pointer(&self) -> *mut u8 {
        match &self.memory {
            BufferMemory::Owned(block) => block.block.pointer(),
            BufferMemory::Mapped { pointer, .. } => pointer.cast_mut(),
            BufferMemory::Wrapped { pointer, .. } => *pointer,
        }
    }

    fn users(&self) -> MutexGuard<'_, BufferUsers> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the buffer for shared reading or exclusive writing; blocks until it is free.
    pub(crate) fn begin(&self, write: bool) {
        let mut users = self.users();
        users.waiting_writers += usize::from(write);
        while users.writing || (write && users.readers > 0) || (!write && users.waiting_writers > 0) {
            users = self.changed.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
        if write {
            users.waiting_writers -= 1;
            users.writing = true;
        } else {
            users.readers += 1;
        }
    }

    /// Releases the lock that [`begin`](HostBuffer::begin) took.
    pub(crate) fn end(&self, write: bool) {
        let mut users = self.users();
        if write {
            users.writing = false;
        } else {
            users.readers = users.readers.saturating_sub(1);
        }
        drop(users);
        self.changed.notify_all();
    }

    fn check_writable(&self) -> Result<(), BackendError> {
        if self.is_read_only() {
            return Err(BackendError::Failed {
                backend: NAME.into(),
                what: "writing a buffer",
                reason: "it is a read-only map of bytes that another owner holds".into(),
            });
        }
        Ok(())
    }

    /// Calls `fill` on bytes of the buffer, with exclusive access.
    pub(crate) fn with_bytes_mut<T>(
        &self,
        offset: usize,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, BackendError> {
        check_range(self, offset, len)?;
        self.check_writable()?;
        let _held = BufferGuard::new(self, true);
        // SAFETY: the range is inside the block, which is initialised, and the buffer is locked for writing.
        Ok(fill(unsafe { std::slice::from_raw_parts_mut(self.pointer().add(offset), len) }))
    }
}

/// Holds the lock of a buffer.
struct BufferGuard<'a>(&'a HostBuffer, bool);

impl<'a> BufferGuard<'a> {
    fn new(buffer: &'a HostBuffer, write: bool) -> BufferGuard<'a> {
        buffer.begin(write);
        BufferGuard(buffer, write)
    }
}

impl Drop for BufferGuard<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Buffer for HostBuffer {
    fn backend(&self) -> &str {
        NAME
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_host(&self) -> bool {
        true
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        let _held = BufferGuard::new(self, false);
        // SAFETY: the range is inside the memory, which is initialised, and the buffer is locked for reading.
        into.copy_from_slice(unsafe {
            std::slice::from_raw_parts(self.pointer().cast_const().add(offset), into.len())
        });
        Ok(())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        self.with_bytes_mut(offset, from.len(), |bytes| bytes.copy_from_slice(from))
    }

    fn address(&self) -> u64 {
        self.pointer().addr() as u64
    }

    fn host_memory(self: Arc<Self>) -> Option<HostMemory> {
        let (pointer, bytes) = (self.pointer(), self.bytes);
        self.is_shared.store(true, Ordering::Release);
        // SAFETY: the memory is allocated, and writable, until the buffer is dropped.
        (!self.is_read_only()).then(|| unsafe { HostMemory::new(pointer, bytes, self) })
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        self.with_bytes_mut(offset, len, |bytes| bytes.fill(0))
    }

    /// Memory that other devices may have stays as it is.
    fn discard(&self) {
        let BufferMemory::Owned(block) = &self.memory else { return };
        let _held = BufferGuard::new(self, true);
        if !self.is_shared.load(Ordering::Acquire) {
            // SAFETY: the buffer is locked for writing, no device has its memory, and the caller does not need its bytes.
            unsafe { block.block.discard() };
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Copies between two regions of this backend's buffers; they may be the same or overlap.
pub(crate) fn copy(from: &Region, to: &Region) -> Result<bool, BackendError> {
    let (Some(source), Some(target)) = (HostBuffer::of(from), HostBuffer::of(to)) else {
        return Ok(false);
    };
    if from.bytes != to.bytes {
        return Err(BackendError::SizeMismatch { backend: NAME.into(), from: from.bytes, to: to.bytes });
    }
    check_range(source, from.offset, from.bytes)?;
    check_range(target, to.offset, to.bytes)?;
    target.check_writable()?;
    if std::ptr::eq(source, target) {
        let _held = BufferGuard::new(target, true);
        // SAFETY: both ranges are inside the buffer, which this thread holds alone; `copy` allows any overlap.
        unsafe {
            let base = target.pointer();
            std::ptr::copy(base.add(from.offset), base.add(to.offset), from.bytes);
        }
        return Ok(true);
    }
    // Locked in the order of addresses, as programs do, against deadlock.
    let first_is_source = std::ptr::from_ref(source) < std::ptr::from_ref(target);
    let _first =
        if first_is_source { BufferGuard::new(source, false) } else { BufferGuard::new(target, true) };
    let _second =
        if first_is_source { BufferGuard::new(target, true) } else { BufferGuard::new(source, false) };
    // SAFETY: both ranges are inside their buffers, which are held; different buffers do not overlap, except maps of
    // the same bytes, and those are never written.
    unsafe {
        std::ptr::copy(
            source.pointer().cast_const().add(from.offset),
            target.pointer().add(to.offset),
            from.bytes,
        );
    }
    Ok(true)
}
