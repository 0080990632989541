//! Compiles a split: resolves and checks addresses, lowers nodes to kernels, and fuses them into steps.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use quadriga_graph::{Collective, Graph, NodeId, Op, TensorId};
use quadriga_runtime::{BackendError, Layout, RankGroups, SplitSource, check_range};

use crate::NAME;
use crate::buffer::HostBuffer;
use crate::feed_forward;
use crate::fusion::build_steps;
use crate::memory::ALIGNMENT;
use crate::ops::{self, ActivationSource, DetachedExchange, LoweredOp, Operand, PackedWeight, RopeTables};
use crate::places::OperandPlaces;
use crate::program::{BufferUse, CpuProgram};
use crate::prologue;
use crate::state::BackendInner;
use crate::step::KernelStep;
use crate::view::TensorView;
use crate::weights::PackedMatrices;

/// Keys or values of at least this many bytes go into huge pages.
const HUGE_PAGES_FROM: usize = 256 << 10;

/// Compiles a split.
pub(crate) fn compile(
    inner: &BackendInner,
    split: &SplitSource<'_>,
    fuse: bool,
    skip: bool,
) -> Result<CpuProgram, BackendError> {
    let mut places = OperandPlaces::new(split);
    let mut prepared = HashMap::new();
    if fuse {
        let scratch = split.scratch.as_ref();
        prepared = feed_forward::place_results(
            &mut places,
            split.graph,
            split.nodes,
            inner.isa,
            split.kept,
            scratch,
        )?;
    }
    let prologues = if fuse { prologue::find(split, &places) } else { HashMap::new() };
    // Nodes that run as prologues of matmuls, and the indices of their names.
    let mut fused: HashMap<NodeId, Option<usize>> =
        prologues.values().flat_map(|prologue| &prologue.nodes).map(|node| (*node, None)).collect();
    let mut compiler = Compiler {
        graph: split.graph,
        places: &places,
        ranks: split.ranks,
        fuse,
        skip,
        uses: HashMap::new(),
        tables: RopeTables::default(),
        detached: None,
    };
    let mut lowered: Vec<LoweredOp> = Vec::new();
    let (mut names, mut nodes) = (Vec::new(), Vec::new());
    let computing = split.graph.nodes().iter().filter(|node| !node.op().is_view()).count();
    for &id in split.nodes {
        let first = lowered.len();
        let source = split.graph.inputs(id).get(1).and_then(|tensor| {
            let found = prologues.get(tensor)?;
            let names = found.nodes.iter().filter_map(|node| fused.get(node).copied().flatten()).collect();
            Some(Arc::new(ActivationSource { tensor: *tensor, prologue: found.prologue, names }))
        });
        if let Some(name) = fused.get_mut(&id) {
            *name = Some(names.len());
            // Its memory is checked, and its buffers are taken, as if the node ran by itself.
            compiler.node(inner, id, None, &mut Vec::new())?;
            names.push(split.graph.node_name(id));
            nodes.push(id);
            continue;
        }
        if names.is_empty() && split.nodes.len() < computing && compiler.detach(id)? {
            names.push(split.graph.node_name(id));
            nodes.push(id);
            continue;
        }
        compiler.node(inner, id, source, &mut lowered)?;
        if let (Some(LoweredOp::Experts(matmul)), Some(memory)) = (lowered.last_mut(), prepared.get(&id)) {
            matmul.set_prepared(*memory);
        }
        if lowered.len() > first {
            let label = split.graph.get_node(id).map_or("", |node| node.op().name());
            for op in lowered.iter_mut().skip(first) {
                op.set_name(names.len(), label);
            }
            names.push(split.graph.node_name(id));
            nodes.push(id);
        }
    }
    let (own_bytes, detached) = (compiler.tables.bytes(), compiler.detached);
    let mut uses: Vec<BufferUse> = compiler.uses.into_values().collect();
    uses.sort_unstable_by_key(|used| Arc::as_ptr(&used.buffer).cast::<u8>().addr());
    let (steps, work_bytes) = build_steps(lowered, fuse);
    let labels =
        if inner.recorder.is_some() { steps.iter().map(KernelStep::label).collect() } else { Vec::new() };
    let mut program =
        CpuProgram { detached, steps, uses, names, nodes, labels, work_bytes, own_bytes, marks: Vec::new() };
    program.reserve(inner)?;
    Ok(program)
}

