//! Copies that change type, shape or strides.

use std::ops::Range;

use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView};

/// Elements of a unit: whole blocks of every type.
const UNIT: usize = 4 * SEGMENT;

struct CopyKernel {
    x: TensorView,
    out: TensorView,
    serial: bool,
}

/// Copies the elements of `x`, in row-major order, to `out`, and converts them to its type. If either has a block type,
/// their rows have the same length.
pub(super) fn copy(x: &TensorView, out: &TensorView) -> StepPart {
    let serial = out.overlaps_itself();
    let elements = out.elements();
    if x.dims == out.dims && !serial {
        let units = out.rows();
        let accesses = vec![
            Access::reads_own(x, Partition::equal(units)),
            Access::writes_own(out, Partition::equal(units)),
        ];
        let by_rows = RowsKernel { x: *x, out: *out };
        return StepPart::new(by_rows, units, elements, accesses);
    }
    let units = if serial { 1 } else { elements.div_ceil(UNIT) };
    let accesses = vec![Access::reads(x), Access::writes(out)];
    StepPart::new(CopyKernel { x: *x, out: *out, serial }, units, elements, accesses)
}

/// Copies a run of elements inside one row of each.
fn run(
    x: &TensorView,
    from: [usize; 3],
    x_first: usize,
    out: &TensorView,
    to: [usize; 3],
    first: usize,
    len: usize,
) {
    if x.dtype == out.dtype {
        out.copy_from(to, first, x, from, x_first, len);
        return;
    }
    let mut values = [0.0; SEGMENT];
    for start in (0..len).step_by(SEGMENT) {
        let Some(values) = values.get_mut(..SEGMENT.min(len - start)) else { continue };
        x.load_at(from, x_first + start, values);
        out.store_at(to, first + start, values);
    }
}

struct RowsKernel {
    x: TensorView,
    out: TensorView,
}

impl Kernel for RowsKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        for row in units {
            let place = self.x.place(row);
            run(&self.x, place, 0, &self.out, place, 0, self.x.cols());
        }
        Ok(())
    }
}

impl Kernel for CopyKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let elements = self.out.elements();
        let (mut at, end) =
            if self.serial { (0, elements) } else { (units.start * UNIT, (units.end * UNIT).min(elements)) };
        let (x_cols, cols) = (self.x.cols().max(1), self.out.cols().max(1));
        while at < end {
            let (x_column, column) = (at % x_cols, at % cols);
            let len = (x_cols - x_column).min(cols - column).min(end - at);
            let (from, to) = (self.x.place(at / x_cols), self.out.place(at / cols));
            run(&self.x, from, x_column, &self.out, to, column, len);
            at += len;
        }
        Ok(())
    }
}
