//! The operations: one short function each, and the dispatch to them.

mod attention;
mod conv;
mod elementwise;
mod experts;
mod layout;
mod matrix;
mod norms;
mod recurrent;
mod reduce;
mod rows;
mod sparse;

use quadriga_graph::Op;

use super::EvalError;
use super::memory::{View, ViewMut};

/// Computes one operation.
///
/// `inputs` are those of the node, without the target for an operation that writes it; the target is `out`.
pub(super) fn evaluate(op: &Op, inputs: &[View<'_>], out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    match (op, inputs) {
        (Op::Binary(kind), [a, b]) => elementwise::binary(*kind, a, b, out),
        (Op::Add1, [a, b]) => elementwise::add1(a, b, out),
        (Op::Scale { scale, bias }, [x]) => {
            let (scale, bias) = (f64::from(*scale), f64::from(*bias));
            elementwise::map(|x| scale * x + bias, x, out)
        }
        (Op::Clamp { min, max }, [x]) => {
            let (min, max) = (f64::from(*min), f64::from(*max));
            elementwise::map(|x| x.max(min).min(max), x, out)
        }
        (Op::Unary(kind), [x]) => elementwise::map(|x| elementwise::unary(*kind, x), x, out),
        (Op::Gated { gate, swapped: false }, [a, b]) => elementwise::gated(*gate, a, b, out),
        (Op::Gated { gate, swapped: true }, [a, b]) => elementwise::gated(*gate, b, a, out),
        (Op::Gated { gate, swapped }, [x]) => elementwise::gated_halves(*gate, *swapped, x, out),
        (Op::DiagMaskInf { past }, [x]) => elementwise::diag_mask(f64::NEG_INFINITY, *past, x, out),
        (Op::DiagMaskZero { past }, [x]) => elementwise::diag_mask(0.0, *past, x, out),
        (Op::Norm { eps }, [x]) => norms::norm((*eps).into(), x, out),
        (Op::RmsNorm { eps }, [x]) => norms::rms_norm((*eps).into(), x, out),
        (Op::L2Norm { eps }, [x]) => norms::l2_norm((*eps).into(), x, out),
        (Op::GroupNorm { groups, eps }, [x]) => norms::group_norm(*groups, (*eps).into(), x, out),
        (Op::SoftMax { scale, mask, sinks }, [x, rest @ ..]) => {
            let [mask, sinks] = optional([*mask, *sinks], rest)?;
            attention::soft_max((*scale).into(), x, mask, sinks, out)
        }
        (Op::Rope { rope, factors }, [x, positions, rest @ ..]) => {
            let [factors] = optional([*factors], rest)?;
            attention::rope(rope, x, positions, factors, out)
        }
        (Op::Attention(parameters), [q, k, v, rest @ ..]) => {
            let given = [parameters.mask, parameters.spans, parameters.sinks, parameters.pages];
            attention::attention(parameters, [q, k, v], optional(given, rest)?, out)
        }
        (Op::MulMat, [w, x]) => matrix::mul_mat(w, x, out),
        (Op::MulMatId, [w, x, ids]) => matrix::mul_mat_id(w, x, ids, out),
        (Op::MulMatSparse { ids }, [w, x, gates, rest @ ..]) => {
            let [ids] = optional([*ids], rest)?;
            sparse::mul_mat(w, x, gates, ids, out)
        }
        (Op::AxpySparse, [w, factors]) => sparse::axpy(w, factors, out),
        (Op::SelectExperts(parameters), [scores]) => experts::select(parameters, scores, out),
        (Op::ExpertWeights(parameters), [p, ids]) => experts::weights(parameters, p, ids, out),
        (Op::AddId, [x, biases, ids]) => experts::add_id(x, biases, ids, out),
        (Op::SumExperts, [x, weights]) => experts::sum(x, weights, out),
        (Op::SsmConv, [x, kernel]) => recurrent::ssm_conv(x, kernel, out),
        (Op::GatedDeltaRule(parameters), [q, k, v, gates, betas, state]) => {
            recurrent::gated_delta_rule(parameters, [q, k, v], [gates, betas], state, out)
        }
        (Op::OutProd, [a, b]) => matrix::out_prod(a, b, out),
        (Op::GetRows, [x, ids]) => rows::get_rows(x, ids, out),
        (Op::SetRows, [x, ids]) => rows::set_rows(x, ids, out),
        (Op::Cast { .. } | Op::CopyInto, [x]) => layout::copy(x, out),
        (Op::Concat { axis4 }, inputs) => layout::concat(*axis4, inputs, out),
        (Op::Repeat { .. }, [x]) => layout::repeat(x, out),
        (Op::Pad { before, .. }, [x]) => layout::pad(before, x, out),
        (Op::Sum, [x]) => reduce::sum(x, out),
        (Op::SumRows, [x]) => reduce::sum_rows(x, out),
        (Op::Mean, [x]) => reduce::mean(x, out),
        (Op::ArgMax, [x]) => reduce::argmax(x, out),
        (Op::ArgSort { order }, [x]) => reduce::argsort(*order, x, out),
        (Op::TopK { k }, [x]) => reduce::top_k(*k, x, out),
        (Op::Im2Col { window, .. }, [x]) => conv::im2col(window, x, out),
        (Op::ConvDepthwise { window }, [kernel, x]) => conv::depthwise(window, kernel, x, out),
        (Op::ConvTranspose { stride }, [kernel, x]) => conv::transposed(*stride, kernel, x, out),
        (Op::Pool { pooling, window }, [x]) => conv::pool(*pooling, window, x, out),
        (Op::Upscale { interpolation, .. }, [x]) => conv::upscale(*interpolation, x, out),
        (Op::Arange { start, step, .. }, []) => conv::arange(f64::from(*start), f64::from(*step), out),
        (Op::CrossEntropyLoss, [logits, labels]) => reduce::cross_entropy(logits, labels, out),
        (Op::Reshape { .. } | Op::View { .. } | Op::Permute { .. } | Op::Transpose, _) => Ok(()),
        (_, inputs) => Err(EvalError::Arity(inputs.len())),
    }
}

/// The enabled optional inputs, in their order.
fn optional<'a, 'm, const N: usize>(
    given: [bool; N],
    inputs: &'a [View<'m>],
) -> Result<[Option<&'a View<'m>>; N], EvalError> {
    let mut rest = inputs.iter();
    let mut found = [None; N];
    for (place, given) in found.iter_mut().zip(given) {
        if given {
            *place = Some(rest.next().ok_or(EvalError::Arity(inputs.len()))?);
        }
    }
    Ok(found)
}