struct Compiler<'a> {
    graph: &'a Graph,
    places: &'a OperandPlaces<'a>,
    ranks: &'a RankGroups,
    fuse: bool,
    skip: bool,
    /// The buffers of the nodes compiled so far, by address.
    uses: HashMap<usize, BufferUse>,
    tables: RopeTables,
    /// The collective before all steps, if the split starts with one.
    detached: Option<DetachedExchange>,
}

impl<'a> Compiler<'a> {
    fn unsupported(&self, node: NodeId, reason: impl Into<String>) -> BackendError {
        let node = self.graph.node_name(node);
        BackendError::Unsupported { backend: NAME.into(), node, reason: reason.into() }
    }

    /// Takes a collective out of the steps; whether the node is one.
    fn detach(&mut self, id: NodeId) -> Result<bool, BackendError> {
        let Some(Op::Collective(Collective { ranks, kind })) = self.graph.get_node(id).map(|node| node.op())
        else {
            return Ok(false);
        };
        let ranks = self.ranks.of(ranks).map_err(|reason| self.unsupported(id, reason))?;
        let (inputs, output) = self.operands(id)?;
        let Some(input) = inputs.first() else { return Err(self.unsupported(id, "it has no input")) };
        self.detached = Some(DetachedExchange::new(ranks, kind, &input.view, &output.view));
        Ok(true)
    }

    /// A node's inputs and result in memory.
    fn operands(&mut self, id: NodeId) -> Result<(Vec<Operand>, Operand), BackendError> {
        let Some(node) = self.graph.get_node(id) else {
            return Err(self.unsupported(id, "the graph has no such node"));
        };
        let output = self.operand(id, node.output(), true)?;
        if output.packed.is_some() {
            return Err(self.unsupported(id, "a result cannot be packed"));
        }
        let mut inputs = Vec::new();
        for (i, input) in self.graph.inputs(id).iter().enumerate() {
            let operand = self.operand(id, *input, false)?;
            self.check_overlap(id, i, &operand, &output.view)?;
            inputs.push(operand);
        }
        Ok((inputs, output))
    }

    /// Lowers one node; views and empty results need no kernel, unless they are exchanged.
    fn node(
        &mut self,
        inner: &BackendInner,
        id: NodeId,
        source: Option<Arc<ActivationSource>>,
        lowered: &mut Vec<LoweredOp>,
    ) -> Result<(), BackendError> {
        let Some(node) = self.graph.get_node(id) else {
            return Err(self.unsupported(id, "the graph has no such node"));
        };
        let op = node.op().clone();
        let result = node.output();
        let is_empty = self.graph.get(result).is_none_or(|tensor| tensor.elements() == 0);
        // Other ranks wait for this one also where it gets nothing.
        if op.is_view() || (is_empty && !matches!(op, Op::Collective(_))) {
            return Ok(());
        }
        let (inputs, output) = self.operands(id)?;
        let ids = self.graph.inputs(id).to_vec();
        if let (Op::Collective(Collective { ranks, kind }), Some(input)) = (&op, inputs.first()) {
            let ranks = self.ranks.of(ranks).map_err(|reason| self.unsupported(id, reason))?;
            lowered.push(LoweredOp::Part(ops::collective(ranks, kind, &input.view, &output.view)));
            return Ok(());
        }
        if let Op::Custom(custom) = &op {
            let made = ops::custom(custom, self.graph, id, &inputs, &output.view);
            lowered.push(made.map_err(|reason| self.unsupported(id, reason))?);
            return Ok(());
        }
        let (fuse, skip) = (self.fuse, self.skip);
        let context = ops::LoweringContext { isa: inner.isa, input_ids: &ids, fuse, skip, source };
        ops::lower(&op, &inputs, &output.view, &context, &mut self.tables, lowered)
            .map_err(|reason| self.unsupported(id, reason))?;
        if matches!(op, Op::Attention(_)) {
            for key_or_value in ids.iter().skip(1).take(2) {
                self.use_huge_pages(*key_or_value);
            }
        }
        Ok(())
    }

