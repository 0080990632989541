//! Settling the borders: a node that followed its source moves over to its readers where that saves copying.
//!
//! The typical case is the first node of a layer, a norm of the residual stream: it stays with the stream it reads, but
//! the stream itself is needed on the other side too. Moved over, it reads the copy that is made anyway.
#![expect(clippy::indexing_slicing, reason = "arrays are sized for the graph's tensors")]

use quadriga_graph::{Graph, TensorId};
use rustc_hash::FxHashSet;

use super::NO_BACKEND;
use super::assign::{Homes, Reason};
use crate::flow::{Flow, Source};

/// Instead of a backend: several of them.
const SEVERAL: u16 = NO_BACKEND - 1;

/// Moves nodes, from the last to the first. `computes` says whether a backend computes a storage.
pub(crate) fn settle(
    graph: &Graph,
    flow: &Flow,
    homes: &mut Homes,
    written: impl Fn(TensorId) -> bool,
    computes: impl Fn(TensorId, u16) -> bool,
) {
    // For each storage the backend of those that read it, and the first of them, of the nodes seen so far.
    let mut readers = vec![(NO_BACKEND, 0); flow.storage.len()];
    let mut read_remotely: FxHashSet<(TensorId, u16)> = FxHashSet::default();
    for (_, output) in graph.outputs() {
        readers[flow.storage[output.index()].index()].0 = SEVERAL;
    }
    for (maker, sources) in flow.iter().rev() {
        let storage = maker.storage;
        let home = homes.home[storage.index()];
        let (there, reader) = readers[storage.index()];
        if there != home
            && there < SEVERAL
            && matches!(homes.reason[storage.index()], Reason::FollowsSource { .. })
            && !maker.overwrites
            && !written(storage)
        {
            // What would have to be copied then, beyond what is copied anyway.
            let brought = |source: &&Source| {
                source.moves()
                    && homes.home[source.storage.index()] != there
                    && !read_remotely.contains(&(source.storage, there))
            };
            let bytes = |tensor: TensorId| flow.bytes[tensor.index()];
            let then = sources.iter().filter(brought);
            let then = then.fold(0u64, |sum, source| sum.saturating_add(bytes(source.tensor)));
            if then < bytes(storage) && computes(storage, there) {
                homes.home[storage.index()] = there;
                homes.reason[storage.index()] = Reason::SavesCopy { node: reader as usize };
            }
        }
        let home = homes.home[storage.index()];
        for Source { storage: source, .. } in sources.iter().filter(|source| source.moves()) {
            let (others, first) = &mut readers[source.index()];
            *others = if *others == NO_BACKEND || *others == home { home } else { SEVERAL };
            *first = maker.node.index() as u32;
            if homes.home[source.index()] != home {
                read_remotely.insert((*source, home));
            }
        }
    }
}
