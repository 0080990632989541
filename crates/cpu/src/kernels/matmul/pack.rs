//! Packed weights: sizes, packing a group of rows, and reading a row back.
#![expect(
    clippy::indexing_slicing,
    reason = "every public function checks the lengths it is given against the layout before it slices"
)]

use half::{bf16, f16};
use quadriga_graph::DType;

use super::format::{BLOCK, GROUP, PackedFormat, QuantRow, superblock_size, with_format};
use crate::kernels::KernelError;

/// The layout of a packed weight matrix of `rows` rows of `columns` elements, as in the file.
///
/// Rows are packed in groups of [`GROUP`]; each group is contiguous and independent of the others, so groups can be
/// packed in parallel, straight from a file map. Quantized types: see [`format`](super::format). Others:
///
/// ```text
/// F32, F16   column 0: row 0, row 1, … row 15; column 1: row 0, …
/// BF16       columns 0 and 1 of row 0, columns 0 and 1 of row 1, … ; columns 2 and 3 of row 0, …
///            (sixteen pairs of columns are one AMX tile; the columns are padded with zeros to a whole tile)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    dtype: DType,
    rows: usize,
    columns: usize,
    file_row_bytes: usize,
    group_bytes: usize,
    bytes: usize,
}

impl PackedLayout {
    /// The packed layout of a matrix of this type and shape.
    ///
    /// # Errors
    /// The type cannot be computed with, the columns are not a whole number of blocks, or the size overflows.
    pub fn new(dtype: DType, rows: usize, columns: usize) -> Result<PackedLayout, KernelError> {
        let too_large = KernelError::TooLarge { rows, columns };
        let group_bytes = match dtype {
            DType::F32 => columns.checked_mul(4 * GROUP),
            DType::F16 => columns.checked_mul(2 * GROUP),
            DType::BF16 => columns.div_ceil(BLOCK).checked_mul(2 * GROUP * BLOCK),
            _ => {
                let (superblock_columns, superblock_bytes) =
                    superblock_size(dtype).ok_or(KernelError::Type { dtype })?;
                if !columns.is_multiple_of(superblock_columns) {
                    return Err(KernelError::Blocks { dtype, columns });
                }
                (columns / superblock_columns).checked_mul(superblock_bytes)
            }
        };
        let Some(((bytes, group_bytes), file_row_bytes)) = group_bytes
            .and_then(|group| Some((rows.div_ceil(GROUP).checked_mul(group)?, group)))
            .zip(dtype.row_bytes(columns))
        else {
            return Err(too_large);
        };
        if isize::try_from(bytes).is_err() || file_row_bytes.checked_mul(rows).is_none() {
            return Err(too_large);
        }
        Ok(PackedLayout { dtype, rows, columns, file_row_bytes, group_bytes, bytes })
    }

