//! What a device must offer: memory, transfers, ordering, and the running of compiled splits.
//!
//! A [`Backend`] owns memory and makes [`Queue`]s. Work given to one queue happens in order; work on different
//! queues is ordered only by [`Event`]s. A backend whose [`Device::asynchronous`] is false does the work before the
//! call returns. Nothing outside a backend touches its memory, except through these traits.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use quadriga_graph::{Data, Graph, NodeId, Op, Tensor, TensorId};

use crate::BackendError;

/// What memory is used for. A backend may place each kind differently.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Usage {
    /// Parameters: written once, then only read.
    Weights,
    /// Tensors that outlive a run.
    State,
    /// Inputs, results and copies of one run.
    Compute,
    /// Host memory that transfers pass through.
    Staging,
}

/// What sort of processor a device is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceKind {
    /// The host's own processor.
    Cpu,
    /// A graphics processor.
    Gpu,
    /// A device that exists only in software.
    Simulated,
}

/// Facts about a device.
#[derive(Clone, Debug)]
pub struct Device {
    /// What the maker calls it.
    pub description: String,
    /// Its sort.
    pub kind: DeviceKind,
    /// Whether queues return before the work is done.
    pub asynchronous: bool,
    /// All of its memory in bytes, if known.
    pub total_bytes: Option<u64>,
    /// What is free of it now, if known.
    pub free_bytes: Option<u64>,
}

/// How a backend's memory is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryFacts {
    /// Every tensor starts at a multiple of this; a power of two.
    pub alignment: usize,
    /// The most bytes one buffer can have, if there is a limit.
    pub max_buffer: Option<usize>,
    /// Whether the host can address the memory: then [`Buffer::read`] and [`Buffer::write`] cost a copy in memory.
    pub host: bool,
}

/// A range of one backend's memory. Dropping it frees the memory once, unless it wraps memory owned elsewhere.
pub trait Buffer: Any + Send + Sync {
    /// The name of the backend it belongs to.
    fn backend(&self) -> &str;

    /// Its size.
    fn bytes(&self) -> usize;

    /// What it is used for.
    fn usage(&self) -> Usage;

    /// Whether the host can address it.
    fn is_host(&self) -> bool;

    /// Copies bytes out, and returns when they are there. It does not wait for queues: the caller has seen to it
    /// that what writes these bytes is done.
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError>;

    /// Copies bytes in, and returns when they are there. The caller has seen to it that nothing uses them.
    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError>;

    /// Where its bytes are, of memory that the host owns and any device may be given access to. Whoever uses the
    /// address keeps the buffer, and orders its accesses with events as queues do.
    fn host_address(&self) -> Option<*mut u8> {
        None
    }

    /// Sets bytes to zero.
    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError>;

    /// The concrete type, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

impl fmt::Debug for dyn Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} buffer of {} bytes for {:?}", self.backend(), self.bytes(), self.usage())
    }
}

/// A part of a buffer.
#[derive(Clone, Debug)]
pub struct Region {
    /// The buffer.
    pub buffer: Arc<dyn Buffer>,
    /// Bytes from the buffer's start.
    pub offset: usize,
    /// How many bytes.
    pub bytes: usize,
}

impl Region {
    /// A part of a buffer, or the error that names what does not fit.
    pub fn new(buffer: Arc<dyn Buffer>, offset: usize, bytes: usize) -> Result<Region, BackendError> {
        check_range(&*buffer, offset, bytes)?;
        Ok(Region { buffer, offset, bytes })
    }

    /// The bytes `offset..offset + bytes` of this region.
    pub fn part(&self, offset: usize, bytes: usize) -> Result<Region, BackendError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(BackendError::OutOfBounds {
                backend: self.buffer.backend().to_owned(),
                offset,
                bytes,
                size: self.bytes,
            });
        }
        Ok(Region { buffer: Arc::clone(&self.buffer), offset: self.offset + offset, bytes })
    }
}

