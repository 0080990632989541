//! A synchronous backend on the heap that counts allocations and hooks, and refuses what it is told to. Its programs
//! compute nothing, which is all that tests of memory need.
#![allow(dead_code, reason = "each test uses a part of it")]

use quadriga_graph::{Data, Graph, NodeId, Tensor};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, MemoryFacts, Program, Queue, Refusal, Region,
    SplitSource, Usage, check_range,
};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// What happened so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HeapCounts {
    /// Bytes that are allocated now.
    pub(crate) live: u64,
    pub(crate) allocations: usize,
    pub(crate) frees: usize,
    /// Calls of the hook `placed` that succeeded.
    pub(crate) placed: usize,
    /// Calls of the hook `released`.
    pub(crate) released: usize,
}

/// A tensor as the hook `placed` saw it.
#[derive(Clone, Debug)]
pub(crate) struct PlacedRecord {
    pub(crate) tensor: Tensor,
    pub(crate) offset: usize,
    pub(crate) buffer_bytes: usize,
    /// The name of the backend that owns the buffer.
    pub(crate) owner: String,
}

#[derive(Clone)]
pub(crate) struct Heap {
    pub(crate) name: String,
    pub(crate) facts: MemoryFacts,
    /// Every storage is rounded up to a multiple of this.
    pub(crate) padding: usize,
    pub(crate) capacity: u64,
    /// The address that buffers claim to start at, if any; nothing is there.
    pub(crate) base: Option<usize>,
    pub(crate) counts: Arc<Mutex<HeapCounts>>,
    pub(crate) records: Arc<Mutex<Vec<PlacedRecord>>>,
    /// The allocation with this number is refused.
    pub(crate) refuse: Arc<Mutex<Option<usize>>>,
    /// The call of `placed` with this number fails.
    pub(crate) refuse_placed: Arc<Mutex<Option<usize>>>,
}

impl Heap {
    pub(crate) fn new(name: &str, alignment: usize, max_buffer: Option<usize>) -> Heap {
        Heap {
            name: name.to_owned(),
            facts: MemoryFacts { alignment, max_buffer, host: true },
            padding: 1,
            capacity: u64::MAX,
            base: None,
            counts: Arc::default(),
            records: Arc::default(),
            refuse: Arc::default(),
            refuse_placed: Arc::default(),
        }
    }

    pub(crate) fn counts(&self) -> HeapCounts {
        self.counts.lock().unwrap().clone()
    }

    pub(crate) fn shared(&self) -> Arc<dyn Backend> {
        Arc::new(self.clone())
    }
}

pub(crate) struct HeapBuffer {
    backend: String,
    usage: Usage,
    bytes: Mutex<Vec<u8>>,
    size: usize,
    base: Option<usize>,
    /// Absent for memory that belongs to someone else.
    counts: Option<Arc<Mutex<HeapCounts>>>,
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        if let Some(counts) = &self.counts {
            let mut counts = counts.lock().unwrap();
            counts.live -= self.size as u64;
            counts.frees += 1;
        }
    }
}

impl Buffer for HeapBuffer {
    fn backend(&self) -> &str {
        &self.backend
    }
    fn bytes(&self) -> usize {
        self.size
    }
    fn usage(&self) -> Usage {
        self.usage
    }
    fn is_host(&self) -> bool {
        true
    }
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + into.len()]);
        Ok(())
    }
    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        check_range(self, offset, from.len())?;
        self.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }
    fn address(&self) -> u64 {
        self.base.unwrap_or(0) as u64
    }
    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        self.bytes.lock().unwrap()[offset..offset + len].fill(0);
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Heap {
    fn name(&self) -> &str {
        &self.name
    }
    fn device(&self) -> Device {
        Device {
            description: "heap".to_owned(),
            kind: DeviceKind::Cpu,
            asynchronous: false,
            total_bytes: Some(self.capacity),
            free_bytes: Some(self.capacity - self.counts().live),
        }
    }
    fn memory(&self) -> MemoryFacts {
        self.facts
    }
    fn storage_bytes(&self, tensor: &Tensor) -> usize {
        tensor.bytes().next_multiple_of(self.padding)
    }
    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        let mut counts = self.counts.lock().unwrap();
        let number = counts.allocations;
        counts.allocations += 1;
        let free = self.capacity - counts.live;
        if *self.refuse.lock().unwrap() == Some(number)
            || bytes as u64 > free
            || self.facts.max_buffer.is_some_and(|max| bytes > max)
        {
            let backend = self.name.clone();
            return Err(BackendError::OutOfMemory { backend, requested: bytes as u64, free: Some(free) });
        }
        counts.live += bytes as u64;
        Ok(Arc::new(HeapBuffer {
            backend: self.name.clone(),
            usage,
            bytes: Mutex::new(vec![0xa5; bytes]),
            size: bytes,
            base: self.base,
            counts: Some(Arc::clone(&self.counts)),
        }))
    }
    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, Usage::Staging)
    }
    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        Some(Arc::new(HeapBuffer {
            backend: self.name.clone(),
            usage: Usage::Weights,
            bytes: Mutex::new(data.bytes().to_vec()),
            size: data.len(),
            base: self.base,
            counts: None,
        }))
    }
    fn placed(&self, tensor: &Tensor, region: &Region) -> Result<(), BackendError> {
        assert_eq!(tensor.bytes(), region.bytes);
        let mut counts = self.counts.lock().unwrap();
        if *self.refuse_placed.lock().unwrap() == Some(counts.placed) {
            let backend = self.name.clone();
            return Err(BackendError::Failed { backend, what: "placing", reason: "told to".to_owned() });
        }
        counts.placed += 1;
        self.records.lock().unwrap().push(PlacedRecord {
            tensor: tensor.clone(),
            offset: region.offset,
            buffer_bytes: region.buffer.bytes(),
            owner: region.buffer.backend().to_owned(),
        });
        Ok(())
    }
    fn released(&self, _: &Tensor, _: &Region) {
        self.counts.lock().unwrap().released += 1;
    }
    fn supports(&self, _: &Graph, _: NodeId) -> Result<(), Refusal> {
        Ok(())
    }
    fn compile(&self, _: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        Ok(Box::new(NoOp))
    }
    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(NoOp))
    }
    fn event(&self, _: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(NoOp))
    }
}

/// Program, queue and event of a heap: transfers happen at once, programs do nothing.
struct NoOp;

impl Program for NoOp {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Event for NoOp {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(true)
    }
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
    fn seconds_since(&self, _: &dyn Event) -> Option<f64> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Queue for NoOp {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        to.buffer.write(to.offset, bytes)
    }
    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        from.buffer.read(from.offset, into)
    }
    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        let mut bytes = vec![0; from.bytes];
        from.buffer.read(from.offset, &mut bytes)?;
        to.buffer.write(to.offset, &bytes)?;
        Ok(true)
    }
    fn run(&mut self, _: &mut dyn Program) -> Result<(), BackendError> {
        Ok(())
    }
    fn record(&mut self, _: &dyn Event) -> Result<(), BackendError> {
        Ok(())
    }
    fn wait(&mut self, _: &dyn Event) -> Result<(), BackendError> {
        Ok(())
    }
    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}
