//! What the checker of schedules follows: versions of storages, and what is known to be done.
#![expect(
    clippy::indexing_slicing,
    reason = "sized for all tensors of a graph, backends and copies of a plan"
)]

use quadriga_graph::{Graph, TensorId};

/// What is done when something starts.
#[derive(Clone)]
pub(super) struct Knowledge {
    /// For each backend one past its last split that is done.
    pub(super) splits: Vec<usize>,
    /// One bit for each copy.
    copies: Vec<u64>,
}

impl Knowledge {
    pub(super) fn new(backends: usize, copies: usize) -> Knowledge {
        Knowledge { splits: vec![0; backends], copies: vec![0; copies.div_ceil(64)] }
    }

    pub(super) fn join(&mut self, other: &Knowledge) {
        for (ours, theirs) in self.splits.iter_mut().zip(&other.splits) {
            *ours = (*ours).max(*theirs);
        }
        for (ours, theirs) in self.copies.iter_mut().zip(&other.copies) {
            *ours |= theirs;
        }
    }

    pub(super) fn has_split(&self, backend: usize, split: usize) -> bool {
        self.splits[backend] > split
    }

    pub(super) fn has_copy(&self, copy: usize) -> bool {
        self.copies[copy / 64] >> (copy % 64) & 1 == 1
    }

    pub(super) fn add_copy(&mut self, copy: usize) {
        self.copies[copy / 64] |= 1 << (copy % 64);
    }
}

/// For each node the version of each storage that it uses: how often the storage is written before it in the graph.
pub(super) fn versions(graph: &Graph) -> Vec<Vec<(TensorId, u32)>> {
    let mut version = vec![0u32; graph.tensors().len()];
    let mut all = Vec::with_capacity(graph.nodes().len());
    for node in graph.node_ids() {
        let output = graph[graph[node].output()].storage();
        let used = graph.inputs(node).iter().map(|input| graph[*input].storage()).chain([output]);
        all.push(used.map(|storage| (storage, version[storage.index()])).collect());
        if !graph[node].op().is_view() {
            version[output.index()] += 1;
        }
    }
    all
}

/// For each node the step of the memory plan that it runs in.
pub(super) fn steps(graph: &Graph) -> Vec<u32> {
    let barriers = graph.barriers();
    graph
        .node_ids()
        .map(|node| match barriers.is_empty() {
            true => node.index() as u32,
            false => barriers.partition_point(|barrier| *barrier <= node) as u32,
        })
        .collect()
}
