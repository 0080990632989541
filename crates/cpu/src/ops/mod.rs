//! Lowering: for each operation of the graph, the kernels that compute it.

mod activation_source;
mod arrange;
mod attention;
mod collective;
mod conv;
mod copy;
mod custom;
mod elementwise;
mod experts;
mod functions;
mod lowered;
mod matmul;
mod norm;
mod operand;
mod packed_matmul;
mod recurrent;
mod reduce;
mod rope;
mod routing;
mod rows;
mod scratch;
mod softmax;
mod sparse;
mod work;

use quadriga_graph::Op;

use crate::view::TensorView;

pub(crate) use activation_source::{ActivationSource, Prologue};
pub(crate) use collective::{DetachedExchange, collective};
pub(crate) use custom::custom;
pub(crate) use experts::{ExpertActivations, ExpertMatMul, FeedForwardStep, MAX_JOB_ROWS, PreparedMemory};
pub(crate) use lowered::{LoweredOp, TeamOp, WorkBytes};
pub(crate) use operand::{LoweringContext, Operand, PackedWeight};
pub(crate) use packed_matmul::{MAX_MATMULS, MatMulStep, PackedMatMul, StepMatMul, is_small};
pub(crate) use rope::RopeTables;
pub(crate) use work::{WorkSettings, work_bytes};

/// Whether there is a kernel for the operation.
pub(crate) fn is_supported(op: &Op) -> bool {
    use Op::*;
    matches!(
        op,
        Binary(_)
            | Add1
            | Scale { .. }
            | Clamp { .. }
            | Unary(_)
            | Gated { .. }
            | Norm { .. }
            | RmsNorm { .. }
            | GroupNorm { .. }
            | L2Norm { .. }
            | SoftMax { .. }
            | Rope { .. }
            | DiagMaskInf { .. }
            | DiagMaskZero { .. }
            | MulMat
            | MulMatId
            | MulMatSparse { .. }
            | AxpySparse
            | SelectExperts(_)
            | ExpertWeights(_)
            | AddId
            | SumExperts
            | SsmConv
            | GatedDeltaRule(_)
            | OutProd
            | GetRows
            | SetRows
            | Cast { .. }
            | CopyInto
            | Concat { .. }
            | Repeat { .. }
            | Pad { .. }
            | Sum
            | SumRows
            | Mean
            | ArgMax
            | ArgSort { .. }
            | TopK { .. }
            | Attention(_)
            | Reshape { .. }
            | View { .. }
            | Permute { .. }
            | Transpose
            | Im2Col { .. }
            | ConvDepthwise { .. }
            | ConvTranspose { .. }
            | Pool { .. }
            | Upscale { .. }
            | Arange { .. }
            | CrossEntropyLoss
            | Collective(_)
            | Custom(_)
    )
}

