//! Who computes what from what: the graph as planning sees it, read once into flat arrays that are walked many times.
//!
//! Views compute nothing and have no maker; as sources they stand with the storage that they look at.
#![expect(clippy::indexing_slicing, reason = "ids are the graph's own, and arrays are sized for its tensors")]

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};

/// Something that computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker {
    pub(crate) node: NodeId,
    /// The storage that it writes.
    pub(crate) storage: TensorId,
    /// Whether the storage was there before, and is not its own.
    pub(crate) overwrites: bool,
    /// Whether it is a product or an attention: of such kind is nearly all of a model's work.
    pub(crate) heavy: bool,
    /// Its sources are `first..end` of all.
    first: u32,
    end: u32,
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) tensor: TensorId,
    /// The storage it lies in.
    pub(crate) storage: TensorId,
    /// Where the storage comes from.
    pub(crate) kind: TensorKind,
}

/// A result that may be computed in the memory of an input, as far as its operation is concerned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Takeover {
    pub(crate) node: NodeId,
    pub(crate) result: TensorId,
    pub(crate) input: TensorId,
}

/// A tensor that lies in the storage of another: a view, or a result that was written into it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lodger {
    pub(crate) tensor: TensorId,
    pub(crate) storage: TensorId,
    /// Where in the storage it begins.
    pub(crate) offset: u64,
}

/// A graph in flat arrays.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flow {
    /// For each tensor the one that owns its storage.
    pub(crate) storage: Vec<TensorId>,
    /// For each tensor where it comes from.
    pub(crate) kind: Vec<TensorKind>,
    /// For each tensor its bytes.
    pub(crate) bytes: Vec<u64>,
    /// All that does not own its storage, in the order of the tensors.
    pub(crate) lodgers: Vec<Lodger>,
    /// The tensors that no node computes, and what they are.
    pub(crate) leaves: Vec<(TensorId, TensorKind)>,
    /// In execution order.
    pub(crate) takeovers: Vec<Takeover>,
    /// The storages that nodes write into that did not make them, with those nodes; sorted.
    pub(crate) writers: Vec<(TensorId, NodeId)>,
    makers: Vec<Maker>,
    sources: Vec<Source>,
}

impl Flow {
    /// Reads a graph; what was read before is forgotten, its memory used again.
    pub(crate) fn read(&mut self, graph: &Graph) {
        let tensors = graph.tensors();
        self.leaves.clear();
        self.lodgers.clear();
        // All that these hold from before is overwritten.
        self.storage.resize(tensors.len(), TensorId::from_index(0));
        self.kind.resize(tensors.len(), TensorKind::Input);
        self.bytes.resize(tensors.len(), 0);
        let arrays = self.storage.iter_mut().zip(&mut self.kind).zip(&mut self.bytes);
        for ((id, tensor), ((storage, kind), bytes)) in graph.tensor_ids().zip(tensors).zip(arrays) {
            *storage = tensor.storage();
            *kind = tensor.kind();
            *bytes = tensor.bytes() as u64;
            if !matches!(*kind, TensorKind::Computed(_)) {
                self.leaves.push((id, *kind));
            } else if *storage != id {
                self.lodgers.push(Lodger { tensor: id, storage: *storage, offset: tensor.offset() as u64 });
            }
        }
        self.makers.clear();
        self.sources.clear();
        self.takeovers.clear();
        self.writers.clear();
        let Flow { storage, kind, makers, sources, .. } = self;
        for (node, n) in graph.node_ids().zip(graph.nodes()) {
            if n.op().is_view() {
                continue;
            }
            let (result, inputs) = (n.output(), graph.inputs(node));
            let first = sources.len() as u32;
            sources.extend(inputs.iter().map(|&tensor| {
                let storage = storage[tensor.index()];
                Source { tensor, storage, kind: kind[storage.index()] }
            }));
            let (storage, end) = (storage[result.index()], sources.len() as u32);
            let heavy = matches!(n.op(), Op::MulMat | Op::MulMatId | Op::Attention(_));
            makers.push(Maker { node, storage, overwrites: storage != result, heavy, first, end });
            if storage != result {
                self.writers.push((storage, node));
            }
            for input in n.in_place_inputs().filter_map(|input| inputs.get(input)) {
                self.takeovers.push(Takeover { node, result, input: *input });
            }
        }
        self.writers.sort_unstable();
    }

    /// All that computes, in execution order.
    pub(crate) fn makers(&self) -> &[Maker] {
        &self.makers
    }

    /// What the maker at a place reads.
    pub(crate) fn sources(&self, place: usize) -> &[Source] {
        self.sources_of(&self.makers[place])
    }

    fn sources_of(&self, maker: &Maker) -> &[Source] {
        &self.sources[maker.first as usize..maker.end as usize]
    }

    /// The nodes that write into a storage that they did not make.
    pub(crate) fn writers_of(&self, storage: TensorId) -> impl Iterator<Item = NodeId> + '_ {
        let first = self.writers.partition_point(|(written, _)| *written < storage);
        let from_there = self.writers.iter().skip(first);
        from_there.take_while(move |(written, _)| *written == storage).map(|(_, node)| *node)
    }

    /// Each maker with what it reads.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (Maker, &[Source])> {
        self.makers.iter().map(|maker| (*maker, self.sources_of(maker)))
    }

    /// The states, in the order they were declared.
    pub(crate) fn states(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.leaves.iter().filter(|(_, kind)| *kind == TensorKind::State).map(|(leaf, _)| *leaf)
    }
}

impl Source {
    /// Whether it must be copied to be read on another backend; other leaves are wherever they are read.
    pub(crate) fn moves(&self) -> bool {
        matches!(self.kind, TensorKind::Computed(_) | TensorKind::State)
    }

    /// One past the node that made its storage; 0 for leaves.
    pub(crate) fn made(&self) -> usize {
        match self.kind {
            TensorKind::Computed(node) => node.index() + 1,
            _ => 0,
        }
    }
}
