//! Reductions of rows: sums, means, argmax, argsort and top-k.

use std::cmp::Ordering;
use std::ops::Range;

use quadriga_graph::Order;

use super::norm::sum_of;
use super::scratch::with_floats;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

fn row_sum(x: &TensorView, row: usize) -> f64 {
    let mut values = [0.0; SEGMENT];
    let mut sum = 0.0;
    for columns in segments(x.cols()) {
        let Some(values) = values.get_mut(..columns.len()) else { continue };
        x.load(row, columns.start, values);
        sum += sum_of(values, |v| v);
    }
    sum
}

struct SumKernel {
    x: TensorView,
    out: TensorView,
}

/// The sum of all elements: one unit, so that the order does not depend on the number of threads.
pub(super) fn sum(x: &TensorView, out: &TensorView) -> StepPart {
    let accesses = vec![Access::reads(x), Access::writes(out)];
    StepPart::new(SumKernel { x: *x, out: *out }, 1, x.elements(), accesses)
}

impl Kernel for SumKernel {
    fn run(&self, _units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let rows = if self.x.cols() == 0 { 0 } else { self.x.rows() };
        let sum: f64 = (0..rows).map(|row| row_sum(&self.x, row)).sum();
        self.out.store(0, 0, &[sum as f32]);
        Ok(())
    }
}

struct CrossEntropyKernel {
    logits: TensorView,
    labels: TensorView,
    out: TensorView,
}

/// The loss of all rows: one unit, so that the order does not depend on the number of threads.
pub(super) fn cross_entropy(logits: &TensorView, labels: &TensorView, out: &TensorView) -> StepPart {
    let accesses = vec![Access::reads(logits), Access::reads(labels), Access::writes(out)];
    let kernel = CrossEntropyKernel { logits: *logits, labels: *labels, out: *out };
    StepPart::new(kernel, 1, logits.elements().saturating_mul(4), accesses)
}

impl Kernel for CrossEntropyKernel {
    fn run(&self, _units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let cols = self.logits.cols();
        let total = with_floats(2 * cols, |floats| {
            let (x, y) = floats.split_at_mut(cols);
            let loss = |row: usize| {
                self.logits.load(row, 0, x);
                self.labels.load(row, 0, y);
                let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = x.iter().map(|x| f64::from((x - largest).exp())).sum();
                let log_sum = sum.ln();
                let products = x.iter().zip(y.iter());
                products.map(|(x, y)| f64::from(*y) * (log_sum - f64::from(x - largest))).sum::<f64>()
            };
            (0..self.logits.rows()).map(loss).sum::<f64>()
        });
        self.out.store(0, 0, &[(total / self.logits.rows().max(1) as f64) as f32]);
        Ok(())
    }
}

struct SumRowsKernel {
    mean: bool,
    x: TensorView,
    out: TensorView,
}

pub(super) fn sum_rows(mean: bool, x: &TensorView, out: &TensorView) -> StepPart {
    let units = out.rows();
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(SumRowsKernel { mean, x: *x, out: *out }, units, x.elements(), accesses)
}

impl Kernel for SumRowsKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        for row in units {
            let sum = row_sum(&self.x, row);
            let value = if self.mean { sum / self.x.cols() as f64 } else { sum };
            self.out.store(row, 0, &[value as f32]);
        }
        Ok(())
    }
}

struct ArgMaxKernel {
    x: TensorView,
    out: TensorView,
}

pub(super) fn argmax(x: &TensorView, out: &TensorView) -> StepPart {
    let units = x.rows();
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(ArgMaxKernel { x: *x, out: *out }, units, x.elements(), accesses)
}

impl Kernel for ArgMaxKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        let cols = self.out.cols().max(1);
        for row in units {
            let (mut best, mut largest) = (0, f32::NEG_INFINITY);
            for columns in segments(self.x.cols()) {
                let Some(values) = values.get_mut(..columns.len()) else { continue };
                self.x.load(row, columns.start, values);
                for (i, value) in values.iter().enumerate() {
                    // The first NaN counts as the largest.
                    if *value > largest || (value.is_nan() && !largest.is_nan()) {
                        (best, largest) = (columns.start + i, *value);
                    }
                }
            }
            self.out.store_indices(row / cols, row % cols, &[best as i32]);
        }
        Ok(())
    }
}

/// Smaller first; a NaN counts as larger than any number.
pub(super) fn ascending(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

struct SortKernel {
    order: Order,
    x: TensorView,
    out: TensorView,
}

pub(super) fn argsort(order: Order, x: &TensorView, out: &TensorView) -> StepPart {
    let units = out.rows();
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(SortKernel { order, x: *x, out: *out }, units, 16 * x.elements(), accesses)
}

/// The `k` largest: the first of the descending order.
pub(super) fn top_k(_k: usize, x: &TensorView, out: &TensorView) -> StepPart {
    let units = x.rows();
    let accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    StepPart::new(
        SortKernel { order: Order::Descending, x: *x, out: *out },
        units,
        4 * x.elements(),
        accesses,
    )
}

impl Kernel for SortKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (cols, wanted) = (self.x.cols(), self.out.cols());
        let mut indices: Vec<i32> = Vec::with_capacity(cols);
        with_floats(cols, |values| {
            for row in units {
                for columns in segments(cols) {
                    if let Some(values) = values.get_mut(columns.clone()) {
                        self.x.load(row, columns.start, values);
                    }
                }
                indices.clear();
                indices.extend(0..cols as i32);
                let value = |i: i32| values.get(i as usize).copied().unwrap_or(f32::NAN);
                let compare = |a: &i32, b: &i32| {
                    let by_value = ascending(value(*a), value(*b));
                    let by_value = if self.order == Order::Ascending { by_value } else { by_value.reverse() };
                    by_value.then(a.cmp(b))
                };
                if (1..cols).contains(&wanted) {
                    indices.select_nth_unstable_by(wanted - 1, compare);
                    indices.truncate(wanted);
                }
                indices.sort_unstable_by(compare);
                self.out.store_indices(row, 0, indices.get(..wanted).unwrap_or_default());
            }
        });
        Ok(())
    }
}
