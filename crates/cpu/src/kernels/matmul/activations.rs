//! Activations in the format of a kernel: converted once per matmul, in parallel, in a work buffer.

use quadriga_graph::DType;

use super::ActivationFormat;
use super::format::{BLOCK, GROUP};
use super::pack::check;
use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// Columns of weights that one thread unpacks at a time in a GEMM.
pub(super) const PANEL_COLUMNS: usize = 3072;

/// Scratch bytes of one thread: two groups of [`PANEL_COLUMNS`] in bf16, or one and a half in bytes with their scales.
pub(super) const SCRATCH: usize = 2 * GROUP * PANEL_COLUMNS * 2 + 4096;

const ALIGN: usize = 64;

/// Activations in an [`ActivationFormat`], and scratch memory for the threads.
///
/// ```text
/// F32Panels(r)  rows in panels of r (the last one shorter): column 0 of the panel's rows, column 1, …    f32
/// Int8x2(s)     row after row, 64 bytes apart, for every block of 32 columns: the high bytes, x / 128 rounded, as 32 × i8, then the
///               low bytes, x - 128 × high, as 32 × i8;
///               then for every row and block: scale, scale × Σ x (f32); for every row and half block: scale × Σ x
///               (f32); then, where s is 256, for every row and block: Σ high of the first half, of the second, Σ low
///               of the first half, of the second (i16); then for every row and 256 columns: Σ x of its sixteen half
///               blocks as three digits in base 128: 16 × i8, the highest first, three times.
///               Blocks within s columns have the same scale. Where s is 32, also x as i16, row after row, 64 bytes apart, for
///               GEMM with AVX2.
/// Int16         span after span of 128 columns, row after row: 128 × i16; then span after span: a scale per row (f32)
/// Bf16Tiles     16 rows × 32 columns of bf16 = one AMX tile of 1024 bytes, row-major inside;
///               tiles of 16 rows side by side over the columns, then the next 16 rows; padded with zeros
/// ```
#[derive(Debug)]
pub struct Activations<'w> {
    pub(super) format: ActivationFormat,
    pub(super) isa: Isa,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The number of threads with scratch memory; `None` if all of it is one thread's.
    threads: Option<usize>,
    base: *mut u8,
    /// The scratch memory, if it is not behind the activations.
    scratch: Option<*mut u8>,
    lifetime: std::marker::PhantomData<&'w mut [u8]>,
}

// SAFETY: the work buffer is borrowed for 'w; threads write disjoint parts of it (rows by chunk, scratch by worker).
unsafe impl Send for Activations<'_> {}
// SAFETY: as above.
unsafe impl Sync for Activations<'_> {}

/// The largest quant of [`ActivationFormat::Int8x2`]: 127 × 128, so that both of its bytes are in -127..=127.
pub(super) const INT8X2_MAX: f32 = 127.0 * 128.0;

/// Bytes of the sums of 256 columns: three digits for each of sixteen half blocks, whose sums are at most
/// 16 × 127 × 128.
pub(super) const DIGITS: usize = 48;

/// Columns of [`ActivationFormat::Int16`] that share a scale.
pub(super) const INT16_SPAN: usize = 128;

/// The largest quants of activations and of weights in [`ActivationFormat::Int16`]: a sum over a span fits 32 bits.
pub(super) const INT16_MAX: f32 = 16383.0;
pub(super) const WEIGHT_MAX: f32 = 1023.0;

const _: () = assert!(INT16_MAX as u64 * WEIGHT_MAX as u64 * INT16_SPAN as u64 <= i32::MAX as u64);

/// The scale of numbers up to `largest` in magnitude, quantized to integers up to `max`, and its inverse. Numbers too
/// small for an inverse count as zeros; a NaN or an infinity makes the scale one, and every sum with it.
pub(super) fn quant_scale(largest: f32, max: f32) -> (f32, f32) {
    if largest < 1e-30 { (0.0, 0.0) } else { (largest / max, max / largest) }
}

/// One row of [`ActivationFormat::Int8x2`].
#[derive(Clone, Copy)]
pub(super) struct Int8x2Row {
    pub(super) quants: *mut i8,
    /// The same numbers in one piece; only where 32 columns share a scale.
    pub(super) words: *mut i16,
    pub(super) scales: *mut f32,
    pub(super) sums: *mut f32,
    pub(super) half_sums: *mut f32,
    /// Sums of high and low bytes; only where 256 columns share a scale.
    pub(super) byte_sums: *mut i16,
    /// Sums of half blocks as digits, [`DIGITS`] for 256 columns; only where 256 columns share a scale.
    pub(super) digits: *mut i8,
}

fn round_up(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN)
}

/// Bytes from one row of quants of [`ActivationFormat::Int8x2`] to the next: so many that the same column of many rows is
/// not in the same set of a cache.
fn int8x2_stride(columns: usize) -> Option<usize> {
    columns.checked_mul(2)?.checked_add(ALIGN)
}

