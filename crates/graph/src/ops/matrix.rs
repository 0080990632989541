//! Inference rules of matrix multiplications.

use super::checks::{Inferred, need, need_dense, need_f32, need_f32_or_f16, need_i32, shape_error, take};
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

fn check_weights(w: &Tensor) -> Result<(), GraphErrorKind> {
    need(0, w, "a type that can be dequantized", DType::is_computable)?;
    need_dense(0, w)
}

pub(super) fn mul_mat(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [w, x] = take(inputs, "2")?;
    check_weights(w)?;
    need_f32_or_f16(1, x)?;
    need_dense(1, x)?;
    let [wb, wh, n, wk] = w.dims4();
    let [b, h, m, k] = x.dims4();
    let repeats =
        |inner: usize, outer: usize| if inner == 0 { outer == 0 } else { outer.is_multiple_of(inner) };
    if wk != k || !repeats(wb, b) || !repeats(wh, h) {
        return shape_error(format!("weights {} do not match {}", w.shape, x.shape));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from_dims4([b, h, m, n], x.shape.rank().max(2))))
}

pub(super) fn mul_mat_id(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [w, x, ids] = take(inputs, "3")?;
    check_weights(w)?;
    need_f32_or_f16(1, x)?;
    need_dense(1, x)?;
    need_i32(2, ids)?;
    need_dense(2, ids)?;
    let [wb, _, n, wk] = w.dims4();
    let [xb, t, u, k] = x.dims4();
    let [ib, ih, it, used] = ids.dims4();
    if wb != 1 || xb != 1 || ib != 1 || ih != 1 || wk != k || it != t || (u != 1 && u != used) {
        return shape_error(format!(
            "experts {}, rows {} and ids {} do not match",
            w.shape, x.shape, ids.shape
        ));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([t, used, n])))
}

pub(super) fn out_prod(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [a, b] = take(inputs, "2")?;
    check_weights(a)?;
    need_f32(1, b)?;
    let [a0, a1, ak, p] = a.dims4();
    let [b0, b1, bk, q] = b.dims4();
    if a0 != b0 || a1 != b1 || ak != bk {
        return shape_error(format!("{} and {} do not match", a.shape, b.shape));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from_dims4([b0, b1, q, p], b.shape.rank().max(2))))
}
