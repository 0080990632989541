//! The backend: a device's memory, its queues, and the compiling of splits.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::sys;
use quadriga_graph::{DType, Data, Graph, NodeId, Op, Tensor};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, Refusal,
    Region, SplitSource, Usage, WeightLayout,
};

use crate::CudaError;
use crate::blas::Blas;
use crate::buffer::{DeviceBuffer, HostPages, LockedMemory, PinnedBuffer};
use crate::context::{self, Context};
use crate::event::CudaEvent;
use crate::faults::Faults;
use crate::gaps::{self, Gaps};
use crate::kernels::{File, Kernels};
use crate::launch::Launch;
use crate::lower::{self, packing};
use crate::program::Stream;
use crate::queue::CudaQueue;

/// How many counters attention has: queries, or tiles of them, times heads whose keys are cut into pieces.
pub(crate) const COUNTERS: usize = 4096;

/// Set to 0, it turns fused kernels off: each operation becomes a launch of its own.
const FUSE_VARIABLE: &str = "QUADRIGA_CUDA_FUSE";

/// Set to 0, it leaves cuBLAS out, as where it is not installed.
const BLAS_VARIABLE: &str = "QUADRIGA_CUDA_BLAS";

/// What the parts of one backend share.
pub(crate) struct Shared {
    /// Whether operations are fused, and kernels start early.
    pub(crate) fuses: bool,
    /// Zero between launches; used by one program at a time.
    pub(crate) counters: DeviceBuffer,
    pub(crate) kernels: Kernels,
    pub(crate) blas: Option<Blas>,
    pub(crate) faults: Arc<Faults>,
    turn: Mutex<Turn>,
    pub(crate) gaps: Option<Gaps>,
    /// Host memory that is locked for transfers, by address and length.
    pages: Mutex<HashMap<(usize, usize), Weak<HostPages>>>,
    /// Memory of other backends that is locked for transfers, by address.
    locked: Mutex<HashMap<usize, Weak<LockedMemory>>>,
    pub(crate) context: Arc<Context>,
}

/// Who uses the counters, which programs share.
struct Turn {
    last_use: CudaEvent,
    /// The stream of the last use: work of the same stream need not wait.
    last_stream: usize,
}

/// The right to use the counters next.
pub(crate) struct CountersTurn<'a>(MutexGuard<'a, Turn>);

impl CountersTurn<'_> {
    /// Takes the turn for a stream; whether it has to wait for another one.
    pub(crate) fn take(&mut self, stream: sys::CUstream) -> bool {
        std::mem::replace(&mut self.0.last_stream, stream.addr()) != stream.addr()
    }

    pub(crate) fn event(&self) -> sys::CUevent {
        self.0.last_use.handle()
    }
}

impl Shared {
    /// Where another backend's host memory is, if it is locked.
    pub(crate) fn locked(&self, buffer: &dyn Buffer) -> Option<*mut u8> {
        let address = buffer.host_address()?;
        let locked = self.locked.lock().unwrap_or_else(PoisonError::into_inner);
        locked.get(&address.addr()).is_some_and(|lock| lock.strong_count() > 0).then_some(address)
    }

