//! The state of lowering a split: steps so far, operands' addresses, and the graph queries that fusion needs.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, Tensor, TensorId};
use quadriga_runtime::{BackendError, Buffer, Layout, SplitSource, TensorPlace};

use super::decode_attention::DecodeAttention;
use super::formats::PackedMatrix;
use super::route_work::{PendingRoute, RouteWork};
use super::scratch;
use crate::blas::OperandType;
use crate::buffer::device_address;
use crate::faults::ProgramFaults;
use crate::inner::BackendInner;
use crate::kernels::{Function, KernelFile};
use crate::launch::{Launch, TensorArg};
use crate::program::ProgramStep;

/// What the rows of a matmul are converted to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MixedRows {
    pub(super) operand: OperandType,
    /// Whether columns are in the order for weights that are converted, and padded.
    pub(super) is_ordered: bool,
}

/// The program of a split, as far as it is lowered.
pub(super) struct Lowering<'a> {
    pub(super) inner: &'a Arc<BackendInner>,
    pub(super) split: &'a SplitSource<'a>,
    pub(super) graph: &'a Graph,
    pub(super) steps: Vec<ProgramStep>,
    /// Buffers that the program keeps.
    pub(super) buffers: Vec<Arc<dyn Buffer>>,
    /// cuBLAS's workspace.
    pub(super) workspace: u64,
    pub(super) scratch_base: u64,
    pub(super) scratch_bytes: usize,
    /// Whether the program uses the counters that programs share.
    pub(super) uses_counters: bool,
    pub(super) faults: Arc<ProgramFaults>,
    /// The positions of the nodes that read each storage; a node that reads it twice is listed twice.
    readers_of: HashMap<TensorId, Vec<usize>>,
    /// Nodes whose work a fused launch of another node does.
    fused: HashSet<NodeId>,
    /// The places of tensors and their addresses in the plan. A caller's `place` function may answer differently each time:
    /// it is asked once, so that every kernel gets the address that was checked.
    places: HashMap<TensorId, (TensorPlace, u64)>,
    /// Storages that are not where the plan has placed them, with their addresses.
    pub(super) moved: HashMap<TensorId, u64>,
    /// Decode attention with fused RoPE and KV-cache write, by its attention node.
    pub(super) decode_attention: HashMap<NodeId, DecodeAttention>,
    /// The rows whose quantized form is at the start of scratch memory.
    pub(super) quantized: Option<TensorId>,
    /// The rows that are there in cuBLAS's operand type.
    pub(super) converted: Option<(TensorId, OperandType)>,
    /// The rows that are there as the mixed GEMM reads them.
    pub(super) mixed_rows: Option<(TensorId, MixedRows)>,
    /// The ids, and the number of experts, by which rows are sorted there.
    pub(super) sorted: Option<(TensorId, usize)>,
    /// The rows that are there after them, for the experts' matrices.
    pub(super) expert_rows: Option<TensorId>,
    /// Routing that is not launched yet: the next launch either does it itself, or comes after it.
    pub(super) pending_route: Option<PendingRoute>,
    /// Routing that the launch before this many steps has done, from logits that were complete before it.
    pub(super) routed: Option<(TensorId, RouteWork, usize)>,
    /// Gates that are not rectified yet: the matmul of active rows, which is next, does it.
    pub(super) unrectified: Option<TensorId>,
}

