//! What is asked of the planner: a graph, where its tensors are, and when its nodes run.

use quadriga_graph::{Graph, Tensor, TensorId};

use super::lifetimes::Lifetime;
use super::packing::Effort;
use crate::{Backend, MemoryFacts};

/// The memory of one backend, as far as planning needs to know it. No memory is touched.
#[derive(Clone, Copy)]
pub struct Memory<'a> {
    /// The backend's name.
    pub name: &'a str,
    /// Alignment and the largest buffer.
    pub facts: MemoryFacts,
    backend: Option<&'a dyn Backend>,
}

impl<'a> Memory<'a> {
    /// The memory of a backend, which decides how many bytes each tensor takes.
    pub fn of(backend: &'a dyn Backend) -> Memory<'a> {
        Memory { name: backend.name(), facts: backend.memory(), backend: Some(backend) }
    }

    /// Memory that need not exist: every tensor takes its own bytes.
    pub fn measuring(name: &'a str, alignment: usize, max_buffer: Option<usize>) -> Memory<'a> {
        Memory { name, facts: MemoryFacts { alignment, max_buffer, host: false }, backend: None }
    }

    /// Bytes to allocate for a tensor's storage; never less than the tensor's own.
    pub fn storage_bytes(&self, tensor: &Tensor) -> u64 {
        self.backend.map_or(0, |backend| backend.storage_bytes(tensor)).max(tensor.bytes()) as u64
    }

    /// Whether tensors may take more than their own bytes.
    pub(crate) fn pads(&self) -> bool {
        self.backend.is_some()
    }
}

/// What becomes of an input's memory after its last reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Inputs {
    /// It stays, so that a run may use the input of the run before.
    #[default]
    Keep,
    /// It is used for other tensors, or overwritten in place: the caller sets every input before every run.
    Release,
}

/// A tensor that is still in use at a step, beyond what the graph says: by a copy to another backend, or by a lane that
/// may be behind.
///
/// A node that reads a tensor of another backend reads a copy of it. Such a read counts at the node's own step, unless
/// the tensor has a hold: then the hold says how long the original is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hold {
    /// The tensor.
    pub tensor: TensorId,
    /// The last step at which it is in use.
    pub until: u32,
}

/// Memory that is not a tensor of the graph, such as the copy of a tensor on another backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extra {
    /// The number of the backend.
    pub backend: u16,
    /// Bytes, backend padding included.
    pub bytes: u64,
    /// When it is needed; [`Lifetime::WHOLE`] for all of the run.
    pub lifetime: Lifetime,
}

/// What to plan. The fields beyond the first two are optional: empty slices mean what they say.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The backends' memories; backends are numbered by their place here.
    pub memories: &'a [Memory<'a>],
    /// For each tensor the number of its backend: of a leaf, where it lives; of a result, where its node runs. A view is
    /// where its storage is, whatever stands here. Empty: all on backend 0.
    pub backends: &'a [u16],
    /// For each node the step it runs in: nodes of one step may run at the same time, and memory changes hands only
    /// between steps. Empty: each node is a step of its own, in the graph's order. See
    /// [`barrier_steps`](super::barrier_steps).
    pub steps: &'a [u32],
    /// Tensors that are in use longer than the graph says.
    pub holds: &'a [Hold],
    /// Further memory to plan for.
    pub extras: &'a [Extra],
    /// Inputs and results that have memory already: they, and what shares their storage, are left alone.
    pub placed: &'a [TensorId],
    /// What becomes of inputs.
    pub inputs: Inputs,
    /// How hard to try.
    pub effort: Effort,
}

impl<'a> Request<'a> {
    /// A request with all else at its default: one backend, the graph's order, inputs kept, little effort.
    pub fn new(graph: &'a Graph, memories: &'a [Memory<'a>]) -> Request<'a> {
        Request {
            graph,
            memories,
            backends: &[],
            steps: &[],
            holds: &[],
            extras: &[],
            placed: &[],
            inputs: Inputs::Keep,
            effort: Effort::Fast,
        }
    }

    /// The backend of a tensor that owns its storage, or on which a tensor's node runs.
    pub(crate) fn backend(&self, tensor: usize) -> u16 {
        self.backends.get(tensor).copied().unwrap_or(0)
    }

    /// The step of a node.
    pub(crate) fn step(&self, node: usize) -> u32 {
        if self.steps.is_empty() { node as u32 } else { self.steps.get(node).copied().unwrap_or(0) }
    }
}