/// An error unless `offset..offset + bytes` lies inside the buffer. Every implementation of [`Buffer`] starts its
/// reads and writes with it.
pub fn check_range(buffer: &dyn Buffer, offset: usize, bytes: usize) -> Result<(), BackendError> {
    if offset.checked_add(bytes).is_none_or(|end| end > buffer.bytes()) {
        return Err(BackendError::OutOfBounds {
            backend: buffer.backend().to_owned(),
            offset,
            bytes,
            size: buffer.bytes(),
        });
    }
    Ok(())
}

/// How the bytes of a tensor are arranged in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Layout {
    /// As its type, shape and strides say.
    #[default]
    Plain,
    /// A weight rearranged by its backend; the number means something to that backend alone.
    Packed(u32),
}

/// How a backend wants to hold a weight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WeightLayout {
    /// The arrangement.
    pub layout: Layout,
    /// Bytes to allocate for it.
    pub bytes: usize,
    /// Whether the bytes of the file can be used where they are, when the backend can map them. Plain layout only.
    pub mappable: bool,
}

/// Where a tensor lies, as a split that uses it sees it.
#[derive(Clone, Debug)]
pub struct TensorPlace {
    /// The tensor's own bytes: a view's region starts at the view's first byte. For a packed weight, all of its
    /// packed bytes.
    pub region: Region,
    /// Their arrangement.
    pub layout: Layout,
}

/// What a backend compiles: some nodes of a graph, in order, and where every tensor they touch lies.
pub struct SplitSource<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The nodes, in execution order; views among them compute nothing.
    pub nodes: &'a [NodeId],
    /// Where a tensor lies: every input and output of the nodes has a place on this backend.
    pub place: &'a dyn Fn(TensorId) -> Option<TensorPlace>,
    /// Whether a result is read after the split, and so must be in memory when it ends. A backend that fuses nodes
    /// may leave the others unwritten.
    ///
    /// Memory is shared on the assumption that nodes run in the given order: a result may lie where a tensor lay
    /// whose last reader came before it. A backend that fuses nodes must check that no fused result overlaps what
    /// the fused nodes still read, other than exactly in place.
    pub kept: &'a dyn Fn(TensorId) -> bool,
    /// Working memory, at least as much as [`Backend::scratch_bytes`] says; none where that is nothing. It is the
    /// program's own while it runs.
    pub scratch: Option<Region>,
}

/// A compiled split, to be run any number of times.
pub trait Program: Send {
    /// Memory it holds beyond the tensors' own and what it was given to work in.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// The times of the steps of the latest run that was [timed](Queue::run_timed) and is done, in order. Nothing,
    /// where the backend takes no such times.
    fn step_times(&self) -> Vec<StepTime> {
        Vec::new()
    }

    /// The concrete type, for the backend that made it.
    fn as_any(&mut self) -> &mut dyn Any;
}

/// How long one step of a program took.
#[derive(Clone, PartialEq, Debug)]
pub struct StepTime {
    /// The nodes that it computed, as one; a node of several steps is named in the last. None, where it only prepares.
    pub nodes: Vec<NodeId>,
    /// Seconds from the start of the program.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// A point in a queue's work that other queues, and the host, can wait for. Before it was first recorded it counts
/// as passed.
pub trait Event: Send + Sync {
    /// Whether the work before it is done; an error if that work failed.
    fn is_done(&self) -> Result<bool, BackendError>;

    /// Waits until the work before it is done; an error if that work failed.
    fn wait(&self) -> Result<(), BackendError>;

    /// Seconds from `earlier` to this one, if both were made with timing by the same backend and are done.
    fn seconds_since(&self, earlier: &dyn Event) -> Option<f64>;

    /// The concrete type, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A list of commands that a backend carries out in order. None of the methods allocates in the steady state.
pub trait Queue: Send {
    /// Copies host bytes into a region; they are taken before the call returns.
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError>;

    /// Copies a region into host bytes, after all earlier work of this queue, and returns when they are there.
    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError>;

    /// Copies one region to another of equal size, if this backend can reach both: its own memory always, host
    /// buffers of any backend, perhaps more. `false` if it cannot.
    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError>;

