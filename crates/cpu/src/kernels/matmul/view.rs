//! Checked views of the matrices that a matmul reads and writes, in memory that threads share.

use std::marker::PhantomData;

use half::f16;

use super::pack::check;
use crate::kernels::KernelError;

/// The element type of an [`Input`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputType {
    /// `f32`
    F32,
    /// `f16`
    F16,
}

impl InputType {
    const fn bytes(self) -> usize {
        match self {
            InputType::F32 => 4,
            InputType::F16 => 2,
        }
    }
}

/// Elements from the first to the last of a matrix with a row stride; `None` if that overflows.
fn extent(rows: usize, columns: usize, row_stride: usize) -> Option<usize> {
    if rows == 0 || columns == 0 { Some(0) } else { (rows - 1).checked_mul(row_stride)?.checked_add(columns) }
}

/// A matrix of activations: rows of contiguous `f32` or `f16` with any stride, optionally gathered by an index list.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pointer: *const u8,
    element: InputType,
    rows: usize,
    columns: usize,
    row_bytes: usize,
    gather: Option<&'a [u32]>,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: a view only reads memory that is borrowed, or promised by the code that made the view, for 'a.
unsafe impl Send for Input<'_> {}
// SAFETY: as above; shared reads are free of races.
unsafe impl Sync for Input<'_> {}

/// In an index list of [`Input::gather`]: a row of zeros; of [`Output::scatter`]: a row that is dropped.
pub const NO_ROW: u32 = u32::MAX;

impl<'a> Input<'a> {
    /// A matrix of `f32` rows `row_stride` elements apart.
    ///
    /// # Errors
    /// The slice is too short.
    pub fn f32(
        data: &'a [f32],
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Result<Input<'a>, KernelError> {
        let needs = extent(rows, columns, row_stride).ok_or(KernelError::TooLarge { rows, columns })?;
        check("input matrix", data.len(), needs)?;
        // SAFETY: the slice covers every row, and is borrowed for 'a.
        Ok(unsafe { Input::from_raw(data.as_ptr().cast(), InputType::F32, rows, columns, row_stride * 4) })
    }

    /// A matrix of `f16` rows `row_stride` elements apart.
    ///
    /// # Errors
    /// The slice is too short.
    pub fn f16(
        data: &'a [f16],
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Result<Input<'a>, KernelError> {
        let needs = extent(rows, columns, row_stride).ok_or(KernelError::TooLarge { rows, columns })?;
        check("input matrix", data.len(), needs)?;
        // SAFETY: the slice covers every row, and is borrowed for 'a.
        Ok(unsafe { Input::from_raw(data.as_ptr().cast(), InputType::F16, rows, columns, row_stride * 2) })
    }

    /// A matrix at an address, with rows `row_bytes` apart; any alignment will do.
    ///
    /// # Safety
    /// For `'a`, every row must be readable and not be written.
    pub const unsafe fn from_raw(
        pointer: *const u8,
        element: InputType,
        rows: usize,
        columns: usize,
        row_bytes: usize,
    ) -> Input<'a> {
        Input { pointer, element, rows, columns, row_bytes, gather: None, lifetime: PhantomData }
    }

    /// Gathers rows: row `i` of the result is row `indices[i]` of this matrix, or zeros for [`NO_ROW`].
    ///
    /// # Errors
    /// An index is out of range.
    pub fn gather(mut self, indices: &'a [u32]) -> Result<Input<'a>, KernelError> {
        for &index in indices {
            if index != NO_ROW && index as usize >= self.rows {
                return Err(KernelError::Row { row: index as usize, rows: self.rows });
            }
        }
        self.gather = Some(indices);
        Ok(self)
    }

    /// Rows, after gathering.
    pub fn rows(&self) -> usize {
        self.gather.map_or(self.rows, <[u32]>::len)
    }

    /// Elements of a row.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// The element type.
    pub const fn element(&self) -> InputType {
        self.element
    }

    /// The address of a row, or `None` for a row of zeros or out of range.
    pub(super) fn row(&self, row: usize) -> Option<*const u8> {
        let row = match self.gather {
            Some(indices) => match *indices.get(row)? {
                NO_ROW => return None,
                index => index as usize,
            },
            None if row < self.rows => row,
            None => return None,
        };
        Some(self.pointer.wrapping_add(row * self.row_bytes))
    }

    /// Copies elements `first..` of a row as `f32`; zeros past the end of the row and for a row of zeros.
    pub(super) fn read(&self, row: usize, first: usize, out: &mut [f32]) {
        out.fill(0.0);
        let Some(pointer) = self.row(row) else { return };
        let count = self.columns.saturating_sub(first).min(out.len());
        let Some(out) = out.get_mut(..count) else { return };
        let pointer = pointer.wrapping_add(first * self.element.bytes());
        // SAFETY: first + count <= columns, so the elements are inside the row that the view covers.
        unsafe {
            match self.element {
                InputType::F32 => {
                    pointer.copy_to_nonoverlapping(out.as_mut_ptr().cast(), size_of_val(out));
                }
                InputType::F16 => {
                    for (i, value) in out.iter_mut().enumerate() {
                        *value = pointer.cast::<f16>().add(i).read_unaligned().to_f32();
                    }
                }
            }
        }
    }
}

