//! The state that a backend shares with its queues and programs.

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
}

impl BackendInner {
    /// State without work memory.
    pub(crate) fn new(pool: Pool, isa: Isa, recorder: Option<ProfileRecorder>) -> BackendInner {
        BackendInner { pool, isa, recorder, work_memory: Mutex::new(HostBlock::empty()) }
    }

    /// Locks the work memory, for one run or while the number of threads changes.
    pub(crate) fn work_memory(&self) -> MutexGuard<'_, HostBlock> {
        self.work_memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the work memory at least this large.
    ///
    /// # Errors
    /// The memory cannot be allocated; the work memory then stays as it is.
    pub(crate) fn grow(work_memory: &mut HostBlock, bytes: usize) -> Result<(), BackendError> {
        if work_memory.bytes() < bytes {
            *work_memory = HostBlock::zeroed(bytes)?;
        }
        Ok(())
    }
}
