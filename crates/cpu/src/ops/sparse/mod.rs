//! Matmuls with the rows of active neurons: rows of inactive ones are not read.
//!
//! A neuron's row is contiguous in the file, and few rows are read, so weights stay as they are in the file. One token's rows of
//! the usual types are multiplied straight from there (kernels/vec/row_sums.rs). For several tokens, a tile of rows is dequantized
//! once, as far as any token needs them, and each token is multiplied with its own active rows of the tile: the work is in
//! proportion to the active pairs of token and neuron. Sums are taken in the order of the rows: neither threads nor skipped
//! rows change a bit.

mod axpy;
mod mul_mat;

use std::ops::Range;

use quadriga_graph::{DType, Tensor};

pub(super) use self::axpy::{axpy, axpy_work_bytes};
pub(super) use self::mul_mat::mul_mat;
use super::lowered::LoweredOp;
use super::operand::LoweringContext;
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::vec;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{TensorView, segments};

/// About how many of the elements are read; for the size of work units.
const ACTIVE_SHARE: usize = 8;

/// The most rows of a tile.
const MAX_TILE_ROWS: usize = 128;

/// Reads elements of a row from column `first` on.
fn load(isa: Isa, w: &TensorView, row: usize, first: usize, out: &mut [f32]) {
    let place = [0, 0, row];
    if let (Some(at), Some(bytes)) = (w.row_pointer(place), w.dtype.row_bytes(first))
        && first + out.len() <= w.cols()
        // SAFETY: these columns are inside the row, which is dense; weights are not written.
        && unsafe { vec::load_row(isa, w.dtype, at.wrapping_add(bytes), out) }
    {
        return;
    }
    for columns in segments(out.len()) {
        let start = first + columns.start;
        if let Some(values) = out.get_mut(columns) {
            w.load_at(place, start, values);
        }
    }
}

/// Prefetches elements of a row.
fn prefetch(isa: Isa, w: &TensorView, row: usize, columns: &Range<usize>) {
    let (first, bytes) = (w.dtype.row_bytes(columns.start), w.dtype.row_bytes(columns.len()));
    if let (Some(at), Some(first), Some(bytes)) = (w.row_pointer([0, 0, row]), first, bytes) {
        vec::prefetch(isa, at.wrapping_add(first), bytes);
    }
}

/// The positions of the factors whose rows are read, of as many factors as the list has room for: those that are not 0, or all.
fn list_active<'a>(isa: Isa, skip: bool, factors: &[f32], list: &'a mut [u32]) -> &'a [u32] {
    let len = if skip {
        vec::list_active(isa, factors, list)
    } else {
        (0..).zip(list.iter_mut()).for_each(|(i, to)| *to = i);
        factors.len()
    };
    list.get(..len).unwrap_or_default()
}

/// Calls `work` with memory for a tile of so many rows and columns, which begins at a cache line.
fn with_tile<T>(rows: usize, columns: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    let len = rows * vec::tile_stride(columns);
    with_floats(len + 16, |floats| {
        let skipped = floats.as_ptr().align_offset(64).min(16);
        work(floats.get_mut(skipped..skipped + len).unwrap_or_default())
    })
}

/// A piece of a matrix whose rows are dequantized as far as any token needs them.
struct Tile<'a> {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Rows of [`vec::tile_stride`] elements.
    elements: &'a mut [f32],
}

impl Tile<'_> {
    /// Dequantizes the rows for which any of these tokens has a factor. `factors` are a token's, of the tile's rows.
    fn fill<'f>(&mut self, isa: Isa, skip: bool, w: &TensorView, factors: impl Iterator<Item = &'f [f32]>) {
        let mut used = [!skip; MAX_TILE_ROWS];
        for factors in factors.take_while(|_| skip) {
            used.iter_mut().zip(factors).for_each(|(used, factor)| *used |= *factor != 0.0);
        }
        let stride = vec::tile_stride(self.columns.len());
        let rows = self.rows.clone().zip(used).zip(self.elements.chunks_mut(stride));
        for ((row, _), to) in rows.filter(|((_, used), _)| *used) {
            let to = to.get_mut(..self.columns.len()).unwrap_or_default();
            load(isa, w, row, self.columns.start, to);
        }
    }
}
