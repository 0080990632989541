//! How much scratch memory a split needs: known from shapes alone, so that plans include it before anything is
//! compiled.

use quadriga_graph::{DType, Graph, NodeId, Op};

use super::delta_chunks::chunk_bytes;
use super::expert_extents::ExpertExtents;
use super::formats::MAX_GEMV_ROWS;
use super::gemm::operand_type;
use super::key_partitions::{AttentionExtents, KeyPartitions};
use super::mixed::takes_packed;
use super::paged_attention::PagedPartitions;
use super::scratch::{
    self, NEURON_SLAB_BYTES, SLAB_BYTES, SPARE_SLAB_BYTES, f16_rows, mixed_rows, operands, quantized, sort,
    total_bytes, transposed_operands,
};
use super::sort::{MAX_SORTED_IN_BLOCK, top_of_runs};
use super::sparse;
use crate::blas::{GemmKernels, OperandType, WORKSPACE_BYTES};
use crate::nccl;

/// Scratch memory of a split: cuBLAS's workspace, then the rows of decode attention (query, key and value of one token
/// as the GEMVs write them), then the arrays of the current node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ScratchBytes {
    pub(crate) workspace: usize,
    pub(crate) decode_rows: usize,
    pub(crate) arrays: usize,
}

impl ScratchBytes {
    pub(crate) fn total(&self) -> usize {
        self.workspace.saturating_add(self.decode_rows).saturating_add(self.arrays)
    }
}

/// The most that any of these nodes needs, with whichever of its kernels. `has_mixed`: weights of some types are usually
/// multiplied without being converted ([`super::mixed`]).
pub(crate) fn scratch_bytes(
    graph: &Graph,
    nodes: &[NodeId],
    kernels: GemmKernels,
    has_mixed: bool,
    multiprocessors: u32,
) -> ScratchBytes {
    let mut most = ScratchBytes::default();
    for node in nodes {
        let inputs = graph.inputs(*node);
        let tensor = |at: usize| inputs.get(at).and_then(|id| graph.get(*id));
        let op = graph.get_node(*node).map(|node| node.op());
        let arrays = match (op, tensor(0), tensor(1), tensor(2)) {
            (Some(Op::MulMat), Some(weight), Some(x), _) => {
                let (n, k, m) = (weight.shape().rows(), weight.shape().cols(), x.shape().rows());
                if m > MAX_GEMV_ROWS {
                    most.workspace = most.workspace.max(workspace(kernels));
                }
                let mixed = if m > 1 { total_bytes(mixed_rows(m, k)) } else { 0 };
                matmul(weight.dtype(), (n, k, m), kernels, has_mixed).max(mixed)
            }
            (Some(Op::Collective(collective)), Some(x), ..) => {
                total_bytes([nccl::scratch_bytes(&collective.kind, x.dims4()[2], x.dtype().block_bytes())])
            }
            (Some(Op::MulMatId), Some(weight), Some(x), Some(ids)) => {
                ExpertExtents::new(weight.dims4(), x.dims4(), ids.dims4()).scratch_bytes()
            }
            (Some(Op::MulMatSparse { .. }), Some(weight), Some(x), _) => {
                let (n, k, m) = (weight.shape().rows(), weight.shape().cols(), x.shape().rows());
                match sparse::multiplies_all_rows(weight, m) {
                    false => 0,
                    true => {
                        most.workspace = most.workspace.max(workspace(kernels));
                        gemm_operands(weight.dtype(), (n, k, m), kernels, NEURON_SLAB_BYTES)
                    }
                }
            }
            (Some(Op::AxpySparse), Some(weight), Some(factors), _) => {
                let (rows, columns, m) =
                    (weight.shape().rows(), weight.shape().cols(), factors.shape().rows());
                let chunks = total_bytes(sparse::chunk_bytes(rows, columns, m));
                match sparse::adds_all_rows(weight, m) {
                    false => chunks,
                    true => {
                        most.workspace = most.workspace.max(workspace(kernels));
                        let size = operand_type(weight.dtype(), kernels).bytes();
                        chunks.max(total_bytes(transposed_operands(m, rows, size, columns)))
                    }
                }
            }
            (Some(Op::Attention(parameters)), Some(q), _, Some(v)) if parameters.pages => {
                let [_, heads, queries, _] = q.dims4();
                let pages = inputs.last().and_then(|id| graph.get(*id)).map_or(0, |t| t.shape().cols());
                let e = v.shape().cols();
                PagedPartitions::of([queries, heads], pages, e).bytes(queries * heads, e)
            }
            (Some(Op::Attention(_)), Some(q), _, Some(v)) => {
                let [b, h, t, _] = q.dims4();
                let [_, groups, keys, e] = v.dims4();
                if b * t == 1 && v.dtype() == DType::F16 {
                    most.decode_rows =
                        most.decode_rows.max(total_bytes([h * e * 4, groups * e * 4, groups * e * 4]));
                }
                let [batch, heads, groups, queries, keys] = [b, h, groups, t, keys].map(|n| n as u64);
                let extents = AttentionExtents { batch, heads, groups, queries, keys, e };
                KeyPartitions::max_bytes(&extents, multiprocessors)
            }
            (Some(Op::GatedDeltaRule(_)), Some(q), _, Some(v)) => {
                let ([_, tokens, key_heads, depth], [_, _, heads, _]) = (q.dims4(), v.dims4());
                chunk_bytes(tokens, key_heads, depth, heads).map_or(0, total_bytes)
            }
            (Some(op @ (Op::ArgSort { .. } | Op::TopK { .. })), Some(x), ..)
                if x.shape().cols() > MAX_SORTED_IN_BLOCK =>
            {
                match top_of_runs(op, x.shape().cols()) {
                    Some((k, runs)) => total_bytes(scratch::top_of_runs(x.shape().rows(), runs, k)),
                    None => total_bytes(sort(x.elements())),
                }
            }
            _ => 0,
        };
        most.arrays = most.arrays.max(arrays);
    }
    most
}

