//! A compiled split: its steps are captured once as a CUDA graph, which every run replays.
//!
//! Collectives are issued between CUDA graphs: NCCL's calls may have to be polled, which a capture cannot contain.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Buffer, Program};

use crate::blas::Gemm;
use crate::faults::ProgramFaults;
use crate::inner::BackendInner;
use crate::launch::Launch;
use crate::nccl::{Connection, DeviceExchange};
use crate::stream::CudaStream;

/// One operation of a program.
pub(crate) enum ProgramStep {
    Kernel(Launch),
    Gemm(Gemm),
    /// A collective, with the name of its node.
    Exchange {
        name: String,
        connection: Arc<Connection>,
        exchange: DeviceExchange,
    },
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
            ProgramStep::Exchange { name, connection, exchange } => {
                exchange_on(inner, name, connection, exchange, stream)
            }
        }
    }
}

fn exchange_on(
    inner: &BackendInner,
    name: &str,
    connection: &Connection,
    exchange: &DeviceExchange,
    stream: sys::CUstream,
) -> Result<(), BackendError> {
    connection.issue(exchange, stream).map_err(|error| BackendError::Node {
        backend: inner.context.name.clone(),
        node: name.to_owned(),
        reason: error.to_string(),
    })
}

/// What a run issues at once.
enum ProgramPart {
    Graph(sys::CUgraphExec),
    Exchange { name: String, connection: Arc<Connection>, exchange: DeviceExchange },
}

pub(crate) struct CudaProgram {
    inner: Arc<BackendInner>,
    parts: Vec<ProgramPart>,
    /// Whether it uses the counters that programs share.
    uses_counters: bool,
    faults: Arc<ProgramFaults>,
    /// Buffers whose addresses the captured launches hold.
    _buffers: Vec<Arc<dyn Buffer>>,
}

// SAFETY: the executable graphs are launched by one thread at a time, since running takes the program mutably.
unsafe impl Send for CudaProgram {}

impl CudaProgram {
    pub(crate) fn new(
        inner: Arc<BackendInner>,
        steps: Vec<ProgramStep>,
        uses_counters: bool,
        faults: Arc<ProgramFaults>,
        buffers: Vec<Arc<dyn Buffer>>,
    ) -> Result<CudaProgram, BackendError> {
        inner.context.bind()?;
        // Dropped with what it has if a later part fails.
        let mut program = CudaProgram { inner, parts: Vec::new(), uses_counters, faults, _buffers: buffers };
        let mut kernels = Vec::new();
        for step in steps {
            match step {
                ProgramStep::Exchange { name, connection, exchange } => {
                    program.capture(&std::mem::take(&mut kernels))?;
                    program.parts.push(ProgramPart::Exchange { name, connection, exchange });
                }
                kernel => kernels.push(kernel),
            }
        }
        if program.parts.is_empty() || !kernels.is_empty() {
            program.capture(&kernels)?;
        }
        Ok(program)
    }

    /// Captures steps without collectives as a CUDA graph.
    fn capture(&mut self, steps: &[ProgramStep]) -> Result<(), BackendError> {
        if steps.is_empty() && !self.parts.is_empty() {
            return Ok(());
        }
        let (inner, context) = (&self.inner, &self.inner.context);
        let stream = CudaStream::new(context)?;
        let mut graph = std::ptr::null_mut();
        let mut executable = std::ptr::null_mut();
        // SAFETY: the stream is private to this call; capture ends on every path; the graph is destroyed once it is
        // instantiated.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            context.check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream.handle, mode))?;
            let mut previous = None;
            let issued = steps.iter().try_for_each(|step| {
                let issued = step.issue(inner, stream.handle, previous);
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
        self.parts.push(ProgramPart::Graph(executable));
        Ok(())
    }

    pub(crate) fn faults(&self) -> &Arc<ProgramFaults> {
        &self.faults
    }

    pub(crate) fn is_of(&self, inner: &Arc<BackendInner>) -> bool {
        Arc::ptr_eq(&self.inner, inner)
    }

    /// Launches the CUDA graphs on a stream, and the collectives between them. Programs that use the shared counters run one after another, on whatever
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
            let launch = || {
                self.parts.iter().try_for_each(|part| match part {
                    ProgramPart::Graph(graph) => {
                        context.check("cuGraphLaunch", sys::cuGraphLaunch(*graph, stream))
                    }
                    ProgramPart::Exchange { name, connection, exchange } => {
                        exchange_on(&self.inner, name, connection, exchange, stream)
                    }
                })
            };
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
            for part in &self.parts {
                if let ProgramPart::Graph(graph) = part {
                    // SAFETY: instantiated by `capture`, destroyed only here; the driver lets a running replay finish.
                    let _ = unsafe { sys::cuGraphExecDestroy(*graph) };
                }
            }
        }
    }
}

impl Program for CudaProgram {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}