/// An output matrix: rows of contiguous `f32` with any stride, optionally scattered by an index list.
///
/// Threads write disjoint columns of it at the same time.
#[derive(Debug)]
pub struct Output<'a> {
    pointer: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    scatter: Option<&'a [u32]>,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: a view writes memory that is borrowed, or promised by the code that made the view, for 'a.
unsafe impl Send for Output<'_> {}
// SAFETY: kernels share a view among threads, each of which writes elements that no other thread touches.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// A matrix of rows `row_stride` elements apart.
    ///
    /// # Errors
    /// The slice is too short, or rows overlap.
    pub fn new(
        data: &'a mut [f32],
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Result<Output<'a>, KernelError> {
        let needs = extent(rows, columns, row_stride).ok_or(KernelError::TooLarge { rows, columns })?;
        check("output matrix", data.len(), needs)?;
        if rows > 1 {
            check("row stride of the output", row_stride, columns)?;
        }
        // SAFETY: the slice covers every row, and is borrowed for 'a.
        Ok(unsafe { Output::from_raw(data.as_mut_ptr(), rows, columns, row_stride) })
    }

    /// A matrix at an address, with rows `row_stride` elements apart; any alignment will do.
    ///
    /// # Safety
    /// For `'a`, every row must be writable and be used through this view alone; rows must not overlap.
    pub const unsafe fn from_raw(
        pointer: *mut f32,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Output<'a> {
        Output { pointer, rows, columns, row_stride, scatter: None, lifetime: PhantomData }
    }

    /// Scatters rows: row `i` of a matmul goes to row `indices[i]` of this matrix; [`NO_ROW`] drops it.
    ///
    /// # Errors
    /// An index is out of range.
    pub fn scatter(mut self, indices: &'a [u32]) -> Result<Output<'a>, KernelError> {
        for &index in indices {
            if index != NO_ROW && index as usize >= self.rows {
                return Err(KernelError::Row { row: index as usize, rows: self.rows });
            }
        }
        self.scatter = Some(indices);
        Ok(self)
    }

    /// Rows, after scattering.
    pub fn rows(&self) -> usize {
        self.scatter.map_or(self.rows, <[u32]>::len)
    }

    /// Elements of a row.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// The row stride in elements, unless rows are scattered.
    pub(super) fn plain_stride(&self) -> Option<usize> {
        if self.scatter.is_some() { None } else { Some(self.row_stride) }
    }

    /// The address of a row, or `None` where the row is dropped or out of range.
    pub(super) fn row(&self, row: usize) -> Option<*mut f32> {
        let row = match self.scatter {
            Some(indices) => match *indices.get(row)? {
                NO_ROW => return None,
                index => index as usize,
            },
            None if row < self.rows => row,
            None => return None,
        };
        Some(self.pointer.wrapping_add(row * self.row_stride))
    }
}
