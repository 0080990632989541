//! Which kernel files a split uses, so that those which must be compiled are compiled at once.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, NodeId, Op};
use quadriga_runtime::SplitSource;

use super::delta_chunks::MIN_CHUNKED_TOKENS;
use super::formats::MAX_GEMV_ROWS;
use super::long_attention::MIN_KEYS;
use super::paged_attention::is_narrow;
use crate::blas::GemmKernels;
use crate::inner::BackendInner;
use crate::kernels::KernelFile;

/// The files that the nodes of a split use. One too few is loaded at its first use, one too many is compiled in vain.
pub(super) fn needed(inner: &Arc<BackendInner>, split: &SplitSource<'_>) -> Vec<KernelFile> {
    let gemm = match inner.gemm_kernels() {
        GemmKernels::Cublas => None,
        _ if inner.kernels.expects_wgmma() => Some(KernelFile::GemmWgmma),
        _ => Some(KernelFile::Gemm),
    };
    let streams = inner.fusion && inner.context.has_bulk_copies();
    let mixed = inner.kernels.expects_wgmma();
    let mma = inner.context.compute_capability >= (8, 0);
    let mut files = Vec::new();
    for node in split.nodes {
        for file in of_node(split.graph, *node, gemm, streams, mma, mixed) {
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    files
}

fn of_node(
    graph: &Graph,
    node: NodeId,
    gemm: Option<KernelFile>,
    streams: bool,
    mma: bool,
    mixed: bool,
) -> Vec<KernelFile> {
    let rows_of = |at: usize| graph.inputs(node).get(at).map_or(0, |id| graph[*id].shape().rows());
    match graph[node].op() {
        op if op.is_view() => Vec::new(),
        Op::MulMat => match rows_of(1) {
            1 if streams => vec![KernelFile::GemvStreamed],
            rows if rows > 1 && mixed => vec![KernelFile::GemmMixed],
            rows if rows <= MAX_GEMV_ROWS => vec![KernelFile::Matmul],
            _ => [KernelFile::Pack].into_iter().chain(gemm).collect(),
        },
        Op::MulMatId => match graph.inputs(node).get(1).map_or(0, |x| graph[*x].dims4()[1]) {
            1 if streams => vec![KernelFile::ExpertsDecode, KernelFile::ExpertsGemv, KernelFile::Matmul],
            tokens if tokens <= MAX_GEMV_ROWS => vec![KernelFile::ExpertsGemv, KernelFile::Matmul],
            _ => vec![KernelFile::ExpertsGemm, KernelFile::Matmul],
        },
        Op::MulMatSparse { .. } | Op::AxpySparse if rows_of(1) <= MAX_GEMV_ROWS => vec![KernelFile::Sparse],
        Op::MulMatSparse { .. } | Op::AxpySparse => {
            [KernelFile::Sparse, KernelFile::Pack].into_iter().chain(gemm).collect()
        }
        Op::OutProd => vec![KernelFile::Matmul],
        Op::Attention(parameters) if parameters.pages => paged_attention(graph, node, mma),
        Op::Attention(_) => attention(graph, node, mma),
        Op::Rope { .. } => vec![KernelFile::Rope],
        Op::Norm { .. } | Op::RmsNorm { .. } | Op::L2Norm { .. } | Op::GroupNorm { .. } => {
            vec![KernelFile::Norm]
        }
        Op::SoftMax { .. } => vec![KernelFile::Norm],
        Op::SelectExperts(_) | Op::ExpertWeights(_) | Op::AddId | Op::SumExperts => {
            vec![KernelFile::Experts]
        }
        Op::GatedDeltaRule(_) if mma && rows_of(3) >= MIN_CHUNKED_TOKENS => vec![KernelFile::DeltaChunks],
        Op::SsmConv | Op::GatedDeltaRule(_) => vec![KernelFile::Recurrent],
        Op::ArgSort { .. } | Op::TopK { .. } | Op::Sum | Op::SumRows | Op::Mean | Op::ArgMax => {
            vec![KernelFile::Reduce]
        }
        Op::Im2Col { .. }
        | Op::ConvDepthwise { .. }
        | Op::ConvTranspose { .. }
        | Op::Pool { .. }
        | Op::Upscale { .. }
        | Op::Arange { .. }
        | Op::CrossEntropyLoss => vec![KernelFile::Conv],
        Op::Unary(_) | Op::Binary(_) | Op::Gated { .. } | Op::Scale { .. } => vec![KernelFile::Elementwise],
        _ => vec![KernelFile::Rows],
    }
}

/// The files for attention: tensor cores take many queries, and caches and heads that the kernels for few do not.
fn attention(graph: &Graph, node: NodeId, mma: bool) -> Vec<KernelFile> {
    let input = |at: usize| graph.inputs(node).get(at).map(|id| &graph[*id]);
    let (Some(q), Some(k)) = (input(0), input(1)) else { return Vec::new() };
    let [.., queries, d] = q.dims4();
    let is_long = k.dims4()[2] as u64 >= MIN_KEYS;
    let wide = d > 128 || !matches!(k.dtype(), DType::F16 | DType::F32);
    match (mma, queries > 1) {
        (true, _) if wide => {
            vec![KernelFile::AttentionGrouped, KernelFile::AttentionMma, KernelFile::Attention]
        }
        (true, true) => vec![KernelFile::AttentionMma, KernelFile::Attention],
        (true, false) if is_long => vec![KernelFile::AttentionDecode, KernelFile::Attention],
        _ => vec![KernelFile::Attention],
    }
}

/// The files for attention through page tables.
fn paged_attention(graph: &Graph, node: NodeId, mma: bool) -> Vec<KernelFile> {
    let input = |at: usize| graph.inputs(node).get(at).map(|id| &graph[*id]);
    let (Some(q), Some(k), Some(v)) = (input(0), input(1), input(2)) else { return Vec::new() };
    let ([_, heads, _, d], [_, groups, _, e]) = (q.dims4(), v.dims4());
    match [k, v].iter().any(|t| t.dtype() == DType::F32) {
        false if mma && is_narrow([d, e], heads, groups) => {
            vec![KernelFile::AttentionPaged, KernelFile::AttentionMma]
        }
        false if mma => vec![KernelFile::AttentionGrouped],
        _ => vec![KernelFile::Attention],
    }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{GraphBuilder, Value, Weight};

    use super::*;

    /// The files of all nodes of a graph over one input of this many rows.
    fn files(rows: usize, streams: bool, build: impl Fn(&GraphBuilder, Value<'_>)) -> Vec<KernelFile> {
        let g = GraphBuilder::new();
        build(&g, g.input("x", DType::F32, [rows, 64]));
        let graph = g.finish().unwrap();
        let of = |node| of_node(&graph, node, Some(KernelFile::GemmWgmma), streams, true, false);
        graph.node_ids().flat_map(of).collect()
    }

    #[test]
    fn a_matmul_needs_the_file_for_its_rows() {
        let multiply = |g: &GraphBuilder, x: Value<'_>| {
            let w = g.weight("w", Weight::new(DType::Q4_0, [64, 64]));
            g.output("y", w.mul_mat(x));
        };
        assert_eq!(files(1, true, multiply), [KernelFile::GemvStreamed]);
        assert_eq!(files(1, false, multiply), [KernelFile::Matmul]);
        assert_eq!(files(8, true, multiply), [KernelFile::Matmul]);
        assert_eq!(files(9, true, multiply), [KernelFile::Pack, KernelFile::GemmWgmma]);
    }

    #[test]
    fn views_need_none_and_other_operations_theirs() {
        let more = |g: &GraphBuilder, x: Value<'_>| {
            let rows = x.reshape([2, 128]).rms_norm(1e-5);
            g.output("y", rows.soft_max(1.0, None, None).silu());
        };
        assert_eq!(files(4, true, more), [KernelFile::Norm, KernelFile::Norm, KernelFile::Elementwise]);
    }
}
