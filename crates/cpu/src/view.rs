//! A tensor in memory as kernels access it: rows are read and written as `f32`, whatever their type and strides.

use std::ops::Range;

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use quadriga_graph::{DType, MAX_DIMS, Tensor, blocks};

/// Elements that kernels convert at a time: a multiple of every block length, small enough for the stack.
pub(crate) const SEGMENT: usize = 512;

/// The column ranges of the segments of a row.
pub(crate) fn segments(cols: usize) -> impl Iterator<Item = Range<usize>> {
    (0..cols).step_by(SEGMENT).map(move |first| first..(first + SEGMENT).min(cols))
}

/// A tensor in memory. A row is given by its `place`: its indices along the three outer dimensions.
///
/// Invariant, checked by [`compile`](crate::compile): all bytes that type, shape and strides reach are inside a buffer
/// that lives as long as the program, elements are aligned, and a caller of the methods below holds the buffer
/// ([`HostBuffer::begin`](crate::buffer::HostBuffer)), for writing if it writes. Elements that one thread writes are not
/// accessed by another before the next barrier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorView {
    base: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) dims: [usize; MAX_DIMS],
    pub(crate) strides: [usize; MAX_DIMS],
    bytes: usize,
    contiguous: bool,
}

// SAFETY: a view is an address and numbers; the rules for using it are the type's invariant.
unsafe impl Send for TensorView {}
// SAFETY: as above.
unsafe impl Sync for TensorView {}

impl TensorView {
    /// A tensor at an address.
    ///
    /// # Safety
    /// The type's invariant must hold wherever the view is used.
    pub(crate) unsafe fn new(tensor: &Tensor, base: *mut u8) -> TensorView {
        TensorView {
            base,
            dtype: tensor.dtype(),
            dims: tensor.dims4(),
            strides: tensor.strides(),
            bytes: tensor.bytes(),
            contiguous: tensor.is_contiguous(),
        }
    }

    /// The addresses it covers.
    pub(crate) fn range(&self) -> Range<usize> {
        let start = self.base.addr();
        start..start + self.bytes
    }

    /// Whether both are the same elements in memory.
    pub(crate) fn is_same(&self, other: &TensorView) -> bool {
        (self.base, self.dtype, self.dims, self.strides)
            == (other.base, other.dtype, other.dims, other.strides)
    }

    /// The length of a row.
    pub(crate) fn cols(&self) -> usize {
        self.dims[3]
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.dims[0] * self.dims[1] * self.dims[2]
    }