    pub(crate) fn counters_turn(&self) -> CountersTurn<'_> {
        CountersTurn(self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// An NVIDIA GPU.
pub struct CudaBackend {
    shared: Arc<Shared>,
}

/// How many CUDA devices this machine has, or why it has none that can be used.
pub fn device_count() -> Result<u32, CudaError> {
    context::count()
}

impl CudaBackend {
    /// The device of this number, as the driver counts.
    pub fn new(ordinal: u32) -> Result<CudaBackend, CudaError> {
        let context = Arc::new(Context::open(ordinal)?);
        let (major, minor) = context.compute_capability;
        // What the compiler of CUDA 13 goes back to.
        if (major, minor) < (7, 5) {
            return Err(CudaError::OldDevice { name: context.description.clone(), major, minor });
        }
        let faults = Arc::new(Faults::new(&context)?);
        let counters = DeviceBuffer::new(&context, COUNTERS * 4, Usage::Compute)?;
        counters.clear(0, COUNTERS * 4)?;
        let shared = Shared {
            fuses: is_on(FUSE_VARIABLE),
            counters,
            kernels: Kernels::new(&context)?,
            blas: if is_on(BLAS_VARIABLE) { Blas::new(&context)? } else { None },
            turn: Mutex::new(Turn { last_use: CudaEvent::new(&context, &faults, false)?, last_stream: 0 }),
            gaps: std::env::var_os(gaps::VARIABLE).map(|_| Gaps::new(&context, &faults)),
            pages: Mutex::default(),
            locked: Mutex::default(),
            faults,
            context,
        };
        Ok(CudaBackend { shared: Arc::new(shared) })
    }
}

impl CudaBackend {
    /// Runs a kernel that traps, for tests of what happens when a device is lost, and returns the error that this
    /// gives. Everything in this process that uses the device fails from then on.
    pub fn lose(&self) -> BackendError {
        let run = || -> Result<(), BackendError> {
            let function = self.shared.kernels.function(File::Elementwise, c"k_trap")?;
            let stream = Stream::new(&self.shared)?;
            Launch::new(function, [1, 1, 1], 1).issue(&self.shared.context, stream.handle, false)?;
            // SAFETY: the stream is live.
            let code = unsafe { sys::cuStreamSynchronize(stream.handle) };
            self.shared.context.check("cuStreamSynchronize", code)
        };
        run().err().unwrap_or_else(|| BackendError::Failed {
            backend: self.shared.context.name.clone(),
            what: "losing the device",
            reason: "the kernel that traps did not".into(),
        })
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.shared.context.name
    }

    fn device(&self) -> Device {
        let context = &self.shared.context;
        let (major, minor) = context.compute_capability;
        Device {
            description: format!(
                "{}, compute capability {major}.{minor}, {} multiprocessors",
                context.description, context.multiprocessors
            ),
            kind: DeviceKind::Gpu,
            asynchronous: true,
            total_bytes: Some(context.total_bytes),
            free_bytes: context.free_bytes(),
        }
    }

    fn memory(&self) -> MemoryFacts {
        MemoryFacts { alignment: 256, max_buffer: None, host: false }
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(DeviceBuffer::new(&self.shared.context, bytes, usage)?))
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(PinnedBuffer::new(&self.shared.context, bytes)?))
    }

    /// Host memory that the device fetches directly; its pages stay locked as long as the buffer is used.
    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        let key = (data.bytes().as_ptr().addr(), data.len());
        let mut pages = self.shared.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = pages.get(&key).and_then(Weak::upgrade) {
            return Some(known);
        }
        let buffer = Arc::new(HostPages::new(&self.shared.context, data).ok()?);
        pages.retain(|_, buffer| buffer.strong_count() > 0);
        pages.insert(key, Arc::downgrade(&buffer));
        Some(buffer)
    }

    fn lock(&self, buffer: &Arc<dyn Buffer>) -> Option<Box<dyn Any + Send + Sync>> {
        let address = buffer.host_address()?.addr();
        let mut locked = self.shared.locked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = locked.get(&address).and_then(Weak::upgrade) {
            return Some(Box::new(known));
        }
        let lock = Arc::new(LockedMemory::new(&self.shared.context, buffer)?);
        locked.retain(|_, lock| lock.strong_count() > 0);
        locked.insert(lock.address(), Arc::downgrade(&lock));
        Some(Box::new(lock))
    }

    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let plain =
            WeightLayout { layout: Layout::Plain, bytes: self.storage_bytes(weight), mappable: false };
        packing::layout(weight, uses).unwrap_or(plain)
    }

    fn load_weight(
        &self,
        weight: &Tensor,
        layout: Layout,
        data: &[u8],
        to: &Region,
    ) -> Result<(), BackendError> {
        match layout {
            Layout::Plain => to.buffer.write(to.offset, data),
            Layout::Packed(_) => packing::load(&self.shared, weight, data, to),
        }
    }

    fn scratch_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        let multiprocessors = self.shared.context.multiprocessors;
        lower::scratch::bytes(graph, nodes, self.shared.blas.is_some(), multiprocessors).total()
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        lower::supports(graph, node)
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        Ok(Box::new(lower::lower(&self.shared, split)?))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(CudaQueue::new(&self.shared)?))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(CudaEvent::new(&self.shared.context, &self.shared.faults, timing)?))
    }
}

/// Whether a switch in the environment is left on.
fn is_on(variable: &str) -> bool {
    std::env::var(variable).map_or(true, |value| value != "0")
}

/// Whether a type is stored element by element.
pub(crate) fn is_plain(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I32)
}
