//! Boundary refinement: a node that was assigned to the backend of its input moves to the backend of its readers where that saves copying.
//!
//! The typical case is the first node of a layer, a norm of the residual stream: it is assigned to the backend of the
//! stream, but the next backend needs the stream too. Moved there, the norm reads the copy that is made anyway.
#![expect(clippy::indexing_slicing, reason = "arrays are sized for the graph's tensors")]

use quadriga_graph::{Graph, TensorId};
use rustc_hash::FxHashSet;

use super::placement::{NO_BACKEND, Placements, Reason};
use crate::flow::{Flow, FlowInput};

/// In place of a backend: several.
const SEVERAL: u16 = NO_BACKEND - 1;

/// Moves nodes, from the last to the first. `written` says whether nodes other than its producer write a storage,
/// `computes` whether a backend computes it.
pub(crate) fn settle(
    graph: &Graph,
    flow: &Flow,
    placements: &mut Placements,
    written: impl Fn(TensorId) -> bool,
    computes: impl Fn(TensorId, u16) -> bool,
) {
    // For each storage the backend of its readers and the first reader, among the nodes visited so far.
    let mut readers = vec![(NO_BACKEND, 0); flow.storage.len()];
    let mut read_remotely: FxHashSet<(TensorId, u16)> = FxHashSet::default();
    for (_, output) in graph.outputs() {
        readers[flow.storage[output.index()].index()].0 = SEVERAL;
    }
    for (producer, inputs) in flow.iter().rev() {
        let storage = producer.storage;
        let backend = placements.backend[storage.index()];
        let (there, reader) = readers[storage.index()];
        if there != backend
            && there < SEVERAL
            && matches!(placements.reason[storage.index()], Reason::FollowsSource { .. })
            && !producer.overwrites
            && !written(storage)
        {
            // Inputs that would have to be copied there and are not copied anyway.
            let is_new_copy = |input: &&FlowInput| {
                input.is_copied()
                    && placements.backend[input.storage.index()] != there
                    && !read_remotely.contains(&(input.storage, there))
            };
            let bytes = |tensor: TensorId| flow.bytes[tensor.index()];
            let new_copies = inputs.iter().filter(is_new_copy);
            let copied = new_copies.fold(0u64, |sum, input| sum.saturating_add(bytes(input.tensor)));
            if copied < bytes(storage) && computes(storage, there) {
                placements.backend[storage.index()] = there;
                placements.reason[storage.index()] = Reason::SavesCopy { node: reader as usize };
            }
        }
        let backend = placements.backend[storage.index()];
        for FlowInput { storage: input, .. } in inputs.iter().filter(|input| input.is_copied()) {
            let (others, first) = &mut readers[input.index()];
            *others = if *others == NO_BACKEND || *others == backend { backend } else { SEVERAL };
            *first = producer.node.index() as u32;
            if placements.backend[input.index()] != backend {
                read_remotely.insert((*input, backend));
            }
        }
    }
}
