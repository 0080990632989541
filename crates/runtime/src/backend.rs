//! The interface of a device: memory, transfers, events, and compiled splits.
//!
//! A [`Backend`] owns memory and makes [`Queue`]s. The commands of one queue run in order; those of different queues are
//! ordered only by [`Event`]s. A backend whose [`Device::asynchronous`] is false does the work before the call returns.
//! Nothing outside a backend accesses its memory, except through these traits.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use quadriga_graph::{Data, Graph, NodeId, Op, Tensor, TensorId};

use crate::{BackendError, Device, HostMemory, MemoryFacts, RankGroup, RankGroups, Rates, Usage};

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

    /// Copies bytes out, and returns when they are copied. It does not wait for queues: the caller makes sure that the
    /// commands that write these bytes are done.
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError>;

    /// Copies bytes in, and returns when they are copied. The caller makes sure that no command in flight uses them.
    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError>;

    /// The address of its first byte, in the backend's own address space: a multiple of the backend's alignment, unless it
    /// wraps memory that is not. Only the backend can access it.
    fn address(&self) -> u64;

    /// Its memory, if other devices may access it directly. They order accesses with events, as queues do.
    fn host_memory(self: Arc<Self>) -> Option<HostMemory> {
        None
    }

    /// Sets bytes to zero.
    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError>;

    /// Its bytes are not needed any more, and unspecified from now on; it stays allocated at its address. A backend may give memory
    /// back to the system until the buffer is used again. The caller makes sure that no command in flight uses it.
    fn discard(&self) {}

    /// The concrete type, for the backend that it belongs to.
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
    /// A part of a buffer, or an error if the buffer is too small.
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

/// An error unless `offset..offset + bytes` is inside the buffer. Every implementation of [`Buffer`] starts its reads and
/// writes with it.
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

/// The layout of a tensor's bytes in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Layout {
    /// Given by its type, shape and strides.
    #[default]
    Plain,
    /// A weight in a layout of its backend, which the number identifies to that backend alone.
    Packed(u32),
}

/// The layout in which a backend holds a weight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WeightLayout {
    /// The layout.
    pub layout: Layout,
    /// Bytes to allocate for it.
    pub bytes: usize,
    /// Whether the backend may read the bytes in the file map, if it can map them. Plain layout only.
    pub mappable: bool,
}

/// Where a split finds a tensor.
#[derive(Clone, Debug)]
pub struct TensorPlace {
    /// The tensor's own bytes: a view's region starts at the view's first byte. For a packed weight, all of its
    /// packed bytes.
    pub region: Region,
    /// Their layout.
    pub layout: Layout,
}

/// What a backend compiles: some nodes of a graph, in order, and the places of their inputs and outputs.
pub struct SplitSource<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The nodes, in execution order; views among them compute nothing.
    pub nodes: &'a [NodeId],
    /// The place of a tensor: every input and output of the nodes has one on this backend.
    pub place: &'a dyn Fn(TensorId) -> Option<TensorPlace>,
    /// Whether a result is read after the split, and so must be in memory when it ends. A backend that fuses nodes need
    /// not write the others.
    ///
    /// Memory is shared on the assumption that nodes run in the given order: a result may have the memory of a tensor
    /// whose last reader comes before it. A backend that fuses nodes must check that no fused result overlaps an input of
    /// the fused nodes, other than exactly in place.
    pub kept: &'a dyn Fn(TensorId) -> bool,
    /// Scratch memory of at least [`Backend::scratch_bytes`]; `None` if that is 0. No other program uses it while this
    /// one runs.
    pub scratch: Option<Region>,
    /// The ranks that collectives among the nodes are executed with.
    pub ranks: &'a RankGroups,
}

/// A compiled split, which can be run any number of times.
pub trait Program: Send {
    /// Memory it holds beyond the tensors' own and the scratch memory it was given.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// The times of the steps of the latest [timed](Queue::run_timed) run, in order, once it is done. Empty if the backend
    /// takes no such times.
    fn step_times(&self) -> Vec<StepTime> {
        Vec::new()
    }