impl<'a> Lowering<'a> {
    pub(super) fn new(
        inner: &'a Arc<BackendInner>,
        split: &'a SplitSource<'a>,
    ) -> Result<Lowering<'a>, BackendError> {
        let mut readers_of: HashMap<TensorId, Vec<usize>> = HashMap::new();
        for (at, node) in split.nodes.iter().enumerate() {
            for id in split.graph.inputs(*node).iter().filter(|_| !split.graph[*node].op().is_view()) {
                readers_of.entry(split.graph[*id].storage()).or_default().push(at);
            }
        }
        Ok(Lowering {
            inner,
            split,
            graph: split.graph,
            steps: Vec::new(),
            buffers: Vec::new(),
            workspace: 0,
            scratch_base: 0,
            scratch_bytes: 0,
            uses_counters: false,
            faults: Arc::new(ProgramFaults::new(&inner.fault_words)?),
            readers_of,
            fused: HashSet::new(),
            places: HashMap::new(),
            moved: HashMap::new(),
            decode_attention: HashMap::new(),
            quantized: None,
            converted: None,
            mixed_rows: None,
            sorted: None,
            expert_rows: None,
            pending_route: None,
            routed: None,
            unrectified: None,
        })
    }

    pub(super) fn push(&mut self, launch: Launch) {
        self.push_step(ProgramStep::Kernel(launch));
    }

    pub(super) fn push_step(&mut self, step: ProgramStep) {
        self.flush_route();
        self.steps.push(step);
    }

    /// Launches the routing that is left.
    pub(super) fn flush_route(&mut self) {
        if let Some(route) = self.pending_route.take() {
            self.steps.push(ProgramStep::Kernel(route.launch));
        }
    }

    pub(super) fn function(&self, file: KernelFile, name: &CStr) -> Result<Function, BackendError> {
        self.inner.kernels.function(file, name)
    }

    /// The addresses of scratch arrays, one after another, for the kernels of one node.
    pub(super) fn scratch<const N: usize>(
        &mut self,
        node: NodeId,
        bytes: [usize; N],
    ) -> Result<[u64; N], BackendError> {
        let needed = scratch::total_bytes(bytes);
        if needed > self.scratch_bytes {
            let given = self.scratch_bytes;
            return Err(self.failed(
                node,
                format!("it needs {needed} bytes of scratch memory, and the split has {given}"),
            ));
        }
        let mut at = self.scratch_base;
        (self.quantized, self.converted, self.mixed_rows) = (None, None, None);
        (self.sorted, self.expert_rows) = (None, None);
        Ok(bytes.map(|b| {
            let address = at;
            at += scratch::aligned(b) as u64;
            address
        }))
    }

    pub(super) fn failed(&self, node: NodeId, reason: impl Into<String>) -> BackendError {
        BackendError::Unsupported {
            backend: self.inner.context.name.clone(),
            node: self.graph.node_name(node),
            reason: reason.into(),
        }
    }

    /// The place and address of a tensor; the program keeps its buffer.
    pub(super) fn place(&mut self, node: NodeId, id: TensorId) -> Result<(TensorPlace, u64), BackendError> {
        let (place, planned) = match self.places.get(&id) {
            Some(known) => known.clone(),
            None => {
                let found = self.find_place(node, id)?;
                self.places.entry(id).or_insert(found).clone()
            }
        };
        let tensor = &self.graph[id];
        let moved = self.moved.get(&tensor.storage());
        Ok((place, moved.map_or(planned, |base| base + tensor.offset() as u64)))
    }

    /// Asks for the place of a tensor, and checks it.
    fn find_place(&mut self, node: NodeId, id: TensorId) -> Result<(TensorPlace, u64), BackendError> {
        let place = (self.split.place)(id).ok_or_else(|| self.failed(node, "a tensor has no place"))?;
        let address = device_address(&self.inner.context, &place.region)?;
        let tensor = &self.graph[id];
        let needed = match place.layout {
            Layout::Plain => Some(tensor.bytes()),
            Layout::Packed(_) => PackedMatrix::of(tensor).map(|packed| packed.bytes),
        };
        if needed.is_none_or(|needed| needed > place.region.bytes) {
            let given = place.region.bytes;
            return Err(
                self.failed(node, format!("a tensor has a place of {given} bytes, which is too small"))
            );
        }
        let alignment = alignment(tensor, place.layout);
        if !address.is_multiple_of(alignment) {
            let name = self.graph.name(id);
            return Err(self.failed(node, format!("{name} is not aligned to {alignment} bytes")));
        }
        if !self.buffers.iter().any(|b| Arc::ptr_eq(b, &place.region.buffer)) {
            self.buffers.push(Arc::clone(&place.region.buffer));
        }
        Ok((place, address))
    }

    /// A tensor in plain layout, as kernels see it.
    pub(super) fn tensor_arg(&mut self, node: NodeId, id: TensorId) -> Result<TensorArg, BackendError> {
        let (place, address) = self.place(node, id)?;
        if place.layout != Layout::Plain {
            return Err(self.failed(node, "the operation cannot read a packed weight"));
        }
        Ok(TensorArg::new(&self.graph[id], address))
    }

    /// Inputs and output of a node.
    pub(super) fn operands(&mut self, node: NodeId) -> Result<(Vec<TensorArg>, TensorArg), BackendError> {
        let graph = self.graph;
        let inputs =
            graph.inputs(node).iter().map(|id| self.tensor_arg(node, *id)).collect::<Result<Vec<_>, _>>()?;
        let output = self.tensor_arg(node, graph[node].output())?;
        Ok((inputs, output))
    }

    /// The nodes after a position that are neither views nor fused.
    pub(super) fn later(&self, at: usize) -> impl Iterator<Item = NodeId> + '_ {
        let nodes = self.split.nodes.iter().skip(at + 1).copied();
        nodes.filter(|n| !self.graph[*n].op().is_view() && !self.is_fused(*n))
    }

    /// The first of them.
    pub(super) fn next(&self, at: usize) -> Option<NodeId> {
        self.later(at).next()
    }

    /// The positions of the nodes that read a storage.
    pub(super) fn readers(&self, storage: TensorId) -> &[usize] {
        self.readers_of.get(&storage).map_or(&[], Vec::as_slice)
    }

    /// The next node after position `at`, if it is the only reader of `value`, which is not kept after the split.
    pub(super) fn only_reader(&self, at: usize, value: TensorId) -> Option<NodeId> {
        let next = self.next(at)?;
        let alone = self.readers(value).iter().filter(|reader| **reader > at).count() == 1;
        (alone && self.graph.inputs(next).contains(&value) && !(self.split.kept)(value)).then_some(next)
    }

    pub(super) fn is_fused(&self, node: NodeId) -> bool {
        self.fused.contains(&node)
    }

    pub(super) fn fuse(&mut self, node: NodeId) {
        self.fused.insert(node);
    }

    /// The address of the fault word, and the code of a fault of this node.
    pub(super) fn fault(&self, node: NodeId, reason: &'static str) -> (u64, u32) {
        (self.faults.address(), self.faults.code(&self.graph.node_name(node), reason))
    }

    pub(super) fn tensor(&self, id: TensorId) -> &'a Tensor {
        &self.graph[id]
    }
}

/// The multiple of bytes at which a tensor must start.
fn alignment(tensor: &Tensor, layout: Layout) -> u64 {
    match (layout, tensor.dtype()) {
        (Layout::Packed(_), _) => 16,
        // Kernels read the fields of blocks byte by byte, or two bytes at a time.
        (Layout::Plain, dtype) if dtype.is_quantized() => {
            if dtype.block_bytes().is_multiple_of(2) {
                2
            } else {
                1
            }
        }
        (Layout::Plain, dtype) => dtype.block_bytes().max(1) as u64,
    }
}