    /// Runs a program that this backend compiled.
    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError>;

    /// As [`Queue::run`], and takes the time of each step for [`Program::step_times`]. A backend that cannot just runs.
    fn run_timed(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.run(program)
    }

    /// Marks this point of the queue; `event` was made by the same backend.
    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError>;

    /// Lets later work of this queue wait for an event of any backend. (An event of another backend may make the
    /// host wait, where the devices cannot do it among themselves.)
    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError>;

    /// Waits until everything given to this queue is done; an error if some of it failed.
    fn synchronize(&mut self) -> Result<(), BackendError>;
}

/// Why a backend does not compute a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(pub Cow<'static, str>);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A device that owns memory and runs graphs.
pub trait Backend: Send + Sync {
    /// What the device is called in messages, plans and on the command line: `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// Facts about the device, as they are now.
    fn device(&self) -> Device;

    /// How its memory is laid out.
    fn memory(&self) -> MemoryFacts;

    /// Bytes to allocate for a tensor's storage: at least its own.
    fn storage_bytes(&self, tensor: &Tensor) -> usize {
        tensor.bytes()
    }

    /// A new buffer. Its bytes are unspecified.
    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError>;

    /// A new buffer of zeros.
    fn allocate_zeroed(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        let buffer = self.allocate(bytes, usage)?;
        buffer.clear(0, bytes)?;
        Ok(buffer)
    }

    /// Host memory for transfers to and from this device; pinned, where that means something.
    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError>;

    /// A read-only buffer over bytes that live elsewhere, such as a file map: nothing is copied and nothing freed.
    /// `None` if this backend cannot use such memory.
    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        let _ = data;
        None
    }

    /// Sees to it that this device reaches another backend's host memory directly in transfers, as long as the result
    /// is kept: by locking its pages, for instance. `None` where there is nothing to be done.
    fn lock(&self, buffer: &Arc<dyn Buffer>) -> Option<Box<dyn Any + Send + Sync>> {
        let _ = buffer;
        None
    }

    /// How this backend wants to hold a weight that is used like this: each operation with the number of the input
    /// that the weight is. Whatever it answers, it computes every operation that it supports from that layout;
    /// a weight that is looked at through views must stay plain.
    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let _ = uses;
        WeightLayout { layout: Layout::Plain, bytes: self.storage_bytes(weight), mappable: true }
    }

    /// Puts a weight's bytes, given as the file has them, into place in the layout that was asked for.
    fn load_weight(
        &self,
        weight: &Tensor,
        layout: Layout,
        data: &[u8],
        to: &Region,
    ) -> Result<(), BackendError> {
        let _ = (weight, layout);
        to.buffer.write(to.offset, data)
    }

    /// Told of each tensor once it has memory, before anything is written there. Never called while measuring.
    fn placed(&self, tensor: &Tensor, region: &Region) -> Result<(), BackendError> {
        let _ = (tensor, region);
        Ok(())
    }

    /// Told of each tensor before its memory is released. Never called while measuring.
    fn released(&self, tensor: &Tensor, region: &Region) {
        let _ = (tensor, region);
    }

    /// How much memory a program of these nodes needs to work in, beside the tensors. It is given to the program in
    /// [`SplitSource::scratch`], and lies in the arena while the split runs: a plan's bytes hold it.
    fn scratch_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        let _ = (graph, nodes);
        0
    }

    /// Whether it computes a node, and if not, why.
    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal>;

    /// Prepares nodes to be run many times.
    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError>;

    /// A new queue.
    fn queue(&self) -> Result<Box<dyn Queue>, BackendError>;

    /// A new event, which counts as passed.
    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError>;
}

impl fmt::Debug for dyn Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "backend {}", self.name())
    }
}

/// Compiles, runs and waits for nodes once, with no session around them.
pub fn compute_once(backend: &dyn Backend, split: &SplitSource<'_>) -> Result<(), BackendError> {
    let mut program = backend.compile(split)?;
    let mut queue = backend.queue()?;
    queue.run(&mut *program)?;
    queue.synchronize()
}
