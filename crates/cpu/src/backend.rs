//! The backend and its builder.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_graph::{Data, Graph, NodeId, Op, Tensor};
use quadriga_runtime::{
    BackendError, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, RankGroup, Rates,
    Refusal, Region, SplitSource, Usage, WeightLayout,
};

use crate::NAME;
use crate::buffer::HostBuffer;
use crate::compile::compile;
use crate::environment;
use crate::feed_forward;
use crate::isa::{Isa, IsaError};
use crate::memory::{ALIGNMENT, HostBlock, StateSlabs, host_bytes, reserved_bytes};
use crate::numa::{NumaBinding, NumaMode, ProcessCpus, Topology};
use crate::ops::WorkSettings;
use crate::pool::{Pool, PoolError, is_inside_job};
use crate::profile::{Profile, ProfileRecorder};
use crate::queue::{CpuEvent, CpuQueue};
use crate::state::BackendInner;
use crate::weights;

/// Why a CPU backend cannot be built or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The requested instruction set is not available.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The requested number of threads is not available.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Settings of a [`Backend`].
///
/// ```
/// use quadriga_cpu::{Backend, isa::Isa};
///
/// let backend = Backend::builder().threads(2).isa(Isa::Scalar).fuse(false).build()?;
/// assert_eq!((backend.threads(), backend.isa()), (2, Isa::Scalar));
/// # Ok::<(), quadriga_cpu::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct BackendBuilder {
    threads: Option<usize>,
    beside_accelerator: bool,
    numa: Option<NumaMode>,
    topology: Option<Topology>,
    isa: Option<Isa>,
    fuse: Option<bool>,
    skip: Option<bool>,
    plain_weights: bool,
    profile: bool,
}

impl BackendBuilder {
    /// The number of threads, the caller's included. [default: the number of cores]
    #[must_use]
    pub fn threads(mut self, threads: usize) -> BackendBuilder {
        self.threads = Some(threads);
        self
    }

    /// Whether an accelerator computes beside the CPU: then the default number of threads leaves one of more than four cores to
    /// the thread of the accelerator's driver, which all others would wait for at the next barrier. [default: no]
    #[must_use]
    pub fn beside_accelerator(mut self, beside: bool) -> BackendBuilder {
        self.beside_accelerator = beside;
        self
    }

    /// Binds threads and weights to NUMA nodes, where the machine has several. [default: the system decides]
    #[must_use]
    pub fn numa(mut self, mode: NumaMode) -> BackendBuilder {
        self.numa = Some(mode);
        self
    }

    /// The NUMA nodes of the machine. [default: as the system describes them]
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> BackendBuilder {
        self.topology = Some(topology);
        self
    }

    /// The instruction set of the kernels. [default: the environment variable `QUADRIGA_ISA`, or the best available]
    #[must_use]
    pub fn isa(mut self, isa: Isa) -> BackendBuilder {
        self.isa = Some(isa);
        self
    }

    /// Whether to fuse operations into common steps; results are the same bit for bit. [default: yes, unless the
    /// environment variable `QUADRIGA_FUSE` is `0`]
    #[must_use]
    pub fn fuse(mut self, fuse: bool) -> BackendBuilder {
        self.fuse = Some(fuse);
        self
    }

    /// Whether to skip the rows of inactive neurons instead of multiplying them by zero; results are the same bit for bit,
    /// unless such a row has elements that are not finite. [default: yes, unless the environment variable `QUADRIGA_SKIP` is `0`]
    #[must_use]
    pub fn skip(mut self, skip: bool) -> BackendBuilder {
        self.skip = Some(skip);
        self
    }

    /// Whether to compute from weights in the file's layout instead of packing them while loading: loads faster,
    /// computes slower. [default: no]
    #[must_use]
    pub fn plain_weights(mut self, plain: bool) -> BackendBuilder {
        self.plain_weights = plain;
        self
    }

    /// Whether to record the time of every step for [`Backend::take_profile`], at a small cost. [default: no]
    #[must_use]
    pub fn profile(mut self, profile: bool) -> BackendBuilder {
        self.profile = profile;
        self
    }

    /// Builds the backend and starts its threads.
    ///
    /// # Errors
    /// The CPU lacks the instruction set, the number of threads is out of range, or a thread cannot be started or bound to a
    /// NUMA node.
    pub fn build(self) -> Result<Backend, Error> {
        let isa = match self.isa {
            Some(isa) => isa,
            None => Isa::from_environment()?,
        };
        let numa = self.numa.and_then(|mode| {
            let topology = self.topology.unwrap_or_else(Topology::detect);
            NumaBinding::new(mode, &topology, &ProcessCpus::detect())
        });
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = numa.as_ref().map_or(cores, |numa| numa.cpus().min(cores));
        let threads = self.threads.unwrap_or_else(|| default_threads(cores, self.beside_accelerator));
        let fuse = self.fuse.unwrap_or_else(environment::fuse);
        let skip = self.skip.unwrap_or_else(environment::skip);
        let recorder = self.profile.then(ProfileRecorder::default);
        let inner = BackendInner::new(Pool::bound(threads, numa)?, isa, recorder);
        let slabs = StateSlabs::default();
        let allocated = Arc::default();
        let plain_weights = self.plain_weights;
        Ok(Backend { inner: Arc::new(inner), fuse, skip, plain_weights, slabs, allocated })
    }
}

