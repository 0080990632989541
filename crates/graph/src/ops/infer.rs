//! Shape and type inference: from an operation and its inputs to its result.

use super::checks::Inferred;
use super::op::Op;
use super::{attention, conv, elementwise, experts, layout, matrix, recurrent, reduce, rows, sparse};
use crate::error::GraphErrorKind;
use crate::tensor::Tensor;

impl Op {
    /// The type, shape and memory of the result, or the rule that the inputs break.
    pub(crate) fn infer(&self, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
        match self {
            Op::Binary(_) => elementwise::binary(inputs),
            Op::Add1 => elementwise::add1(inputs),
            Op::Scale { .. } | Op::Unary(_) => elementwise::map(inputs),
            Op::Clamp { min, max } => elementwise::clamp(*min, *max, inputs),
            Op::Gated { .. } => elementwise::gated(inputs),
            Op::Norm { eps } | Op::RmsNorm { eps } | Op::L2Norm { eps } => {
                elementwise::row_norm(*eps, inputs)
            }
            Op::GroupNorm { groups, eps } => elementwise::group_norm(*groups, *eps, inputs),
            Op::DiagMaskInf { .. } | Op::DiagMaskZero { .. } => elementwise::diag_mask(inputs),
            Op::SoftMax { scale, mask, sinks } => attention::soft_max(*scale, *mask, *sinks, inputs),
            Op::Rope { rope, factors } => attention::rope(rope, *factors, inputs),
            Op::Attention(parameters) => attention::attention(parameters, inputs),
            Op::MulMat => matrix::mul_mat(inputs),
            Op::MulMatId => matrix::mul_mat_id(inputs),
            Op::MulMatSparse { ids } => sparse::mul_mat(*ids, inputs),
            Op::AxpySparse => sparse::axpy(inputs),
            Op::SelectExperts(parameters) => experts::select(parameters, inputs),
            Op::ExpertWeights(parameters) => experts::weights(parameters, inputs),
            Op::AddId => experts::add_id(inputs),
            Op::SumExperts => experts::sum(inputs),
            Op::SsmConv => recurrent::ssm_conv(inputs),
            Op::GatedDeltaRule(parameters) => recurrent::gated_delta_rule(parameters, inputs),
            Op::OutProd => matrix::out_prod(inputs),
            Op::GetRows => rows::get_rows(inputs),
            Op::SetRows => rows::set_rows(inputs),
            Op::Cast { to } => layout::cast(*to, inputs),
            Op::CopyInto => layout::copy_into(inputs),
            Op::Concat { axis4 } => layout::concat(*axis4, inputs),
            Op::Repeat { shape } => layout::repeat(shape, inputs),
            Op::Pad { before, after } => layout::pad(before, after, inputs),
            Op::Sum => reduce::sum(inputs),
            Op::SumRows | Op::Mean => reduce::per_row(inputs),
            Op::ArgMax => reduce::argmax(inputs),
            Op::ArgSort { .. } => reduce::argsort(inputs),
            Op::TopK { k } => reduce::top_k(*k, inputs),
            Op::Reshape { shape } => layout::reshape(shape, inputs),
            Op::View { shape, strides, offset } => layout::view(shape, strides, *offset, inputs),
            Op::Permute { axes } => layout::permute(*axes, inputs),
            Op::Transpose => layout::permute([0, 1, 3, 2], inputs),
            Op::Im2Col { window, to } => conv::im2col(window, *to, inputs),
            Op::ConvDepthwise { window } => conv::depthwise(window, inputs),
            Op::ConvTranspose { stride } => conv::transposed(*stride, inputs),
            Op::Pool { pooling, window } => conv::pool(*pooling, window, inputs),
            Op::Upscale { shape, interpolation } => conv::upscale(shape, *interpolation, inputs),
            Op::Arange { start, step, count } => conv::arange(*start, *step, *count, inputs),
            Op::CrossEntropyLoss => conv::cross_entropy(inputs),
            Op::Collective(collective) => collective.infer(inputs),
            Op::Custom(custom) => {
                let (dtype, shape) = custom.infer(inputs).map_err(GraphErrorKind::Custom)?;
                Ok(Inferred::fresh(dtype, shape))
            }
        }
    }
}
