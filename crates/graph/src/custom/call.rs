//! What the code of a custom operation gets: its inputs, and the part of the result to compute.

use std::ops::Range;

use super::error::CustomError;
use crate::blocks;
use crate::dtype::DType;
use crate::shape::{MAX_DIMS, Shape};
use crate::tensor::Tensor;

/// A call of [`CustomKernel::compute`](super::CustomKernel::compute).
pub struct CustomCall<'a> {
    /// The inputs, in order.
    pub inputs: &'a [CustomInput<'a>],
    /// The units to compute, of `0..unit_count`.
    pub units: Range<usize>,
    /// The number of units of the whole result.
    pub unit_count: usize,
    /// The part of the result that these units are.
    pub output: CustomOutput<'a>,
    /// Scratch memory of this thread, with any content.
    pub scratch: &'a mut [u8],
}

impl<'a> CustomCall<'a> {
    /// An input, or an error if there are not so many.
    ///
    /// # Errors
    /// The node has fewer inputs.
    pub fn input(&self, index: usize) -> Result<CustomInput<'a>, CustomError> {
        self.inputs.get(index).copied().ok_or_else(|| format!("there is no input {index}").into())
    }
}

/// An input of a custom operation in memory.
#[derive(Clone, Copy)]
pub struct CustomInput<'a> {
    dtype: DType,
    shape: Shape,
    strides: [usize; MAX_DIMS],
    contiguous: bool,
    /// `None` for the input that the result overwrites.
    bytes: Option<&'a [u8]>,
}

impl<'a> CustomInput<'a> {
    /// A tensor and its bytes; without bytes if the result overwrites it.
    pub fn new(tensor: &Tensor, bytes: Option<&'a [u8]>) -> CustomInput<'a> {
        CustomInput {
            dtype: tensor.dtype(),
            shape: *tensor.shape(),
            strides: tensor.strides(),
            contiguous: tensor.is_contiguous(),
            bytes,
        }
    }

    /// Elements in row-major order of a type and shape, without gaps; `None` if a row is not a whole number of blocks.
    pub fn contiguous(dtype: DType, shape: Shape, bytes: Option<&'a [u8]>) -> Option<CustomInput<'a>> {
        let (strides, _) = shape.contiguous(dtype)?;
        Some(CustomInput { dtype, shape, strides: strides.0, contiguous: true, bytes })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The byte strides, outermost of four dimensions first.
    pub fn strides(&self) -> [usize; MAX_DIMS] {
        self.strides
    }

    /// The bytes from the first to the last element, gaps included.
    ///
    /// # Errors
    /// The result overwrites this input.
    pub fn bytes(&self) -> Result<&'a [u8], CustomError> {
        self.bytes.ok_or_else(|| "the result overwrites this input: its elements are in the output".into())
    }

    fn elements<T: bytemuck::Pod>(&self, dtype: DType) -> Result<&'a [T], CustomError> {
        if self.dtype != dtype || !self.contiguous {
            return Err(
                format!("a contiguous {dtype} input is needed, not {} {}", self.dtype, self.shape).into()
            );
        }
        let bytes = self.bytes()?.get(..self.shape.elements() * size_of::<T>());
        let elements = bytes.and_then(|bytes| bytemuck::try_cast_slice(bytes).ok());
        elements.ok_or_else(|| "the input is not aligned, or too short".into())
    }

    /// The elements of a contiguous F32 input.
    ///
    /// # Errors
    /// It has another type, is not contiguous, or the result overwrites it.
    pub fn f32(&self) -> Result<&'a [f32], CustomError> {
        self.elements(DType::F32)
    }

    /// The elements of a contiguous I32 input.
    ///
    /// # Errors
    /// It has another type, is not contiguous, or the result overwrites it.
    pub fn i32(&self) -> Result<&'a [i32], CustomError> {
        self.elements(DType::I32)
    }

    /// Reads a row of an input of any strides and of any type that can be dequantized; `row` counts in row-major order.
    ///
    /// # Errors
    /// There is no such row, it has another length, its type cannot be dequantized, or the result overwrites it.
    pub fn read_row(&self, row: usize, into: &mut [f32]) -> Result<(), CustomError> {
        let [d0, d1, d2, columns] = self.shape.dims4();
        let place = [row / (d1 * d2).max(1), row / d2.max(1) % d1.max(1), row % d2.max(1)];
        if place[0] >= d0 || d1 == 0 || d2 == 0 || into.len() != columns {
            return Err(format!("{} elements of row {row} of {}", into.len(), self.shape).into());
        }
        let [s0, s1, s2, step] = self.strides;
        let start = place[0] * s0 + place[1] * s1 + place[2] * s2;
        let (len, size) = (self.dtype.block_len(), self.dtype.block_bytes());
        let bytes = self.bytes()?;
        if step == size {
            let row = bytes.get(start..start + columns / len * size).ok_or("the input is too short")?;
            return Ok(blocks::dequantize(self.dtype, row, into)?);
        }
        for (block, values) in into.chunks_mut(len).enumerate() {
            let at = start + block * step;
            let block = bytes.get(at..at + size).ok_or("the input is too short")?;
            blocks::dequantize(self.dtype, block, values)?;
        }
        Ok(())
    }
}

/// The part of the result that a call computes: contiguous elements in row-major order.
pub struct CustomOutput<'a> {
    dtype: DType,
    shape: Shape,
    first: usize,
    bytes: &'a mut [u8],
}

impl<'a> CustomOutput<'a> {
    /// Elements of a result from `first` on.
    pub fn new(dtype: DType, shape: Shape, first: usize, bytes: &'a mut [u8]) -> CustomOutput<'a> {
        CustomOutput { dtype, shape, first, bytes }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of the whole result.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The index of this part's first element in the whole result.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The bytes of this part.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.bytes
    }

    fn elements<T: bytemuck::Pod>(&mut self, dtype: DType) -> Result<&mut [T], CustomError> {
        if self.dtype != dtype {
            return Err(format!("the result is {}, not {dtype}", self.dtype).into());
        }
        bytemuck::try_cast_slice_mut(self.bytes).map_err(|_| "the result is not aligned".into())
    }

    /// The elements of this part of an F32 result.
    ///
    /// # Errors
    /// The result has another type.
    pub fn f32(&mut self) -> Result<&mut [f32], CustomError> {
        self.elements(DType::F32)
    }

    /// The elements of this part of an I32 result.
    ///
    /// # Errors
    /// The result has another type.
    pub fn i32(&mut self) -> Result<&mut [i32], CustomError> {
        self.elements(DType::I32)
    }
}

/// The values of an input in float64, for [`CustomKernel::reference`](super::CustomKernel::reference).
#[derive(Clone, PartialEq, Debug)]
pub struct CustomValues {
    /// The extents, outermost of four dimensions first.
    pub dims: [usize; MAX_DIMS],
    /// The values, in row-major order.
    pub values: Vec<f64>,
}