/// Threads for so many cores.
fn default_threads(cores: usize, beside_accelerator: bool) -> usize {
    if beside_accelerator && cores > FEW_CORES { cores - 1 } else { cores }
}

/// The most cores of which none is left to others: a thread less would cost more than waiting for it.
const FEW_CORES: usize = 4;

/// Rates of so many threads: each adds what was measured of one among sixteen, up to what a socket's memory gives.
fn nominal_rates(isa: Isa, threads: usize) -> Rates {
    let threads = threads as f64;
    let (quantized, float) = match isa {
        Isa::Scalar => (4e9, 4e9),
        Isa::Avx2(_) => (80e9, 50e9),
        Isa::AvxVnni(_) => (120e9, 50e9),
        Isa::Avx512(_) => (200e9, 100e9),
        Isa::Amx(_) => (370e9, 100e9),
    };
    let bf16 = if isa.amx().is_some() { quantized } else { float };
    Rates {
        read: (8e9 * threads).clamp(20e9, 200e9),
        int8: quantized * threads,
        bf16: bf16 * threads,
        f32: float * threads,
        ..Rates::assumed(DeviceKind::Cpu)
    }
}

/// The host's CPU as a device of a scheduler.
///
/// ```
/// use quadriga_cpu::Backend;
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::{Scheduler, Session};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [4]);
/// g.output("y", x.silu());
/// let cpu = Backend::builder().threads(2).build()?;
/// let mut session = Session::new(&Scheduler::new(cpu))?;
/// session.use_graph(g.finish()?)?;
/// session.run(&[("x", &[0.0_f32, 1.0, 2.0, 3.0])])?;
/// let y: Vec<f32> = session.read("y")?;
/// assert_eq!(y[0], 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Backend {
    inner: Arc<BackendInner>,
    fuse: bool,
    skip: bool,
    plain_weights: bool,
    /// Memory of states, such as KV caches.
    slabs: StateSlabs,
    /// Bytes of all buffers that are not dropped.
    allocated: Arc<AtomicUsize>,
}

impl Backend {
    /// A backend with default settings: one thread per core, the best instruction set.
    ///
    /// # Errors
    /// The environment variable `QUADRIGA_ISA` names an instruction set that the CPU lacks, or a thread cannot be
    /// started.
    pub fn new() -> Result<Backend, Error> {
        Backend::builder().build()
    }

    /// Settings for a new backend.
    pub fn builder() -> BackendBuilder {
        BackendBuilder::default()
    }

    /// The number of threads that compute.
    pub fn threads(&self) -> usize {
        self.inner.pool.threads()
    }

    /// Changes the number of threads, once the current run is over. Compiled programs run with the new number and give
    /// the same results.
    ///
    /// # Errors
    /// The count is 0 or too large, a thread cannot be started, or a custom operation calls it while it computes; the number
    /// then stays as it is.
    pub fn set_threads(&self, threads: usize) -> Result<(), Error> {
        if is_inside_job() {
            // The run that the caller belongs to holds the work memory.
            return Err(PoolError::InsideJob.into());
        }
        let _held = self.inner.work_memory();
        Ok(self.inner.pool.set_threads(threads)?)
    }

    /// The NUMA nodes that threads and weights are bound to; `None` without a mode, and on a machine with one node.
    pub fn numa(&self) -> Option<&NumaBinding> {
        self.inner.pool.numa()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.inner.isa
    }

    /// The time of every kind of step in all runs since the last call; empty unless the backend was built with
    /// [`BackendBuilder::profile`].
    pub fn take_profile(&self) -> Profile {
        self.inner.recorder.as_ref().map(ProfileRecorder::take).unwrap_or_default()
    }

