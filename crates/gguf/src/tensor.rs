//! A tensor of an open file.

use std::fmt;

use quadriga_graph::{DType, Data, Shape, Weight};

use crate::parse::TensorRecord;

/// A tensor of a [`File`](crate::File): its name, type, shape and bytes, which stay in the file map.
///
/// [`GraphBuilder::weight`](quadriga_graph::GraphBuilder::weight) accepts it as a weight.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    name: &'a str,
    part: usize,
    record: &'a TensorRecord,
    data: &'a Data,
}

impl<'a> Tensor<'a> {
    pub(crate) fn new(name: &'a str, part: usize, record: &'a TensorRecord, data: &'a Data) -> Self {
        Tensor { name, part, record, data }
    }

    /// The name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.record.dtype
    }

    /// The dimensions, outermost first; the file lists the innermost first.
    pub fn shape(&self) -> Shape {
        self.record.shape
    }

    /// The number of elements.
    pub fn element_count(&self) -> u64 {
        self.record.shape.elements() as u64
    }

    /// The bytes, contiguous and row-major.
    pub fn bytes(&self) -> &'a [u8] {
        self.data.as_slice().unwrap_or_default()
    }

    /// The size in bytes.
    pub fn byte_len(&self) -> usize {
        self.record.data.len()
    }

    /// A handle on the bytes that keeps the file map alive.
    pub fn data(&self) -> Data {
        self.data.clone()
    }

    /// The offset of the bytes in their file.
    pub fn offset(&self) -> usize {
        self.record.data.start
    }

    /// The part of a split model that holds the tensor, counted from 0.
    pub fn part(&self) -> usize {
        self.part
    }
}

impl From<Tensor<'_>> for Weight {
    fn from(tensor: Tensor<'_>) -> Weight {
        Weight { dtype: tensor.dtype(), shape: tensor.shape(), data: Some(tensor.data()) }
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("name", &self.name())
            .field("dtype", &self.dtype())
            .field("shape", &self.shape())
            .field("offset", &self.offset())
            .finish_non_exhaustive()
    }
}
