//! A compiled split: its steps are captured once as a CUDA graph, which every run replays.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Buffer, Program};

use crate::blas::Gemm;
use crate::faults::ProgramFaults;
use crate::inner::BackendInner;
use crate::launch::Launch;
use crate::stream::CudaStream;

/// One operation of a program.
pub(crate) enum ProgramStep {
    Kernel(Launch),
    Gemm(Gemm),
}

impl ProgramStep {
    /// Issues the step to a stream, after the step `previous`.
    fn issue(
        &self,
        inner: &BackendInner,
        stream: sys::CUstream,
        previous: Option<&ProgramStep>,
    ) -> Result<(), BackendError> {
        match self {
            ProgramStep::Kernel(launch) => {
                let overlaps = inner.fusion && inner.context.has_bulk_copies();
                let after_kernel = matches!(previous, Some(ProgramStep::Kernel(_)));
                launch.issue(&inner.context, stream, overlaps && after_kernel)
            }
            ProgramStep::Gemm(gemm) => match &inner.blas {
                Some(blas) => blas.issue(gemm, stream),
                None => Err(BackendError::Failed {
                    backend: inner.context.name.clone(),
                    what: "a GEMM",
                    reason: "cuBLAS is not installed".into(),
                }),
            },
        }
    }
}

pub(crate) struct CudaProgram {
    inner: Arc<BackendInner>,
    executable: sys::CUgraphExec,
    /// Whether it uses the counters that programs share.
    uses_counters: bool,
    faults: Arc<ProgramFaults>,
    /// Buffers whose addresses the captured launches hold.
    _buffers: Vec<Arc<dyn Buffer>>,
}

// SAFETY: the executable graph is launched by one thread at a time, since running takes the program mutably.
unsafe impl Send for CudaProgram {}

impl CudaProgram {
    pub(crate) fn new(
        inner: Arc<BackendInner>,
        steps: &[ProgramStep],
        uses_counters: bool,
        faults: Arc<ProgramFaults>,
        buffers: Vec<Arc<dyn Buffer>>,
    ) -> Result<CudaProgram, BackendError> {
        let context = Arc::clone(&inner.context);
        context.bind()?;
        let stream = CudaStream::new(&context)?;
        let mut graph = std::ptr::null_mut();
        let mut executable = std::ptr::null_mut();
        // SAFETY: the stream is private to this call; capture ends on every path; the graph is destroyed once it is
        // instantiated.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            context.check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream.handle, mode))?;
            let mut previous = None;
            let issued = steps.iter().try_for_each(|step| {
                let issued = step.issue(&inner, stream.handle, previous);
                previous = Some(step);
                issued
            });
            let ended =
                context.check("cuStreamEndCapture", sys::cuStreamEndCapture(stream.handle, &mut graph));
            let made = issued.and(ended).and_then(|()| {
                context
                    .check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0))
            });
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
            made?;
        }
        Ok(CudaProgram { inner, executable, uses_counters, faults, _buffers: buffers })
    }

    pub(crate) fn faults(&self) -> &Arc<ProgramFaults> {
        &self.faults
    }

    pub(crate) fn is_of(&self, inner: &Arc<BackendInner>) -> bool {
        Arc::ptr_eq(&self.inner, inner)
    }

    /// Launches the CUDA graph on a stream. Programs that use the shared counters run one after another, on whatever
    /// streams they are.
    pub(crate) fn launch(&mut self, stream: sys::CUstream) -> Result<(), BackendError> {
        let context = &self.inner.context;
        let mut counters = self.uses_counters.then(|| self.inner.lock_counters());
        // SAFETY: stream, event and graph are live; nothing they point to is freed before the program is dropped.
        unsafe {
            if let Some(counters) = &mut counters {
                let wait = |event| sys::cuStreamWaitEvent(stream, event, 0);
                counters.acquire(stream, |event| context.check("cuStreamWaitEvent", wait(event)))?;
            }
            let launch = || context.check("cuGraphLaunch", sys::cuGraphLaunch(self.executable, stream));
            match &self.inner.idle_gaps {
                None => launch()?,
                Some(gaps) => gaps.record(stream, launch)?,
            }
            if let Some(counters) = &counters {
                context.check("cuEventRecord", sys::cuEventRecord(counters.event(), stream))?;
            }
        }
        Ok(())
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        if self.inner.context.bind().is_ok() {
            // SAFETY: instantiated by `new`, destroyed only here; the driver lets a running replay finish.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

impl Program for CudaProgram {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}
