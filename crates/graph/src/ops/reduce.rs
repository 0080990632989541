//! Inference rules of reductions and sorts of rows.

use super::checks::{Inferred, need_f32, take};
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) fn sum(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    Ok(Inferred::fresh(DType::F32, Shape::from([1])))
}

pub(super) fn per_row(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    let mut dims = x.dims4();
    dims[3] = 1;
    Ok(Inferred::fresh(DType::F32, Shape::from_dims4(dims, x.shape.rank())))
}

pub(super) fn argmax(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    row_not_empty(x)?;
    let [a, b, c, _] = x.dims4();
    Ok(Inferred::fresh(DType::I32, Shape::from_dims4([1, a, b, c], x.shape.rank().saturating_sub(1))))
}

pub(super) fn argsort(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    indexable(x)?;
    Ok(Inferred::fresh(DType::I32, x.shape))
}

pub(super) fn top_k(k: usize, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need_f32(0, x)?;
    indexable(x)?;
    if k > x.shape.cols() {
        return Err(GraphErrorKind::Parameter(format!(
            "the {k} largest of a row of {} elements",
            x.shape.cols()
        )));
    }
    let mut dims = x.dims4();
    dims[3] = k;
    Ok(Inferred::fresh(DType::I32, Shape::from_dims4(dims, x.shape.rank())))
}

fn row_not_empty(x: &Tensor) -> Result<(), GraphErrorKind> {
    if x.shape.cols() == 0 {
        return Err(GraphErrorKind::Shape("an empty row has no largest element".into()));
    }
    indexable(x)
}

fn indexable(x: &Tensor) -> Result<(), GraphErrorKind> {
    if i32::try_from(x.shape.cols()).is_err() {
        return Err(GraphErrorKind::Shape(format!(
            "a row of {} elements is too long for I32 indices",
            x.shape.cols()
        )));
    }
    Ok(())
}
