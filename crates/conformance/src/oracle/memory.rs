//! Reading and writing tensors where they lie: rows found by byte strides, elements decoded from their type.

use half::{bf16, f16};
use quadriga_graph::{DType, MAX_DIMS, Tensor, blocks};

use super::Fault;

/// More elements than this are refused, so that a view that repeats one element without end cannot keep the
/// oracle busy for ever.
const MOST_ELEMENTS: usize = 1 << 32;

/// The position of a row: the outer three of four dimensions.
pub(crate) type RowIndex = [usize; 3];

/// The memory of a tensor, from its first byte on.
#[derive(Clone, Copy)]
pub(crate) enum Memory<'a> {
    /// F32 values that were computed, kept as f64: element `i` stands for bytes `4i..4i + 4`.
    Exact(&'a [f64]),
    /// Bytes as the type says.
    Stored(&'a [u8]),
}

/// The same, to be written.
pub(crate) enum MemoryMut<'a> {
    Exact(&'a mut [f64]),
    Stored(&'a mut [u8]),
}

/// A tensor's type, extents and byte strides.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    pub(crate) dims: [usize; MAX_DIMS],
    strides: [usize; MAX_DIMS],
}

impl Layout {
    pub(crate) fn of(tensor: &Tensor) -> Result<Layout, Fault> {
        if tensor.elements() > MOST_ELEMENTS {
            return Err(Fault::TooLarge(tensor.elements()));
        }
        Ok(Layout { dtype: tensor.dtype(), dims: tensor.dims4(), strides: tensor.strides() })
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

    /// The byte offset of each block of a row; of each element, for types without blocks.
    fn block_offsets(&self, [i, j, k]: RowIndex) -> impl Iterator<Item = usize> + use<> {
        let [s0, s1, s2, s3] = self.strides;
        let start = i * s0 + j * s1 + k * s2;
        (0..self.cols() / self.dtype.block_len()).map(move |block| start + block * s3)
    }
}

/// A tensor to be read.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) layout: Layout,
    pub(crate) memory: Memory<'a>,
}

impl<'a> View<'a> {
    pub(crate) fn dims(&self) -> [usize; MAX_DIMS] {
        self.layout.dims
    }

    /// The values of one row.
    pub(crate) fn row(&self, index: RowIndex) -> Result<Vec<f64>, Fault> {
        let mut row = with_capacity(self.layout.cols())?;
        for at in self.layout.block_offsets(index) {
            match self.memory {
                Memory::Exact(values) => row.push(*values.get(at / 4).ok_or(Fault::Memory)?),
                Memory::Stored(bytes) => decode(self.layout.dtype, block_at(bytes, at, self)?, &mut row)?,
            }
        }
        Ok(row)
    }

    /// The row at `index`, where the tensor is repeated as often as needed along its outer dimensions.
    pub(crate) fn repeated_row(&self, index: RowIndex) -> Result<Vec<f64>, Fault> {
        let [d0, d1, d2, _] = self.dims();
        let [i, j, k] = index;
        self.row([i % d0.max(1), j % d1.max(1), k % d2.max(1)])
    }

    /// Whole numbers of one row.
    pub(crate) fn int_row(&self, index: RowIndex) -> Result<Vec<i64>, Fault> {
        Ok(self.row(index)?.into_iter().map(|v| v as i64).collect())
    }

    /// All values, row by row.
    pub(crate) fn all(&self) -> Result<Vec<f64>, Fault> {
        let mut all = Vec::new();
        for index in self.layout.rows() {
            all.extend(self.row(index)?);
        }
        Ok(all)
    }

    /// The bytes of each block in row-major order; F32 values kept as f64 are rounded.
    pub(crate) fn all_bytes(&self) -> Result<Vec<u8>, Fault> {
        let mut all = Vec::new();
        for at in self.layout.rows().flat_map(|row| self.layout.block_offsets(row)) {
            match self.memory {
                Memory::Exact(values) => {
                    all.extend((*values.get(at / 4).ok_or(Fault::Memory)? as f32).to_le_bytes());
                }
                Memory::Stored(bytes) => all.extend_from_slice(block_at(bytes, at, self)?),
            }
        }
        Ok(all)
    }
}

fn block_at<'a>(bytes: &'a [u8], at: usize, view: &View<'_>) -> Result<&'a [u8], Fault> {
    bytes.get(at..at + view.layout.dtype.block_bytes()).ok_or(Fault::Memory)
}

/// A tensor to be written.
pub(crate) struct ViewMut<'a> {
    pub(crate) layout: Layout,
    pub(crate) memory: MemoryMut<'a>,
}

