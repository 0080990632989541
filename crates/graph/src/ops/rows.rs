//! Inference rules of gathering and scattering rows by index.

use super::checks::{Inferred, ResultMemory, need, need_dense, need_f32_or_f16, need_i32, shape_error, take};
use super::layout::can_write;
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) fn get_rows(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x, ids] = take(inputs, "2")?;
    need(0, x, "I32 or a type that can be dequantized", |t| t.is_computable() || t == DType::I32)?;
    need_dense(0, x)?;
    need_i32(1, ids)?;
    let [b, h, _, cols] = x.dims4();
    let [i0, ib, ih, count] = ids.dims4();
    if i0 != 1 || ib != b || ih != h {
        return shape_error(format!("ids {} do not match rows of {}", ids.shape, x.shape));
    }
    let dtype = if x.dtype == DType::I32 { DType::I32 } else { DType::F32 };
    Ok(Inferred::fresh(dtype, Shape::from_dims4([b, h, count, cols], ids.shape.rank() + 1)))
}

pub(super) fn set_rows(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [target, x, ids] = take(inputs, "3")?;
    can_write(target, x)?;
    need_dense(0, target)?;
    need_f32_or_f16(1, x)?;
    need_i32(2, ids)?;
    let [b, h, _, cols] = target.dims4();
    let [xb, xh, count, xcols] = x.dims4();
    let [i0, ib, ih, icount] = ids.dims4();
    let once = |d: usize, full: usize| d == 1 || d == full;
    if xb != b || xh != h || xcols != cols || icount != count || i0 != 1 || !once(ib, b) || !once(ih, h) {
        return shape_error(format!("rows {} at ids {} do not match {}", x.shape, ids.shape, target.shape));
    }
    Ok(Inferred { dtype: target.dtype, shape: target.shape, memory: ResultMemory::Written })
}