    /// The concrete type, for the backend that it belongs to.
    fn as_any(&mut self) -> &mut dyn Any;
}

/// How long one step of a program took.
#[derive(Clone, PartialEq, Debug)]
pub struct StepTime {
    /// The nodes that it computed, fused; a node of several steps is listed with the last. Empty if it only prepares.
    pub nodes: Vec<NodeId>,
    /// Seconds from the start of the program.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// A point in a queue that other queues, and the host, can wait for. Before it is first recorded it counts as done.
pub trait Event: Send + Sync {
    /// Whether the work before it is done; an error if that work failed.
    fn is_done(&self) -> Result<bool, BackendError>;

    /// Waits until the work before it is done; an error if that work failed.
    fn wait(&self) -> Result<(), BackendError>;

    /// Seconds from `earlier` to this one, if both were made with timing by the same backend and are done.
    fn seconds_since(&self, earlier: &dyn Event) -> Option<f64>;

    /// The concrete type, for the backend that it belongs to.
    fn as_any(&self) -> &dyn Any;
}

/// The slices of a streamed weight that a run reads, such as the matrices of the experts that a batch uses. Which they
/// are is known on the reading device alone, from indices that the run computes there.
pub struct SliceSelection {
    /// The weight, with its slices in the outermost of three dimensions.
    pub weight: Tensor,
    /// The layout of the copy: that of [`Backend::streamed_layout`].
    pub layout: Layout,
    /// The indices of the slices, in any order and with repetitions: contiguous 32-bit integers in memory of the backend
    /// that reads the copy. One that is out of range selects nothing.
    pub ids: Region,
    /// Whether [`Queue::prefetch_slices`] was called for this copy in this run, and has
    /// returned `true`.
    pub prefetched: bool,
    /// What the backend remembers of this copy from one run to the next, such as the slices that were selected last.
    pub memory: Option<Box<dyn Any + Send>>,
}

impl SliceSelection {
    /// A selection from the slices of a weight by indices.
    pub fn new(weight: Tensor, layout: Layout, ids: Region) -> SliceSelection {
        SliceSelection { weight, layout, ids, prefetched: false, memory: None }
    }

    /// How many slices the weight has.
    pub fn slices(&self) -> usize {
        self.weight.dims4()[1]
    }

    /// Forgets a run that was given up.
    pub(crate) fn reset(&mut self) {
        (self.prefetched, self.memory) = (false, None);
    }
}

/// A queue of commands that a backend executes in order. No method allocates in the steady state.
pub trait Queue: Send {
    /// Copies host bytes into a region; the caller may reuse them when the call returns.
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError>;

    /// Copies a region into host bytes, after all earlier commands of this queue, and returns when they are copied.
    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError>;

    /// Copies one region to another of equal size, if this backend can reach both: its own memory always, host
    /// buffers of any backend, perhaps more. `false` if it cannot.
    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError>;

    /// Writes a slice of a weight along its first dimension, whose bytes are in a region of this backend as a file has
    /// them, to the weight's region in one of the backend's layouts. [default: plain weights only]
    fn load_slice(
        &mut self,
        weight: &Tensor,
        layout: Layout,
        index: usize,
        from: &Region,
        to: &Region,
    ) -> Result<(), BackendError> {
        let _ = weight;
        match layout {
            Layout::Plain => copy_plain_slice(self, index, from, to),
            Layout::Packed(_) => Err(no_slice(to, "it packs whole weights only")),
        }
    }

    /// Copies the selected slices of a weight, as its file has it, to memory of this backend, in the layout of the
    /// selection. Other slices need not be copied: nothing reads them. `false` if this backend does not reach the weight;
    /// its [`streamed_layout`](Backend::streamed_layout) must be plain then. [default: copies all of the weight]
    fn copy_slices(
        &mut self,
        from: &Region,
        to: &Region,
        selection: &mut SliceSelection,
    ) -> Result<bool, BackendError> {
        let _ = selection;
        self.copy(from, to)
    }

