//! Inference rules of elementwise operations, norms and masks, which keep the shape.

use super::checks::{Inferred, need, need_f32, need_f32_or_f16, shape_error, take};
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) fn binary(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [a, b] = take(inputs, "2")?;
    need_f32_or_f16(0, a)?;
    need_f32_or_f16(1, b)?;
    if !b.shape.repeats_into(&a.shape) {
        return shape_error(format!("{} cannot be repeated to {}", b.shape, a.shape));
    }
    Ok(Inferred::like(a))
}

pub(super) fn add1(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [a, b] = take(inputs, "2")?;
    need_f32_or_f16(0, a)?;
    need_f32(1, b)?;
    if b.elements() != 1 {
        return shape_error(format!("input 1 has {} elements, not one", b.elements()));
    }
    Ok(Inferred::like(a))
}

pub(super) fn map(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32_or_f16(0, x)?;
    Ok(Inferred::like(x))
}

pub(super) fn clamp(min: f32, max: f32, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    if min > max || min.is_nan() || max.is_nan() {
        return Err(GraphErrorKind::Parameter(format!("the range {min} to {max} is empty")));
    }
    map(inputs)
}

pub(super) fn gated(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    if let [x] = inputs {
        need_f32_or_f16(0, x)?;
        let cols = x.shape.cols();
        if cols % 2 != 0 {
            return shape_error(format!("a row of {cols} elements cannot be split in two halves"));
        }
        let mut dims = x.shape.dims4();
        dims[3] = cols / 2;
        return Ok(Inferred::fresh(x.dtype, Shape::from_dims4(dims, x.shape.rank())));
    }
    let [gate, up] = take(inputs, "1 or 2")?;
    need_f32_or_f16(0, gate)?;
    need(1, up, "the type of input 0", |t| t == gate.dtype)?;
    if gate.shape.dims4() != up.shape.dims4() {
        return shape_error(format!("{} and {} differ", gate.shape, up.shape));
    }
    Ok(Inferred::like(gate))
}

fn check_eps(eps: f32) -> Result<(), GraphErrorKind> {
    if eps.is_finite() && eps >= 0.0 {
        Ok(())
    } else {
        Err(GraphErrorKind::Parameter(format!("epsilon {eps} is negative or not finite")))
    }
}

pub(super) fn row_norm(eps: f32, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    check_eps(eps)?;
    Ok(Inferred::like(x))
}

pub(super) fn group_norm(groups: usize, eps: f32, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    check_eps(eps)?;
    let channels = x.dims4()[1];
    if groups == 0 || channels % groups != 0 {
        return Err(GraphErrorKind::Parameter(format!(
            "{channels} channels cannot be divided into {groups} groups"
        )));
    }
    Ok(Inferred::like(x))
}

pub(super) fn diag_mask(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    Ok(Inferred::like(x))
}
