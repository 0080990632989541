//! The input of the planner: a graph, the backends of its tensors, and the steps of its nodes.

use quadriga_graph::{Graph, Tensor, TensorId};

use super::lifetime::Lifetime;
use super::packing::Effort;
use crate::{Backend, MemoryFacts};

/// The properties of one backend's memory that planning needs. Nothing is allocated.
#[derive(Clone, Copy)]
pub struct BackendMemory<'a> {
    /// The backend's name.
    pub name: &'a str,
    /// Alignment and the largest buffer.
    pub facts: MemoryFacts,
    backend: Option<&'a dyn Backend>,
}

impl<'a> BackendMemory<'a> {
    /// The memory of a backend, which may pad each tensor.
    pub fn of(backend: &'a dyn Backend) -> BackendMemory<'a> {
        BackendMemory { name: backend.name(), facts: backend.memory(), backend: Some(backend) }
    }

    /// Memory without a backend, to measure how much a graph needs: no tensor is padded.
    pub fn measuring(name: &'a str, alignment: usize, max_buffer: Option<usize>) -> BackendMemory<'a> {
        BackendMemory { name, facts: MemoryFacts { alignment, max_buffer, host: false }, backend: None }
    }

    /// Bytes to allocate for a tensor's storage, backend padding included.
    pub fn storage_bytes(&self, tensor: &Tensor) -> u64 {
        self.backend.map_or(0, |backend| backend.storage_bytes(tensor)).max(tensor.bytes()) as u64
    }

    /// Whether tensors may be padded.
    pub(crate) fn pads(&self) -> bool {
        self.backend.is_some()
    }
}

/// Whether an input's memory may be reused after its last reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InputPolicy {
    /// It is kept, so that a run may use the previous run's input.
    #[default]
    Keep,
    /// It is reused for other tensors, or overwritten in place: the caller sets every input before every run.
    Release,
}

/// Extends the lifetime of a tensor beyond its readers in the graph: a copy to another backend, or another backend's
/// queue that runs behind, still reads it.
///
/// A node that reads a tensor of another backend reads a copy of it. Such a read counts at the node's own step, unless
/// the tensor has a hold: then the hold alone decides how long the original is live.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hold {
    /// The tensor.
    pub tensor: TensorId,
    /// The last step at which it is live.
    pub until: u32,
}

/// Memory that is not a tensor of the graph: a copy of a tensor on another backend, a second bank of an input, or a
/// split's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extra {
    /// The index of the backend.
    pub backend: u16,
    /// Bytes, backend padding included.
    pub bytes: u64,
    /// The steps in which it is live; [`Lifetime::WHOLE`] for the whole run.
    pub lifetime: Lifetime,
}

/// A graph to plan, and where and when it runs. All fields but the first two are optional.
#[derive(Clone, Copy)]
pub struct MemoryRequest<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The memory of each backend; a backend's index is its index here.
    pub memories: &'a [BackendMemory<'a>],
    /// For each tensor the index of its backend: the placement of a leaf, the backend that runs a result's node. For a
    /// view the entry is ignored: it is on the backend of its storage. Empty: all on backend 0.
    pub backends: &'a [u16],
    /// For each node the step it runs in: nodes of one step may run concurrently, and memory is reused only between
    /// steps. Empty: each node is a step of its own, in the graph's order. See
    /// [`barrier_steps`](super::barrier_steps).
    pub steps: &'a [u32],
    /// Tensors that are live longer than the graph says.
    pub holds: &'a [Hold],
    /// Memory to plan beside the graph's tensors.
    pub extras: &'a [Extra],
    /// Inputs and results that have memory already: they, and all tensors in their storage, are not planned.
    pub external: &'a [TensorId],
    /// Whether the memory of inputs may be reused.
    pub inputs: InputPolicy,
    /// How much search to spend on the packing.
    pub effort: Effort,
}

impl<'a> MemoryRequest<'a> {
    /// A request with defaults: one backend, the graph's order, inputs kept, [`Effort::Fast`].
    pub fn new(graph: &'a Graph, memories: &'a [BackendMemory<'a>]) -> MemoryRequest<'a> {
        MemoryRequest {
            graph,
            memories,
            backends: &[],
            steps: &[],
            holds: &[],
            extras: &[],
            external: &[],
            inputs: InputPolicy::Keep,
            effort: Effort::Fast,
        }
    }

    /// The backend of a tensor that is no view.
    pub(crate) fn backend(&self, tensor: usize) -> u16 {
        self.backends.get(tensor).copied().unwrap_or(0)
    }

    /// The step of a node.
    pub(crate) fn step(&self, node: usize) -> u32 {
        if self.steps.is_empty() { node as u32 } else { self.steps.get(node).copied().unwrap_or(0) }
    }
}
