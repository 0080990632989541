//! The backend: device memory, queues, and the compilation of splits.

use std::any::Any;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use quadriga_graph::{Data, Graph, NodeId, Op, Tensor};
use quadriga_runtime::{
    BackendError, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, RankGroup, Rates,
    Refusal, Region, SplitSource, Usage, WeightLayout,
};

use crate::buffer::{DeviceBuffer, HostPages, PinnedBuffer, RegisteredMemory};
use crate::context::{self, Context, ContextOwner};
use crate::error::Error;
use crate::event::CudaEvent;
use crate::inner::BackendInner;
use crate::kernels::KernelFile;
use crate::launch::Launch;
use crate::lower;
use crate::nccl::{Connection, NcclError, NcclRanks, nccl_is_enabled};
use crate::options::{KernelOrigin, Options};
use crate::queue::CudaQueue;
use crate::slices;
use crate::stream::CudaStream;

/// The oldest compute capability that kernels are made for.
const MIN_COMPUTE_CAPABILITY: (i32, i32) = (7, 5);

/// Bytes of a copy that measures the link, long enough that its start does not count, and how many there are.
const LINK_BYTES: usize = 16 << 20;
const LINK_COPIES: usize = 4;

/// How long ranks wait for each other to be connected.
const RANKS_START: Duration = Duration::from_secs(120);

/// Rates of a GPU by its compute capability, as matmuls of this crate reach them, and by the bandwidth of its memory.
fn nominal_rates(major: i32, multiprocessors: u32, bandwidth: f64) -> Rates {
    let assumed = Rates::assumed(DeviceKind::Gpu);
    let of_one = match major {
        ..8 => 0.5e12,
        8 => 1.2e12,
        _ => 2.5e12,
    };
    let (matmul, f32) = (of_one * f64::from(multiprocessors), 0.15e12 * f64::from(multiprocessors));
    let read = if bandwidth > 0.0 { 0.85 * bandwidth } else { assumed.read };
    Rates { read, int8: matmul, bf16: matmul, f32, ..assumed }
}

/// Settings of a [`Backend`] before it is made; those that are not set come from the environment (see the crate's
/// page).
#[derive(Clone, Debug)]
pub struct Builder {
    ordinal: u32,
    options: Options,
}

impl Builder {
    /// Whether operations are fused, and kernels overlap by programmatic dependent launch [`QUADRIGA_CUDA_FUSE`, or
    /// yes].
    #[must_use]
    pub fn fusion(mut self, fusion: bool) -> Builder {
        self.options.fusion = fusion;
        self
    }

    /// Whether cuBLAS multiplies matrices, where it is installed [`QUADRIGA_CUDA_BLAS`, or yes].
    #[must_use]
    pub fn cublas(mut self, cublas: bool) -> Builder {
        self.options.cublas = cublas;
        self
    }

    /// Where kernels come from [`QUADRIGA_CUDA_KERNELS`, or the binary].
    #[must_use]
    pub fn kernels(mut self, origin: KernelOrigin) -> Builder {
        self.options.kernels = origin;
        self
    }

    /// Whether the GPU's idle time between programs is measured, and printed to standard error when the backend is
    /// dropped [`QUADRIGA_CUDA_GAPS`, or no].
    #[must_use]
    pub fn measure_idle_gaps(mut self, measure: bool) -> Builder {
        self.options.idle_gaps = measure;
        self
    }

    /// The folder for cached files; kernels that are compiled on this machine are kept in its folder `kernels`, if no
    /// one else can write there. `None` compiles them anew in every process [`QUADRIGA_CACHE`, or `quadriga` in the user's cache folder].
    #[must_use]
    pub fn cache_dir(mut self, folder: Option<PathBuf>) -> Builder {
        self.options.cache_dir = folder;
        self
    }

