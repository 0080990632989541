//! Splits and copies: what a graph is cut into.

use quadriga_graph::{NodeId, TensorId};
use rustc_hash::FxHashMap;
use serde::Serialize;

/// Nodes that one backend runs as one program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Split {
    /// The backend's number.
    pub backend: usize,
    /// Its nodes are `first_node..first_node + node_count` of [`Splits::nodes`].
    pub first_node: usize,
    /// How many nodes it has.
    pub node_count: usize,
    /// The copies that it is the first to read.
    pub inputs: Vec<usize>,
    /// Copies that must be done before it starts although it does not read them: of storages that it overwrites, or
    /// whose source it lets go.
    pub after_copies: Vec<usize>,
    /// Splits of other backends that must be done before it starts: those before a barrier of the graph, and that of the
    /// previous collective.
    pub after_splits: Vec<usize>,
}

/// Bytes that are copied from one backend to another once in each run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Copy {
    /// The tensor that is read, by index; the first of those that share the copy.
    pub tensor: usize,
    /// The tensor that owns the storage, by index.
    pub storage: usize,
    /// The first byte within the storage.
    pub offset: usize,
    /// How many bytes.
    pub bytes: usize,
    /// The backend that holds the tensor.
    pub from: usize,
    /// The backend that reads the copy.
    pub to: usize,
    /// The split that computes them; `None` if they are there before the run, as states and weights are.
    pub source: Option<usize>,
    /// The first split that reads them.
    pub reader: usize,
    /// The split of the reading lane that must be done before the copy may start, because other tensors used its memory
    /// before; `None`: the lane's part of the previous run.
    pub after: Option<usize>,
    /// The last node that reads it.
    pub last_node: usize,
    /// Of a streamed weight of which nodes read selected slices only: the indices that select them. `bytes` are the most
    /// that are copied then.
    pub selected_by: Option<CopySelection>,
}

/// The indices that select the slices of which a copy is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CopySelection {
    /// The tensor of indices, by index; it is on the backend that reads the copy.
    pub ids: usize,
    /// The split that computes them, which the copy waits for.
    pub computed_by: usize,
}

impl Copy {
    /// Whether slices may be copied before it is known which are selected: when the memory is free earlier.
    pub fn is_prefetched(&self) -> bool {
        self.selected_by.is_some_and(|selection| self.after.is_none_or(|after| after < selection.computed_by))
    }
}

/// A weight, constant or input, and a backend that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LeafUse {
    /// The tensor, by index.
    pub tensor: usize,
    /// The backend.
    pub backend: usize,
    /// Whether some of it is read through views.
    pub viewed: bool,
}

/// A graph, cut into splits.
#[derive(Clone, Debug, Default)]
pub struct Splits {
    /// All splits; each waits only for earlier ones.
    pub splits: Vec<Split>,
    /// The nodes of all splits, one after the other.
    pub nodes: Vec<NodeId>,
    /// All copies.
    pub copies: Vec<Copy>,
    /// The leaves, each with a backend that reads it.
    pub leaves: Vec<LeafUse>,
    /// For each backend its splits, in order.
    pub lanes: Vec<Vec<u32>>,
    /// For each node its split; `u32::MAX` for views.
    pub split_of_node: Vec<u32>,
    /// Nodes that write a state and are repeated on another backend's copy of it, in order, each with the split that
    /// repeats it.
    pub mirrored_writes: Vec<(NodeId, usize)>,
    /// For each split and backend: one past the highest split of that backend known to be done when it starts.
    pub(crate) done: Vec<u32>,
    /// For each lane and each remote tensor it reads: the copy.
    pub(crate) copy_of: FxHashMap<(u32, u16), u32>,
    /// Tensors read through a copy, with it.
    pub(crate) remote_reads: Vec<(TensorId, u32)>,
    /// Copies that a later split of their source's lane waits for, so that their source can be let go.
    pub(crate) released: FxHashMap<u32, u32>,
}

impl Splits {
    /// Whether a split repeats, on a copy, a node that writes a state of another backend.
    pub fn is_mirrored_write(&self, node: NodeId, split: usize) -> bool {
        self.mirrored_writes.binary_search(&(node, split)).is_ok()
    }

    /// The nodes of a split.
    pub fn nodes_of(&self, split: usize) -> &[NodeId] {
        self.splits
            .get(split)
            .map_or(&[], |s| self.nodes.get(s.first_node..s.first_node + s.node_count).unwrap_or(&[]))
    }

    /// For each backend: one past the highest of its splits known to be done when a split starts.
    pub(crate) fn done_before(&self, split: usize) -> &[u32] {
        let lanes = self.lanes.len();
        self.done.get(split * lanes..(split + 1) * lanes).unwrap_or(&[])
    }
}
