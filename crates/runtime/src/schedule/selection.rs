//! Streamed weights of which a run reads selected slices: the matrices of the experts that a batch uses.
//!
//! Which experts those are is known on the device once the router has run there. So the copy of such a weight waits for
//! the split that computes the indices, and the device copies what they select (`Queue::copy_slices`). Before that,
//! while the split runs, the device may copy what it expects to be selected (`Queue::prefetch_slices`).

use quadriga_graph::{DType, Graph, Op, TensorId, TensorKind};
use rustc_hash::{FxHashMap, FxHashSet};

/// The streamed weights of which selected slices are read.
pub(super) struct SliceReads {
    /// For each weight the indices; `None` if nodes read other slices, too.
    ids: FxHashMap<TensorId, Option<TensorId>>,
}

impl SliceReads {
    pub(super) fn of(graph: &Graph, streamed: &FxHashSet<TensorId>) -> SliceReads {
        let mut ids: FxHashMap<TensorId, Option<TensorId>> = FxHashMap::default();
        let nodes = graph.node_ids().filter(|_| !streamed.is_empty());
        for node in nodes {
            let inputs = graph.inputs(node);
            for (at, input) in inputs.iter().enumerate().filter(|(_, input)| streamed.contains(input)) {
                let selected = inputs.get(2).copied().filter(|by| {
                    at == 0 && *graph[node].op() == Op::MulMatId && can_select(graph, *input, *by)
                });
                let known = ids.entry(*input).or_insert(selected);
                if *known != selected {
                    *known = None;
                }
            }
        }
        SliceReads { ids }
    }

    /// The indices that select the slices of a weight that are read.
    pub(super) fn ids_of(&self, weight: TensorId) -> Option<TensorId> {
        self.ids.get(&weight).copied().flatten()
    }
}

/// Whether a device can tell from the indices, as they are in memory, which slices of a weight are read.
fn can_select(graph: &Graph, weight: TensorId, ids: TensorId) -> bool {
    let (weight, ids) = (&graph[weight], &graph[ids]);
    let is_computed = matches!(graph[ids.storage()].kind(), TensorKind::Computed(_));
    weight.dims4()[0] == 1
        && weight.is_contiguous()
        && ids.is_contiguous()
        && ids.dtype() == DType::I32
        && is_computed
}

/// Streamed weights from this size on count: norms and biases do not end splits.
const MIN_BYTES: usize = 1 << 20;
/// A split that is the first to read as many bytes of streamed weights ends before the next: a device then computes with
/// some while the others are copied, and has memory for some of them only.
const MAX_SPLIT_BYTES: usize = 32 << 20;

/// The streamed weights that a split is the first to read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamedReads {
    bytes: usize,
    /// What the last of them is multiplied with.
    activations: Option<TensorId>,
}

impl StreamedReads {
    /// Whether the split has too many of them for one more. Matrices that are multiplied with the same activations (those
    /// of query, key and value, or of gate and up) stay together, so that a backend can fuse their products.
    pub(super) fn is_full(&self, bytes: usize, activations: Option<TensorId>) -> bool {
        let same = activations.is_some() && activations == self.activations;
        bytes >= MIN_BYTES && self.bytes >= MAX_SPLIT_BYTES && !same
    }

    pub(super) fn add(&mut self, bytes: usize, activations: Option<TensorId>) {
        if bytes >= MIN_BYTES {
            (self.bytes, self.activations) = (self.bytes.saturating_add(bytes), activations);
        }
    }
}
