//! An inferred result, and the checks that inference rules share.

use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::{Shape, Strides};
use crate::tensor::Tensor;

/// The memory that holds a result.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum ResultMemory {
    /// New memory, contiguous.
    Fresh,
    /// A view of input 0: a byte offset relative to it, and strides.
    View(usize, Strides),
    /// The memory and layout of input 0, which the operation writes.
    Written,
}

/// Type, shape and memory of a result.
pub(crate) struct Inferred {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) memory: ResultMemory,
}

impl Inferred {
    pub(super) fn fresh(dtype: DType, shape: Shape) -> Inferred {
        Inferred { dtype, shape, memory: ResultMemory::Fresh }
    }

    pub(super) fn like(tensor: &Tensor) -> Inferred {
        Inferred::fresh(tensor.dtype, tensor.shape)
    }
}

/// The inputs as an array of `N`, or an arity error.
pub(super) fn take<'a, const N: usize>(
    inputs: &[&'a Tensor],
    expected: &'static str,
) -> Result<[&'a Tensor; N], GraphErrorKind> {
    inputs.try_into().map_err(|_| GraphErrorKind::Arity { expected, found: inputs.len() })
}

/// A type error unless `is` accepts the type of input `input`.
pub(super) fn need(
    input: usize,
    tensor: &Tensor,
    expected: &'static str,
    is: impl Fn(DType) -> bool,
) -> Result<(), GraphErrorKind> {
    if is(tensor.dtype) { Ok(()) } else { Err(GraphErrorKind::Type { input, found: tensor.dtype, expected }) }
}

pub(super) fn need_f32(input: usize, tensor: &Tensor) -> Result<(), GraphErrorKind> {
    need(input, tensor, "F32", |t| t == DType::F32)
}

pub(super) fn need_i32(input: usize, tensor: &Tensor) -> Result<(), GraphErrorKind> {
    need(input, tensor, "I32", |t| t == DType::I32)
}

pub(super) fn need_f32_or_f16(input: usize, tensor: &Tensor) -> Result<(), GraphErrorKind> {
    need(input, tensor, "F32 or F16", |t| matches!(t, DType::F32 | DType::F16))
}

pub(super) fn need_dense(input: usize, tensor: &Tensor) -> Result<(), GraphErrorKind> {
    if tensor.has_dense_rows() { Ok(()) } else { Err(GraphErrorKind::Strided { input }) }
}

pub(super) fn shape_error<T>(text: impl Into<String>) -> Result<T, GraphErrorKind> {
    Err(GraphErrorKind::Shape(text.into()))
}
