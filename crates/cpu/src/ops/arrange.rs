//! Data movement: concat, repeat, pad and diagonal masks.

use std::ops::Range;

use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

struct DiagMaskKernel {
    past: usize,
    value: f32,
    x: TensorView,
    out: TensorView,
}

pub(super) fn diag_mask(past: usize, value: f32, x: &TensorView, out: &TensorView) -> StepPart {
    let units = out.rows();
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(DiagMaskKernel { past, value, x: *x, out: *out }, units, out.elements(), accesses)
}

impl Kernel for DiagMaskKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        for row in units {
            let place = self.x.place(row);
            let visible = place[2].saturating_add(self.past).saturating_add(1);
            for columns in segments(self.x.cols()) {
                let Some(values) = values.get_mut(..columns.len()) else { continue };
                self.x.load_at(place, columns.start, values);
                for value in values.iter_mut().skip(visible.saturating_sub(columns.start)) {
                    *value = self.value;
                }
                self.out.store_at(place, columns.start, values);
            }
        }
        Ok(())
    }
}

struct ConcatKernel {
    axis: usize,
    /// Each input, with its offset along the concatenated axis.
    inputs: Vec<(usize, TensorView)>,
    out: TensorView,
}

pub(super) fn concat(axis: usize, inputs: &[TensorView], out: &TensorView) -> StepPart {
    let mut start = 0;
    let placed = inputs
        .iter()
        .map(|view| {
            let at = start;
            start += view.dims.get(axis).copied().unwrap_or(0);
            (at, *view)
        })
        .collect();
    let mut accesses: Vec<Access> = inputs.iter().map(Access::reads).collect();
    accesses.push(Access::writes_own(out, Partition::equal(out.rows())));
    StepPart::new(ConcatKernel { axis, inputs: placed, out: *out }, out.rows(), out.elements(), accesses)
}

impl Kernel for ConcatKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        for row in units {
            let place = self.out.place(row);
            for (start, view) in &self.inputs {
                if self.axis == 3 {
                    self.out.copy_from(place, *start, view, place, 0, view.cols());
                    continue;
                }
                let mut from = place;
                let (Some(index), Some(extent)) = (from.get_mut(self.axis), view.dims.get(self.axis)) else {
                    continue;
                };
                if (*start..start + extent).contains(index) {
                    *index -= start;
                    self.out.copy_from(place, 0, view, from, 0, view.cols());
                }
            }
        }
        Ok(())
    }
}

struct RepeatKernel {
    x: TensorView,
    out: TensorView,
}

pub(super) fn repeat(x: &TensorView, out: &TensorView) -> StepPart {
    let accesses = vec![Access::reads(x), Access::writes_own(out, Partition::equal(out.rows()))];
    StepPart::new(RepeatKernel { x: *x, out: *out }, out.rows(), out.elements(), accesses)
}

impl Kernel for RepeatKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [d0, d1, d2, cols] = self.x.dims.map(|d| d.max(1));
        for row in units {
            let place = self.out.place(row);
            let from = [place[0] % d0, place[1] % d1, place[2] % d2];
            for first in (0..self.out.cols()).step_by(cols) {
                self.out.copy_from(place, first, &self.x, from, 0, cols);
            }
        }
        Ok(())
    }
}

struct PadKernel {
    before: [usize; 4],
    x: TensorView,
    out: TensorView,
}

pub(super) fn pad(before: [usize; 4], x: &TensorView, out: &TensorView) -> StepPart {
    let accesses = vec![Access::reads(x), Access::writes_own(out, Partition::equal(out.rows()))];
    StepPart::new(PadKernel { before, x: *x, out: *out }, out.rows(), out.elements(), accesses)
}

impl Kernel for PadKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let zeros = [0.0; SEGMENT];
        let [b0, b1, b2, before] = self.before;
        let [d0, d1, d2, cols] = self.x.dims;
        for row in units {
            let place = self.out.place(row);
            for columns in segments(self.out.cols()) {
                self.out.store_at(place, columns.start, zeros.get(..columns.len()).unwrap_or_default());
            }
            let [i0, i1, i2] =
                [place[0].wrapping_sub(b0), place[1].wrapping_sub(b1), place[2].wrapping_sub(b2)];
            if i0 < d0 && i1 < d1 && i2 < d2 {
                self.out.copy_from(place, before, &self.x, [i0, i1, i2], 0, cols);
            }
        }
        Ok(())
    }
}
