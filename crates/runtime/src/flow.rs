//! The dataflow of a graph, read once into flat arrays that planning walks many times.
//!
//! Views compute nothing and have no producer; as inputs they stand for the storage that they look at.
#![expect(clippy::indexing_slicing, reason = "ids are the graph's own, and arrays are sized for its tensors")]

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};

/// A node that computes something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Producer {
    pub(crate) node: NodeId,
    /// The storage that it writes.
    pub(crate) storage: TensorId,
    /// Whether it writes into the storage of another tensor.
    pub(crate) overwrites: bool,
    /// Whether it is a matmul or attention, which nearly all of a model's work is.
    pub(crate) heavy: bool,
    /// Its inputs are `first..end` of all inputs.
    first: u32,
    end: u32,
}

/// A tensor that a producer reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowInput {
    pub(crate) tensor: TensorId,
    /// The storage that the tensor is in.
    pub(crate) storage: TensorId,
    /// The kind of the storage.
    pub(crate) kind: TensorKind,
}

/// A result that its operation can compute in the memory of an input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InPlaceCandidate {
    pub(crate) node: NodeId,
    pub(crate) result: TensorId,
    pub(crate) input: TensorId,
}

/// A tensor in the storage of another: a view, or the result of a write into it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alias {
    pub(crate) tensor: TensorId,
    pub(crate) storage: TensorId,
    /// Bytes from the start of the storage.
    pub(crate) offset: u64,
}

/// A graph in flat arrays.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flow {
    /// For each tensor the one that owns its storage.
    pub(crate) storage: Vec<TensorId>,
    /// For each tensor its kind.
    pub(crate) kind: Vec<TensorKind>,
    /// For each tensor its bytes.
    pub(crate) bytes: Vec<u64>,
    /// The computed tensors that do not own their storage, by id.
    pub(crate) aliases: Vec<Alias>,
    /// The tensors that no node computes.
    pub(crate) leaves: Vec<(TensorId, TensorKind)>,
    /// In execution order.
    pub(crate) in_place: Vec<InPlaceCandidate>,
    /// Each storage that a node other than its producer writes, with that node; sorted.
    pub(crate) writers: Vec<(TensorId, NodeId)>,
    producers: Vec<Producer>,
    inputs: Vec<FlowInput>,
}

impl Flow {
    /// Reads a graph into the memory of the one read before.
    pub(crate) fn read(&mut self, graph: &Graph) {
        let tensors = graph.tensors();
        self.leaves.clear();
        self.aliases.clear();
        // The loop below overwrites every element of these.
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
                self.aliases.push(Alias { tensor: id, storage: *storage, offset: tensor.offset() as u64 });
            }
        }
        self.producers.clear();
        self.inputs.clear();
        self.in_place.clear();
        self.writers.clear();
        let Flow { storage, kind, producers, inputs, .. } = self;
        for (node, n) in graph.node_ids().zip(graph.nodes()) {
            if n.op().is_view() {
                continue;
            }
            let (result, operands) = (n.output(), graph.inputs(node));
            let first = inputs.len() as u32;
            inputs.extend(operands.iter().map(|&tensor| {
                let storage = storage[tensor.index()];
                FlowInput { tensor, storage, kind: kind[storage.index()] }
            }));
            let (storage, end) = (storage[result.index()], inputs.len() as u32);
            let heavy = matches!(
                n.op(),
                Op::MulMat | Op::MulMatId | Op::MulMatSparse { .. } | Op::AxpySparse | Op::Attention(_)
            );
            producers.push(Producer { node, storage, overwrites: storage != result, heavy, first, end });
            if storage != result {
                self.writers.push((storage, node));
            }
            for input in n.in_place_inputs().filter_map(|input| operands.get(input)) {
                self.in_place.push(InPlaceCandidate { node, result, input: *input });
            }
        }
        self.writers.sort_unstable();
    }

    /// All producers, in execution order.
    pub(crate) fn producers(&self) -> &[Producer] {
        &self.producers
    }

    /// The inputs of the producer with this number.
    pub(crate) fn inputs(&self, number: usize) -> &[FlowInput] {
        self.inputs_of(&self.producers[number])
    }

    fn inputs_of(&self, producer: &Producer) -> &[FlowInput] {
        &self.inputs[producer.first as usize..producer.end as usize]
    }

    /// The nodes that write a storage, except its producer.
    pub(crate) fn writers_of(&self, storage: TensorId) -> impl Iterator<Item = NodeId> + '_ {
        let first = self.writers.partition_point(|(written, _)| *written < storage);
        let from_there = self.writers.iter().skip(first);
        from_there.take_while(move |(written, _)| *written == storage).map(|(_, node)| *node)
    }

    /// Each producer with its inputs, in execution order.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (Producer, &[FlowInput])> {
        self.producers.iter().map(|producer| (*producer, self.inputs_of(producer)))
    }

    /// The states, in the order they were declared.
    pub(crate) fn states(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.leaves.iter().filter(|(_, kind)| *kind == TensorKind::State).map(|(leaf, _)| *leaf)
    }
}

impl FlowInput {
    /// Whether another backend must copy it to read it. Other leaves are on every backend that reads them.
    pub(crate) fn is_copied(&self) -> bool {
        matches!(self.kind, TensorKind::Computed(_) | TensorKind::State)
    }

    /// One past the node that computes its storage; 0 for leaves.
    pub(crate) fn produced(&self) -> usize {
        match self.kind {
            TensorKind::Computed(node) => node.index() + 1,
            _ => 0,
        }
    }
}
