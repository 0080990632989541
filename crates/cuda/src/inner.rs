//! State that a backend shares with its queues and programs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Buffer, Region, Usage};

use crate::blas::{Blas, GemmKernels};
use crate::buffer::{DeviceBuffer, HostPages, RegisteredMemory};
use crate::context::Context;
use crate::error::Error;
use crate::event::CudaEvent;
use crate::faults::FaultWords;
use crate::idle_gaps::IdleGaps;
use crate::kernels::Kernels;
use crate::options::Options;

/// Counters of attention kernels: one for each query, or tile of queries, and head whose keys are partitioned.
pub(crate) const MAX_COUNTERS: usize = 4096;
/// The most experts whose logits have their place behind the counters.
pub(crate) const MAX_LOGITS: usize = 1024;
/// The most blocks that share an argmax, and the bytes of what each finds.
pub(crate) const MAX_ARGMAX_PARTS: usize = 32;
const ARGMAX_PART_BYTES: usize = 16;

/// State that a backend shares with its queues and programs.
pub(crate) struct BackendInner {
    /// Whether operations are fused, and kernels use programmatic dependent launch.
    pub(crate) fusion: bool,
    /// Whether rows of inactive neurons are skipped.
    pub(crate) skip: bool,
    /// Zero between launches; behind them a router's logits, then what blocks that share an argmax find. Used by one program
    /// at a time.
    pub(crate) counters: DeviceBuffer,
    pub(crate) kernels: Kernels,
    /// `None` where cuBLAS is not installed, or turned off.
    pub(crate) blas: Option<Blas>,
    pub(crate) fault_words: Arc<FaultWords>,
    counters_use: Mutex<CountersUse>,
    pub(crate) idle_gaps: Option<IdleGaps>,
    /// Page-locked file maps and other host bytes, by address and length.
    pub(crate) host_pages: Mutex<HashMap<(usize, usize), Weak<HostPages>>>,
    /// Page-locked memory of other backends, by address and length.
    pub(crate) registered: Mutex<HashMap<(usize, usize), Weak<RegisteredMemory>>>,
    pub(crate) context: Arc<Context>,
}

/// The last use of the counters, which programs share.
struct CountersUse {
    event: CudaEvent,
    /// The stream of the last use: later work of the same stream need not wait for it.
    stream: usize,
}

/// Exclusive access to the counters, while a program that uses them is launched.
pub(crate) struct CountersGuard<'a>(MutexGuard<'a, CountersUse>);

impl CountersGuard<'_> {
    /// Makes a stream the last user, once `wait` has let it wait for the last use by another one.
    pub(crate) fn acquire(
        &mut self,
        stream: sys::CUstream,
        wait: impl FnOnce(sys::CUevent) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.0.stream != stream.addr() {
            wait(self.0.event.handle())?;
            self.0.stream = stream.addr();
        }
        Ok(())
    }

    pub(crate) fn event(&self) -> sys::CUevent {
        self.0.event.handle()
    }
}

impl BackendInner {
    pub(crate) fn new(context: Arc<Context>, options: &Options) -> Result<BackendInner, Error> {
        let bytes = (MAX_COUNTERS + MAX_LOGITS) * 4 + MAX_ARGMAX_PARTS * ARGMAX_PART_BYTES;
        let counters = DeviceBuffer::new(&context, bytes, Usage::Compute)?;
        counters.clear(0, MAX_COUNTERS * 4)?;
        let event = CudaEvent::new(&context, false)?;
        Ok(BackendInner {
            fusion: options.fusion,
            skip: options.skip,
            counters,
            kernels: Kernels::new(&context, options.cache_dir.as_deref(), options.kernels)?,
            blas: if options.cublas { Blas::new(&context) } else { None },
            counters_use: Mutex::new(CountersUse { event, stream: 0 }),
            idle_gaps: options.idle_gaps.then(|| IdleGaps::new(&context)),
            host_pages: Mutex::default(),
            registered: Mutex::default(),
            fault_words: Arc::new(FaultWords::new(&context)),
            context,
        })
    }

    /// Which kernels multiply matrices of many rows.
    pub(crate) fn gemm_kernels(&self) -> GemmKernels {
        match &self.blas {
            Some(_) => GemmKernels::Cublas,
            None if self.context.compute_capability >= (8, 0) => GemmKernels::Own,
            None => GemmKernels::OwnF32,
        }
    }

    /// The address of a region of another backend's host memory, if the buffer is page-locked.
    pub(crate) fn registered_address(&self, region: &Region) -> Option<*mut u8> {
        let memory = Arc::clone(&region.buffer).host_memory()?;
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let known = registered.get(&(memory.pointer().addr(), memory.bytes()))?.upgrade()?;
        known.address(region.offset, region.bytes)
    }

    /// The place of a router's logits that several kernels read.
    pub(crate) fn logits_address(&self) -> u64 {
        self.counters.address() + MAX_COUNTERS as u64 * 4
    }

    /// The place of what blocks that share an argmax find.
    pub(crate) fn argmax_parts_address(&self) -> u64 {
        self.logits_address() + MAX_LOGITS as u64 * 4
    }

    pub(crate) fn lock_counters(&self) -> CountersGuard<'_> {
        CountersGuard(self.counters_use.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
