//! Settling the borders: a node that followed its source moves over to its readers where that saves copying.
//!
//! The typical case is the first node of a layer, a norm of the residual stream: it stays with the stream it reads, but
//! the stream itself is needed on the other side too. Moved over, it reads the copy that is made anyway.
#![expect(clippy::indexing_slicing, reason = "arrays are sized for the graph's tensors")]

use quadriga_graph::{Graph, Kind, NodeId, TensorId};
use rustc_hash::FxHashSet;

use super::NO_BACKEND;
use super::assign::{Homes, Reason};

/// Who reads a storage, of the nodes seen so far.
#[derive(Clone, Copy, PartialEq)]
enum Readers {
    Nobody,
    Only(u16, u32),
    Several,
}

/// Moves nodes, from the last to the first. `computes` says whether a backend computes a storage.
pub(crate) fn settle(
    graph: &Graph,
    homes: &mut Homes,
    written: impl Fn(TensorId) -> bool,
    computes: impl Fn(TensorId, u16) -> bool,
) {
    let mut readers = vec![Readers::Nobody; graph.tensors().len()];
    let mut read_remotely: FxHashSet<(TensorId, u16)> = FxHashSet::default();
    for (_, output) in graph.outputs() {
        readers[graph[*output].storage().index()] = Readers::Several;
    }
    for index in (0..graph.nodes().len()).rev() {
        let node = NodeId::from_index(index);
        if graph[node].op().is_view() {
            continue;
        }
        let output = graph[node].output();
        let storage = graph[output].storage();
        let home = homes.home[storage.index()];
        let follows = matches!(homes.reason[storage.index()], Reason::FollowsSource { .. });
        if let Readers::Only(there, reader) = readers[storage.index()]
            && there != home
            && follows
            && storage == output
            && !written(storage)
        {
            // What would have to be copied then, beyond what is copied anyway.
            let brought = |input: &&TensorId| {
                let source = graph[**input].storage();
                let moves = matches!(graph[source].kind(), Kind::Computed(_) | Kind::State);
                moves && homes.home[source.index()] != there && !read_remotely.contains(&(source, there))
            };
            let then: usize =
                graph.inputs(node).iter().filter(brought).map(|input| graph[*input].bytes()).sum();
            if then < graph[output].bytes() && computes(storage, there) {
                homes.home[storage.index()] = there;
                homes.reason[storage.index()] = Reason::SavesCopy { node: reader as usize };
            }
        }
        let home = homes.home[storage.index()];
        for input in graph.inputs(node) {
            let source = graph[*input].storage();
            let now = &mut readers[source.index()];
            *now = match *now {
                Readers::Nobody => Readers::Only(home, index as u32),
                Readers::Only(other, _) if other == home => Readers::Only(home, index as u32),
                _ => Readers::Several,
            };
            if homes.home[source.index()] != home && homes.home[source.index()] != NO_BACKEND {
                read_remotely.insert((source, home));
            }
        }
    }
}
