//! The work memory that nodes will need, from shapes alone: for forecasts.

use std::collections::HashMap;
use std::ptr::NonNull;

use quadriga_graph::{Graph, NodeId, Op, Tensor, TensorId, TensorKind};

use super::attention::shape_of;
use super::experts::ExpertActivations;
use super::packed_matmul::{ActivationMatrix, WorkMemoryNeed, is_small};
use super::sparse::axpy_work_bytes;
use crate::isa::Isa;
use crate::kernels::attention as fast;
use crate::memory::ALIGNMENT;
use crate::view::TensorView;
use crate::weights::{self, PackedMatrices};

/// What decides about work memory besides the graph.
pub(crate) struct WorkSettings {
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
    pub(crate) fuse: bool,
    /// Whether weights are packed.
    pub(crate) packs: bool,
}

/// Bytes of work memory that a program of these nodes needs.
pub(crate) fn work_bytes(graph: &Graph, nodes: &[NodeId], settings: &WorkSettings) -> usize {
    let packed = if settings.packs { packed_weights(graph) } else { HashMap::new() };
    let of_node = |node: &NodeId| {
        let op = graph.get_node(*node)?.op();
        let tensor = |index: usize| graph.get(*graph.inputs(*node).get(index)?);
        let matrices = || packed.get(graph.inputs(*node).first()?).copied().flatten();
        let output = graph.get(graph.get_node(*node)?.output()).filter(|output| output.elements() > 0)?;
        match op {
            Op::MulMat => matmul(settings, &matrices()?, tensor(0)?, tensor(1)?),
            Op::MulMatId => experts(settings, &matrices()?, tensor(1)?, output),
            Op::AxpySparse => axpy_work_bytes(tensor(0)?, tensor(1)?),
            Op::Attention(parameters) => {
                let spans = tensor(3 + usize::from(parameters.mask)).filter(|_| parameters.spans);
                let before = 3 + [parameters.mask, parameters.spans, parameters.sinks]
                    .map(usize::from)
                    .iter()
                    .sum::<usize>();
                let pages = tensor(before).filter(|_| parameters.pages);
                let shape = shape_of(parameters, [tensor(0)?, tensor(1)?, tensor(2)?], pages);
                let fast = shape.slots > 0 && [spans, pages].into_iter().flatten().all(Tensor::is_contiguous);
                fast.then(|| fast::Attention::work_bytes(settings.isa, &shape, settings.threads).ok())?
            }
            Op::Custom(op) => {
                let inputs: Vec<&Tensor> =
                    graph.inputs(*node).iter().filter_map(|id| graph.get(*id)).collect();
                let each = op.scratch_bytes(&inputs, output).ok()?.checked_next_multiple_of(ALIGNMENT)?;
                each.checked_mul(settings.threads)
            }
            _ => None,
        }
    };
    nodes.iter().filter_map(of_node).max().unwrap_or(0)
}

/// The weights of a graph that will be packed.
fn packed_weights(graph: &Graph) -> HashMap<TensorId, Option<PackedMatrices>> {
    let mut uses: HashMap<TensorId, Vec<(&Op, usize)>> = HashMap::new();
    for node in graph.node_ids() {
        let Some(op) = graph.get_node(node).map(|node| node.op()) else { continue };
        for (index, id) in graph.inputs(node).iter().enumerate() {
            if graph.get(*id).is_some_and(|tensor| tensor.kind() == TensorKind::Weight) {
                uses.entry(*id).or_default().push((op, index));
            }
        }
    }
    let packed = |(id, uses): (TensorId, Vec<(&Op, usize)>)| {
        let weight = graph.get(id)?;
        Some((id, weights::packed(weight, &weights::layout(weight, &uses))))
    };
    uses.into_iter().filter_map(packed).collect()
}

/// A tensor without memory.
fn view(tensor: &Tensor) -> TensorView {
    // SAFETY: only its shape is used, no memory is accessed through it.
    unsafe { TensorView::new(tensor, NonNull::<u64>::dangling().as_ptr().cast()) }
}

fn matmul(settings: &WorkSettings, matrices: &PackedMatrices, w: &Tensor, x: &Tensor) -> Option<usize> {
    let x = view(x);
    let [wb, wh, ..] = w.dims4();
    let whole = if (wb, wh) == (1, 1) { ActivationMatrix::of(&x) } else { None };
    let (rows, columns) = whole.or_else(|| ActivationMatrix::at(&x, 0, 0))?.extents();
    let private = settings.fuse && is_small(rows, columns);
    let dtype = matrices.layout.dtype();
    WorkMemoryNeed { isa: settings.isa, dtype, rows, columns, private }.bytes(settings.threads).ok()
}

fn experts(settings: &WorkSettings, matrices: &PackedMatrices, x: &Tensor, output: &Tensor) -> Option<usize> {
    let ([_, tokens, used, _], [_, _, choices, columns]) = (output.dims4(), x.dims4());
    let (dtype, shape) = (matrices.layout.dtype(), [tokens, used, choices]);
    let activations = ExpertActivations::new(settings.isa, dtype, shape, matrices.count, columns).ok()?;
    activations.work_bytes(settings.threads).ok()
}
