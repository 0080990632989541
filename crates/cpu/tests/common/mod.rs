//! Runs graphs on a CPU backend without a session: every tensor at an odd offset, with guard bytes around it.
#![allow(dead_code, reason = "each test uses some of it")]

use std::collections::HashMap;
use std::sync::Arc;

use quadriga_cpu::Backend;
use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};
use quadriga_runtime::{
    Backend as _, BackendError, Buffer, Layout, Program, RankGroups, Region, SplitSource, TensorPlace, Usage,
};

const GUARD: u8 = 0xa5;
const MARGIN: usize = 256;

/// A graph in memory, compiled.
pub(crate) struct Placed<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) backend: &'g Backend,
    buffer: Arc<dyn Buffer>,
    places: HashMap<TensorId, TensorPlace>,
    program: Box<dyn Program>,
}

impl<'g> Placed<'g> {
    /// Gives every storage its own memory and compiles all nodes. `packed` lets the backend pack weights.
    pub(crate) fn new(
        graph: &'g Graph,
        backend: &'g Backend,
        packed: bool,
    ) -> Result<Placed<'g>, BackendError> {
        Placed::with_ranks(graph, backend, packed, RankGroups::NONE)
    }

    /// The same with ranks for collectives.
    pub(crate) fn with_ranks(
        graph: &'g Graph,
        backend: &'g Backend,
        packed: bool,
        ranks: &RankGroups,
    ) -> Result<Placed<'g>, BackendError> {
        let mut offsets = HashMap::new();
        let mut end = MARGIN;
        for (i, id) in graph.tensor_ids().enumerate() {
            let tensor = &graph[id];
            if tensor.storage() != id {
                continue;
            }
            let mut layout = Layout::Plain;
            let mut bytes = tensor.bytes();
            if packed && tensor.kind() == TensorKind::Weight {
                let uses = uses(graph, id);
                let uses: Vec<(&Op, usize)> = uses.iter().map(|(node, i)| (graph[*node].op(), *i)).collect();
                if !uses.iter().any(|(op, _)| op.is_view()) {
                    let chosen = backend.weight_layout(tensor, &uses);
                    (layout, bytes) = (chosen.layout, chosen.bytes);
                }
            }
            // Aligned to the element and no more; block types and packed weights take any address.
            let unit = if tensor.dtype().is_quantized() { 1 } else { tensor.dtype().block_bytes() };
            let offset = (end + MARGIN).next_multiple_of(64) + unit * (1 + 2 * (i % 7));
            offsets.insert(id, (offset, bytes, layout));
            end = offset + bytes;
        }
        let buffer = backend.allocate(end + 2 * MARGIN, Usage::Compute)?;
        buffer.write(0, &vec![GUARD; end + 2 * MARGIN])?;
        let mut places = HashMap::new();
        for id in graph.tensor_ids() {
            let tensor = &graph[id];
            let (offset, bytes, layout) = offsets[&tensor.storage()];
            let region = if layout == Layout::Plain {
                Region::new(Arc::clone(&buffer), offset + tensor.offset(), tensor.bytes())?
            } else {
                Region::new(Arc::clone(&buffer), offset, bytes)?
            };
            if tensor.storage() == id && tensor.kind() == TensorKind::State {
                buffer.clear(offset, bytes)?;
            }
            if let Some(data) = graph.data(id) {
                backend.load_weight(tensor, layout, &data.bytes(), &region)?;
            }
            places.insert(id, TensorPlace { region, layout });
        }
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        let source = SplitSource {
            graph,
            nodes: &nodes,
            place: &|id| places.get(&id).cloned(),
            kept: &|_| true,
            scratch: None,
            ranks,
        };
        let program = backend.compile(&source)?;
        Ok(Placed { graph, backend, buffer, places, program })
    }

    /// Sets an input or state.
    pub(crate) fn set(&self, name: &str, bytes: &[u8]) -> Result<(), BackendError> {
        let region = &self.places[&self.graph.leaf(name).unwrap()].region;
        assert_eq!(region.bytes, bytes.len(), "{name}");
        region.buffer.write(region.offset, bytes)
    }

    /// Runs all nodes, and checks that nothing around the tensors changed.
    pub(crate) fn run(&mut self) -> Result<(), BackendError> {
        let mut queue = self.backend.queue()?;
        let result = queue.run(&mut *self.program).and_then(|()| queue.synchronize());
        self.check_guards();
        result
    }

    /// The bytes of a tensor, made contiguous.
    pub(crate) fn read(&self, id: TensorId) -> Vec<u8> {
        let tensor = &self.graph[id];
        let region = &self.places[&id].region;
        let mut bytes = vec![0; region.bytes];
        region.buffer.read(region.offset, &mut bytes).unwrap();
        let dtype = tensor.dtype();
        let ([d0, d1, d2, d3], [s0, s1, s2, s3]) = (tensor.dims4(), tensor.strides());
        let unit = dtype.block_bytes();
        let mut out = Vec::new();
        for i0 in 0..d0 {
            for i1 in 0..d1 {
                for i2 in 0..d2 {
                    for i3 in 0..d3 / dtype.block_len() {
                        let at = i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3;
                        out.extend_from_slice(&bytes[at..at + unit]);
                    }
                }
            }
        }
        out
    }

    fn check_guards(&self) {
        let mut all = vec![0; self.buffer.bytes()];
        self.buffer.read(0, &mut all).unwrap();
        for place in self.places.values() {
            all[place.region.offset..][..place.region.bytes].fill(GUARD);
        }
        let changed = all.iter().position(|byte| *byte != GUARD);
        assert_eq!(changed, None, "a byte outside every tensor was written");
    }
}

/// The nodes that read a tensor, with the number of the input.
fn uses(graph: &Graph, id: TensorId) -> Vec<(NodeId, usize)> {
    let mut found = Vec::new();
    for node in graph.node_ids() {
        for (i, input) in graph.inputs(node).iter().enumerate() {
            if *input == id {
                found.push((node, i));
            }
        }
    }
    found
}

/// The bytes of f32 values.
pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The bytes of i32 values.
pub(crate) fn bytes_of_i32(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// f32 values from bytes.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}
