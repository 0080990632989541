//! Which nodes there are kernels for.

use quadriga_graph::{DType, Gate, Graph, NodeId, Op};
use quadriga_runtime::Refusal;

use super::sort::MAX_SORTED_IN_BLOCK;

/// The largest grid in y and z.
const MAX_GRID_Y: usize = 65_535;
/// The largest grid in x.
const MAX_ROWS: usize = i32::MAX as usize;
/// The largest head that the attention kernels take.
const MAX_HEAD: usize = 512;

/// Whether there is a kernel for a node.
pub(crate) fn supports(graph: &Graph, node: NodeId) -> Result<(), Refusal> {
    let refuse = |reason: &'static str| Err(Refusal(reason.into()));
    let n = &graph[node];
    let out = &graph[n.output()];
    let input = |i: usize| graph.inputs(node).get(i).map(|id| &graph[*id]);
    if out.shape().rows() > MAX_ROWS {
        return refuse("more rows than a grid has blocks");
    }
    if graph.inputs(node).iter().any(|id| lacks_kernels(graph[*id].dtype())) {
        return refuse("a type of weights without kernels");
    }
    match n.op() {
        Op::SelectExperts(_)
        | Op::ExpertWeights(_)
        | Op::AddId
        | Op::SumExperts
        | Op::SsmConv
        | Op::GatedDeltaRule(_) => refuse("no kernel"),
        Op::Gated { gate: Gate::SwigluOai, .. } => refuse("no kernel"),
        Op::Attention(parameters) if parameters.sinks => refuse("no kernel for attention sinks"),
        Op::Attention(_)
            if [1, 2].into_iter().any(|i| {
                input(i).is_some_and(|t| !matches!(t.dtype(), DType::F16 | DType::F32 | DType::Q8_0))
            }) =>
        {
            refuse("no kernel for this type of the KV cache")
        }
        Op::Custom(_) => refuse("custom operations run on the CPU"),
        Op::ArgSort { .. } | Op::TopK { .. }
            if input(0).is_some_and(|x| x.shape().cols() > MAX_SORTED_IN_BLOCK * MAX_GRID_Y) =>
        {
            refuse("rows of more sorted runs than a grid has blocks")
        }
        Op::Attention(_) => {
            let (Some(q), Some(v)) = (input(0), input(2)) else { return refuse("inputs are missing") };
            let [b, h, t, d] = q.dims4();
            if d > MAX_HEAD || v.shape().cols() > MAX_HEAD {
                return refuse("heads of more than 512 elements");
            }
            if b.saturating_mul(t) > MAX_GRID_Y || h > MAX_GRID_Y {
                return refuse("more queries than a grid has blocks");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Whether no kernel reads a type.
fn lacks_kernels(dtype: DType) -> bool {
    use DType::*;
    matches!(dtype, NVFP4 | TQ1_0 | TQ2_0 | IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S)
}
