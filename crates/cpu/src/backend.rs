//! The backend: its threads, its instruction set, its work memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quadriga_graph::{Data, Graph, NodeId, Op, Tensor};
use quadriga_runtime::{
    BackendError, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, Refusal, Region,
    SplitSource, Usage, WeightLayout,
};

use crate::NAME;
use crate::buffer::HostBuffer;
use crate::compile::compile;
use crate::isa::{Isa, IsaError};
use crate::memory::{ALIGNMENT, Block, Slabs, host_bytes};
use crate::pool::{Pool, PoolError};
use crate::profile::{Ledger, Profile};
use crate::queue::{CpuEvent, CpuQueue};
use crate::weights;

/// Switches the joining of steps off: every operation runs on its own, between barriers.
pub const FUSE_VARIABLE: &str = "QUADRIGA_FUSE";

/// Why a CPU backend cannot be made or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The instruction set asked for cannot be had.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The threads asked for cannot be had.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// What the queues and programs of one backend share.
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    /// Where times are written down, if they are taken.
    pub(crate) ledger: Option<Ledger>,
    work: Mutex<Block>,
}

impl Shared {
    /// The work memory, held for one run. Held, too, while the number of threads changes.
    pub(crate) fn work(&self) -> MutexGuard<'_, Block> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the work memory at least this large.
    ///
    /// # Errors
    /// Memory is short; the work memory is then what it was before (defect X14).
    pub(crate) fn grow(work: &mut Block, bytes: usize) -> Result<(), BackendError> {
        if work.bytes() < bytes {
            *work = Block::zeroed(bytes)?;
        }
        Ok(())
    }
}

/// How to make a [`Backend`].
#[derive(Clone, Debug, Default)]
pub struct Builder {
    threads: Option<usize>,
    isa: Option<Isa>,
    fuse: Option<bool>,
    plain_weights: bool,
    profile: bool,
}

impl Builder {
    /// How many threads compute, the caller's included. Otherwise as many as there are cores.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Builder {
        self.threads = Some(threads);
        self
    }

    /// Which kernels to use. Otherwise those that the environment variable `QUADRIGA_ISA` names, or the best.
    #[must_use]
    pub fn isa(mut self, isa: Isa) -> Builder {
        self.isa = Some(isa);
        self
    }

    /// Whether neighbouring operations may run as one step. Otherwise yes, unless the environment variable
    /// `QUADRIGA_FUSE` is `0`.
    #[must_use]
    pub fn fuse(mut self, fuse: bool) -> Builder {
        self.fuse = Some(fuse);
        self
    }

    /// Uses weights as the file has them instead of packing them while loading: starts sooner, computes slower.
    #[must_use]
    pub fn plain_weights(mut self, plain: bool) -> Builder {
        self.plain_weights = plain;
        self
    }

    /// Takes the time of every step, for [`Backend::take_profile`]. Costs a little.
    #[must_use]
    pub fn profile(mut self, profile: bool) -> Builder {
        self.profile = profile;
        self
    }

    /// The backend.
    ///
    /// # Errors
    /// The CPU lacks the instruction set, or the system gives no threads.
    pub fn build(self) -> Result<Backend, Error> {
        let isa = match self.isa {
            Some(isa) => isa,
            None => Isa::from_environment()?,
        };
        let threads =
            self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let fuse =
            self.fuse.unwrap_or_else(|| std::env::var(FUSE_VARIABLE).map_or(true, |value| value != "0"));
        let ledger = self.profile.then(Ledger::default);
        let shared = Shared { pool: Pool::new(threads)?, isa, ledger, work: Mutex::new(Block::empty()) };
        let slabs = Slabs::default();
        Ok(Backend { shared: Arc::new(shared), fuse, plain_weights: self.plain_weights, slabs })
    }
}

/// The host's own processor as a device.
pub struct Backend {
    shared: Arc<Shared>,
    fuse: bool,
    plain_weights: bool,
    /// Memory of states.
    slabs: Slabs,
}

impl Backend {
    /// A backend with as many threads as there are cores, and the best kernels that the CPU can run.
    ///
    /// # Errors
    /// The environment variable `QUADRIGA_ISA` names an instruction set that the CPU lacks, or the system gives no
    /// threads.
    pub fn new() -> Result<Backend, Error> {
        Backend::builder().build()
    }

    /// Choices to make before the backend is made.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// How many threads compute.
    pub fn threads(&self) -> usize {
        self.shared.pool.threads()
    }

    /// Changes how many threads compute, once the current run is over. Programs compiled before run with the new
    /// number, and give the same results.
    ///
    /// # Errors
    /// The count is 0 or too large, or the system gives no more threads; the number then stays what it was.
    pub fn set_threads(&self, threads: usize) -> Result<(), Error> {
        let _work = self.shared.work();
        Ok(self.shared.pool.set_threads(threads)?)
    }

    /// The kernels in use.
    pub fn isa(&self) -> Isa {
        self.shared.isa
    }

    /// Where the time of all runs since the last call went; empty unless the backend was made with
    /// [`Builder::profile`].
    pub fn take_profile(&self) -> Profile {
        self.shared.ledger.as_ref().map(Ledger::take).unwrap_or_default()
    }

    /// Bytes of the work memory that all programs share. It only grows.
    pub fn work_bytes(&self) -> usize {
        self.shared.work().bytes()
    }
}

/// What the maker calls the processor, as far as the system tells.
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
            description: format!("{}, {threads} threads, {}", processor(), self.shared.isa),
            kind: DeviceKind::Cpu,
            asynchronous: false,
            total_bytes,
            free_bytes,
        }
    }

    fn memory(&self) -> MemoryFacts {
        MemoryFacts { alignment: ALIGNMENT, max_buffer: None, host: true }
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        let block = if usage == Usage::State { self.slabs.zeroed(bytes)? } else { Block::zeroed(bytes)? };
        Ok(Arc::new(HostBuffer::new(block, usage)))
    }

    /// The system gives zeros, and only when they are touched: most of a long cache never is.
    fn allocate_zeroed(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, usage)
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, Usage::Staging)
    }

    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        // Elements must be aligned; anything else is copied to memory of the backend's own.
        data.bytes()
            .as_ptr()
            .addr()
            .is_multiple_of(size_of::<u64>())
            .then(|| Arc::new(HostBuffer::map(data)) as _)
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
        weights::load(&self.shared, weight, layout, data, to)
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        match graph.get_node(node) {
            Some(node) if crate::ops::is_known(node.op()) => Ok(()),
            Some(node) => Err(Refusal(format!("there is no kernel for {}", node.op().name()).into())),
            None => Err(Refusal("there is no such node".into())),
        }
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        Ok(Box::new(compile(&self.shared, split, self.fuse)?))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(CpuQueue { shared: Arc::clone(&self.shared) }))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(CpuEvent::new(timing)))
    }
}
