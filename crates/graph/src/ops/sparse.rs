//! Inference rules of the operations that read the rows of active neurons only.

use super::checks::{Inferred, need, need_dense, need_f32, need_i32, shape_error, take};
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// The extents `[rows, columns]` of a dense matrix.
fn matrix(input: usize, tensor: &Tensor) -> Result<[usize; 2], GraphErrorKind> {
    need_dense(input, tensor)?;
    match tensor.dims4() {
        [1, 1, rows, columns] => Ok([rows, columns]),
        _ => shape_error(format!("input {input} {} is not a matrix", tensor.shape)),
    }
}

pub(super) fn mul_mat(ids: bool, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let (matrices, ids) = match (ids, inputs) {
        (false, _) => (inputs, None),
        (true, [matrices @ .., ids]) => (matrices, Some(*ids)),
        (true, []) => return Err(GraphErrorKind::Arity { expected: "4", found: 0 }),
    };
    let [w, x, gates] = take(matrices, if ids.is_some() { "4" } else { "3" })?;
    need(0, w, "a type that can be dequantized", DType::is_computable)?;
    need_f32(1, x)?;
    need_f32(2, gates)?;
    let ([rows, depth], [tokens, columns]) = (matrix(0, w)?, matrix(1, x)?);
    let [count, neurons] = matrix(2, gates)?;
    let named = match ids {
        None => neurons,
        Some(ids) => {
            need_i32(3, ids)?;
            match matrix(3, ids)? {
                [1, named] => named,
                _ => return shape_error(format!("ids {} are not a vector", ids.shape)),
            }
        }
    };
    if depth != columns || tokens != count || rows != named {
        return shape_error(format!(
            "weights {}, rows {} and gates {} do not match",
            w.shape, x.shape, gates.shape
        ));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([tokens, rows])))
}

pub(super) fn axpy(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [w, factors] = take(inputs, "2")?;
    need(0, w, "a type that can be dequantized", DType::is_computable)?;
    need_f32(1, factors)?;
    let ([rows, columns], [tokens, count]) = (matrix(0, w)?, matrix(1, factors)?);
    if rows != count {
        return shape_error(format!("rows {} and factors {} do not match", w.shape, factors.shape));
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([tokens, columns])))
}