/// Adds the kernels of a node to `lowered`. The graph's inference has checked types and shapes.
pub(crate) fn lower(
    op: &Op,
    inputs: &[Operand],
    out: &TensorView,
    context: &LoweringContext<'_>,
    tables: &mut RopeTables,
    lowered: &mut Vec<LoweredOp>,
) -> Result<(), String> {
    let views: Vec<TensorView> = inputs.iter().map(|operand| operand.view).collect();
    let may_be_packed = matches!(op, Op::MulMat | Op::MulMatId | Op::GetRows);
    if inputs.iter().enumerate().any(|(i, x)| x.packed.is_some() && !(may_be_packed && i == 0)) {
        return Err("it cannot read a packed weight".into());
    }
    let part = match (op, views.as_slice()) {
        (Op::Binary(binary), [a, b]) => elementwise::binary(*binary, a, b, out, context.isa),
        (Op::Add1, [a, b]) => elementwise::binary(quadriga_graph::Binary::Add, a, b, out, context.isa),
        (Op::Scale { scale, bias }, [x]) => elementwise::scale(*scale, *bias, x, out),
        (Op::Clamp { min, max }, [x]) => elementwise::clamp(*min, *max, x, out),
        (Op::Unary(unary), [x]) => elementwise::unary(*unary, x, out, context.isa),
        (Op::Gated { gate, swapped }, [_] | [_, _]) => {
            elementwise::gated(*gate, *swapped, &views, out, context.isa)
        }
        (Op::Norm { eps }, [x]) => norm::norm(norm::NormKind::Norm, *eps, x, out, context.isa),
        (Op::RmsNorm { eps }, [x]) => norm::norm(norm::NormKind::Rms, *eps, x, out, context.isa),
        (Op::L2Norm { eps }, [x]) => norm::norm(norm::NormKind::L2, *eps, x, out, context.isa),
        (Op::GroupNorm { groups, eps }, [x]) => norm::group_norm(*groups, *eps, x, out),
        (Op::SoftMax { scale, mask, sinks }, [x, rest @ ..]) => {
            softmax::soft_max(*scale, *mask, *sinks, x, rest, out, context.isa)?
        }
        (Op::Rope { rope, .. }, [x, positions, factors @ ..]) => {
            rope::rope(rope, x, positions, factors.first(), out, context, tables, lowered)?
        }
        (Op::DiagMaskInf { past }, [x]) => arrange::diag_mask(*past, f32::NEG_INFINITY, x, out),
        (Op::DiagMaskZero { past }, [x]) => arrange::diag_mask(*past, 0.0, x, out),
        (Op::MulMat, [_, x]) => return matmul::mul_mat(inputs.first(), x, out, context, lowered),
        (Op::MulMatId, [_, x, ids]) => {
            return matmul::mul_mat_id(inputs.first(), x, ids, out, context, lowered);
        }
        (Op::MulMatSparse { .. }, [w, x, gates, ids @ ..]) => {
            sparse::mul_mat([w, x, gates], ids.first(), out, context)
        }
        (Op::AxpySparse, [w, factors]) => sparse::axpy(w, factors, out, context, lowered),
        (Op::SelectExperts(parameters), [scores]) => routing::select(parameters, scores, out),
        (Op::ExpertWeights(parameters), [p, ids]) => routing::weights(parameters, p, ids, out),
        (Op::AddId, [x, biases, ids]) => routing::add_id(x, biases, ids, out, context.isa),
        (Op::SumExperts, [x, weights]) => routing::sum(x, weights, out, context.isa),
        (Op::SsmConv, [x, kernel]) => recurrent::ssm_conv(x, kernel, out, context.isa),
        (Op::GatedDeltaRule(parameters), [q, k, v, gates, betas, state]) => {
            recurrent::gated_delta_rule(parameters, [q, k, v, gates, betas, state], out, context.isa)
        }
        (Op::OutProd, [a, b]) => matmul::out_prod(a, b, out, context.isa),
        (Op::GetRows, [_, ids]) => rows::get_rows(inputs.first(), ids, out)?,
        (Op::SetRows, [_, x, ids]) => rows::set_rows(x, ids, out, context.isa),
        (Op::Cast { .. }, [x]) | (Op::CopyInto, [_, x]) => copy::copy(x, out),
        (Op::Concat { axis4 }, all) => arrange::concat(*axis4, all, out),
        (Op::Repeat { .. }, [x]) => arrange::repeat(x, out),
        (Op::Pad { before, .. }, [x]) => arrange::pad(*before, x, out),
        (Op::Sum, [x]) => reduce::sum(x, out),
        (Op::SumRows, [x]) => reduce::sum_rows(false, x, out),
        (Op::Mean, [x]) => reduce::sum_rows(true, x, out),
        (Op::ArgMax, [x]) => reduce::argmax(x, out),
        (Op::ArgSort { order }, [x]) => reduce::argsort(*order, x, out),
        (Op::TopK { k }, [x]) => reduce::top_k(*k, x, out),
        (Op::Im2Col { window, .. }, [x]) => conv::im2col(*window, x, out),
        (Op::ConvDepthwise { window }, [kernel, x]) => conv::depthwise(*window, kernel, x, out),
        (Op::ConvTranspose { stride }, [kernel, x]) => conv::transposed(*stride, kernel, x, out),
        (Op::Pool { pooling, window }, [x]) => conv::pool(*pooling, *window, x, out),
        (Op::Upscale { interpolation, .. }, [x]) => conv::upscale(*interpolation, x, out),
        (Op::Arange { start, step, .. }, []) => conv::arange(*start, *step, out),
        (Op::CrossEntropyLoss, [logits, labels]) => reduce::cross_entropy(logits, labels, out),
        (Op::Attention(parameters), [q, k, v, rest @ ..]) => {
            return attention::attention(parameters, [q, k, v], rest, out, context, lowered);
        }
        _ => return Err(format!("there is no kernel for {} with {} inputs", op.name(), views.len())),
    };
    lowered.push(LoweredOp::Part(part));
    Ok(())
}
