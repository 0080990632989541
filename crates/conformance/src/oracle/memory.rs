//! Strided access to tensors: rows by byte strides, elements decoded from and encoded to their type.

use half::{bf16, f16};
use quadriga_graph::{DType, MAX_DIMS, Tensor, blocks};

use super::EvalError;

/// The maximum number of elements: a view with stride 0 could otherwise have so many that the oracle never ends.
const MAX_ELEMENTS: usize = 1 << 32;

/// The position of a row: the outer three of four dimensions.
pub(crate) type RowIndex = [usize; 3];

/// The memory of a tensor, from its first byte.
#[derive(Clone, Copy)]
pub(crate) enum OracleMemory<'a> {
    /// Computed F32 values, kept as f64: element `i` stands for bytes `4i..4i + 4`.
    Exact(&'a [f64]),
    /// Bytes in the encoding of the type.
    Stored(&'a [u8]),
}

/// Mutable memory of a tensor.
pub(crate) enum OracleMemoryMut<'a> {
    Exact(&'a mut [f64]),
    Stored(&'a mut [u8]),
}

/// A tensor's type, extents and byte strides.
#[derive(Clone, Copy)]
pub(crate) struct OracleLayout {
    pub(crate) dtype: DType,
    pub(crate) dims: [usize; MAX_DIMS],
    strides: [usize; MAX_DIMS],
}

impl OracleLayout {
    pub(crate) fn of(tensor: &Tensor) -> Result<OracleLayout, EvalError> {
        if tensor.elements() > MAX_ELEMENTS {
            return Err(EvalError::TooLarge(tensor.elements()));
        }
        Ok(OracleLayout { dtype: tensor.dtype(), dims: tensor.dims4(), strides: tensor.strides() })
    }

    pub(crate) fn cols(&self) -> usize {
        self.dims[3]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    /// The positions of all rows, in row-major order; none if the tensor has no elements.
    pub(crate) fn rows(&self) -> impl Iterator<Item = RowIndex> + use<> {
        let [d0, d1, d2, _] = if self.is_empty() { [0; 4] } else { self.dims };
        (0..d0).flat_map(move |i| (0..d1).flat_map(move |j| (0..d2).map(move |k| [i, j, k])))
    }

    /// The byte offset of each block of a row.
    fn block_offsets(&self, [i, j, k]: RowIndex) -> impl Iterator<Item = usize> + use<> {
        let [s0, s1, s2, s3] = self.strides;
        let start = i * s0 + j * s1 + k * s2;
        (0..self.cols() / self.dtype.block_len()).map(move |block| start + block * s3)
    }
}

/// A tensor as an input.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) layout: OracleLayout,
    pub(crate) memory: OracleMemory<'a>,
}

impl<'a> View<'a> {
    pub(crate) fn dims(&self) -> [usize; MAX_DIMS] {
        self.layout.dims
    }

    /// The values of one row.
    pub(crate) fn row(&self, index: RowIndex) -> Result<Vec<f64>, EvalError> {
        let mut row = with_capacity(self.layout.cols())?;
        for at in self.layout.block_offsets(index) {
            match self.memory {
                OracleMemory::Exact(values) => row.push(*values.get(at / 4).ok_or(EvalError::Memory)?),
                OracleMemory::Stored(bytes) => {
                    decode(self.layout.dtype, block_at(bytes, at, self)?, &mut row)?
                }
            }
        }
        Ok(row)
    }

    /// The row at `index` of the tensor repeated along its outer dimensions.
    pub(crate) fn repeated_row(&self, index: RowIndex) -> Result<Vec<f64>, EvalError> {
        let [d0, d1, d2, _] = self.dims();
        let [i, j, k] = index;
        self.row([i % d0.max(1), j % d1.max(1), k % d2.max(1)])
    }

    /// The integers of one row.
    pub(crate) fn int_row(&self, index: RowIndex) -> Result<Vec<i64>, EvalError> {
        Ok(self.row(index)?.into_iter().map(|v| v as i64).collect())
    }

    /// All values, row by row.
    pub(crate) fn all(&self) -> Result<Vec<f64>, EvalError> {
        let mut all = Vec::new();
        for index in self.layout.rows() {
            all.extend(self.row(index)?);
        }
        Ok(all)
    }

    /// The blocks in row-major order; F32 values kept as f64 are rounded.
    pub(crate) fn all_bytes(&self) -> Result<Vec<u8>, EvalError> {
        let mut all = Vec::new();
        for at in self.layout.rows().flat_map(|row| self.layout.block_offsets(row)) {
            match self.memory {
                OracleMemory::Exact(values) => {
                    all.extend((*values.get(at / 4).ok_or(EvalError::Memory)? as f32).to_le_bytes());
                }
                OracleMemory::Stored(bytes) => all.extend_from_slice(block_at(bytes, at, self)?),
            }
        }
        Ok(all)
    }
}

fn block_at<'a>(bytes: &'a [u8], at: usize, view: &View<'_>) -> Result<&'a [u8], EvalError> {
    bytes.get(at..at + view.layout.dtype.block_bytes()).ok_or(EvalError::Memory)
}

/// A tensor as an output.
pub(crate) struct ViewMut<'a> {
    pub(crate) layout: OracleLayout,
    pub(crate) memory: OracleMemoryMut<'a>,
}

impl ViewMut<'_> {
    pub(crate) fn dims(&self) -> [usize; MAX_DIMS] {
        self.layout.dims
    }

    /// Writes one row, rounded to the tensor's type.
    pub(crate) fn set_row(&mut self, index: RowIndex, row: &[f64]) -> Result<(), EvalError> {
        let dtype = self.layout.dtype;
        for (at, values) in self.layout.block_offsets(index).zip(row.chunks(dtype.block_len())) {
            match &mut self.memory {
                OracleMemoryMut::Exact(exact) => {
                    *exact.get_mut(at / 4).ok_or(EvalError::Memory)? =
                        *values.first().ok_or(EvalError::Memory)?;
                }
                OracleMemoryMut::Stored(bytes) => {
                    let block = bytes.get_mut(at..at + dtype.block_bytes()).ok_or(EvalError::Memory)?;
                    encode(dtype, values, block)?;
                }
            }
        }
        Ok(())
    }

    /// Writes every row with the result of `compute` at its index.
    pub(crate) fn each_row(
        &mut self,
        compute: impl Fn(RowIndex) -> Result<Vec<f64>, EvalError>,
    ) -> Result<(), EvalError> {
        for index in self.layout.rows() {
            self.set_row(index, &compute(index)?)?;
        }
        Ok(())
    }

    /// Fills the tensor with values in row-major order.
    pub(crate) fn set_all(&mut self, values: &[f64]) -> Result<(), EvalError> {
        for (index, row) in self.layout.rows().zip(values.chunks(self.layout.cols().max(1))) {
            self.set_row(index, row)?;
        }
        Ok(())
    }

    /// Fills the tensor with blocks of its type in row-major order, bit-exactly.
    pub(crate) fn set_all_bytes(&mut self, blocks: &[u8]) -> Result<(), EvalError> {
        let dtype = self.layout.dtype;
        if let OracleMemoryMut::Exact(_) = self.memory {
            return self.set_all(&decode_all(dtype, blocks)?);
        }
        let OracleMemoryMut::Stored(bytes) = &mut self.memory else { return Ok(()) };
        let offsets = self.layout.rows().flat_map(|row| self.layout.block_offsets(row));
        for (at, block) in offsets.zip(blocks.chunks(dtype.block_bytes())) {
            bytes.get_mut(at..at + block.len()).ok_or(EvalError::Memory)?.copy_from_slice(block);
        }
        Ok(())
    }
}

