//! A tensor of an open file.

use std::fmt;

use quadriga_graph::{DType, Data, Shape, Weight};

use crate::parse::TensorRecord;

/// A tensor in a [`File`](crate::File): its name, type and shape, and its bytes where they lie in the file map.
///
/// It can be given to [`GraphBuilder::weight`](quadriga_graph::GraphBuilder::weight) as it is.
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

    /// The dimensions, outermost first: the other way round than in the file.
    pub fn shape(&self) -> Shape {
        self.record.shape
    }

    /// How many elements there are.
    pub fn element_count(&self) -> u64 {
        self.record.shape.elements() as u64
    }

    /// The bytes, contiguous and row-major.
    pub fn bytes(&self) -> &'a [u8] {
        self.data.bytes()
    }

    /// How many bytes there are.
    pub fn byte_len(&self) -> usize {
        self.record.data.len()
    }

    /// The bytes as a handle that keeps the file map alive on its own.
    pub fn data(&self) -> Data {
        self.data.clone()
    }

    /// Where the bytes start, counted from the start of their file.
    pub fn offset(&self) -> usize {
        self.record.data.start
    }

    /// Which file of a split model the tensor is in, counted from 0.
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