    /// The number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.rows() * self.dims[3]
    }

    /// Whether elements are contiguous in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// Whether the elements of each row are contiguous.
    pub(crate) fn is_dense(&self) -> bool {
        self.cols() <= self.dtype.block_len() || self.strides[3] == self.dtype.block_bytes()
    }

    /// Whether two different elements can have the same address.
    pub(crate) fn overlaps_itself(&self) -> bool {
        let unit = self.dtype.block_bytes();
        let mut axes = [(0, 0); MAX_DIMS];
        for ((axis, extent), stride) in axes.iter_mut().zip(self.dims).zip(self.strides) {
            *axis = (stride, extent);
        }
        axes[3].1 /= self.dtype.block_len();
        axes.sort_unstable();
        let mut reach = unit;
        for (stride, extent) in axes {
            if extent <= 1 {
                continue;
            }
            if stride < reach {
                return true;
            }
            reach = stride.saturating_mul(extent - 1).saturating_add(reach);
        }
        false
    }

    /// The place of a row, counted in row-major order over the outer dimensions.
    pub(crate) fn place(&self, row: usize) -> [usize; 3] {
        let [_, d1, d2, _] = self.dims;
        let (outer, i2) = (row / d2.max(1), row % d2.max(1));
        [outer / d1.max(1), outer % d1.max(1), i2]
    }

    /// The address of element `first` of a row, if `len` elements from there are inside the row.
    fn at(&self, [i0, i1, i2]: [usize; 3], first: usize, len: usize) -> Option<*mut u8> {
        let [d0, d1, d2, cols] = self.dims;
        if i0 >= d0 || i1 >= d1 || i2 >= d2 || first.checked_add(len)? > cols {
            debug_assert!(false, "row {i0},{i1},{i2} columns {first}+{len} of {:?}", self.dims);
            return None;
        }
        let [s0, s1, s2, s3] = self.strides;
        let inner = if self.is_dense() { self.dtype.block_bytes() } else { s3 };
        Some(self.base.wrapping_add(i0 * s0 + i1 * s1 + i2 * s2 + first / self.dtype.block_len() * inner))
    }

    /// Bytes from one element to the next.
    fn step(&self) -> usize {
        if self.is_dense() { self.dtype.block_bytes() } else { self.strides[3] }
    }

    /// Reads elements of row `row` (in row-major order) from `first` on, as `f32`. For block types, `first` and the
    /// length are whole numbers of blocks.
    pub(crate) fn load(&self, row: usize, first: usize, out: &mut [f32]) {
        self.load_at(self.place(row), first, out);
    }

    /// As [`load`](TensorView::load), for a row given by its place.
    pub(crate) fn load_at(&self, place: [usize; 3], first: usize, out: &mut [f32]) {
        let Some(at) = self.at(place, first, out.len()) else { return };
        let len = out.len();
        if !self.is_dense() {
            for (i, value) in out.iter_mut().enumerate() {
                let element = at.wrapping_add(i * self.strides[3]);
                // SAFETY: first + i is a column of the row, so the element is inside the tensor.
                *value = unsafe { read_element(self.dtype, element) };
            }
            return;
        }
        // SAFETY: `len` elements from here on are inside the row, dense and (see the invariant) aligned; `out` is
        // the caller's own memory.
        unsafe {
            match self.dtype {
                DType::F32 => std::ptr::copy_nonoverlapping(at.cast::<f32>(), out.as_mut_ptr(), len),
                DType::F16 => std::slice::from_raw_parts(at.cast::<f16>(), len).convert_to_f32_slice(out),
                dtype => {
                    let bytes = dtype.row_bytes(len).unwrap_or(0);
                    // The lengths fit: `len` is a whole number of blocks of a computable type.
                    let _ = blocks::dequantize(dtype, std::slice::from_raw_parts(at, bytes), out);
                }
            }
        }
    }

    /// Writes values to elements of row `row` (in row-major order) from `first` on.
    pub(crate) fn store(&self, row: usize, first: usize, values: &[f32]) {
        self.store_at(self.place(row), first, values);
    }

    /// As [`store`](TensorView::store), for a row given by its place.
    pub(crate) fn store_at(&self, place: [usize; 3], first: usize, values: &[f32]) {
        let Some(at) = self.at(place, first, values.len()) else { return };
        let len = values.len();
        if !self.is_dense() {
            for (i, value) in values.iter().enumerate() {
                let element = at.wrapping_add(i * self.strides[3]);
                // SAFETY: first + i is a column of the row, so the element is inside the tensor.
                unsafe { write_element(self.dtype, element, *value) };
            }
            return;
        }
        // SAFETY: as in `load_at`; no other thread accesses these elements meanwhile (see the invariant).
        unsafe {
            match self.dtype {
                DType::F32 => std::ptr::copy_nonoverlapping(values.as_ptr(), at.cast::<f32>(), len),
                DType::F16 => std::slice::from_raw_parts_mut(at.cast::<u16>(), len)
                    .reinterpret_cast_mut::<f16>()
                    .convert_from_f32_slice(values),
                dtype => {
                    let bytes = dtype.row_bytes(len).unwrap_or(0);
                    // The lengths fit: `len` is a whole number of blocks of a writable type.
                    let _ = blocks::quantize(dtype, values, std::slice::from_raw_parts_mut(at, bytes));
                }
            }
        }
    }

    /// Reads one i32.
    pub(crate) fn index(&self, place: [usize; 3], column: usize) -> i32 {
        match self.at(place, column, 1) {
            // SAFETY: the element is inside the tensor, whose type has four bytes.
            Some(at) if self.dtype == DType::I32 => unsafe { at.cast::<i32>().read_unaligned() },
            _ => 0,
        }
    }

    /// A dense row of i32 as a slice; `None` for other types and strided rows.
    ///
    /// # Safety
    /// Nothing writes to the row while the slice is used.
    pub(crate) unsafe fn row_i32(&self, place: [usize; 3]) -> Option<&[i32]> {
        if self.dtype != DType::I32 || !self.is_dense() {
            return None;
        }
        let at = self.at(place, 0, self.cols())?.cast::<i32>();
        // SAFETY: the row is inside the tensor, and not written (promised by the caller).
        at.is_aligned().then(|| unsafe { std::slice::from_raw_parts(at, self.cols()) })
    }

    /// Writes i32 values from `first` on.
    pub(crate) fn store_indices(&self, row: usize, first: usize, values: &[i32]) {
        let Some(at) = self.at(self.place(row), first, values.len()) else { return };
        if self.dtype != DType::I32 {
            return;
        }
        for (i, value) in values.iter().enumerate() {
            // SAFETY: the element is inside the tensor, whose type has four bytes.
            unsafe { at.wrapping_add(i * self.step()).cast::<i32>().write_unaligned(*value) };
        }
    }

    /// Copies elements of the same type from another tensor, bit for bit; for block types whole blocks.
    pub(crate) fn copy_from(
        &self,
        place: [usize; 3],
        first: usize,
        from: &TensorView,
        from_place: [usize; 3],
        from_first: usize,
        len: usize,
    ) {
        let (Some(to), Some(at)) = (self.at(place, first, len), from.at(from_place, from_first, len)) else {
            return;
        };
        if self.dtype != from.dtype {
            return;
        }
        let unit = self.dtype.block_bytes();
        let count = len / self.dtype.block_len();
        let (to_step, at_step) = (self.step(), from.step());
        // SAFETY: both ranges are inside their tensors; `copy` allows any overlap.
        unsafe {
            if to_step == unit && at_step == unit {
                std::ptr::copy(at.cast_const(), to, count * unit);
                return;
            }
            for i in 0..count {
                std::ptr::copy(at.wrapping_add(i * at_step).cast_const(), to.wrapping_add(i * to_step), unit);
            }
        }
    }

    /// A dense row of `f32` as a slice; `None` for other types and strided rows.
    ///
    /// # Safety
    /// Nothing writes to the row while the slice is used.
    pub(crate) unsafe fn row_f32(&self, place: [usize; 3]) -> Option<&[f32]> {
        if self.dtype != DType::F32 || !self.is_dense() {
            return None;
        }
        let at = self.at(place, 0, self.cols())?;
        // SAFETY: the row is inside the tensor, aligned, and not written (promised by the caller).
        Some(unsafe { std::slice::from_raw_parts(at.cast::<f32>(), self.cols()) })
    }

    /// The address of `len` dense `f32` elements of a row; `None` for other types, strided rows and past the row.
    /// They may be used as the invariant says.
    pub(crate) fn floats_at(&self, place: [usize; 3], first: usize, len: usize) -> Option<*mut f32> {
        if self.dtype != DType::F32 || !self.is_dense() {
            return None;
        }
        Some(self.at(place, first, len)?.cast())
    }

    /// As [`floats_at`](TensorView::floats_at), for `f16` or `bf16` elements at an address that suits them.
    pub(crate) fn halves_at(&self, place: [usize; 3], first: usize, len: usize) -> Option<*mut u16> {
        if !matches!(self.dtype, DType::F16 | DType::BF16) || !self.is_dense() {
            return None;
        }
        Some(self.at(place, first, len)?.cast::<u16>()).filter(|at| at.is_aligned())
    }

    /// The bytes of `len` elements of a row of a quantized type; `None` for other types and past the row.
    ///
    /// # Safety
    /// The program holds the buffer for writing, and nothing else accesses these bytes while the slice is used.
    pub(crate) unsafe fn blocks_at<'a>(
        &self,
        place: [usize; 3],
        first: usize,
        len: usize,
    ) -> Option<&'a mut [u8]> {
        if !self.dtype.is_quantized() || !self.is_dense() {
            return None;
        }
        let (at, bytes) = (self.at(place, first, len)?, self.dtype.row_bytes(len)?);
        // SAFETY: whole blocks inside the row, which nothing else accesses (promised by the caller).
        Some(unsafe { std::slice::from_raw_parts_mut(at, bytes) })
    }

    /// All its bytes, gaps included.
    ///
    /// # Safety
    /// The program holds the buffer, and nothing writes to the bytes while the slice is used.
    pub(crate) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: the bytes are inside the buffer (see the invariant), and not written (promised by the caller).
        unsafe { std::slice::from_raw_parts(self.base.cast_const(), self.bytes) }
    }

    /// The bytes of some elements of a contiguous tensor; `None` for other tensors, past the end and inside a block.
    ///
    /// # Safety
    /// The program holds the buffer for writing, and nothing else accesses these bytes while the slice is used.
    pub(crate) unsafe fn elements_mut<'a>(&self, elements: Range<usize>) -> Option<&'a mut [u8]> {
        let (start, end) = (self.dtype.row_bytes(elements.start)?, self.dtype.row_bytes(elements.end)?);
        if !self.contiguous || end > self.bytes || start > end {
            return None;
        }
        // SAFETY: the range is inside the tensor, and nothing else accesses it (promised by the caller).
        Some(unsafe { std::slice::from_raw_parts_mut(self.base.wrapping_add(start), end - start) })
    }

    /// The address of a row's first element; valid for the row as the invariant says. `None` if there is no such row.
    pub(crate) fn row_pointer(&self, place: [usize; 3]) -> Option<*mut u8> {
        self.at(place, 0, 0)
    }
}

/// # Safety
/// The element is readable.
unsafe fn read_element(dtype: DType, at: *const u8) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        match dtype {
            DType::F32 => at.cast::<f32>().read_unaligned(),
            DType::F16 => at.cast::<f16>().read_unaligned().to_f32(),
            DType::BF16 => at.cast::<half::bf16>().read_unaligned().to_f32(),
            _ => 0.0,
        }
    }
}

/// # Safety
/// The element is writable.
unsafe fn write_element(dtype: DType, at: *mut u8, value: f32) {
    // SAFETY: promised by the caller.
    unsafe {
        match dtype {
            DType::F32 => at.cast::<f32>().write_unaligned(value),
            DType::F16 => at.cast::<f16>().write_unaligned(f16::from_f32(value)),
            DType::BF16 => at.cast::<half::bf16>().write_unaligned(half::bf16::from_f32(value)),
            _ => {}
        }
    }
}