/// An empty vector with capacity for `count` values, or an error if the allocation fails.
pub(crate) fn with_capacity<T>(count: usize) -> Result<Vec<T>, EvalError> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| EvalError::TooLarge(count))?;
    Ok(values)
}

/// `count` zeros, or an error if the allocation fails.
pub(crate) fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, EvalError> {
    let mut values = with_capacity(count)?;
    values.resize(count, T::default());
    Ok(values)
}

/// Decodes whole blocks.
pub(crate) fn decode_all(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>, EvalError> {
    let mut values = Vec::new();
    bytes.chunks(dtype.block_bytes()).try_for_each(|block| decode(dtype, block, &mut values))?;
    Ok(values)
}

/// Decodes one block.
fn decode(dtype: DType, block: &[u8], out: &mut Vec<f64>) -> Result<(), EvalError> {
    match (dtype, block) {
        (DType::F32, &[a, b, c, d]) => out.push(f32::from_le_bytes([a, b, c, d]).into()),
        (DType::F16, &[a, b]) => out.push(f16::from_le_bytes([a, b]).into()),
        (DType::BF16, &[a, b]) => out.push(bf16::from_le_bytes([a, b]).into()),
        (DType::I32, &[a, b, c, d]) => out.push(i32::from_le_bytes([a, b, c, d]).into()),
        (DType::I16, &[a, b]) => out.push(i16::from_le_bytes([a, b]).into()),
        (DType::I8, &[a]) => out.push(i8::from_le_bytes([a]).into()),
        _ if dtype.is_quantized() => {
            let mut values = vec![0.0f32; dtype.block_len()];
            blocks::dequantize(dtype, block, &mut values)?;
            out.extend(values.into_iter().map(f64::from));
        }
        _ => return Err(EvalError::Type(dtype)),
    }
    Ok(())
}

/// Encodes one block.
fn encode(dtype: DType, values: &[f64], block: &mut [u8]) -> Result<(), EvalError> {
    match (dtype, values) {
        (DType::F32, &[v]) => block.copy_from_slice(&(v as f32).to_le_bytes()),
        (DType::F16, &[v]) => block.copy_from_slice(&f16::from_f64(v).to_le_bytes()),
        // By way of f32: `bf16::from_f64` truncates low bits before it rounds, so that values near a tie round wrong.
        (DType::BF16, &[v]) => block.copy_from_slice(&bf16::from_f32(v as f32).to_le_bytes()),
        (DType::I32, &[v]) => block.copy_from_slice(&(v as i32).to_le_bytes()),
        _ if dtype.is_quantized() => {
            let rounded: Vec<f32> = values.iter().map(|v| *v as f32).collect();
            blocks::quantize(dtype, &rounded, block)?;
        }
        _ => return Err(EvalError::Type(dtype)),
    }
    Ok(())
}