    /// The type of the elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows of the matrix: output features.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix: input features.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of the packed matrix.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Groups of rows.
    pub const fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }

    /// Bytes of one packed group.
    pub const fn group_bytes(&self) -> usize {
        self.group_bytes
    }

    /// Packs one group: `file` is the whole matrix as the file stores it, `out` the group's part of the packed one.
    ///
    /// # Errors
    /// A slice is too short, or there is no such group.
    pub fn pack_group(&self, group: usize, file: &[u8], out: &mut [u8]) -> Result<(), KernelError> {
        check("weights in the file", file.len(), self.rows * self.file_row_bytes)?;
        check("packed group", out.len(), self.group_bytes)?;
        check("groups of rows", self.groups(), group.saturating_add(1))?;
        let out = &mut out[..self.group_bytes];
        out.fill(0);
        let first = group * GROUP;
        for row in first..(first + GROUP).min(self.rows) {
            let source = &file[row * self.file_row_bytes..(row + 1) * self.file_row_bytes];
            self.pack_row(row - first, source, out);
        }
        Ok(())
    }

    fn pack_row(&self, row: usize, source: &[u8], out: &mut [u8]) {
        match self.dtype {
            DType::F32 => {
                for (place, value) in out.chunks_exact_mut(4 * GROUP).zip(source.chunks_exact(4)) {
                    place[4 * row..4 * row + 4].copy_from_slice(value);
                }
            }
            DType::BF16 => {
                for (place, pair) in out.chunks_exact_mut(4 * GROUP).zip(source.chunks(4)) {
                    place[4 * row..4 * row + pair.len()].copy_from_slice(pair);
                }
            }
            DType::F16 => {
                for (place, value) in out.chunks_exact_mut(2 * GROUP).zip(source.chunks_exact(2)) {
                    place[2 * row..2 * row + 2].copy_from_slice(value);
                }
            }
            dtype => with_format!(dtype, F => pack_blocks::<F>(dtype, row, source, out), else {}),
        }
    }

    /// Packs a whole matrix on one thread.
    ///
    /// # Errors
    /// As [`PackedLayout::pack_group`].
    pub fn pack(&self, file: &[u8], out: &mut [u8]) -> Result<(), KernelError> {
        check("packed weights", out.len(), self.bytes)?;
        for group in 0..self.groups() {
            self.pack_group(group, file, &mut out[group * self.group_bytes..])?;
        }
        Ok(())
    }

    /// Writes one row of a packed matrix as `f32`: the same numbers as `blocks::dequantize` gives.
    ///
    /// # Errors
    /// A slice is too short, or there is no such row.
    pub fn read_row(&self, packed: &[u8], row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        check("packed weights", packed.len(), self.bytes)?;
        check("row of values", out.len(), self.columns)?;
        if row >= self.rows {
            return Err(KernelError::Row { row, rows: self.rows });
        }
        let (group, lane) = (row / GROUP, row % GROUP);
        let group = &packed[group * self.group_bytes..(group + 1) * self.group_bytes];
        let out = &mut out[..self.columns];
        self.read_lane(group, lane, 0, out);
        Ok(())
    }

    /// Reads columns `first..` of one row of a group; `first` is a multiple of the superblock's columns.
    pub(super) fn read_lane(&self, group: &[u8], lane: usize, first: usize, out: &mut [f32]) {
        let half_at = |at: usize| u16::from_le_bytes([group[at], group[at + 1]]);
        match self.dtype {
            DType::F32 => {
                for (k, value) in out.iter_mut().enumerate() {
                    let at = ((first + k) * GROUP + lane) * 4;
                    *value = f32::from_le_bytes([group[at], group[at + 1], group[at + 2], group[at + 3]]);
                }
            }
            DType::BF16 => {
                for (k, value) in out.iter_mut().enumerate() {
                    let k = first + k;
                    *value = bf16::from_bits(half_at((k / 2 * GROUP + lane) * 4 + k % 2 * 2)).to_f32();
                }
            }
            DType::F16 => {
                for (k, value) in out.iter_mut().enumerate() {
                    *value = f16::from_bits(half_at(((first + k) * GROUP + lane) * 2)).to_f32();
                }
            }
            dtype => with_format!(dtype, F => dequantize::<F>(group, lane, first, out), else {}),
        }
    }

    /// Whether the type is quantized, with integer kernels.
    pub(super) fn is_quantized(&self) -> bool {
        self.dtype.is_quantized()
    }
}

/// Packs a row of the file as row `row` of a group, in which the row's bits are 0.
fn pack_blocks<F: PackedFormat>(dtype: DType, row: usize, source: &[u8], out: &mut [u8]) {
    let mut buffer = QuantRow::new();
    let superblocks = out.chunks_exact_mut(F::BYTES);
    for (superblock, block) in superblocks.zip(source.chunks_exact(dtype.block_bytes())) {
        F::pack_block(block, superblock, row, &mut buffer);
    }
}

/// Reads columns `first..` of row `row` of a group.
fn dequantize<F: PackedFormat>(group: &[u8], row: usize, first: usize, out: &mut [f32]) {
    let mut buffer = QuantRow::new();
    let superblocks = group.chunks_exact(F::BYTES).skip(first / F::COLUMNS);
    for (superblock, values) in superblocks.zip(out.chunks_mut(F::COLUMNS)) {
        F::dequantize(superblock, row, &mut buffer, values);
    }
}

/// Checks that something is long enough.
pub(super) fn check(what: &'static str, has: usize, needs: usize) -> Result<(), KernelError> {
    if has < needs { Err(KernelError::Short { what, has, needs }) } else { Ok(()) }
}
