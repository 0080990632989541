//! Layer norm, RMS norm, L2 norm and group norm.

use std::ops::Range;

use crate::isa::Isa;
use crate::kernels::vec;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

/// The norm of a row.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum NormKind {
    Norm,
    Rms,
    L2,
}

struct NormKernel {
    isa: Isa,
    kind: NormKind,
    eps: f32,
    x: TensorView,
    out: TensorView,
}

pub(super) fn norm(kind: NormKind, eps: f32, x: &TensorView, out: &TensorView, isa: Isa) -> StepPart {
    let units = out.rows();
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(NormKernel { isa, kind, eps, x: *x, out: *out }, units, 2 * out.elements(), accesses)
}

/// The sum of a function over a segment, by sixteen partial sums.
pub(super) fn sum_of(values: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    let mut lanes = [0.0_f32; 16];
    let (groups, rest) = values.as_chunks::<16>();
    for group in groups {
        for (lane, value) in lanes.iter_mut().zip(group) {
            *lane += f(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f(*value);
    }
    lanes.iter().map(|lane| f64::from(*lane)).sum()
}

/// The sum of a function over some rows of a tensor.
fn sum_rows(x: &TensorView, rows: impl Iterator<Item = usize>, f: impl Fn(f32) -> f32) -> f64 {
    let mut values = [0.0; SEGMENT];
    let mut sum = 0.0;
    for row in rows {
        for columns in segments(x.cols()) {
            let Some(values) = values.get_mut(..columns.len()) else { continue };
            x.load(row, columns.start, values);
            sum += sum_of(values, &f);
        }
    }
    sum
}

/// Writes `(x − mean) · factor` for some rows.
fn apply(x: &TensorView, out: &TensorView, rows: impl Iterator<Item = usize>, mean: f32, factor: f32) {
    let mut values = [0.0; SEGMENT];
    for row in rows {
        for columns in segments(x.cols()) {
            let Some(values) = values.get_mut(..columns.len()) else { continue };
            x.load(row, columns.start, values);
            for value in values.iter_mut() {
                *value = (*value - mean) * factor;
            }
            out.store(row, columns.start, values);
        }
    }
}

impl NormKernel {
    /// Computes the RMS norm without conversion, if both rows are dense `f32`; returns whether it did.
    fn direct(&self, row: usize) -> bool {
        let (place, cols) = (self.x.place(row), self.x.cols());
        let (Some(x), Some(out)) = (self.x.floats_at(place, 0, cols), self.out.floats_at(place, 0, cols))
        else {
            return false;
        };
        let null = std::ptr::null_mut();
        // SAFETY: both have `cols` elements there; compilation has checked that the result is either exactly in place
        // of the input or does not overlap it.
        unsafe { vec::rms_norm_add(self.isa, null, x, null, null, self.eps, out, cols) };
        true
    }
}

impl Kernel for NormKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let count = self.x.cols().max(1) as f64;
        let eps = f64::from(self.eps);
        for row in units {
            if self.kind == NormKind::Rms && self.direct(row) {
                continue;
            }
            let rows = row..row + 1;
            let (mean, factor) = match self.kind {
                NormKind::Rms => {
                    (0.0, 1.0 / (sum_rows(&self.x, rows.clone(), |v| v * v) / count + eps).sqrt())
                }
                NormKind::L2 => (0.0, 1.0 / sum_rows(&self.x, rows.clone(), |v| v * v).sqrt().max(eps)),
                NormKind::Norm => {
                    let mean = (sum_rows(&self.x, rows.clone(), |v| v) / count) as f32;
                    let variance = sum_rows(&self.x, rows.clone(), |v| (v - mean) * (v - mean)) / count;
                    (mean, 1.0 / (variance + eps).sqrt())
                }
            };
            apply(&self.x, &self.out, rows, mean, factor as f32);
        }
        Ok(())
    }
}

struct GroupNormKernel {
    groups: usize,
    eps: f32,
    x: TensorView,
    out: TensorView,
}

pub(super) fn group_norm(groups: usize, eps: f32, x: &TensorView, out: &TensorView) -> StepPart {
    let units = out.dims[0] * groups;
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(GroupNormKernel { groups, eps, x: *x, out: *out }, units, 3 * out.elements(), accesses)
}

impl Kernel for GroupNormKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let rows_each = self.x.dims[1] / self.groups.max(1) * self.x.dims[2];
        let count = (rows_each * self.x.cols()).max(1) as f64;
        for unit in units {
            let rows = unit * rows_each..(unit + 1) * rows_each;
            let mean = (sum_rows(&self.x, rows.clone(), |v| v) / count) as f32;
            let variance = sum_rows(&self.x, rows.clone(), |v| (v - mean) * (v - mean)) / count;
            let factor = 1.0 / (variance + f64::from(self.eps)).sqrt();
            apply(&self.x, &self.out, rows, mean, factor as f32);
        }
        Ok(())
    }
}