    /// Copies slices that are likely to be selected, before the indices are computed. The copy of the selected slices
    /// follows in the same queue, with nothing in between that uses `to`. `false` if nothing was copied. [default: copies
    /// nothing]
    fn prefetch_slices(
        &mut self,
        from: &Region,
        to: &Region,
        selection: &mut SliceSelection,
    ) -> Result<bool, BackendError> {
        let _ = (from, to, selection);
        Ok(false)
    }

    /// The slices that the latest [copy](Queue::copy_slices) with this selection selected, once it is done: for traces. `None` if
    /// that is not known. [default: not known]
    fn selected_slices(&mut self, selection: &SliceSelection) -> Result<Option<Vec<bool>>, BackendError> {
        let _ = selection;
        Ok(None)
    }

    /// Runs a program that this backend compiled.
    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError>;

    /// As [`Queue::run`], and takes the time of each step for [`Program::step_times`], if the backend can.
    fn run_timed(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.run(program)
    }

    /// Records this point of the queue in an event of the same backend.
    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError>;

    /// Lets later commands of this queue wait for an event of any backend. (The host may have to wait for an event of
    /// another backend, where the devices cannot do it among themselves.)
    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError>;

    /// Waits until all commands of this queue are done; an error if one of them failed.
    fn synchronize(&mut self) -> Result<(), BackendError>;
}

/// [`Queue::load_slice`] of a plain weight: a copy within the backend's memory.
pub fn copy_plain_slice<Q: Queue + ?Sized>(
    queue: &mut Q,
    index: usize,
    from: &Region,
    to: &Region,
) -> Result<(), BackendError> {
    let slice = to.part(index.saturating_mul(from.bytes), from.bytes)?;
    match queue.copy(from, &slice)? {
        true => Ok(()),
        false => Err(no_slice(to, "it cannot copy within its memory")),
    }
}

fn no_slice(to: &Region, reason: &str) -> BackendError {
    let (backend, what) = (to.buffer.backend().to_owned(), "writing a slice of a weight");
    BackendError::Failed { backend, what, reason: reason.to_owned() }
}

/// Why a backend does not compute a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(pub Cow<'static, str>);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A device that owns memory and runs compiled parts of graphs.
///
/// The example `own_backend` of the crate `quadriga` is the smallest implementation, `quadriga_sim` a complete one;
/// `quadriga_cpu` is a synchronous one that reads weights in the file map, `quadriga_cuda` an asynchronous one with
/// streams, events and pinned memory. An implementation is tested with the cases of `quadriga_conformance`.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::Backend;
///
/// let g = GraphBuilder::new();
/// g.output("y", g.input("x", DType::F32, [8]).silu());
/// let graph = g.finish()?;
///
/// let cpu = quadriga_cpu::Backend::new()?;
/// assert_eq!(cpu.name(), "cpu");
/// assert!(graph.node_ids().all(|node| cpu.supports(&graph, node).is_ok()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Backend: Send + Sync {
    /// The device's name in messages and plans: `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// Facts about the device at this moment.
    fn device(&self) -> Device;

    /// What tells the device apart from all others of its machine, the same in every process that uses it. [default: `None`, as for one
    /// that only this process has]
    fn identity(&self) -> Option<String> {
        None
    }

    /// Bytes of this process's allocations that [`Device::free_bytes`] still counts as free, since nothing was written there
    /// yet. [default: none]
    fn reserved_bytes(&self) -> u64 {
        0
    }

    /// Rates to assume as long as nothing was measured. [default: those of its kind]
    fn nominal_rates(&self) -> Rates {
        Rates::assumed(self.device().kind)
    }

    /// The properties of its memory.
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

