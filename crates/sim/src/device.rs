//! The device: what the runtime asks of a backend.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use quadriga_graph::{Data, Fingerprint, Graph, NodeId, Op, Tensor};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, Refusal,
    Region, SplitSource, Usage, WeightLayout,
};

use crate::event::SimEvent;
use crate::faults::{Counts, Faults, What};
use crate::memory::SimBuffer;
use crate::program::{PACKED, SimProgram};
use crate::queue::SimQueue;
use crate::settings::Settings;

/// A simulated device.
pub struct Sim {
    shared: Arc<Shared>,
}

/// What buffers, queues and programs share with their device.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) faults: Faults,
    pub(crate) used: AtomicU64,
    /// How many tensors it has been told to have, and not yet to have lost.
    pub(crate) tenants: AtomicU64,
    /// The latest moment that any queue has reached, as bits of an `f64` that is never negative.
    latest: AtomicU64,
    /// When the device was made.
    pub(crate) made: Instant,
    /// Graphs of living programs, each kept once.
    graphs: Mutex<HashMap<Fingerprint, Weak<Graph>>>,
}

impl Shared {
    pub(crate) fn free(&self) -> u64 {
        self.settings.capacity.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    pub(crate) fn reached(&self, seconds: f64) {
        // Bits of positive floats are ordered like the floats.
        self.latest.fetch_max(seconds.max(0.0).to_bits(), Ordering::Relaxed);
    }

    fn graph(&self, graph: &Graph) -> Arc<Graph> {
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = graphs.get(&graph.fingerprint()).and_then(Weak::upgrade) {
            return known;
        }
        graphs.retain(|_, graph| graph.strong_count() > 0);
        let owned = Arc::new(graph.clone());
        graphs.insert(graph.fingerprint(), Arc::downgrade(&owned));
        owned
    }
}

impl Sim {
    /// Settings for a device of this name; see [`Settings`] for what can be set.
    #[expect(clippy::new_ret_no_self, reason = "settings come first; the device is built from them")]
    pub fn new(name: &str) -> Settings {
        Settings::new(name)
    }

    pub(crate) fn with(settings: Settings) -> Sim {
        Sim {
            shared: Arc::new(Shared {
                settings,
                faults: Faults::default(),
                used: AtomicU64::new(0),
                tenants: AtomicU64::new(0),
                latest: AtomicU64::new(0),
                made: Instant::now(),
                graphs: Mutex::default(),
            }),
        }
    }

    /// Lets the next but `after` of a kind fail, once.
    pub fn fail(&self, what: What, after: u64) {
        self.shared.faults.plan(what, after, false);
    }

    /// Lets the device be lost at the next but `after` of a kind.
    pub fn lose(&self, what: What, after: u64) {
        self.shared.faults.plan(what, after, true);
    }

    /// Takes back planned faults, and finds a lost device again.
    pub fn mend(&self) {
        self.shared.faults.clear();
    }

    /// How often each thing was tried.
    pub fn counts(&self) -> Counts {
        self.shared.faults.counts()
    }

    /// Bytes that are allocated.
    pub fn used_bytes(&self) -> u64 {
        self.shared.used.load(Ordering::Relaxed)
    }

    /// How many tensors have their place on it, as far as it has been told.
    pub fn tenants(&self) -> u64 {
        self.shared.tenants.load(Ordering::Relaxed)
    }

    /// The latest moment that any queue of the device has reached, in seconds of its own clock.
    pub fn seconds(&self) -> f64 {
        f64::from_bits(self.shared.latest.load(Ordering::Relaxed))
    }
}

impl Backend for Sim {
    fn name(&self) -> &str {
        &self.shared.settings.name
    }

    fn device(&self) -> Device {
        Device {
            description: "simulated device".to_owned(),
            kind: DeviceKind::Simulated,
            asynchronous: self.shared.settings.asynchronous,
            total_bytes: Some(self.shared.settings.capacity),
            free_bytes: Some(self.shared.free()),
        }
    }

    fn memory(&self) -> MemoryFacts {
        let Settings { alignment, max_buffer, host, .. } = self.shared.settings;
        MemoryFacts { alignment, max_buffer, host }
    }

    fn storage_bytes(&self, tensor: &Tensor) -> usize {
        match self.shared.settings.padding {
            1 => tensor.bytes(),
            padding => tensor.bytes().next_multiple_of(padding),
        }
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(SimBuffer::new(&self.shared, bytes, usage, self.shared.settings.host)?))
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(SimBuffer::new(&self.shared, bytes, Usage::Staging, true)?))
    }

    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        let _ = data;
        None
    }

    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let only_products = !uses.is_empty() && uses.iter().all(|(op, at)| **op == Op::MulMat && *at == 0);
        let layout = if self.shared.settings.packs && only_products { PACKED } else { Layout::Plain };
        WeightLayout { layout, bytes: self.storage_bytes(weight), mappable: layout == Layout::Plain }
    }

    fn load_weight(&self, _: &Tensor, layout: Layout, data: &[u8], to: &Region) -> Result<(), BackendError> {
        if layout == PACKED {
            let turned: Vec<u8> = data.iter().map(|byte| !byte).collect();
            return to.buffer.write(to.offset, &turned);
        }
        to.buffer.write(to.offset, data)
    }

    fn placed(&self, _: &Tensor, _: &Region) -> Result<(), BackendError> {
        self.shared.tenants.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn released(&self, _: &Tensor, _: &Region) {
        self.shared.tenants.fetch_sub(1, Ordering::Relaxed);
    }

    fn scratch_bytes(&self, _: &Graph, _: &[NodeId]) -> usize {
        self.shared.settings.scratch
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        match self.shared.settings.refuses.as_ref().and_then(|refuses| refuses(graph, node)) {
            Some(reason) => Err(Refusal(reason.into())),
            None => Ok(()),
        }
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        self.shared.faults.check(self.name(), What::Compile)?;
        let graph = self.shared.graph(split.graph);
        Ok(Box::new(SimProgram::new(&self.shared, graph, split)?))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(SimQueue::new(&self.shared)?))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        self.shared.faults.alive(self.name())?;
        let (device, shared) = (Arc::clone(&self.shared), Arc::default());
        Ok(Arc::new(SimEvent { device, shared, timing }))
    }
}
