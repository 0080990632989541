//! Inference rules of convolutions, pooling, upscaling and ranges.

use super::checks::{Inferred, need, need_f32, need_f32_or_f16, shape_error, take};
use super::parameters::{Interpolation, Pooling};
use super::window::Window;
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) fn im2col(window: &Window, to: DType, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32_or_f16(0, x)?;
    if !matches!(to, DType::F32 | DType::F16) {
        return Err(GraphErrorKind::Parameter(format!("the result is F32 or F16, not {to}")));
    }
    let [n, c, h, w] = x.dims4();
    let [oh, ow] = window.positions([h, w])?;
    let [kh, kw] = window.kernel;
    let columns = c.checked_mul(kh).and_then(|all| all.checked_mul(kw)).ok_or(GraphErrorKind::Overflow)?;
    Ok(Inferred::fresh(to, Shape::from([n, oh, ow, columns])))
}

pub(super) fn depthwise(window: &Window, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [kernel, x] = take(inputs, "2")?;
    need_f32_or_f16(0, kernel)?;
    need_f32_or_f16(1, x)?;
    let [n, c, h, w] = x.dims4();
    let [kh, kw] = window.kernel;
    if kernel.dims4() != [c, 1, kh, kw] {
        return shape_error(format!(
            "a kernel {} does not match {c} channels and a window of {kh} × {kw}",
            kernel.shape
        ));
    }
    let [oh, ow] = window.positions([h, w])?;
    Ok(Inferred::fresh(DType::F32, Shape::from([n, c, oh, ow])))
}

pub(super) fn transposed(stride: [usize; 2], inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [kernel, x] = take(inputs, "2")?;
    need_f32_or_f16(0, kernel)?;
    need_f32_or_f16(1, x)?;
    let [ic, oc, kh, kw] = kernel.dims4();
    let [n, c, h, w] = x.dims4();
    if ic != c {
        return shape_error(format!("a kernel {} does not match {c} channels", kernel.shape));
    }
    let [sv, sh] = stride;
    if [kh, kw, sv, sh, h, w].contains(&0) {
        return Err(GraphErrorKind::Parameter(format!(
            "kernel {kh} × {kw}, stride {sv} × {sh} and input {h} × {w} must be at least 1"
        )));
    }
    let extent = |input: usize, stride: usize, kernel: usize| {
        let all = (input - 1).checked_mul(stride)?.checked_add(kernel)?;
        i32::try_from(all).is_ok().then_some(all)
    };
    let (Some(oh), Some(ow)) = (extent(h, sv, kh), extent(w, sh, kw)) else {
        return Err(GraphErrorKind::Overflow);
    };
    Ok(Inferred::fresh(DType::F32, Shape::from([n, oc, oh, ow])))
}

pub(super) fn pool(
    pooling: Pooling,
    window: &Window,
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32_or_f16(0, x)?;
    let [n, c, h, w] = x.dims4();
    // Every window then has an element.
    if window.padding.iter().zip(window.kernel).any(|(padding, kernel)| *padding >= kernel) {
        return Err(GraphErrorKind::Parameter(format!(
            "the padding {:?} must be smaller than the window {:?}",
            window.padding, window.kernel
        )));
    }
    if window.dilation != [1; 2] {
        return Err(GraphErrorKind::Parameter(format!("{pooling:?} pooling has no dilation")));
    }
    if h == 0 || w == 0 {
        return shape_error(format!("{} has no elements to pool", x.shape));
    }
    let [oh, ow] = window.positions([h, w])?;
    Ok(Inferred::fresh(DType::F32, Shape::from_dims4([n, c, oh, ow], x.shape.rank())))
}

pub(super) fn upscale(
    shape: &Shape,
    interpolation: Interpolation,
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need(0, x, "F32", |t| t == DType::F32)?;
    if x.dims4().iter().zip(shape.dims4()).any(|(from, to)| *from == 0 && to > 0) {
        return shape_error(format!("{} has no elements to fill {shape}", x.shape));
    }
    if x.dims4().iter().chain(&shape.dims4()).any(|extent| i32::try_from(*extent).is_err()) {
        return shape_error(format!("{interpolation:?} upscaling of {} to {shape} is too large", x.shape));
    }
    Ok(Inferred::fresh(DType::F32, *shape))
}

pub(super) fn arange(
    start: f32,
    step: f32,
    count: usize,
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let [] = take(inputs, "0")?;
    if !start.is_finite() || !step.is_finite() {
        return Err(GraphErrorKind::Parameter(format!("a range from {start} by {step} is not finite")));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([count])))
}

pub(super) fn cross_entropy(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [logits, labels] = take(inputs, "2")?;
    need_f32(0, logits)?;
    need_f32(1, labels)?;
    if logits.dims4() != labels.dims4() {
        return shape_error(format!("logits {} and labels {} differ", logits.shape, labels.shape));
    }
    if logits.elements() == 0 {
        return shape_error(format!("{} has no rows to compare", logits.shape));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([1])))
}