    /// Host memory for transfers to and from this device; pinned, where there is such memory.
    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError>;

    /// A read-only buffer over bytes with another owner, such as a file map: nothing is copied and nothing freed. `None`
    /// if this backend cannot use such memory.
    fn map(&self, data: &Data) -> Option<Arc<dyn Buffer>> {
        let _ = data;
        None
    }

    /// Lets this device access another backend's host memory directly in transfers for as long as the result is kept, for
    /// instance by locking its pages. `None` where there is nothing to do.
    fn lock(&self, buffer: &Arc<dyn Buffer>) -> Option<Box<dyn Any + Send + Sync>> {
        let _ = buffer;
        None
    }

    /// Whether [`Queue::copy`] of this backend copies between its own memory and that of another backend; if neither reaches
    /// the other, copies between them need staging memory, which plans forecast. [default: if the host can address the
    /// other's memory]
    fn reaches(&self, other: &dyn Backend) -> bool {
        other.memory().host
    }

    /// The layout in which this backend holds a weight with these uses: each operation with the number of the input that
    /// the weight is. The backend computes every operation that it supports from any layout that it returns. Weights
    /// that are read through views are always plain; this is not called for them.
    fn weight_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let _ = uses;
        WeightLayout { layout: Layout::Plain, bytes: self.storage_bytes(weight), mappable: true }
    }

    /// The layout in which queues of this backend [copy slices](Queue::copy_slices) of a streamed weight with these uses.
    /// [default: plain]
    fn streamed_layout(&self, weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
        let _ = uses;
        WeightLayout { layout: Layout::Plain, bytes: self.storage_bytes(weight), mappable: false }
    }

    /// Writes a weight's bytes, given as the file has them, to a region in one of the backend's layouts.
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

    /// Called for each tensor when it has been given memory, before anything is written there.
    fn placed(&self, tensor: &Tensor, region: &Region) -> Result<(), BackendError> {
        let _ = (tensor, region);
        Ok(())
    }

    /// Called for each tensor before its memory is released.
    fn released(&self, tensor: &Tensor, region: &Region) {
        let _ = (tensor, region);
    }

    /// The scratch memory that a program of these nodes needs. The program gets it as [`SplitSource::scratch`]; it is in
    /// the arena while the split runs, and counted in a plan's bytes.
    fn scratch_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        let _ = (graph, nodes);
        0
    }

    /// The work memory that the backend keeps outside of arenas for programs of these nodes. All programs of the backend
    /// share it; it is counted in a plan's bytes.
    fn work_bytes(&self, graph: &Graph, nodes: &[NodeId]) -> usize {
        let _ = (graph, nodes);
        0
    }

    /// Whether it computes a node; if not, the reason.
    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal>;

    /// Whether it executes collectives with these ranks, if it [supports](Backend::supports) them; if not, the reason. `None` stands
    /// for ranks that are planned, and not there. [default: no]
    fn exchanges(&self, ranks: Option<&dyn RankGroup>) -> Result<(), Refusal> {
        let _ = ranks;
        Err(Refusal("it does not exchange data with other ranks".into()))
    }

    /// Lets this device exchange data with those of other ranks by itself; all ranks of the group call this. Returns the ranks that
    /// collectives are executed with on this device, and elsewhere as before; `None` where the host exchanges data. [default: none]
    fn join_ranks(&self, ranks: &Arc<dyn RankGroup>) -> Result<Option<Arc<dyn RankGroup>>, BackendError> {
        let _ = ranks;
        Ok(None)
    }

    /// Compiles nodes into a program that can be run many times.
    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError>;

    /// A new queue.
    fn queue(&self) -> Result<Box<dyn Queue>, BackendError>;

    /// A new event, which counts as done. Only events with `timing` have times.
    fn event(&self, timing: bool) -> Result<Arc<dyn Event>, BackendError>;
}

impl fmt::Debug for dyn Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "backend {}", self.name())
    }
}
