//! CUDA events.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUresult};
use quadriga_runtime::{BackendError, Event};

use crate::context::Context;
use crate::faults::QueueFaults;

/// Identifies a recording of an event, also after the event is destroyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Recording {
    event: u64,
    count: u64,
}

pub(crate) struct CudaEvent {
    /// Unique in the process: the driver reuses the handles of destroyed events.
    id: u64,
    context: Arc<Context>,
    /// Faults of the queue that recorded it last, and how many runs that queue had launched.
    faults: Mutex<Option<(Arc<QueueFaults>, u64)>>,
    event: sys::CUevent,
    timing: bool,
    /// How often queues have recorded it.
    recorded: AtomicU64,
}

// SAFETY: a driver event may be used from any thread with its context current.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    pub(crate) fn new(context: &Arc<Context>, timing: bool) -> Result<CudaEvent, BackendError> {
        context.bind()?;
        let flags = if timing { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        let mut event = std::ptr::null_mut();
        // SAFETY: writes the handle it is given.
        context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Ok(CudaEvent {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            context: Arc::clone(context),
            faults: Mutex::default(),
            event,
            timing,
            recorded: AtomicU64::new(0),
        })
    }

    pub(crate) fn handle(&self) -> sys::CUevent {
        self.event
    }

    /// Notes a recording by a queue.
    pub(crate) fn set_recorded(&self, queue: &Arc<QueueFaults>) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *faults {
            Some((known, runs)) if Arc::ptr_eq(known, queue) => *runs = queue.runs(),
            other => *other = Some((Arc::clone(queue), queue.runs())),
        }
        self.recorded.fetch_add(1, Ordering::Relaxed);
    }

    /// The faults of the queue that recorded the event last.
    pub(crate) fn queue_faults(&self) -> Option<Arc<QueueFaults>> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.as_ref().map(|(queue, _)| Arc::clone(queue))
    }

    /// Takes the faults of the work that the event completes.
    fn take_faults(&self) -> Result<(), BackendError> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone();
        faults.map_or(Ok(()), |(queue, runs)| queue.take(runs))
    }

    /// The last recording.
    pub(crate) fn recording(&self) -> Recording {
        Recording { event: self.id, count: self.recorded.load(Ordering::Relaxed) }
    }

    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created by `new`, destroyed only here; the driver lets pending work finish with it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// The driver's `cuEventElapsedTime`: cudarc has only its second version, which drivers before 570 lack.
fn elapsed_time() -> Option<ElapsedTime> {
    static FUNCTION: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    // SAFETY: the driver's library is loaded, or no event existed; the function of this name has had this signature
    // since CUDA 2.
    *FUNCTION.get_or_init(|| unsafe {
        sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime\0").ok().map(|function| *function)
    })
}

impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, BackendError> {
        self.context.bind()?;
        // SAFETY: the handle is live.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => {
                self.context.check("cuEventQuery", code)?;
                self.take_faults()?;
                Ok(true)
            }
        }
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.context.bind()?;
        // SAFETY: the handle is live.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })?;
        self.take_faults()
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Option<f64> {
        let earlier = earlier.as_any().downcast_ref::<CudaEvent>()?;
        if !self.timing || !earlier.timing || !earlier.is_of(&self.context) {
            return None;
        }
        self.context.bind().ok()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: the function has this signature; both handles are live and of this context; writes one float.
        let code = unsafe { elapsed_time()?(&mut milliseconds, earlier.event, self.event) };
        (code == CUresult::CUDA_SUCCESS).then_some(f64::from(milliseconds) / 1e3)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