/// Bytes of the converted activations, without scratch memory.
fn format_bytes(format: ActivationFormat, rows: usize, columns: usize) -> Option<usize> {
    let elements = rows.checked_mul(columns)?;
    match format {
        ActivationFormat::F32Panels(_) => round_up(elements.checked_mul(4)?),
        ActivationFormat::Int8x2(span) => {
            let each = if span > BLOCK { 16 + 8 + DIGITS / 8 } else { 16 };
            let quants = round_up(rows.checked_mul(int8x2_stride(columns)?)?)?;
            let words = if span > BLOCK { 0 } else { quants };
            quants.checked_add(round_up((elements / BLOCK).checked_mul(each)?)?)?.checked_add(words)
        }
        ActivationFormat::Int16 => {
            round_up(rows.checked_mul(columns.div_ceil(INT16_SPAN))?.checked_mul(2 * INT16_SPAN + 4)?)
        }
        ActivationFormat::Bf16Tiles => rows
            .checked_next_multiple_of(GROUP)?
            .checked_mul(columns.checked_next_multiple_of(BLOCK)?)?
            .checked_mul(2),
    }
}

impl<'w> Activations<'w> {
    /// Bytes of work memory for a matmul of `rows` activations of `columns` elements with weights of a type.
    ///
    /// # Errors
    /// There is no kernel for the type, or the sizes overflow.
    pub fn work_bytes(
        isa: Isa,
        dtype: DType,
        rows: usize,
        columns: usize,
        threads: usize,
    ) -> Result<usize, KernelError> {
        Activations::format_work_bytes(ActivationFormat::choose(isa, dtype, rows)?, rows, columns, threads)
    }

    /// As [`work_bytes`](Activations::work_bytes), in a given format.
    ///
    /// # Errors
    /// The sizes overflow.
    pub fn format_work_bytes(
        format: ActivationFormat,
        rows: usize,
        columns: usize,
        threads: usize,
    ) -> Result<usize, KernelError> {
        format_bytes(format, rows, columns)
            .and_then(|bytes| bytes.checked_add(threads.checked_mul(SCRATCH)?)?.checked_add(ALIGN))
            .ok_or(KernelError::TooLarge { rows, columns })
    }