    /// Whether the backend has a context of its own instead of the device's primary one, as if it were the only user of the
    /// device in this process (no by default), and a name of its own, such as `cuda:0, context 1`. Collectives through NCCL need the primary one.
    #[must_use]
    pub fn own_context(mut self, own: bool) -> Builder {
        self.options.context = if own { ContextOwner::Backend } else { ContextOwner::Process };
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// There is no such device, it is too old, the driver is missing, or NVRTC is where kernels must be compiled.
    pub fn build(self) -> Result<Backend, Error> {
        let context = Arc::new(Context::open(self.ordinal, self.options.context)?);
        let (major, minor) = context.compute_capability;
        if (major, minor) < MIN_COMPUTE_CAPABILITY {
            return Err(Error::OldDevice { name: context.description.clone(), major, minor });
        }
        let inner = Arc::new(BackendInner::new(context, &self.options)?);
        Ok(Backend { inner, link: OnceLock::new() })
    }
}

/// An NVIDIA GPU.
pub struct Backend {
    inner: Arc<BackendInner>,
    /// Bytes per second of uploads, once somebody asked; `None` inside if there was no memory to measure them with.
    link: OnceLock<Option<f64>>,
}

/// How many CUDA devices this machine has.
///
/// # Errors
/// The driver is missing, too old, or reports an error.
pub fn device_count() -> Result<u32, Error> {
    context::count()
}

impl Backend {
    /// Opens device number `ordinal`, in the driver's order, with settings from the environment.
    ///
    /// # Errors
    /// As for [`Builder::build`].
    pub fn new(ordinal: u32) -> Result<Backend, Error> {
        Backend::builder(ordinal).build()
    }

    /// Settings for device number `ordinal`, in the driver's order.
    pub fn builder(ordinal: u32) -> Builder {
        Builder { ordinal, options: Options::from_environment() }
    }

    /// Bytes per second of copies from page-locked memory, the fastest of a few; `None` if none was possible.
    fn upload_rate(&self) -> Result<Option<f64>, BackendError> {
        use quadriga_runtime::Backend as _;
        let from = Region::new(self.staging(LINK_BYTES)?, 0, LINK_BYTES)?;
        let to = Region::new(self.allocate(LINK_BYTES, Usage::Compute)?, 0, LINK_BYTES)?;
        let mut queue = self.queue()?;
        let mut fastest = None::<f64>;
        for _ in 0..LINK_COPIES {
            let started = Instant::now();
            if queue.copy(&from, &to)? {
                queue.synchronize()?;
                let rate = LINK_BYTES as f64 / started.elapsed().as_secs_f64().max(1e-9);
                fastest = Some(fastest.map_or(rate, |fastest| fastest.max(rate)));
            }
        }
        Ok(fastest)
    }

    /// Connects this device with those of other ranks through NCCL; all ranks of a group call this. A scheduler that has the result
    /// for the ranks of a group executes its collectives on the device.
    ///
    /// Waits for NCCL end after `limit`, or when a rank has failed by what `ranks` say.
    ///
    /// # Errors
    /// NCCL is missing on a rank, or the ranks do not meet.
    pub fn connect_ranks(&self, ranks: &Arc<dyn RankGroup>, limit: Duration) -> Result<NcclRanks, NcclError> {
        NcclRanks::connect(&self.inner.context, ranks, limit)
    }

    /// Runs a kernel that traps, to test how a lost device is reported, and returns the resulting error. Everything in
    /// this process that uses the device fails from then on.
    pub fn lose(&self) -> BackendError {
        let run = || -> Result<(), BackendError> {
            let function = self.inner.kernels.function(KernelFile::Elementwise, c"k_trap")?;
            let stream = CudaStream::new(&self.inner.context)?;
            Launch::new(function, [1, 1, 1], 1).issue(&self.inner.context, stream.handle, false)?;
            stream.synchronize()
        };
        run().err().unwrap_or_else(|| BackendError::Failed {
            backend: self.inner.context.name.clone(),
            what: "losing the device",
            reason: "the kernel that traps returned".into(),
        })
    }
}

impl quadriga_runtime::Backend for Backend {
    fn name(&self) -> &str {
        &self.inner.context.name
    }

    /// Only the link is measured, which takes some milliseconds the first time: no driver says how many lanes a device has.
    fn nominal_rates(&self) -> Rates {
        let context = &self.inner.context;
        let rates =
            nominal_rates(context.compute_capability.0, context.multiprocessors, context.memory_bandwidth);
        let measured = self.link.get_or_init(|| self.upload_rate().unwrap_or(None));
        Rates { link: measured.unwrap_or(rates.link), ..rates }
    }

