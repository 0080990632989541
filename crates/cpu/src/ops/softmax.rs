//! Softmax along rows, with scale, mask and sinks.

use std::ops::Range;

use crate::isa::Isa;
use crate::kernels::vec::{self, Map};
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

struct SoftMaxKernel {
    isa: Isa,
    scale: f32,
    mask: Option<TensorView>,
    sinks: Option<TensorView>,
    x: TensorView,
    out: TensorView,
}

pub(super) fn soft_max(
    scale: f32,
    mask: bool,
    sinks: bool,
    x: &TensorView,
    rest: &[TensorView],
    out: &TensorView,
    isa: Isa,
) -> Result<StepPart, String> {
    let mut rest = rest.iter().copied();
    let mut take = |wanted: bool| if wanted { rest.next() } else { None };
    let (mask_view, sinks_view) = (take(mask), take(sinks));
    if mask_view.is_some() != mask || sinks_view.is_some() != sinks {
        return Err("an input is missing".into());
    }
    let units = out.rows();
    let mut accesses =
        vec![Access::reads_own(x, Partition::equal(units)), Access::writes_own(out, Partition::equal(units))];
    accesses.extend(mask_view.iter().chain(&sinks_view).map(Access::reads));
    let kernel = SoftMaxKernel { isa, scale, mask: mask_view, sinks: sinks_view, x: *x, out: *out };
    Ok(StepPart::new(kernel, units, 6 * out.elements(), accesses))
}

impl SoftMaxKernel {
    /// Loads scores of a row: `scale · x + mask`.
    fn scores(&self, place: [usize; 3], first: usize, values: &mut [f32]) {
        self.x.load_at(place, first, values);
        for value in values.iter_mut() {
            *value *= self.scale;
        }
        if let Some(mask) = &self.mask {
            let [m0, m1, ..] = mask.dims;
            let [i0, i1, i2] = place;
            let mut added = [0.0; SEGMENT];
            let Some(added) = added.get_mut(..values.len()) else { return };
            mask.load_at([i0 % m0.max(1), i1 % m1.max(1), i2], first, added);
            for (value, more) in values.iter_mut().zip(added) {
                *value += *more;
            }
        }
    }
}

impl Kernel for SoftMaxKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        let cols = self.x.cols();
        for row in units {
            let place = self.x.place(row);
            let sink = self.sinks.as_ref().map(|sinks| {
                let mut one = [0.0];
                sinks.load_at([0, 0, 0], place[1], &mut one);
                one[0]
            });
            let mut largest = sink.unwrap_or(f32::NEG_INFINITY);
            for columns in segments(cols) {
                let Some(values) = values.get_mut(..columns.len()) else { continue };
                self.scores(place, columns.start, values);
                largest = largest.max(vec::largest(self.isa, values));
            }
            // A row whose scores are all −∞ becomes zeros.
            let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
            let mut sum = sink.map_or(0.0, |sink| f64::from((sink - base).exp()));
            for columns in segments(cols) {
                let Some(values) = values.get_mut(..columns.len()) else { continue };
                self.scores(place, columns.start, values);
                values.iter_mut().for_each(|value| *value -= base);
                vec::map_in_place(self.isa, Map::Exp, values);
                sum += super::norm::sum_of(values, |v| v);
                self.out.store_at(place, columns.start, values);
            }
            let factor = if sum == 0.0 { 0.0 } else { (1.0 / sum) as f32 };
            for columns in segments(cols) {
                let Some(values) = values.get_mut(..columns.len()) else { continue };
                self.out.load_at(place, columns.start, values);
                vec::scale(self.isa, values, factor);
                self.out.store_at(place, columns.start, values);
            }
        }
        Ok(())
    }
}
