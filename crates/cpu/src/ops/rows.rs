//! Row lookups (`get_rows`) and row updates (`set_rows`) by index.

use std::ops::Range;

use quadriga_graph::DType;

use super::operand::{Operand, PackedWeight};
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::vec;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

struct GetRowsKernel {
    x: TensorView,
    packed: Option<PackedWeight>,
    ids: TensorView,
    out: TensorView,
}

pub(super) fn get_rows(x: Option<&Operand>, ids: &TensorView, out: &TensorView) -> Result<StepPart, String> {
    let x = x.ok_or("an input is missing")?;
    let accesses = vec![
        Access::range(x.range(), false),
        Access::reads(ids),
        Access::writes_own(out, Partition::equal(out.rows())),
    ];
    let kernel = GetRowsKernel { x: x.view, packed: x.packed, ids: *ids, out: *out };
    Ok(StepPart::new(kernel, out.rows(), out.elements(), accesses))
}

/// An index of a row, checked.
fn row_index(index: i32, rows: usize) -> Result<usize, String> {
    usize::try_from(index)
        .ok()
        .filter(|row| *row < rows)
        .ok_or_else(|| format!("row index {index} is outside 0..{rows}"))
}

impl Kernel for GetRowsKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        for unit in units {
            let [b, h, t] = self.out.place(unit);
            let row = row_index(self.ids.index([0, b, h], t), self.x.dims[2])?;
            let (to, from) = ([b, h, t], [b, h, row]);
            if let Some(packed) = &self.packed {
                let matrix = packed.matrix(b * self.x.dims[1] + h)?;
                with_floats(self.x.cols(), |values| {
                    // SAFETY: the program holds the buffer of the weights, which are never written.
                    let bytes = unsafe { matrix.bytes() };
                    matrix.layout.read_row(bytes, row, values).map_err(|error| error.to_string())?;
                    self.out.store_at(to, 0, values);
                    Ok::<(), String>(())
                })?;
                continue;
            }
            if self.x.dtype == self.out.dtype {
                self.out.copy_from(to, 0, &self.x, from, 0, self.x.cols());
                continue;
            }
            for columns in segments(self.x.cols()) {
                let Some(values) = values.get_mut(..columns.len()) else { continue };
                self.x.load_at(from, columns.start, values);
                self.out.store_at(to, columns.start, values);
            }
        }
        Ok(())
    }
}

/// Columns and new rows of a unit of [`SetRowsKernel`]; the columns are whole blocks of every type. A unit takes more rows
/// where there would be more than [`CHUNKS`] chunks of rows, since each unit reads all indices.
const COLUMNS: usize = 1024;
const ROWS: usize = 16;
const CHUNKS: usize = 64;

struct SetRowsKernel {
    isa: Isa,
    x: TensorView,
    ids: TensorView,
    target: TensorView,
    /// Whether one unit does everything: for targets whose rows overlap in memory.
    serial: bool,
}

/// A unit takes some columns of some new rows of one matrix. If the indices are not ascending, one unit takes all rows in
/// order, so that of two rows with the same index the last wins, whatever the number of threads.
pub(super) fn set_rows(x: &TensorView, ids: &TensorView, target: &TensorView, isa: Isa) -> StepPart {
    let serial = target.overlaps_itself();
    let kernel = SetRowsKernel { isa, x: *x, ids: *ids, target: *target, serial };
    let units = if serial { 1 } else { kernel.units() };
    let accesses = vec![Access::reads(x), Access::reads(ids), Access::writes(target)];
    StepPart::new(kernel, units, x.elements() * 2, accesses)
}

impl SetRowsKernel {
    /// Rows of a chunk.
    fn rows(&self) -> usize {
        self.ids.cols().div_ceil(CHUNKS).max(ROWS)
    }

    /// Pieces of a row, and chunks of rows.
    fn pieces(&self) -> [usize; 2] {
        [self.target.cols().div_ceil(COLUMNS), self.ids.cols().div_ceil(self.rows())]
    }

    fn units(&self) -> usize {
        let [b, h, ..] = self.target.dims;
        let [pieces, chunks] = self.pieces();
        b * h * pieces * chunks
    }

    fn unit(&self, unit: usize) -> Result<(), String> {
        let [_, h, rows, cols] = self.target.dims;
        let [_, ib, ih, count] = self.ids.dims;
        let [pieces, chunks] = self.pieces();
        let (chunk, piece, matrix) = (unit % chunks, unit / chunks % pieces, unit / chunks / pieces);
        let (b, h) = (matrix / h, matrix % h);
        let place = [0, b % ib.max(1), h % ih.max(1)];
        let id = |t: usize| self.ids.index(place, t);
        // SAFETY: indices are inputs of the operation, which it does not write.
        let ascending = match unsafe { self.ids.row_i32(place) } {
            Some(ids) => ids.is_sorted_by(|a, b| a < b),
            None => (1..count).all(|t| id(t - 1) < id(t)),
        };
        let taken = match (ascending, chunk) {
            (true, _) => chunk * self.rows()..((chunk + 1) * self.rows()).min(count),
            (false, 0) => 0..count,
            (false, _) => return Ok(()),
        };
        for t in taken {
            let row = row_index(id(t), rows)?;
            self.row([b, h, row], [b, h, t], piece * COLUMNS..((piece + 1) * COLUMNS).min(cols));
        }
        Ok(())
    }

    fn row(&self, to: [usize; 3], from: [usize; 3], columns: Range<usize>) {
        let (first, len) = (columns.start, columns.len());
        if self.x.dtype == self.target.dtype {
            self.target.copy_from(to, first, &self.x, from, first, len);
            return;
        }
        if let Some(x) = self.x.floats_at(from, first, len)
            // SAFETY: the blocks of these columns, which only this unit writes.
            && let Some(out) = unsafe { self.target.blocks_at(to, first, len) }
        {
            // SAFETY: so many elements of the new row, which is not in the target.
            let x = unsafe { std::slice::from_raw_parts(x, len) };
            if vec::quantize_row(self.isa, self.target.dtype, x, out) {
                return;
            }
        }
        let (x, out) = (self.x.floats_at(from, first, len), self.target.halves_at(to, first, len));
        if let (Some(x), Some(out)) = (x, out) {
            // SAFETY: both rows have these elements, of 16 bits in the target; the new rows are not in the target,
            // which only this unit writes here.
            unsafe {
                let x = std::slice::from_raw_parts(x, len);
                if self.target.dtype == DType::F16 {
                    vec::f32_to_f16(self.isa, x, std::slice::from_raw_parts_mut(out.cast(), len));
                } else {
                    vec::f32_to_bf16(self.isa, x, std::slice::from_raw_parts_mut(out.cast(), len));
                }
            }
            return;
        }
        let mut values = [0.0; SEGMENT];
        for part in segments(len) {
            let Some(values) = values.get_mut(..part.len()) else { continue };
            self.x.load_at(from, first + part.start, values);
            self.target.store_at(to, first + part.start, values);
        }
    }
}

impl Kernel for SetRowsKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let mut units = if self.serial { 0..self.units() } else { units };
        units.try_for_each(|unit| self.unit(unit))
    }
}