    fn identity(&self) -> Option<String> {
        self.inner.context.uuid.clone()
    }

    fn device(&self) -> Device {
        let context = &self.inner.context;
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
        Ok(Arc::new(DeviceBuffer::new(&self.inner.context, bytes, usage)?))
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(PinnedBuffer::new(&self.inner.context, bytes)?))
    }

    /// Host bytes that the device reads by DMA; their pages stay locked as long as the buffer is in use.
    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        let bytes = data.as_slice()?;
        let key = (bytes.as_ptr().addr(), bytes.len());
        let mut pages = self.inner.host_pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = pages.get(&key).and_then(Weak::upgrade) {
            return Some(known);
        }
        let buffer = Arc::new(HostPages::new(&self.inner.context, data, bytes).ok()?);
        pages.retain(|_, buffer| buffer.strong_count() > 0);
        pages.insert(key, Arc::downgrade(&buffer));
        Some(buffer)
    }

    fn lock(&self, buffer: &Arc<dyn Buffer>) -> Option<Box<dyn Any + Send + Sync>> {
        let memory = Arc::clone(buffer).host_memory()?;
        let key = (memory.pointer().addr(), memory.bytes());
        let mut registered = self.inner.registered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = registered.get(&key).and_then(Weak::upgrade) {
            return Some(Box::new(known));
        }
        let memory = Arc::new(RegisteredMemory::new(&self.inner.context, memory)?);
        registered.retain(|_, memory| memory.strong_count() > 0);
        registered.insert(key, Arc::downgrade(&memory));
        Some(Box::new(memory))
    }

    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let plain =
            WeightLayout { layout: Layout::Plain, bytes: self.storage_bytes(weight), mappable: false };
        lower::formats::layout(weight, uses).unwrap_or(plain)
    }

    fn streamed_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let plain =
            WeightLayout { layout: Layout::Plain, bytes: self.storage_bytes(weight), mappable: false };
        lower::formats::layout(weight, uses).filter(|_| slices::packs(weight)).unwrap_or(plain)
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
            Layout::Packed(_) => lower::formats::load(&self.inner, weight, data, to),
        }
    }

    fn scratch_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        let multiprocessors = self.inner.context.multiprocessors;
        let has_mixed = self.inner.kernels.expects_wgmma();
        lower::scratch_bytes(graph, nodes, self.inner.gemm_kernels(), has_mixed, multiprocessors).total()
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        lower::supports(graph, node)
    }

    fn exchanges(&self, ranks: Option<&dyn RankGroup>) -> Result<(), Refusal> {
        match ranks.and_then(Connection::of).filter(|found| found.is_of(&self.inner.context)) {
            Some(_) => Ok(()),
            None => {
                Err(Refusal("ranks exchange data through the host where NCCL does not connect them".into()))
            }
        }
    }

    fn join_ranks(&self, ranks: &Arc<dyn RankGroup>) -> Result<Option<Arc<dyn RankGroup>>, BackendError> {
        if !nccl_is_enabled() {
            return Ok(None);
        }
        let connected = self.connect_ranks(ranks, RANKS_START).map_err(|error| BackendError::Failed {
            backend: self.inner.context.name.clone(),
            what: "connecting ranks",
            reason: error.to_string(),
        });
        Ok(Some(Arc::new(connected?)))
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        Ok(Box::new(lower::lower(&self.inner, split)?))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(CudaQueue::new(&self.inner)?))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(CudaEvent::new(&self.inner.context, timing)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_device() {
        // An H200, and a laptop's GPU of 2018 whose driver does not tell the bandwidth.
        let (large, small) = (nominal_rates(9, 132, 4.9e12), nominal_rates(7, 14, 0.0));
        assert!(large.read > 4e12 && large.int8 > 3e14 && !large.measured);
        assert!(small.int8 < 1e13 && small.read == Rates::assumed(DeviceKind::Gpu).read);
    }
}