fn matmul(dtype: DType, (n, k, m): (usize, usize, usize), kernels: GemmKernels, has_mixed: bool) -> usize {
    let blocks = k.div_ceil(32);
    if m <= MAX_GEMV_ROWS {
        return total_bytes(quantized(m.next_power_of_two(), blocks));
    }
    let slab = if has_mixed && takes_packed(dtype) { SPARE_SLAB_BYTES } else { SLAB_BYTES };
    let converted = gemm_operands(dtype, (n, k, m), kernels, slab);
    match kernels {
        // A packed weight is multiplied with quantized rows.
        GemmKernels::OwnF32 => {
            converted.max(total_bytes(quantized(m.next_multiple_of(MAX_GEMV_ROWS), blocks)))
        }
        _ => converted,
    }
}

/// The operands of a GEMM, whose weight is converted in slabs of so many bytes.
fn gemm_operands(dtype: DType, (n, k, m): (usize, usize, usize), kernels: GemmKernels, slab: usize) -> usize {
    match operand_type(dtype, kernels) {
        OperandType::F16 => total_bytes(f16_rows(m, k)),
        operand => total_bytes(operands(m, k, operand.bytes(), n, slab)),
    }
}

/// The workspace of a GEMM.
fn workspace(kernels: GemmKernels) -> usize {
    if kernels == GemmKernels::Cublas { WORKSPACE_BYTES } else { 0 }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{GraphBuilder, Ranks, Weight};

    use super::super::scratch::aligned;
    use super::*;

    fn of(build: impl FnOnce(&GraphBuilder), kernels: GemmKernels) -> ScratchBytes {
        let g = GraphBuilder::new();
        build(&g);
        let graph = g.finish().unwrap();
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        scratch_bytes(&graph, &nodes, kernels, false, 132)
    }

    fn matmul_of(dtype: DType, rows: usize, kernels: GemmKernels) -> ScratchBytes {
        of(
            |g| {
                let w = g.weight("w", Weight::new(dtype, [11008, 4096]));
                g.output("y", w.mul_mat(g.input("x", DType::F32, [rows, 4096])));
            },
            kernels,
        )
    }

    #[test]
    fn matmuls_of_many_rows_need_their_rows_a_slab_of_the_weight_and_a_workspace() {
        let many = matmul_of(DType::Q4_0, 512, GemmKernels::Cublas);
        assert_eq!(many.workspace, WORKSPACE_BYTES);
        // 11,008 rows of 8 KiB are less than a slab.
        assert_eq!(many.arrays, 512 * 4096 * 2 + 11008 * 4096 * 2);
        assert_eq!(matmul_of(DType::F16, 512, GemmKernels::Cublas).arrays, 512 * 4096 * 2 + 512 * 4);
        assert!(matmul_of(DType::F32, 512, GemmKernels::Cublas).arrays <= 512 * 4096 * 4 + SLAB_BYTES);
        // Without cuBLAS the same, but no workspace.
        assert_eq!(matmul_of(DType::Q4_0, 512, GemmKernels::Own), ScratchBytes { workspace: 0, ..many });
        // Without mma, f32 operands.
        let old = matmul_of(DType::F16, 512, GemmKernels::OwnF32);
        assert_eq!(old, matmul_of(DType::F32, 512, GemmKernels::Own));
    }

    #[test]
    fn a_collective_of_several_rows_needs_its_matrix_as_it_is_aligned() {
        let gathered = |rows: usize| {
            let gather = |g: &GraphBuilder| {
                let ranks = Ranks { group: 0, rank: 0, count: 2 };
                g.output("y", g.input("x", DType::F16, [rows, 1]).all_gather(ranks, [1, 4]));
            };
            of(gather, GemmKernels::Own).total()
        };
        assert_eq!((gathered(1), gathered(2), gathered(100)), (0, aligned(20), aligned(1000)));
        assert!(gathered(2) > 20);
    }

    #[test]
    fn neurons_of_many_tokens_need_the_operands_of_gemm() {
        let of_tokens = |dtype: DType, tokens: usize| {
            let build = |g: &GraphBuilder| {
                let weight = |name: &str| g.weight(name, Weight::new(dtype, [11008, 4096]));
                let x = g.input("x", DType::F32, [tokens, 4096]);
                let gates = g.input("gates", DType::F32, [tokens, 11008]);
                let inner = weight("up").mul_mat_sparse(x, gates, None);
                g.output("y", weight("down").axpy_sparse(inner));
            };
            of(build, GemmKernels::Own).arrays
        };
        // One token: the sums of chunks of rows.
        assert_eq!(of_tokens(DType::F16, 1), 86 * 4096 * 4);
        // Many: rows, their scales, 2,176 transposed columns of 22,016 bytes, and 344 × 128 tiles.
        let transposed = 512 * 11008 * 2 + 512 * 4 + 2176 * 11008 * 2 + 344 * 128;
        assert_eq!(of_tokens(DType::F16, 512), transposed);
        let slab = NEURON_SLAB_BYTES / 8192 * 8192;
        assert_eq!(of_tokens(DType::Q4_0, 512), transposed.max(512 * 8192 + slab));
    }

    #[test]
    fn weights_that_are_not_converted_need_a_small_slab_only() {
        let g = GraphBuilder::new();
        let w = g.weight("w", Weight::new(DType::Q4_0, [11008, 4096]));
        g.output("y", w.mul_mat(g.input("x", DType::F32, [512, 4096])));
        let graph = g.finish().unwrap();
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        let of = |mixed| scratch_bytes(&graph, &nodes, GemmKernels::Own, mixed, 132).arrays;
        assert_eq!(of(false) - of(true), (11008 - SPARE_SLAB_BYTES / 8192) * 8192);
    }

    #[test]
    fn gemv_needs_a_quantized_row_and_elementwise_operations_nothing() {
        assert_eq!(
            matmul_of(DType::Q4_0, 1, GemmKernels::Cublas),
            ScratchBytes { workspace: 0, decode_rows: 0, arrays: 4096 + 1024 }
        );
        let sum = of(
            |g| {
                let x = g.input("x", DType::F32, [64, 64]);
                g.output("y", x.add(x));
            },
            GemmKernels::Cublas,
        );
        assert_eq!(sum.total(), 0);
    }

    #[test]
    fn sorting_long_rows_needs_two_lists() {
        let sorted = |cols: usize, k: usize| {
            of(|g| g.output("y", g.input("x", DType::F32, [3, cols]).top_k(k)), GemmKernels::Own).total()
        };
        assert_eq!(sorted(MAX_SORTED_IN_BLOCK, 5), 0);
        assert_eq!(sorted(50_000, 5000), 2 * aligned(3 * 50_000 * 4));
        // Few of many are found without sorting the others.
        assert_eq!(sorted(50_000, 5), 2 * aligned(3 * 13 * 5 * 4));
    }
}
