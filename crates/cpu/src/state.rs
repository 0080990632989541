//! The state that a backend shares with its queues and programs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use quadriga_runtime::BackendError;

use crate::isa::Isa;
use crate::memory::HostBlock;
use crate::pool::Pool;
use crate::profile::ProfileRecorder;

/// The thread pool, instruction set and work memory of a backend.
pub(crate) struct BackendInner {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    /// Records the time of every step, if profiling is on.
    pub(crate) recorder: Option<ProfileRecorder>,
    work_memory: Mutex<HostBlock>,
    /// Bytes of the work memory, readable while a run holds the lock.
    work_bytes: AtomicUsize,
}

impl BackendInner {
    /// State without work memory.
    pub(crate) fn new(pool: Pool, isa: Isa, recorder: Option<ProfileRecorder>) -> BackendInner {
        let work_memory = Mutex::new(HostBlock::empty());
        BackendInner { pool, isa, recorder, work_memory, work_bytes: AtomicUsize::new(0) }
    }

    /// Locks the work memory, for one run or while the number of threads changes. A job of a pool must not: the run that
    /// it belongs to may hold the lock.
    pub(crate) fn work_memory(&self) -> MutexGuard<'_, HostBlock> {
        self.work_memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the work memory at least this large.
    ///
    /// # Errors
    /// The memory cannot be allocated; the work memory then stays as it is.
    pub(crate) fn grow(&self, work_memory: &mut HostBlock, bytes: usize) -> Result<(), BackendError> {
        if work_memory.bytes() < bytes {
            *work_memory = HostBlock::zeroed(bytes)?;
            self.work_bytes.store(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Bytes of the work memory. Never blocks.
    pub(crate) fn work_bytes(&self) -> usize {
        self.work_bytes.load(Ordering::Relaxed)
    }
}
