//! The simulated device as a backend.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use quadriga_graph::{Data, Graph, NodeId, Op, Tensor};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, RankGroup,
    Refusal, Region, SplitSource, Usage, WeightLayout,
};

use crate::event::SimEvent;
use crate::faults::{FaultCounts, FaultPoint};
use crate::inner::DeviceInner;
use crate::memory::SimBuffer;
use crate::program::{PACKED, SimProgram, custom_code};
use crate::queue::SimQueue;
use crate::settings::SimSettings;

/// A simulated device. [`Sim::new`] starts from its settings:
///
/// ```
/// use quadriga_sim::{FaultPoint, Sim};
/// use quadriga_runtime::{Backend, Usage};
///
/// let sim = Sim::new("sim:0").capacity(1 << 20).alignment(256).device();
/// let buffer = sim.allocate(4096, Usage::Compute)?;
/// assert_eq!((buffer.bytes(), sim.used_bytes()), (4096, 4096));
///
/// // Fault injection: the next allocation fails, once.
/// sim.fail(FaultPoint::Allocation, 0);
/// assert!(sim.allocate(4096, Usage::Compute).is_err());
/// assert!(sim.allocate(4096, Usage::Compute).is_ok());
/// # Ok::<(), quadriga_runtime::BackendError>(())
/// ```
pub struct Sim {
    inner: Arc<DeviceInner>,
}

impl Sim {
    /// Settings of a device with this name; [`SimSettings::build`] makes the device.
    #[expect(clippy::new_ret_no_self, reason = "settings come first; the device is built from them")]
    pub fn new(name: &str) -> SimSettings {
        SimSettings::new(name)
    }

    /// Injects a fault: the operation after `after` more of this kind fails, once.
    pub fn fail(&self, point: FaultPoint, after: u64) {
        self.inner.faults.plan(point, after, false);
    }

    /// Injects the loss of the device: it is lost at the operation after `after` more of this kind.
    pub fn lose(&self, point: FaultPoint, after: u64) {
        self.inner.faults.plan(point, after, true);
    }

    /// The first access to memory that was not ordered after those it conflicts with, if there was one: it was refused, and so is
    /// every operation from then on, whatever faults are cleared. A caller that tries again after an error cannot hide it.
    pub fn unordered_access(&self) -> Option<String> {
        self.inner.faults.unordered()
    }

    /// Removes injected faults and restores a lost device.
    pub fn clear_faults(&self) {
        self.inner.faults.clear();
    }

    /// How many operations of each kind were attempted.
    pub fn counts(&self) -> FaultCounts {
        self.inner.faults.counts()
    }

    /// Allocated bytes.
    pub fn used_bytes(&self) -> u64 {
        self.inner.used.load(Ordering::Relaxed)
    }

    /// How many tensors have been placed on the device and not released.
    pub fn placed_tensors(&self) -> u64 {
        self.inner.tensors.load(Ordering::Relaxed)
    }

    /// The latest time that any queue of the device has reached, in seconds of the device's clock.
    pub fn seconds(&self) -> f64 {
        self.inner.seconds()
    }

    /// The latest time that the host has waited for, in seconds of the device's clock.
    pub fn host_seconds(&self) -> f64 {
        self.inner.host_seconds()
    }
}

impl SimSettings {
    /// Builds the device as a backend for a scheduler. [`SimSettings::device`] returns its own type, for fault
    /// injection.
    pub fn build(self) -> Arc<dyn Backend> {
        self.device()
    }

    /// Builds the device.
    pub fn device(self) -> Arc<Sim> {
        Arc::new(Sim { inner: Arc::new(DeviceInner::new(self)) })
    }
}

impl Backend for Sim {
    fn name(&self) -> &str {
        &self.inner.settings.name
    }

    fn device(&self) -> Device {
        Device {
            description: "simulated device".to_owned(),
            kind: DeviceKind::Simulated,
            asynchronous: self.inner.settings.asynchronous,
            total_bytes: Some(self.inner.settings.capacity),
            free_bytes: Some(self.inner.free()),
        }
    }

    fn memory(&self) -> MemoryFacts {
        let SimSettings { alignment, max_buffer, host, .. } = self.inner.settings;
        MemoryFacts { alignment, max_buffer, host }
    }

    fn storage_bytes(&self, tensor: &Tensor) -> usize {
        match self.inner.settings.padding {
            1 => tensor.bytes(),
            padding => tensor.bytes().next_multiple_of(padding),
        }
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(SimBuffer::new(&self.inner, bytes, usage, self.inner.settings.host)?))
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(SimBuffer::new(&self.inner, bytes, Usage::Staging, true)?))
    }

    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        let _ = data;
        None
    }

    fn reaches(&self, other: &dyn Backend) -> bool {
        let SimSettings { peers, isolated, .. } = self.inner.settings;
        let is_peer = peers && other.device().kind == DeviceKind::Simulated;
        is_peer || (other.memory().host && !isolated)
    }

    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let is_matmul = |op: &Op| matches!(op, Op::MulMat | Op::MulMatId);
        let only_matmuls = !uses.is_empty() && uses.iter().all(|(op, at)| is_matmul(op) && *at == 0);
        let layout = if self.inner.settings.packs && only_matmuls { PACKED } else { Layout::Plain };
        WeightLayout { layout, bytes: self.storage_bytes(weight), mappable: layout == Layout::Plain }
    }

    fn streamed_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let of_experts = !uses.is_empty() && uses.iter().all(|(op, at)| **op == Op::MulMatId && *at == 0);
        let layout = if self.inner.settings.packs && of_experts { PACKED } else { Layout::Plain };
        WeightLayout { layout, bytes: self.storage_bytes(weight), mappable: false }
    }

    fn load_weight(&self, _: &Tensor, layout: Layout, data: &[u8], to: &Region) -> Result<(), BackendError> {
        if layout == PACKED {
            let inverted: Vec<u8> = data.iter().map(|byte| !byte).collect();
            return to.buffer.write(to.offset, &inverted);
        }
        to.buffer.write(to.offset, data)
    }

    fn placed(&self, _: &Tensor, _: &Region) -> Result<(), BackendError> {
        self.inner.tensors.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn released(&self, _: &Tensor, _: &Region) {
        self.inner.tensors.fetch_sub(1, Ordering::Relaxed);
    }

    fn scratch_bytes(&self, _: &Graph, _: &[NodeId]) -> usize {
        self.inner.settings.scratch
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        if let Some(reason) = self.inner.settings.refuses.as_ref().and_then(|refuses| refuses(graph, node)) {
            return Err(Refusal(reason.into()));
        }
        match graph.get_node(node).map(|node| node.op()) {
            Some(Op::Custom(op)) if custom_code(op).is_none() => {
                Err(Refusal("the custom operation has no code for simulated devices".into()))
            }
            _ => Ok(()),
        }
    }

    fn exchanges(&self, _: Option<&dyn RankGroup>) -> Result<(), Refusal> {
        Ok(())
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        self.inner.faults.check(self.name(), FaultPoint::Compile)?;
        let graph = self.inner.graph(split.graph);
        Ok(Box::new(SimProgram::new(&self.inner, graph, split)?))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(SimQueue::new(&self.inner)?))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        self.inner.faults.alive(self.name())?;
        let (device, inner) = (Arc::clone(&self.inner), Arc::default());
        Ok(Arc::new(SimEvent { device, inner, timing }))
    }
}