    /// Lays activations out in a work buffer, for a run of at most `threads` threads. They are still to be filled by
    /// [`prepare`](Activations::prepare).
    ///
    /// # Errors
    /// The buffer is shorter than [`work_bytes`](Activations::work_bytes).
    pub fn new(
        isa: Isa,
        dtype: DType,
        rows: usize,
        columns: usize,
        threads: usize,
        work: &'w mut [u8],
    ) -> Result<Activations<'w>, KernelError> {
        check("work memory", work.len(), Activations::work_bytes(isa, dtype, rows, columns, threads)?)?;
        // SAFETY: the buffer is long enough, and borrowed for 'w.
        unsafe { Activations::from_raw(isa, dtype, rows, columns, threads, work.as_mut_ptr()) }
    }

    /// As [`new`](Activations::new), in memory at an address.
    ///
    /// # Errors
    /// There is no kernel for the type.
    ///
    /// # Safety
    /// For `'w`, [`work_bytes`](Activations::work_bytes) bytes at the address must be writable, initialised, and used
    /// through this object alone.
    pub unsafe fn from_raw(
        isa: Isa,
        dtype: DType,
        rows: usize,
        columns: usize,
        threads: usize,
        work: *mut u8,
    ) -> Result<Activations<'w>, KernelError> {
        let format = ActivationFormat::choose(isa, dtype, rows)?;
        // SAFETY: promised by the caller.
        unsafe { Activations::in_format(format, isa, dtype, [rows, columns], Some(threads), work) }
    }

    /// As [`from_raw`](Activations::from_raw), in a given format. Without a number of threads, all of the memory is one
    /// thread's, as in [`private`](Activations::private).
    ///
    /// # Errors
    /// Rows are no whole blocks.
    ///
    /// # Safety
    /// As for [`from_raw`](Activations::from_raw), with [`format_work_bytes`](Activations::format_work_bytes) bytes; the
    /// instruction set has kernels for the format.
    pub unsafe fn in_format(
        format: ActivationFormat,
        isa: Isa,
        dtype: DType,
        [rows, columns]: [usize; 2],
        threads: Option<usize>,
        work: *mut u8,
    ) -> Result<Activations<'w>, KernelError> {
        let multiple = match format {
            ActivationFormat::Int8x2(span) => span,
            ActivationFormat::Int16 => BLOCK,
            ActivationFormat::F32Panels(_) | ActivationFormat::Bf16Tiles => 1,
        };
        if !columns.is_multiple_of(multiple) {
            return Err(KernelError::Blocks { dtype, columns });
        }
        let base = work.wrapping_add(work.align_offset(ALIGN));
        let lifetime = std::marker::PhantomData;
        Ok(Activations { format, isa, rows, columns, threads, base, scratch: None, lifetime })
    }

    /// As [`in_format`](Activations::in_format), with the scratch memory that this worker has in other activations: the
    /// memory needs [`format_work_bytes`](Activations::format_work_bytes) for no thread. Every worker makes an object of its
    /// own over the memory that they share.
    ///
    /// # Errors
    /// Rows are no whole blocks, or the other activations have no scratch memory for this worker.
    ///
    /// # Safety
    /// As for [`in_format`](Activations::in_format), but other workers may have such objects of the same memory. Only this
    /// worker uses the object, and not while it multiplies with the other activations.
    pub(crate) unsafe fn beside(
        other: &Activations<'w>,
        worker: &Worker<'_>,
        format: ActivationFormat,
        dtype: DType,
        extents: [usize; 2],
        work: *mut u8,
    ) -> Result<Activations<'w>, KernelError> {
        let scratch = Some(other.scratch(worker)?);
        // SAFETY: promised by the caller.
        let made = unsafe { Activations::in_format(format, other.isa, dtype, extents, None, work)? };
        Ok(Activations { scratch, ..made })
    }

    /// As [`from_raw`](Activations::from_raw) for one thread, whichever it is: it fills them itself, and multiplies
    /// with them what others multiply with theirs.
    ///
    /// # Errors
    /// There is no kernel for the type.
    ///
    /// # Safety
    /// As for [`from_raw`](Activations::from_raw) with one thread; only one thread may use the object.
    pub unsafe fn private(
        isa: Isa,
        dtype: DType,
        rows: usize,
        columns: usize,
        work: *mut u8,
    ) -> Result<Activations<'w>, KernelError> {
        let format = ActivationFormat::choose(isa, dtype, rows)?;
        // SAFETY: promised by the caller.
        unsafe { Activations::in_format(format, isa, dtype, [rows, columns], None, work) }
    }

    /// The format.
    pub const fn format(&self) -> ActivationFormat {
        self.format
    }

    /// The instruction set they were made for.
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Rows of activations.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// The panel that starts at row `first`, and its rows.
    pub(super) fn f32_panel(&self, first: usize) -> (*mut f32, usize) {
        let ActivationFormat::F32Panels(step) = self.format else { return (std::ptr::null_mut(), 0) };
        (self.base.cast::<f32>().wrapping_add(first * self.columns), step.min(self.rows - first))
    }

    /// A row of [`ActivationFormat::Int8x2`].
    pub(super) fn int8x2_row(&self, row: usize) -> Int8x2Row {
        let elements = self.rows * self.columns;
        let blocks = elements / BLOCK;
        let at = row * (self.columns / BLOCK);
        let stride = int8x2_stride(self.columns).unwrap_or(0);
        let floats = self.base.wrapping_add((self.rows * stride).next_multiple_of(ALIGN)).cast::<f32>();
        Int8x2Row {
            quants: self.base.wrapping_add(row * stride).cast(),
            // After four floats for each block.
            words: floats
                .cast::<u8>()
                .wrapping_add((16 * blocks).next_multiple_of(ALIGN) + row * stride)
                .cast(),
            scales: floats.wrapping_add(at),
            sums: floats.wrapping_add(blocks + at),
            half_sums: floats.wrapping_add(2 * blocks + 2 * at),
            byte_sums: floats.wrapping_add(4 * blocks).cast::<i16>().wrapping_add(4 * at),
            digits: floats.wrapping_add(6 * blocks).cast::<i8>().wrapping_add(at / 8 * DIGITS),
        }
    }

    /// The quants of a row in a span, and its scale there; those of the next row follow.
    pub(super) fn int16_row(&self, row: usize, span: usize) -> (*mut i16, *mut f32) {
        let at = span * self.rows + row;
        let scales = self
            .base
            .wrapping_add(self.rows * self.columns.div_ceil(INT16_SPAN) * 2 * INT16_SPAN)
            .cast::<f32>();
        (self.base.cast::<i16>().wrapping_add(at * INT16_SPAN), scales.wrapping_add(at))
    }

    /// The first tile of the sixteen rows that start at `16 × strip`.
    pub(super) fn bf16_tiles(&self, strip: usize) -> *mut u8 {
        self.base.wrapping_add(strip * self.columns.div_ceil(BLOCK) * 1024)
    }

    /// The scratch memory of a worker: [`SCRATCH`] bytes, aligned to 64.
    ///
    /// # Errors
    /// There are more workers than the activations were laid out for.
    pub(super) fn scratch(&self, worker: &Worker<'_>) -> Result<*mut u8, KernelError> {
        if let Some(scratch) = self.scratch {
            return Ok(scratch);
        }
        let index = if let Some(threads) = self.threads {
            check("threads the work memory was laid out for", threads, worker.index() + 1)?;
            worker.index()
        } else {
            0
        };
        let bytes = format_bytes(self.format, self.rows, self.columns)
            .ok_or(KernelError::TooLarge { rows: self.rows, columns: self.columns })?;
        Ok(self.base.wrapping_add(bytes + index * SCRATCH))
    }
}
