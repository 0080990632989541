//! Rows picked and replaced by index.

use std::ops::Range;

use super::scratch::with_floats;
use super::{Operand, Packed};
use crate::step::{Access, Kernel, Part, Work};
use crate::view::{SEGMENT, View, segments};

struct GetRowsKernel {
    x: View,
    packed: Option<Packed>,
    ids: View,
    out: View,
}

pub(super) fn get_rows(x: Option<&Operand>, ids: &View, out: &View) -> Result<Part, String> {
    let x = x.ok_or("an input is missing")?;
    let accesses = vec![Access::reads(&x.view), Access::reads(ids), Access::writes_own(out, out.rows())];
    let kernel = GetRowsKernel { x: x.view, packed: x.packed, ids: *ids, out: *out };
    Ok(Part::new(kernel, out.rows(), out.elements(), accesses))
}

/// An index of a row, checked.
fn row_index(index: i32, rows: usize) -> Result<usize, String> {
    usize::try_from(index)
        .ok()
        .filter(|row| *row < rows)
        .ok_or_else(|| format!("row index {index} is outside 0..{rows}"))
}

impl Kernel for GetRowsKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        for unit in units {
            let [b, h, t] = self.out.place(unit);
            let row = row_index(self.ids.index([0, b, h], t), self.x.dims[2])?;
            let (to, from) = ([b, h, t], [b, h, row]);
            if let Some(packed) = &self.packed {
                let matrix = packed.matrix(b * self.x.dims[1] + h)?;
                with_floats(self.x.cols(), |values| {
                    // SAFETY: the program holds the buffer of the weights, which nobody writes.
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

/// Columns that a unit of [`SetRowsKernel`] takes: whole blocks of every type that can be written.
const PIECE: usize = 128;

struct SetRowsKernel {
    x: View,
    ids: View,
    target: View,
    /// One unit does everything: for targets whose rows share memory.
    serial: bool,
}

/// A unit takes some columns of one matrix through all its new rows in order, so that of two rows for one place the
/// last wins, whatever the number of threads.
pub(super) fn set_rows(x: &View, ids: &View, target: &View) -> Part {
    let serial = target.overlaps_itself();
    let [b, h, ..] = target.dims;
    let units = if serial { 1 } else { b * h * target.cols().div_ceil(PIECE) };
    let accesses = vec![Access::reads(x), Access::reads(ids), Access::writes(target)];
    let kernel = SetRowsKernel { x: *x, ids: *ids, target: *target, serial };
    Part::new(kernel, units, x.elements() * 2, accesses)
}

impl SetRowsKernel {
    fn matrix(&self, b: usize, h: usize, columns: Range<usize>) -> Result<(), String> {
        let mut values = [0.0; PIECE];
        let [_, ib, ih, count] = self.ids.dims;
        let ids_place = [0, b % ib.max(1), h % ih.max(1)];
        for t in 0..count {
            let row = row_index(self.ids.index(ids_place, t), self.target.dims[2])?;
            let (to, from) = ([b, h, row], [b, h, t]);
            if self.x.dtype == self.target.dtype {
                self.target.copy_from(to, columns.start, &self.x, from, columns.start, columns.len());
                continue;
            }
            let Some(values) = values.get_mut(..columns.len()) else { continue };
            self.x.load_at(from, columns.start, values);
            self.target.store_at(to, columns.start, values);
        }
        Ok(())
    }
}

impl Kernel for SetRowsKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let [b, h, _, cols] = self.target.dims;
        let pieces = cols.div_ceil(PIECE).max(1);
        let units = if self.serial { 0..b * h * pieces } else { units };
        for unit in units {
            let (matrix, first) = (unit / pieces, unit % pieces * PIECE);
            self.matrix(matrix / h.max(1), matrix % h.max(1), first..(first + PIECE).min(cols))?;
        }
        Ok(())
    }
}
