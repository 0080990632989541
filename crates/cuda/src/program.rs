//! A compiled split: its steps, captured once as a CUDA graph, and replayed for every run.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Buffer, Program};

use crate::backend::Shared;
use crate::blas::Product;
use crate::launch::Launch;

/// Something the device does.
pub(crate) enum Step {
    Launch(Launch),
    Product(Product),
}

impl Step {
    /// Puts the step into a stream, behind another one.
    fn issue(
        &self,
        shared: &Shared,
        stream: sys::CUstream,
        before: Option<&Step>,
    ) -> Result<(), BackendError> {
        match self {
            Step::Launch(launch) => {
                let early = shared.fuses && matches!(before, Some(Step::Launch(_)));
                launch.issue(&shared.context, stream, early && shared.context.has_bulk_copies())
            }
            Step::Product(product) => match &shared.blas {
                Some(blas) => blas.issue(product, stream),
                None => Err(BackendError::Failed {
                    backend: shared.context.name.clone(),
                    what: "a matrix product",
                    reason: "cuBLAS is not installed".into(),
                }),
            },
        }
    }
}

pub(crate) struct CudaProgram {
    shared: Arc<Shared>,
    executable: sys::CUgraphExec,
    /// Whether it uses the counters that programs share.
    counts: bool,
    /// What the captured launches point to.
    _buffers: Vec<Arc<dyn Buffer>>,
}

// SAFETY: the executable graph is launched by one thread at a time, since running takes the program mutably.
unsafe impl Send for CudaProgram {}

impl CudaProgram {
    pub(crate) fn new(
        shared: Arc<Shared>,
        steps: &[Step],
        counts: bool,
        buffers: Vec<Arc<dyn Buffer>>,
    ) -> Result<CudaProgram, BackendError> {
        let context = Arc::clone(&shared.context);
        context.bind()?;
        let stream = Stream::new(&shared)?;
        let mut graph = std::ptr::null_mut();
        let mut executable = std::ptr::null_mut();
        // SAFETY: the stream is private to this call; capture ends on every path; the graph is destroyed once it is
        // instantiated.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            context.check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream.handle, mode))?;
            let mut before = None;
            let issued = steps.iter().try_for_each(|step| {
                let issued = step.issue(&shared, stream.handle, before);
                before = Some(step);
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
        Ok(CudaProgram { shared, executable, counts, _buffers: buffers })
    }

    pub(crate) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Replays the graph on a stream. Programs share counters: those that use them run one after another, whatever
    /// streams they are on.
    pub(crate) fn launch(&mut self, stream: sys::CUstream) -> Result<(), BackendError> {
        let context = &self.shared.context;
        let mut turn = self.counts.then(|| self.shared.counters_turn());
        // SAFETY: stream, event and graph are live; nothing they point to is freed before the program is dropped.
        unsafe {
            if let Some(turn) = &mut turn
                && turn.take(stream)
            {
                context.check("cuStreamWaitEvent", sys::cuStreamWaitEvent(stream, turn.event(), 0))?;
            }
            let launch = || context.check("cuGraphLaunch", sys::cuGraphLaunch(self.executable, stream));
            match &self.shared.gaps {
                None => launch()?,
                Some(gaps) => gaps.around(stream, launch)?,
            }
            if let Some(turn) = &turn {
                context.check("cuEventRecord", sys::cuEventRecord(turn.event(), stream))?;
            }
        }
        Ok(())
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        if self.shared.context.bind().is_ok() {
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

/// A stream that is destroyed with its owner.
pub(crate) struct Stream {
    shared: Arc<Shared>,
    pub(crate) handle: sys::CUstream,
}

// SAFETY: a stream may be used from any thread with its context current.
unsafe impl Send for Stream {}

impl Stream {
    pub(crate) fn new(shared: &Arc<Shared>) -> Result<Stream, BackendError> {
        shared.context.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        shared.context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Stream { shared: Arc::clone(shared), handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.shared.context.bind().is_ok() {
            // SAFETY: created by `new`, destroyed only here. Work in flight is waited for, so that buffers dropped
            // after the stream are no longer in use.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.handle);
                let _ = sys::cuStreamDestroy_v2(self.handle);
            }
        }
    }
}
