//! Inference rules of a mixture of experts: selecting experts, their weights, biases and the sum of their results.

use super::checks::{Inferred, need_dense, need_f32, need_i32, shape_error, take};
use super::parameters::{ExpertWeights, SelectExperts};
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) fn select(parameters: &SelectExperts, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [scores] = take(inputs, "1")?;
    need_f32(0, scores)?;
    need_dense(0, scores)?;
    let [1, 1, tokens, experts] = scores.dims4() else {
        return shape_error(format!("scores {} are not a matrix of tokens and experts", scores.shape));
    };
    let SelectExperts { used, groups, groups_used, .. } = *parameters;
    let of = |text: String| Err(GraphErrorKind::Parameter(text));
    if groups == 0 || !experts.is_multiple_of(groups) {
        return of(format!("{experts} experts cannot be divided into {groups} groups"));
    }
    if groups_used == 0 || groups_used > groups {
        return of(format!("{groups_used} of {groups} groups"));
    }
    let candidates = experts / groups * groups_used;
    if used == 0 || used > candidates {
        return of(format!("{used} of {candidates} experts"));
    }
    Ok(Inferred::fresh(DType::I32, Shape::from([tokens, used])))
}

pub(super) fn weights(parameters: &ExpertWeights, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [probabilities, ids] = take(inputs, "2")?;
    need_f32(0, probabilities)?;
    need_i32(1, ids)?;
    need_dense(0, probabilities)?;
    need_dense(1, ids)?;
    let [pb, ph, tokens, _] = probabilities.dims4();
    let [ib, ih, count, used] = ids.dims4();
    if [pb, ph, ib, ih] != [1; 4] || tokens != count {
        return shape_error(format!(
            "probabilities {} and ids {} do not match",
            probabilities.shape, ids.shape
        ));
    }
    if !parameters.scale.is_finite() {
        return Err(GraphErrorKind::Parameter(format!("scale {} is not finite", parameters.scale)));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([tokens, used])))
}

pub(super) fn add_id(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x, biases, ids] = take(inputs, "3")?;
    need_f32(0, x)?;
    need_f32(1, biases)?;
    need_i32(2, ids)?;
    for (i, tensor) in [x, biases, ids].into_iter().enumerate() {
        need_dense(i, tensor)?;
    }
    let [xb, tokens, used, columns] = x.dims4();
    let [bb, bh, _, width] = biases.dims4();
    if [xb, bb, bh] != [1; 3] || width != columns || ids.dims4() != [1, 1, tokens, used] {
        return shape_error(format!(
            "rows {}, biases {} and ids {} do not match",
            x.shape, biases.shape, ids.shape
        ));
    }
    Ok(Inferred::like(x))
}

pub(super) fn sum(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x, weights] = take(inputs, "2")?;
    for (i, tensor) in [x, weights].into_iter().enumerate() {
        need_f32(i, tensor)?;
        need_dense(i, tensor)?;
    }
    let [batch, tokens, used, columns] = x.dims4();
    if batch != 1 || weights.dims4() != [1, 1, tokens, used] {
        return shape_error(format!("rows {} and weights {} do not match", x.shape, weights.shape));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([tokens, columns])))
}