    /// A writable buffer over the bytes of `memory`, which is dropped with it: nothing is copied.
    ///
    /// ```
    /// use quadriga_runtime::Buffer;
    ///
    /// let cpu = quadriga_cpu::Backend::new()?;
    /// let buffer = cpu.wrap(vec![1u8; 64]);
    /// buffer.write(8, &[7])?;
    /// assert_eq!(buffer.bytes(), 64);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wrap(&self, memory: impl AsMut<[u8]> + Send + Sync + 'static) -> Arc<dyn Buffer> {
        let owner = Box::into_raw(Box::new(memory));
        // SAFETY: nothing else has the pointer, which is that of a box.
        let bytes = unsafe { &mut *owner }.as_mut();
        let (pointer, len) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the owner comes from a box. The bytes are its own: nothing else accesses them, and they stay where they are,
        // because the owner neither moves nor is asked again.
        Arc::new(unsafe { HostBuffer::wrap(pointer, len, owner) })
    }

    /// A writable buffer over memory of the caller, used in place and never freed by the buffer; `owner` is dropped with
    /// it. Elements of tensors in it must be aligned.
    ///
    /// # Safety
    /// Until `owner` is dropped, the bytes are allocated and initialised, no other buffer has them, and nothing else
    /// accesses them while a command or a program that uses the buffer is running.
    pub unsafe fn wrap_pointer(
        &self,
        pointer: *mut u8,
        bytes: usize,
        owner: impl Send + Sync + 'static,
    ) -> Arc<dyn Buffer> {
        // SAFETY: the owner comes from a box; the caller promises the rest.
        Arc::new(unsafe { HostBuffer::wrap(pointer, bytes, Box::into_raw(Box::new(owner))) })
    }

    /// Bytes that the buffers of this backend have allocated and not freed, with the work memory. Mapped and wrapped
    /// memory is not counted.
    pub fn allocated_bytes(&self) -> usize {
        self.allocated.load(Ordering::Relaxed) + self.work_bytes()
    }

    /// Bytes of the work memory that all programs share. It never shrinks.
    pub fn work_bytes(&self) -> usize {
        self.inner.work_bytes()
    }
}

/// The model name of the processor, or the architecture where the system does not tell.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

impl quadriga_runtime::Backend for Backend {
    fn name(&self) -> &str {
        NAME
    }

    fn device(&self) -> Device {
        let (total_bytes, free_bytes) = host_bytes();
        let threads = self.threads();
        Device {
            description: format!(
                "{}, {threads} {}, {}",
                processor(),
                if threads == 1 { "thread" } else { "threads" },
                self.inner.isa
            ),
            kind: DeviceKind::Cpu,
            asynchronous: false,
            total_bytes,
            free_bytes,
        }
    }

    fn reserved_bytes(&self) -> u64 {
        reserved_bytes()
    }

    fn nominal_rates(&self) -> Rates {
        nominal_rates(self.inner.isa, self.threads())
    }

    fn memory(&self) -> MemoryFacts {
        MemoryFacts { alignment: ALIGNMENT, max_buffer: None, host: true }
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        let block = if usage == Usage::State { self.slabs.zeroed(bytes)? } else { HostBlock::zeroed(bytes)? };
        Ok(Arc::new(HostBuffer::new(block, usage, &self.allocated)))
    }

    /// The system maps zeroed pages on first touch, and most of a long KV cache is never touched.
    fn allocate_zeroed(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, usage)
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, Usage::Staging)
    }

    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        // Other data is copied to a buffer of the backend.
        Some(Arc::new(HostBuffer::map(data)?))
    }

    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        if self.plain_weights { weights::plain(weight) } else { weights::layout(weight, uses) }
    }

    fn load_weight(
        &self,
        weight: &Tensor,
        layout: Layout,
        data: &[u8],
        to: &Region,
    ) -> Result<(), BackendError> {
        weights::load(&self.inner, weight, layout, data, to)
    }

    fn scratch_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        if !self.fuse || self.plain_weights {
            return 0;
        }
        feed_forward::scratch_bytes(graph, nodes, self.inner.isa)
    }

    fn work_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        let settings = WorkSettings {
            isa: self.inner.isa,
            threads: self.threads(),
            fuse: self.fuse,
            packs: !self.plain_weights,
        };
        crate::ops::work_bytes(graph, nodes, &settings)
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        match graph.get_node(node) {
            Some(node) if crate::ops::is_supported(node.op()) => Ok(()),
            Some(node) => Err(Refusal(format!("there is no kernel for {}", node.op().name()).into())),
            None => Err(Refusal("the graph has no such node".into())),
        }
    }

    fn exchanges(&self, _: Option<&dyn RankGroup>) -> Result<(), Refusal> {
        Ok(())
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        Ok(Box::new(compile(&self.inner, split, self.fuse, self.skip)?))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(CpuQueue { inner: Arc::clone(&self.inner) }))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(CpuEvent::new(timing)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Isa, default_threads, nominal_rates};

    #[test]
    fn more_threads_read_more_up_to_the_memory_of_a_socket() {
        let read = [1, 2, 8, 16, 128].map(|threads| nominal_rates(Isa::detect(), threads).read / 1e9);
        assert_eq!(read, [20.0, 20.0, 64.0, 128.0, 200.0]);
        assert!(nominal_rates(Isa::detect(), 16).int8 > nominal_rates(Isa::Scalar, 16).int8);
    }

    #[test]
    fn the_driver_of_an_accelerator_has_a_core_where_there_are_many() {
        let beside = [1, 2, 4, 5, 16].map(|cores| default_threads(cores, true));
        assert_eq!(beside, [1, 2, 4, 4, 15]);
        assert_eq!(default_threads(16, false), 16);
    }
}
