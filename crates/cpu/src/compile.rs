//! From the nodes of a split to a list of steps: addresses resolved and checked, kernels picked, steps joined.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, Op, TensorId};
use quadriga_runtime::{BackendError, Layout, SplitSource, check_range};

use crate::NAME;
use crate::backend::Shared;
use crate::buffer::HostBuffer;
use crate::chains;
use crate::fuse::{Item, join};
use crate::memory::ALIGNMENT;
use crate::ops::{self, Operand, Packed, RopeTables, Source};
use crate::places::Places;
use crate::program::{CpuProgram, Use};
use crate::step::Step;
use crate::view::View;
use crate::weights::Matrices;

/// Bytes of keys or values that are worth large pages.
const LARGE_FROM: usize = 256 << 10;

/// Compiles a split.
pub(crate) fn compile(
    shared: &Shared,
    split: &SplitSource<'_>,
    fuse: bool,
) -> Result<CpuProgram, BackendError> {
    let places = Places::new(split);
    let chains = if fuse { chains::find(split, &places) } else { HashMap::new() };
    // Nodes that products compute, and the indices of their names.
    let mut inside: HashMap<NodeId, Option<usize>> =
        chains.values().flat_map(|chain| &chain.nodes).map(|node| (*node, None)).collect();
    let mut compiler = Compiler {
        graph: split.graph,
        places: &places,
        fuse,
        uses: HashMap::new(),
        tables: RopeTables::default(),
    };
    let mut items: Vec<Item> = Vec::new();
    let (mut names, mut nodes) = (Vec::new(), Vec::new());
    for &id in split.nodes {
        let first = items.len();
        let source = split.graph.inputs(id).get(1).and_then(|tensor| {
            let chain = chains.get(tensor)?;
            let names = chain.nodes.iter().filter_map(|node| inside.get(node).copied().flatten()).collect();
            Some(Arc::new(Source { tensor: *tensor, recipe: chain.recipe, names }))
        });
        if let Some(name) = inside.get_mut(&id) {
            *name = Some(names.len());
            // The buffers are used, and the memory is checked, as if the node ran by itself.
            compiler.node(shared, id, None, &mut Vec::new())?;
            names.push(split.graph.node_name(id));
            nodes.push(id);
            continue;
        }
        compiler.node(shared, id, source, &mut items)?;
        if items.len() > first {
            let label = split.graph.get_node(id).map_or("", |node| node.op().name());
            for item in items.iter_mut().skip(first) {
                item.set_name(names.len(), label);
            }
            names.push(split.graph.node_name(id));
            nodes.push(id);
        }
    }
    let own_bytes = compiler.tables.bytes();
    let mut uses: Vec<Use> = compiler.uses.into_values().collect();
    uses.sort_unstable_by_key(|used| Arc::as_ptr(&used.buffer).cast::<u8>().addr());
    let (steps, work_bytes) = join(items, fuse);
    let labels = if shared.ledger.is_some() { steps.iter().map(Step::label).collect() } else { Vec::new() };
    let mut program =
        CpuProgram { steps, uses, names, nodes, labels, work_bytes, own_bytes, marks: Vec::new() };
    program.reserve(shared)?;
    Ok(program)
}

struct Compiler<'a> {
    graph: &'a Graph,
    places: &'a Places<'a>,
    fuse: bool,
    /// The buffers of the nodes compiled so far, by address.
    uses: HashMap<usize, Use>,
    tables: RopeTables,
}

impl<'a> Compiler<'a> {
    fn unsupported(&self, node: NodeId, reason: impl Into<String>) -> BackendError {
        let node = self.graph.node_name(node);
        BackendError::Unsupported { backend: NAME.into(), node, reason: reason.into() }
    }

    /// The steps of one node; none for views and empty results.
    fn node(
        &mut self,
        shared: &Shared,
        id: NodeId,
        source: Option<Arc<Source>>,
        items: &mut Vec<Item>,
    ) -> Result<(), BackendError> {
        let Some(node) = self.graph.get_node(id) else {
            return Err(self.unsupported(id, "there is no such node"));
        };
        let op = node.op().clone();
        let result = node.output();
        if op.is_view() || self.graph.get(result).is_none_or(|tensor| tensor.elements() == 0) {
            return Ok(());
        }
        let output = self.operand(id, result, true)?;
        if output.packed.is_some() {
            return Err(self.unsupported(id, "a result cannot be packed"));
        }
        let ids = self.graph.inputs(id).to_vec();
        let mut inputs = Vec::with_capacity(ids.len());
        for (i, input) in ids.iter().enumerate() {
            let operand = self.operand(id, *input, false)?;
            self.check_overlap(id, i, &operand, &output.view)?;
            inputs.push(operand);
        }
        let context = ops::Context { isa: shared.isa, input_ids: &ids, fuse: self.fuse, source };
        ops::prepare(&op, &inputs, &output.view, &context, &mut self.tables, items)
            .map_err(|reason| self.unsupported(id, reason))?;
        if matches!(op, Op::Attention(_)) {
            for key_or_value in ids.iter().skip(1).take(2) {
                self.use_large_pages(*key_or_value);
            }
        }
        Ok(())
    }

    /// Large pages for keys and values, if there may be many.
    fn use_large_pages(&self, id: TensorId) {
        let many = self.graph.get(id).is_some_and(|tensor| tensor.bytes() >= LARGE_FROM);
        if many
            && let Some(place) = self.places.get(id)
            && let Some(buffer) = HostBuffer::of(&place.region)
        {
            buffer.use_large_pages();
        }
    }

    /// A result may lie exactly where an input lies, if the operation can work in place; it must not overlap an
    /// input in any other way.
    fn check_overlap(
        &self,
        node: NodeId,
        index: usize,
        input: &Operand,
        output: &View,
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

    /// A tensor of a node in memory, checked.
    fn operand(&mut self, node: NodeId, id: TensorId, write: bool) -> Result<Operand, BackendError> {
        let Some(tensor) = self.graph.get(id) else {
            return Err(self.unsupported(node, "there is no such tensor"));
        };
        if tensor.bytes() == 0 {
            let base = NonNull::<u64>::dangling().as_ptr().cast();
            // SAFETY: an empty tensor reaches no bytes.
            let view = unsafe { View::new(tensor, base) };
            return Ok(Operand { view, packed: None });
        }
        let Some(place) = self.places.get(id) else {
            let name = self.graph.name(id);
            return Err(self.unsupported(node, format!("{name} has no memory here")));
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
            Layout::Packed(number) => match Matrices::numbered(tensor, number) {
                Some(matrices) => Some(matrices),
                None => return Err(self.unsupported(node, "a weight is packed in an unknown way")),
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
            return Err(self.unsupported(node, format!("{name} does not lie at a multiple of {align} bytes")));
        }
        let used = self
            .uses
            .entry(Arc::as_ptr(&region.buffer).cast::<u8>().addr())
            .or_insert_with(|| Use { buffer: Arc::clone(&region.buffer), write: false });
        used.write |= write;
        // SAFETY: the region holds the packed matrices, in a buffer that the program keeps alive and takes; a packed
        // weight is never written, since results cannot be packed.
        let packed = matrices.map(|matrices| unsafe { Packed::new(base, &matrices) });
        // SAFETY: the region holds the tensor, plain elements are aligned, the program keeps the buffer alive and
        // takes it (for writing, where a node writes) while it runs. A packed weight is only read through `packed`.
        let view = unsafe { View::new(tensor, base) };
        Ok(Operand { view, packed })
    }
}
