//! A tensor of an open file.

use std::fmt;

use quadriga_graph::DType;

use crate::{
    data::Data,
    parse::{self, TensorRecord},
};

/// A tensor in a [`File`](crate::File): its name, type and shape, and its bytes where they lie in the file map.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    part: usize,
    file: &'a Data,
    record: &'a TensorRecord,
}

impl<'a> Tensor<'a> {
    pub(crate) fn new(part: usize, file: &'a Data, record: &'a TensorRecord) -> Self {
        Tensor { part, file, record }
    }

    /// The name.
    pub fn name(&self) -> &'a str {
        parse::text_at(self.file.bytes(), &self.record.name)
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.record.dtype
    }

    /// The dimensions, outermost first: the other way round than in the file.
    pub fn shape(&self) -> &'a [usize] {
        &self.record.dims
    }

    /// How many elements there are.
    pub fn element_count(&self) -> u64 {
        self.shape().iter().map(|dim| *dim as u64).product()
    }

    /// The bytes, contiguous and row-major.
    pub fn bytes(&self) -> &'a [u8] {
        parse::at(self.file.bytes(), &self.record.data)
    }

    /// How many bytes there are.
    pub fn byte_len(&self) -> usize {
        self.record.data.len()
    }

    /// The bytes as a handle that keeps the file map alive on its own.
    pub fn data(&self) -> Option<Data> {
        self.file.slice(self.record.data.start, self.record.data.len())
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