    /// Moves a long KV cache into huge pages.
    fn use_huge_pages(&self, id: TensorId) {
        let long = self.graph.get(id).is_some_and(|tensor| tensor.bytes() >= HUGE_PAGES_FROM);
        if long
            && let Some(place) = self.places.get(id)
            && let Some(buffer) = HostBuffer::of(&place.region)
        {
            buffer.use_huge_pages();
        }
    }

    /// Refuses a result that overlaps an input, except exactly in place where the operation allows that.
    fn check_overlap(
        &self,
        node: NodeId,
        index: usize,
        input: &Operand,
        output: &TensorView,
    ) -> Result<(), BackendError> {
        let (a, b) = (input.range(), output.range());
        if a.start >= b.end || b.start >= a.end {
            return Ok(());
        }
        let Some(op) = self.graph.get_node(node).map(|node| node.op()) else { return Ok(()) };
        let same = a.start == b.start
            && input.view.dtype == output.dtype
            && input.view.dims == output.dims
            && input.view.strides == output.strides;
        let allowed = same && ((op.is_write() && index == 0) || op.declaration().in_place.contains(&index));
        if allowed {
            return Ok(());
        }
        Err(self.unsupported(node, format!("its result overlaps input {index} in memory")))
    }

    /// A tensor of a node in memory, with its range, alignment and layout checked.
    fn operand(&mut self, node: NodeId, id: TensorId, write: bool) -> Result<Operand, BackendError> {
        let Some(tensor) = self.graph.get(id) else {
            return Err(self.unsupported(node, "the graph has no such tensor"));
        };
        if tensor.bytes() == 0 {
            let base = NonNull::<u64>::dangling().as_ptr().cast();
            // SAFETY: an empty tensor reaches no bytes.
            let view = unsafe { TensorView::new(tensor, base) };
            return Ok(Operand { view, packed: None });
        }
        let Some(place) = self.places.get(id) else {
            let name = self.graph.name(id);
            return Err(self.unsupported(node, format!("{name} has no memory on this backend")));
        };
        let region = &place.region;
        let Some(buffer) = HostBuffer::of(region) else {
            return Err(BackendError::Foreign { backend: NAME.into(), what: "buffer" });
        };
        check_range(buffer, region.offset, region.bytes)?;
        if write && buffer.is_read_only() {
            return Err(self.unsupported(node, "its result would be written to read-only memory"));
        }
        let matrices = match place.layout {
            Layout::Plain => None,
            Layout::Packed(number) => match PackedMatrices::numbered(tensor, number) {
                Some(matrices) => Some(matrices),
                None => return Err(self.unsupported(node, "a weight has an unknown packed layout")),
            },
        };
        let needs = matrices.map_or(tensor.bytes(), |matrices| matrices.bytes);
        if region.bytes < needs {
            return Err(BackendError::OutOfBounds {
                backend: NAME.into(),
                offset: region.offset,
                bytes: needs,
                size: region.bytes,
            });
        }
        let base = buffer.pointer().wrapping_add(region.offset);
        let align = match tensor.dtype() {
            dtype if dtype.is_quantized() => 1,
            dtype => dtype.block_bytes().min(ALIGNMENT),
        };
        let aligned = base.addr().is_multiple_of(align) && tensor.strides().iter().all(|s| s % align == 0);
        if matrices.is_none() && !aligned {
            let name = self.graph.name(id);
            return Err(self.unsupported(node, format!("{name} is not aligned to {align} bytes")));
        }
        let used = self
            .uses
            .entry(Arc::as_ptr(&region.buffer).cast::<u8>().addr())
            .or_insert_with(|| BufferUse { buffer: Arc::clone(&region.buffer), write: false });
        used.write |= write;
        // SAFETY: the region holds the packed matrices, in a buffer that the program keeps alive and takes; a packed
        // weight is never written, since results cannot be packed.
        let packed = matrices.map(|matrices| unsafe { PackedWeight::new(base, &matrices) });
        // SAFETY: the region holds the tensor, plain elements are aligned, the program keeps the buffer alive and
        // takes it (for writing, where a node writes) while it runs. A packed weight is only read through `packed`.
        let view = unsafe { TensorView::new(tensor, base) };
        Ok(Operand { view, packed })
    }
}
