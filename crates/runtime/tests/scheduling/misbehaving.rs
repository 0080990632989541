//! A device that breaks the rules of a backend.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use quadriga_graph::{Graph, NodeId, Tensor};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Device, Event, MemoryFacts, Program, Queue, Refusal, Region, SplitSource,
    Usage,
};

/// A device that behaves like another one, but for the rules that it is told to break.
pub(crate) struct Misbehaving {
    device: Arc<dyn Backend>,
    /// Bytes by which the memory of a tensor grows each time it is asked for.
    growth: usize,
    asked: AtomicUsize,
    /// The number of the run that panics; 0 for none. Counts down.
    panics: Arc<AtomicUsize>,
    /// How often memory of the host was locked for it.
    locks: AtomicUsize,
    /// The results that it was told to keep, by name, and those that it may leave out.
    kept: Mutex<[BTreeSet<String>; 2]>,
}

impl Misbehaving {
    pub(crate) fn new(device: Arc<dyn Backend>) -> Misbehaving {
        Misbehaving {
            device,
            growth: 0,
            asked: AtomicUsize::new(0),
            panics: Arc::default(),
            locks: AtomicUsize::new(0),
            kept: Mutex::default(),
        }
    }

    /// Wants so many bytes more for a tensor each time it is asked: no plan is right when it is checked.
    pub(crate) fn growth(self, growth: usize) -> Misbehaving {
        Misbehaving { growth, ..self }
    }

    /// How many buffers of the host were locked for it so far.
    pub(crate) fn locks(&self) -> usize {
        self.locks.load(Ordering::Relaxed)
    }

    /// The results that are needed after the splits that compute them, and those that are not.
    pub(crate) fn kept(&self) -> [Vec<String>; 2] {
        self.kept.lock().unwrap().clone().map(|names| names.into_iter().collect())
    }

    /// The n-th program from now on panics when it is run.
    pub(crate) fn panic_in_run(&self, number: usize) {
        self.panics.store(number, Ordering::Relaxed);
    }
}

impl Backend for Misbehaving {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn device(&self) -> Device {
        self.device.device()
    }

    fn memory(&self) -> MemoryFacts {
        self.device.memory()
    }

    fn storage_bytes(&self, tensor: &Tensor) -> usize {
        self.device.storage_bytes(tensor) + self.growth * self.asked.fetch_add(1, Ordering::Relaxed)
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        self.device.allocate(bytes, usage)
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        self.device.staging(bytes)
    }

    fn lock(&self, _: &Arc<dyn Buffer>) -> Option<Box<dyn Any + Send + Sync>> {
        self.locks.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        self.device.supports(graph, node)
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        for node in split.nodes {
            let output = split.graph[*node].output();
            let [kept, not_kept] = &mut *self.kept.lock().unwrap();
            if (split.kept)(output) { kept } else { not_kept }.insert(split.graph.name(output));
        }
        self.device.compile(split)
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(PanickingQueue { queue: self.device.queue()?, panics: Arc::clone(&self.panics) }))
    }

    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        self.device.event(timing)
    }
}

struct PanickingQueue {
    queue: Box<dyn Queue>,
    panics: Arc<AtomicUsize>,
}

impl Queue for PanickingQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        self.queue.write(to, bytes)
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        self.queue.read(from, into)
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        self.queue.copy(from, to)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let number = self.panics.load(Ordering::Relaxed);
        self.panics.store(number.saturating_sub(1), Ordering::Relaxed);
        if number == 1 {
            // Without a message of the panic hook.
            std::panic::resume_unwind(Box::new("the device panics"));
        }
        self.queue.run(program)
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        self.queue.record(event)
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        self.queue.wait(event)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.queue.synchronize()
    }
}
