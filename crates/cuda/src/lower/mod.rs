//! Lowering: the kernel launches and cuBLAS calls that each node of a split becomes, and which nodes share one.

mod attention;
mod collective;
mod conv;
mod decode_attention;
mod delta_chunks;
mod expert_extents;
mod expert_fusion;
mod expert_matmul;
mod experts;
mod experts_decode;
mod files;
pub(crate) mod formats;
mod gemm;
mod gemv_streamed;
mod grouped_attention;
mod key_partitions;
mod long_attention;
mod lowering;
mod matmul;
mod mixed;
mod norm;
mod op_codes;
mod ops;
mod paged_attention;
mod recurrent;
mod rope;
mod route_work;
mod router;
mod scratch;
mod scratch_bytes;
mod sort;
mod sparse;
mod supports;

use std::sync::Arc;

use quadriga_graph::{Op, Unary};
use quadriga_runtime::{BackendError, SplitSource};

use self::lowering::Lowering;
pub(crate) use self::scratch_bytes::scratch_bytes;
pub(crate) use self::supports::supports;
use crate::buffer::device_address;
use crate::inner::BackendInner;
use crate::program::CudaProgram;

/// Lowers a split to a program.
pub(crate) fn lower(inner: &Arc<BackendInner>, split: &SplitSource<'_>) -> Result<CudaProgram, BackendError> {
    inner.kernels.prepare(&files::needed(inner, split));
    let mut lowering = Lowering::new(inner, split)?;
    if let Some(region) = &split.scratch {
        let multiprocessors = inner.context.multiprocessors;
        let has_mixed = inner.kernels.expects_wgmma();
        let needs = scratch_bytes(split.graph, split.nodes, inner.gemm_kernels(), has_mixed, multiprocessors);
        // Where the region is too small, the node that needs more fails.
        let workspace = needs.workspace.min(region.bytes);
        let rows = needs.decode_rows.min(region.bytes - workspace);
        lowering.workspace = device_address(&inner.context, region)?;
        let rows_base = lowering.workspace + workspace as u64;
        lowering.scratch_base = rows_base + rows as u64;
        lowering.scratch_bytes = region.bytes - workspace - rows;
        lowering.buffers.push(Arc::clone(&region.buffer));
        lowering.find_decode_attention(rows_base, rows)?;
    }
    lower_nodes(&mut lowering)?;
    let Lowering { steps, uses_counters, faults, buffers, .. } = lowering;
    CudaProgram::new(Arc::clone(inner), steps, uses_counters, faults, buffers)
}

fn lower_nodes(lowering: &mut Lowering<'_>) -> Result<(), BackendError> {
    let graph = lowering.graph;
    for (at, node) in lowering.split.nodes.iter().enumerate() {
        let op = graph[*node].op();
        if op.is_view() || lowering.is_fused(*node) {
            continue;
        }
        // Other ranks wait for this one also where it gets nothing.
        if let Op::Collective(collective) = op {
            lowering.collective(*node, collective)?;
            continue;
        }
        let empty = graph[graph[*node].output()].elements() == 0;
        let writes_nothing =
            op.is_write() && graph.inputs(*node).get(1).is_some_and(|x| graph[*x].elements() == 0);
        if empty || writes_nothing {
            continue;
        }
        match op {
            Op::MulMat => lowering.mul_mat(at, *node)?,
            Op::MulMatId => lowering.mul_mat_id(at, *node)?,
            Op::Attention(parameters) => lowering.attention(*node, parameters)?,
            Op::Rope { rope, .. } => lowering.rope(at, *node, rope)?,
            Op::Norm { .. } | Op::RmsNorm { .. } | Op::L2Norm { .. } => lowering.row_norm(at, *node)?,
            Op::SoftMax { .. } | Op::Unary(_) if lowering.route(at, *node)? => {}
            Op::Unary(Unary::Relu) if lowering.leaves_relu_to_matmul(at, *node)? => {}
            Op::MulMatSparse { .. } => lowering.mul_mat_sparse(*node)?,
            Op::AxpySparse => lowering.axpy_sparse(at, *node)?,
            Op::SelectExperts(_) => lowering.select_experts(at, *node)?,
            Op::ExpertWeights(parameters) => lowering.expert_weights(*node, parameters)?,
            Op::AddId => lowering.add_id(*node)?,
            Op::SumExperts => lowering.sum_experts(*node)?,
            Op::SsmConv => lowering.ssm_conv(*node)?,
            Op::GatedDeltaRule(parameters) => lowering.gated_delta_rule(*node, parameters)?,
            Op::ArgSort { .. } | Op::TopK { .. } => lowering.sort(*node)?,
            op if conv::is_here(op) => lowering.window_op(*node)?,
            _ => lowering.one_launch(at, *node)?,
        }
    }
    lowering.flush_route();
    Ok(())
}
