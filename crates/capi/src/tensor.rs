//! Tensors by number, and what is known of them.

use quadriga::graph::{DType, MAX_DIMS, Shape, Strides, Tensor};

use crate::dtype::qd_dtype;

/// A tensor of a graph, by number: the builder, its graph and plans of it use the same.
pub type qd_tensor = i32;

/// No tensor: for optional arguments, and after errors.
pub const QD_NO_TENSOR: qd_tensor = -1;

/// The most dimensions of a tensor.
pub const QD_MAX_DIMS: usize = 4;

/// Type and shape of a tensor. Dimensions and byte strides are outermost first, and always four: those that a tensor does
/// not have come first and are 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_tensor_info {
    /// The element type.
    pub dtype: qd_dtype,
    /// The number of dimensions.
    pub rank: u32,
    /// The extents.
    pub dims: [usize; QD_MAX_DIMS],
    /// Bytes from one element (of quantized types: one block) to the next.
    pub strides: [usize; QD_MAX_DIMS],
    /// Elements in all.
    pub elements: usize,
    /// Bytes from the first to the last element, gaps included.
    pub bytes: usize,
}

const _: () = assert!(QD_MAX_DIMS == MAX_DIMS);

impl qd_tensor_info {
    pub(crate) fn new(dtype: DType, shape: &Shape, strides: [usize; MAX_DIMS]) -> qd_tensor_info {
        let bytes = Strides(strides).span(shape, dtype).unwrap_or(0);
        qd_tensor_info {
            dtype: dtype.id(),
            rank: shape.rank() as u32,
            dims: shape.dims4(),
            strides,
            elements: shape.elements(),
            bytes,
        }
    }

    /// Of a tensor of a graph.
    pub(crate) fn of(tensor: &Tensor) -> qd_tensor_info {
        let info = qd_tensor_info::new(tensor.dtype(), tensor.shape(), tensor.strides());
        qd_tensor_info { bytes: tensor.bytes(), ..info }
    }
}
