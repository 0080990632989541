//! Inference rules of recurrent layers.

use super::checks::{Inferred, need_dense, need_f32, shape_error, take};
use super::parameters::GatedDeltaRule;
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) fn ssm_conv(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x, kernel] = take(inputs, "2")?;
    for (i, tensor) in [x, kernel].into_iter().enumerate() {
        need_f32(i, tensor)?;
        need_dense(i, tensor)?;
    }
    let [xb, xh, rows, channels] = x.dims4();
    let [kb, kh, kernels, taps] = kernel.dims4();
    if [xb, xh, kb, kh] != [1; 4] || kernels != channels || taps == 0 || rows + 1 < taps {
        return shape_error(format!("rows {} and kernel {} do not match", x.shape, kernel.shape));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([rows + 1 - taps, channels])))
}

pub(super) fn gated_delta_rule(
    parameters: &GatedDeltaRule,
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let [q, k, v, gates, betas, state] = take(inputs, "6")?;
    for (i, tensor) in [q, k, v, gates, betas, state].into_iter().enumerate() {
        need_f32(i, tensor)?;
        need_dense(i, tensor)?;
    }
    let [qb, tokens, key_heads, depth] = q.dims4();
    let [vb, value_tokens, heads, width] = v.dims4();
    let heads_fit = key_heads > 0 && heads.is_multiple_of(key_heads);
    if [qb, vb] != [1; 2] || k.dims4() != q.dims4() || value_tokens != tokens || !heads_fit {
        return shape_error(format!(
            "queries {}, keys {} and values {} do not match",
            q.shape, k.shape, v.shape
        ));
    }
    let per_head = [1, 1, tokens, heads];
    if gates.dims4() != per_head || betas.dims4() != per_head || state.dims4() != [1, heads, depth, width] {
        return shape_error(format!(
            "gates {}, betas {} and state {} do not match values {} and keys {}",
            gates.shape, betas.shape, state.shape, v.shape, k.shape
        ));
    }
    if !parameters.scale.is_finite() {
        return Err(GraphErrorKind::Parameter(format!("scale {} is not finite", parameters.scale)));
    }
    let rows = tokens.checked_add(depth).and_then(|rows| rows.checked_mul(heads));
    let Some(rows) = rows else { return shape_error("too many rows") };
    Ok(Inferred::fresh(DType::F32, Shape::from([rows, width])))
}
