//! From nodes to launches: what each operation becomes on the device.

mod attention;
mod fresh;
mod matrix;
pub(crate) mod packing;
mod rope;
pub(crate) mod scratch;
mod simple;
mod stream;

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, Op, Tensor, TensorId};
use quadriga_runtime::{BackendError, Buffer, Layout, Refusal, SplitSource, TensorPlace};

use crate::backend::Shared;
use crate::blas::Operand;
use crate::buffer::DeviceBuffer;
use crate::kernels::{File, Function};
use crate::launch::{Described, Launch};
use crate::program::{CudaProgram, Step};

/// Whether there is a kernel for a node.
pub(crate) fn supports(graph: &Graph, node: NodeId) -> Result<(), Refusal> {
    simple::supports(graph, node)
}

/// Lowers nodes to a program.
pub(crate) fn lower(shared: &Arc<Shared>, split: &SplitSource<'_>) -> Result<CudaProgram, BackendError> {
    let mut lowering = Lowering::new(shared, split);
    if let Some(region) = &split.scratch {
        let Some(buffer) = region.buffer.as_any().downcast_ref::<DeviceBuffer>() else {
            return Err(BackendError::Foreign { backend: shared.context.name.clone(), what: "buffer" });
        };
        let multiprocessors = shared.context.multiprocessors;
        let needs = scratch::bytes(split.graph, split.nodes, shared.blas.is_some(), multiprocessors);
        // What is not there is missed when it is asked for.
        let workspace = needs.workspace.min(region.bytes);
        let rows = needs.rows.min(region.bytes - workspace);
        lowering.workspace = buffer.address() + region.offset as u64;
        let rows_base = lowering.workspace + workspace as u64;
        lowering.scratch_base = rows_base + rows as u64;
        lowering.scratch_bytes = region.bytes - workspace - rows;
        lowering.buffers.push(Arc::clone(&region.buffer));
        lowering.find_fresh(rows_base, rows)?;
    }
    lowering.nodes()?;
    CudaProgram::new(Arc::clone(shared), &lowering.steps, lowering.counts, lowering.buffers)
}

pub(crate) struct Lowering<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) split: &'a SplitSource<'a>,
    pub(crate) graph: &'a Graph,
    steps: Vec<Step>,
    buffers: Vec<Arc<dyn Buffer>>,
    /// Where cuBLAS works.
    workspace: u64,
    scratch_base: u64,
    scratch_bytes: usize,
    /// Whether the counters are used, which programs share.
    counts: bool,
    /// For each storage the positions of the nodes that read it; one that reads it twice stands there twice.
    readers_of: HashMap<TensorId, Vec<usize>>,
    /// Nodes that an earlier one took along.
    fused: HashSet<NodeId>,
    /// Storages that lie elsewhere than the plan has them.
    moved: HashMap<TensorId, u64>,
    /// Attention that takes the token under way along, by its node.
    fresh: HashMap<NodeId, fresh::Group>,
    /// The rows whose quantized form is at the start of scratch memory.
    quantized: Option<TensorId>,
    /// The rows that are there as cuBLAS takes them.
    converted: Option<(TensorId, Operand)>,
}

