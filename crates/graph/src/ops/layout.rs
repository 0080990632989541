//! Inference rules of copies, views and other operations that move elements.

use super::checks::{Inferred, ResultMemory, need, need_dense, shape_error, take};
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::{MAX_DIMS, Shape, Strides};
use crate::tensor::Tensor;

/// The types that values can be stored in by an operation.
fn is_writable(dtype: DType) -> bool {
    use DType::*;
    matches!(dtype, F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0)
}

/// Whether elements of `from` can be converted to `to`: equal types, or by way of f32.
fn castable(from: DType, to: DType) -> bool {
    from == to || (from.is_computable() && is_writable(to))
}

/// An error unless the elements of `x` (input 1) can be written to `target` (input 0).
pub(super) fn can_write(target: &Tensor, x: &Tensor) -> Result<(), GraphErrorKind> {
    if castable(x.dtype, target.dtype) {
        let apart = target.offset + target.bytes <= x.offset || x.offset + x.bytes <= target.offset;
        if target.storage == x.storage && !apart {
            return shape_error("source and target overlap in memory; copy the source with cont() first");
        }
        return Ok(());
    }
    Err(GraphErrorKind::Type {
        input: 0,
        found: target.dtype,
        expected: "the source's type, a float type or a type that can be quantized to",
    })
}

pub(super) fn cast(to: DType, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    if !castable(x.dtype, to) {
        return Err(GraphErrorKind::Parameter(format!("{} cannot be cast to {to}", x.dtype)));
    }
    if x.dtype.is_quantized() {
        need_dense(0, x)?;
    }
    Ok(Inferred::fresh(to, x.shape))
}

pub(super) fn copy_into(inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [target, x] = take(inputs, "2")?;
    can_write(target, x)?;
    for (i, t) in [(0, target), (1, x)] {
        if t.dtype.is_quantized() {
            need_dense(i, t)?;
        }
    }
    if target.elements() != x.elements() {
        return shape_error(format!("{} elements cannot be copied into {}", x.elements(), target.elements()));
    }
    let quantized = target.dtype.is_quantized() || x.dtype.is_quantized();
    if quantized && target.shape.cols() != x.shape.cols() {
        return shape_error(format!(
            "rows of quantized types must have equal lengths: {} and {}",
            target.shape, x.shape
        ));
    }
    Ok(Inferred { dtype: target.dtype, shape: target.shape, memory: ResultMemory::Written })
}

pub(super) fn concat(axis4: usize, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let Some((first, rest)) = inputs.split_first() else {
        return Err(GraphErrorKind::Arity { expected: "at least 1", found: 0 });
    };
    let mut dims = first.dims4();
    let mut rank = first.shape.rank();
    for (i, t) in inputs.iter().enumerate() {
        need(i, t, "F32, F16 or I32, the same for all", |d| {
            d == first.dtype && matches!(d, DType::F32 | DType::F16 | DType::I32)
        })?;
    }
    let Some(total) = dims.get(axis4).copied() else {
        return Err(GraphErrorKind::Parameter(format!("dimension {axis4} does not exist")));
    };
    let mut total = total;
    for t in rest {
        for (axis, (mine, theirs)) in dims.iter().zip(t.dims4()).enumerate() {
            if axis == axis4 {
                total = total.checked_add(theirs).ok_or(GraphErrorKind::Overflow)?;
            } else if *mine != theirs {
                return shape_error(format!(
                    "{} and {} differ outside the concatenated dimension",
                    first.shape, t.shape
                ));
            }
        }
        rank = rank.max(t.shape.rank());
    }
    if let Some(d) = dims.get_mut(axis4) {
        *d = total;
    }
    Ok(Inferred::fresh(first.dtype, Shape::from_dims4(dims, rank.max(MAX_DIMS - axis4))))
}

pub(super) fn repeat(shape: &Shape, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need(0, x, "F32, F16 or I32", |t| matches!(t, DType::F32 | DType::F16 | DType::I32))?;
    if !x.shape.repeats_into(shape) {
        return shape_error(format!("{} cannot be repeated to {shape}", x.shape));
    }
    Ok(Inferred::fresh(x.dtype, *shape))
}

pub(super) fn pad(
    before: &[usize; MAX_DIMS],
    after: &[usize; MAX_DIMS],
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    need(0, x, "F32 or F16", |t| matches!(t, DType::F32 | DType::F16))?;
    let mut dims = x.dims4();
    for ((d, b), a) in dims.iter_mut().zip(before).zip(after) {
        *d = d.checked_add(*b).and_then(|d| d.checked_add(*a)).ok_or(GraphErrorKind::Overflow)?;
    }
    Ok(Inferred::fresh(x.dtype, Shape::from_dims4(dims, x.shape.rank())))
}

pub(super) fn reshape(shape: &Shape, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    if shape.checked_elements() != Some(x.elements()) {
        return shape_error(format!("{} and {shape} have different numbers of elements", x.shape));
    }
    if !x.is_contiguous() {
        return shape_error("only a contiguous tensor can be reshaped; make a copy with cont()");
    }
    if !shape.cols().is_multiple_of(x.dtype.block_len()) {
        return Err(GraphErrorKind::Blocks { dtype: x.dtype, cols: shape.cols() });
    }
    let (strides, _) = shape.contiguous(x.dtype).ok_or(GraphErrorKind::Overflow)?;
    Ok(Inferred { dtype: x.dtype, shape: *shape, memory: ResultMemory::View(0, strides) })
}

pub(super) fn view(
    shape: &Shape,
    strides: &Strides,
    offset: usize,
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    if !shape.cols().is_multiple_of(x.dtype.block_len()) {
        return Err(GraphErrorKind::Blocks { dtype: x.dtype, cols: shape.cols() });
    }
    let span = strides.span(shape, x.dtype).ok_or(GraphErrorKind::Overflow)?;
    let end = offset.checked_add(span).ok_or(GraphErrorKind::Overflow)?;
    if end > x.bytes {
        return Err(GraphErrorKind::OutOfRange { end, bytes: x.bytes });
    }
    let unit = if x.dtype.is_quantized() { x.dtype.block_bytes() } else { x.dtype.block_bytes().min(8) };
    if !offset.is_multiple_of(unit) || strides.0.iter().any(|s| !s.is_multiple_of(unit)) {
        return Err(GraphErrorKind::Parameter(format!(
            "offset and strides must be multiples of {unit} bytes"
        )));
    }
    Ok(Inferred { dtype: x.dtype, shape: *shape, memory: ResultMemory::View(offset, *strides) })
}

pub(super) fn permute(axes: [u8; MAX_DIMS], inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let [x] = take(inputs, "1")?;
    let mut sorted = axes;
    sorted.sort_unstable();
    if sorted != [0, 1, 2, 3] {
        return Err(GraphErrorKind::Parameter(format!("{axes:?} is not a permutation of four dimensions")));
    }
    if axes[3] != 3 && x.dtype.is_quantized() {
        return Err(GraphErrorKind::Parameter(format!(
            "the rows of {} are blocks and cannot be transposed",
            x.dtype
        )));
    }
    let (dims, strides) = (x.dims4(), x.strides());
    let pick = |from: [usize; MAX_DIMS]| axes.map(|a| from.get(usize::from(a)).copied().unwrap_or(1));
    let shape = Shape::from_dims4(pick(dims), x.shape.rank());
    Ok(Inferred { dtype: x.dtype, shape, memory: ResultMemory::View(0, Strides(pick(strides))) })
}
