//! Who computes what from what: the graph as scheduling sees it, in two flat arrays that are walked several times.
//!
//! Views compute nothing and are left out; what they look at stands in their place.
#![expect(clippy::indexing_slicing, reason = "ids are the graph's own")]

use quadriga_graph::{Graph, Kind, NodeId, TensorId};

/// Something that computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker {
    pub(crate) node: NodeId,
    /// The storage that it writes.
    pub(crate) storage: TensorId,
    /// Whether the storage was there before, and is not its own.
    pub(crate) overwrites: bool,
    /// Its sources are `first..` up to the next one's.
    first: u32,
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) tensor: TensorId,
    /// The storage it lies in.
    pub(crate) storage: TensorId,
    /// Where the storage comes from.
    pub(crate) kind: Kind,
}

/// The graph without its views.
#[derive(Debug)]
pub(crate) struct Flow {
    makers: Vec<Maker>,
    sources: Vec<Source>,
}

impl Flow {
    pub(crate) fn of(graph: &Graph) -> Flow {
        let mut makers = Vec::with_capacity(graph.nodes().len() + 1);
        let mut sources = Vec::with_capacity(3 * graph.nodes().len());
        for (node, n) in graph.node_ids().zip(graph.nodes()) {
            if n.op().is_view() {
                continue;
            }
            let storage = graph[n.output()].storage();
            makers.push(Maker {
                node,
                storage,
                overwrites: storage != n.output(),
                first: sources.len() as u32,
            });
            sources.extend(graph.inputs(node).iter().map(|&tensor| {
                let storage = graph[tensor].storage();
                Source { tensor, storage, kind: graph[storage].kind() }
            }));
        }
        Flow { makers, sources }
    }

    /// All that computes, in execution order.
    pub(crate) fn makers(&self) -> &[Maker] {
        &self.makers
    }

    /// What the maker at a place reads.
    pub(crate) fn sources(&self, place: usize) -> &[Source] {
        let end = self.makers.get(place + 1).map_or(self.sources.len(), |next| next.first as usize);
        &self.sources[self.makers[place].first as usize..end]
    }

    /// Each maker with what it reads.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (Maker, &[Source])> {
        self.makers.iter().enumerate().map(|(place, maker)| (*maker, self.sources(place)))
    }
}

impl Source {
    /// Whether it must be copied to be read on another backend; other leaves are wherever they are read.
    pub(crate) fn moves(&self) -> bool {
        matches!(self.kind, Kind::Computed(_) | Kind::State)
    }

    /// One past the node that made its storage; 0 for leaves.
    pub(crate) fn made(&self) -> usize {
        match self.kind {
            Kind::Computed(node) => node.index() + 1,
            _ => 0,
        }
    }
}