impl<'a> Lowering<'a> {
    fn new(shared: &'a Arc<Shared>, split: &'a SplitSource<'a>) -> Lowering<'a> {
        let mut readers_of: HashMap<TensorId, Vec<usize>> = HashMap::new();
        for (at, node) in split.nodes.iter().enumerate() {
            for id in split.graph.inputs(*node).iter().filter(|_| !split.graph[*node].op().is_view()) {
                readers_of.entry(split.graph[*id].storage()).or_default().push(at);
            }
        }
        Lowering {
            shared,
            split,
            graph: split.graph,
            steps: Vec::new(),
            buffers: Vec::new(),
            workspace: 0,
            scratch_base: 0,
            scratch_bytes: 0,
            counts: false,
            readers_of,
            fused: HashSet::new(),
            moved: HashMap::new(),
            fresh: HashMap::new(),
            quantized: None,
            converted: None,
        }
    }

    fn nodes(&mut self) -> Result<(), BackendError> {
        for (at, node) in self.split.nodes.iter().enumerate() {
            let op = self.graph[*node].op();
            if op.is_view() || self.is_fused(*node) {
                continue;
            }
            let empty = self.graph[self.graph[*node].output()].elements() == 0;
            let writes_nothing = op.is_write()
                && self.graph.inputs(*node).get(1).is_some_and(|x| self.graph[*x].elements() == 0);
            if empty || writes_nothing {
                continue;
            }
            match op {
                Op::MulMat => self.mul_mat(at, *node)?,
                Op::MulMatId => self.mul_mat_id(*node)?,
                Op::Attention(parameters) => self.attention(*node, parameters)?,
                _ => self.simple(at, *node)?,
            }
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, launch: Launch) {
        self.steps.push(Step::Launch(launch));
    }

    pub(crate) fn function(&self, file: File, name: &CStr) -> Result<Function, BackendError> {
        self.shared.kernels.function(file, name)
    }

    /// The addresses of some scratch arrays, one after another; they last until the node is done.
    pub(crate) fn scratch<const N: usize>(
        &mut self,
        node: NodeId,
        bytes: [usize; N],
    ) -> Result<[u64; N], BackendError> {
        let needed = scratch::together(bytes);
        if needed > self.scratch_bytes {
            let given = self.scratch_bytes;
            return Err(self.failed(node, format!("it works in {needed} bytes, and the split has {given}")));
        }
        let mut at = self.scratch_base;
        (self.quantized, self.converted) = (None, None);
        Ok(bytes.map(|b| {
            let address = at;
            at += scratch::aligned(b) as u64;
            address
        }))
    }

    pub(crate) fn failed(&self, node: NodeId, reason: impl Into<String>) -> BackendError {
        BackendError::Unsupported {
            backend: self.shared.context.name.clone(),
            node: self.graph.node_name(node),
            reason: reason.into(),
        }
    }

    /// Where a tensor lies; the program keeps its buffer.
    pub(crate) fn place(&mut self, node: NodeId, id: TensorId) -> Result<(TensorPlace, u64), BackendError> {
        let place = (self.split.place)(id).ok_or_else(|| self.failed(node, "a tensor has no place"))?;
        let Some(buffer) = place.region.buffer.as_any().downcast_ref::<DeviceBuffer>() else {
            return Err(BackendError::Foreign { backend: self.shared.context.name.clone(), what: "buffer" });
        };
        let tensor = &self.graph[id];
        let address = match self.moved.get(&tensor.storage()) {
            Some(base) => base + tensor.offset() as u64,
            None => buffer.address() + place.region.offset as u64,
        };
        if !self.buffers.iter().any(|b| Arc::ptr_eq(b, &place.region.buffer)) {
            self.buffers.push(Arc::clone(&place.region.buffer));
        }
        Ok((place, address))
    }

    /// A plain tensor, as kernels see it.
    pub(crate) fn described(&mut self, node: NodeId, id: TensorId) -> Result<Described, BackendError> {
        let (place, address) = self.place(node, id)?;
        if place.layout != Layout::Plain {
            return Err(self.failed(node, "a packed weight is used in a way that needs it plain"));
        }
        Ok(Described::new(&self.graph[id], address))
    }

    /// Inputs and output of a node.
    pub(crate) fn operands(&mut self, node: NodeId) -> Result<(Vec<Described>, Described), BackendError> {
        let graph = self.graph;
        let inputs =
            graph.inputs(node).iter().map(|id| self.described(node, *id)).collect::<Result<Vec<_>, _>>()?;
        let output = self.described(node, graph[node].output())?;
        Ok((inputs, output))
    }

    /// The nodes after a position that compute something and were not taken along.
    pub(crate) fn later(&self, at: usize) -> impl Iterator<Item = NodeId> + '_ {
        let nodes = self.split.nodes.iter().skip(at + 1).copied();
        nodes.filter(|n| !self.graph[*n].op().is_view() && !self.is_fused(*n))
    }

    /// The first of them.
    pub(crate) fn next(&self, at: usize) -> Option<NodeId> {
        self.later(at).next()
    }

    /// The positions of the nodes that read a storage.
    pub(crate) fn readers(&self, storage: TensorId) -> &[usize] {
        self.readers_of.get(&storage).map_or(&[], Vec::as_slice)
    }

    /// The next node after position `at` that computes something, if it is the only reader of `value`, which is not
    /// needed afterwards.
    pub(crate) fn only_reader(&self, at: usize, value: TensorId) -> Option<NodeId> {
        let next = self.next(at)?;
        let alone = self.readers(value).iter().filter(|reader| **reader > at).count() == 1;
        (alone && self.graph.inputs(next).contains(&value) && !(self.split.kept)(value)).then_some(next)
    }

    pub(crate) fn is_fused(&self, node: NodeId) -> bool {
        self.fused.contains(&node)
    }

    pub(crate) fn fuse(&mut self, node: NodeId) {
        self.fused.insert(node);
    }

    pub(crate) fn fault(&self, node: NodeId, reason: &'static str) -> (u64, u32) {
        let faults = &self.shared.faults;
        (faults.address(), faults.number(&self.graph.node_name(node), reason))
    }

    pub(crate) fn tensor(&self, id: TensorId) -> &'a Tensor {
        &self.graph[id]
    }
}

/// Whether two ranges of bytes share any.
pub(crate) fn overlap(a: u64, a_bytes: usize, b: u64, b_bytes: usize) -> bool {
    a < b + b_bytes as u64 && b < a + a_bytes as u64
}
