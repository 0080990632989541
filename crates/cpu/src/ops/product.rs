//! Matrix products in plain Rust, for weights as they lie in memory: any type, any strides between rows.

use std::ops::Range;

use super::experts::{self, expert};
use super::packed;
use super::scratch::with_floats;
use super::{Context, Operand};
use crate::fuse::Item;
use crate::isa::Isa;
use crate::kernels::vec;
use crate::partition::Partition;
use crate::step::{Access, Kernel, Part, Work};
use crate::view::{View, segments};

/// Rows of weights that one unit multiplies.
const UNIT: usize = 16;

struct ProductKernel {
    isa: Isa,
    w: View,
    x: View,
    out: View,
}

pub(super) fn mul_mat(
    w: Option<&Operand>,
    x: &View,
    out: &View,
    context: &Context<'_>,
    items: &mut Vec<Item>,
) -> Result<(), String> {
    let w = w.ok_or("an input is missing")?;
    if let Some(packed) = w.packed {
        return packed::mul_mat(w, packed, x, out, context, items);
    }
    let [b, h, m, n] = out.dims;
    let units = b * h * n.div_ceil(UNIT);
    let accesses = vec![Access::reads(&w.view), Access::reads(x), Access::writes(out)];
    let cost = (b * h * m * n).saturating_mul(x.cols().max(1));
    let kernel = ProductKernel { isa: context.isa, w: w.view, x: *x, out: *out };
    items.push(Item::Part(Part::new(kernel, units, cost, accesses)));
    Ok(())
}

impl Kernel for ProductKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let [_, h, m, n] = self.out.dims;
        let k = self.x.cols();
        let blocks = n.div_ceil(UNIT);
        let repeat = |axis: usize| {
            let (outer, inner) = (self.x.dims.get(axis), self.w.dims.get(axis));
            outer.zip(inner).map_or(1, |(outer, inner)| outer / inner.max(&1)).max(1)
        };
        let (repeat_b, repeat_h) = (repeat(0), repeat(1));
        with_floats(k + k, |floats| {
            let (weights, activations) = floats.split_at_mut(k);
            for unit in units {
                let (block, outer) = (unit % blocks, unit / blocks);
                let (i1, i0) = (outer % h, outer / h);
                for row in block * UNIT..((block + 1) * UNIT).min(n) {
                    load_row(&self.w, [i0 / repeat_b, i1 / repeat_h, row], weights);
                    for i in 0..m {
                        // SAFETY: a product never works in place: its input is not written while it runs.
                        let sum = match unsafe { self.x.row_f32([i0, i1, i]) } {
                            Some(x) => vec::dot(self.isa, weights, x),
                            None => {
                                load_row(&self.x, [i0, i1, i], activations);
                                vec::dot(self.isa, weights, activations)
                            }
                        };
                        self.out.store_at([i0, i1, i], row, &[sum]);
                    }
                }
            }
        });
        Ok(())
    }
}

/// Loads a whole row.
fn load_row(from: &View, place: [usize; 3], out: &mut [f32]) {
    for columns in segments(from.cols()) {
        if let Some(values) = out.get_mut(columns.clone()) {
            from.load_at(place, columns.start, values);
        }
    }
}

struct ExpertsKernel {
    isa: Isa,
    w: View,
    x: View,
    ids: View,
    out: View,
}

pub(super) fn mul_mat_id(
    w: Option<&Operand>,
    x: &View,
    ids: &View,
    out: &View,
    context: &Context<'_>,
    items: &mut Vec<Item>,
) -> Result<(), String> {
    let w = w.ok_or("an input is missing")?;
    if let Some(packed) = w.packed {
        return experts::mul_mat_id(packed, x, ids, out, context, items);
    }
    let [_, t, u, n] = out.dims;
    let accesses = vec![Access::reads(&w.view), Access::reads(x), Access::reads(ids), Access::writes(out)];
    let cost = (t * u * n).saturating_mul(x.cols().max(1));
    let kernel = ExpertsKernel { isa: context.isa, w: w.view, x: *x, ids: *ids, out: *out };
    items.push(Item::Part(Part::new(kernel, t * u * n.div_ceil(UNIT), cost, accesses)));
    Ok(())
}

impl Kernel for ExpertsKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let [_, _, used, n] = self.out.dims;
        let k = self.x.cols();
        let blocks = n.div_ceil(UNIT);
        with_floats(k + k, |floats| {
            let (weights, activations) = floats.split_at_mut(k);
            for unit in units {
                let (block, row) = (unit % blocks, unit / blocks);
                let (u, t) = (row % used, row / used);
                let expert = expert(&self.ids, t, u, self.w.dims[1])?;
                load_row(&self.x, [0, t, u % self.x.dims[2].max(1)], activations);
                for row in block * UNIT..((block + 1) * UNIT).min(n) {
                    load_row(&self.w, [0, expert, row], weights);
                    self.out.store_at([0, t, u], row, &[vec::dot(self.isa, weights, activations)]);
                }
            }
            Ok(())
        })
    }
}

struct OuterKernel {
    isa: Isa,
    a: View,
    b: View,
    out: View,
}

/// Sums of outer products: a row of the result is the sum of the rows of `a`, each times an element of `b`.
pub(super) fn out_prod(a: &View, b: &View, out: &View, isa: Isa) -> Part {
    let accesses =
        vec![Access::reads(a), Access::reads(b), Access::writes_own(out, Partition::equal(out.rows()))];
    let cost = out.elements().saturating_mul(a.dims[2].max(1));
    Part::new(OuterKernel { isa, a: *a, b: *b, out: *out }, out.rows(), cost, accesses)
}

impl Kernel for OuterKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let (p, count) = (self.a.cols(), self.a.dims[2]);
        with_floats(2 * p, |floats| {
            let (sums, values) = floats.split_at_mut(p);
            for unit in units {
                let [i0, i1, q] = self.out.place(unit);
                sums.fill(0.0);
                for k in 0..count {
                    let mut factor = [0.0];
                    self.b.load_at([i0, i1, k], q, &mut factor);
                    load_row(&self.a, [i0, i1, k], values);
                    vec::axpy(self.isa, factor[0], values, sums);
                }
                self.out.store_at([i0, i1, q], 0, sums);
            }
        });
        Ok(())
    }
}