impl ViewMut<'_> {
    pub(crate) fn dims(&self) -> [usize; MAX_DIMS] {
        self.layout.dims
    }

    /// Writes one row, rounded to the tensor's type.
    pub(crate) fn set_row(&mut self, index: RowIndex, row: &[f64]) -> Result<(), Fault> {
        let dtype = self.layout.dtype;
        for (at, values) in self.layout.block_offsets(index).zip(row.chunks(dtype.block_len())) {
            match &mut self.memory {
                MemoryMut::Exact(exact) => {
                    *exact.get_mut(at / 4).ok_or(Fault::Memory)? = *values.first().ok_or(Fault::Memory)?;
                }
                MemoryMut::Stored(bytes) => {
                    let block = bytes.get_mut(at..at + dtype.block_bytes()).ok_or(Fault::Memory)?;
                    encode(dtype, values, block)?;
                }
            }
        }
        Ok(())
    }

    /// Computes every row by its position and writes it.
    pub(crate) fn each_row(
        &mut self,
        compute: impl Fn(RowIndex) -> Result<Vec<f64>, Fault>,
    ) -> Result<(), Fault> {
        for index in self.layout.rows() {
            self.set_row(index, &compute(index)?)?;
        }
        Ok(())
    }

    /// Fills the tensor with values in row-major order.
    pub(crate) fn set_all(&mut self, values: &[f64]) -> Result<(), Fault> {
        for (index, row) in self.layout.rows().zip(values.chunks(self.layout.cols().max(1))) {
            self.set_row(index, row)?;
        }
        Ok(())
    }

    /// Fills the tensor with blocks of its own type in row-major order, bit by bit.
    pub(crate) fn set_all_bytes(&mut self, blocks: &[u8]) -> Result<(), Fault> {
        let dtype = self.layout.dtype;
        if let MemoryMut::Exact(_) = self.memory {
            return self.set_all(&decode_all(dtype, blocks)?);
        }
        let MemoryMut::Stored(bytes) = &mut self.memory else { return Ok(()) };
        let offsets = self.layout.rows().flat_map(|row| self.layout.block_offsets(row));
        for (at, block) in offsets.zip(blocks.chunks(dtype.block_bytes())) {
            bytes.get_mut(at..at + block.len()).ok_or(Fault::Memory)?.copy_from_slice(block);
        }
        Ok(())
    }
}

/// An empty vector with room for `count` values, or an error where there is no memory for them.
pub(crate) fn with_capacity<T>(count: usize) -> Result<Vec<T>, Fault> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| Fault::TooLarge(count))?;
    Ok(values)
}

/// `count` zeros, or an error where there is no memory for them.
pub(crate) fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, Fault> {
    let mut values = with_capacity(count)?;
    values.resize(count, T::default());
    Ok(values)
}

/// All values of bytes that hold a whole number of blocks.
pub(crate) fn decode_all(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>, Fault> {
    let mut values = Vec::new();
    bytes.chunks(dtype.block_bytes()).try_for_each(|block| decode(dtype, block, &mut values))?;
    Ok(values)
}

/// The values of one block.
fn decode(dtype: DType, block: &[u8], out: &mut Vec<f64>) -> Result<(), Fault> {
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
        _ => return Err(Fault::Type(dtype)),
    }
    Ok(())
}

/// The block that holds these values.
fn encode(dtype: DType, values: &[f64], block: &mut [u8]) -> Result<(), Fault> {
    match (dtype, values) {
        (DType::F32, &[v]) => block.copy_from_slice(&(v as f32).to_le_bytes()),
        (DType::F16, &[v]) => block.copy_from_slice(&f16::from_f64(v).to_le_bytes()),
        // By way of f32: `bf16::from_f64` drops low bits before it rounds, and takes values near a tie for ties.
        (DType::BF16, &[v]) => block.copy_from_slice(&bf16::from_f32(v as f32).to_le_bytes()),
        (DType::I32, &[v]) => block.copy_from_slice(&(v as i32).to_le_bytes()),
        _ if dtype.is_quantized() => {
            let rounded: Vec<f32> = values.iter().map(|v| *v as f32).collect();
            blocks::quantize(dtype, &rounded, block)?;
        }
        _ => return Err(Fault::Type(dtype)),
    }
    Ok(())
}
