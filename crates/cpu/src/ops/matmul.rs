//! Lowering of matmuls, and plain kernels for weights that are not packed: any type, any strides between rows.

use std::ops::Range;

use super::experts::{ExpertMatMul, expert};
use super::lowered::LoweredOp;
use super::operand::{LoweringContext, Operand, PackedWeight};
use super::packed_matmul::{ActivationMatrix, PackedMatMul, is_small};
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::matmul::ActivationFormat;
use crate::kernels::vec;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{TensorView, segments};

/// Rows of weights that one unit multiplies.
const UNIT: usize = 16;

struct MatMulKernel {
    isa: Isa,
    w: TensorView,
    x: TensorView,
    out: TensorView,
}

pub(super) fn mul_mat(
    w: Option<&Operand>,
    x: &TensorView,
    out: &TensorView,
    context: &LoweringContext<'_>,
    lowered: &mut Vec<LoweredOp>,
) -> Result<(), String> {
    let w = w.ok_or("an input is missing")?;
    if let Some(packed) = w.packed {
        return mul_mat_packed(w, packed, x, out, context, lowered);
    }
    let [b, h, m, n] = out.dims;
    let units = b * h * n.div_ceil(UNIT);
    let accesses = vec![Access::reads(&w.view), Access::reads(x), Access::writes(out)];
    let cost = (b * h * m * n).saturating_mul(x.cols().max(1));
    let kernel = MatMulKernel { isa: context.isa, w: w.view, x: *x, out: *out };
    lowered.push(LoweredOp::Part(StepPart::new(kernel, units, cost, accesses)));
    Ok(())
}

/// Lowers a `mul_mat` with packed weights: one matmul, or one for each batch and head.
fn mul_mat_packed(
    w: &Operand,
    packed: PackedWeight,
    x: &TensorView,
    out: &TensorView,
    context: &LoweringContext<'_>,
    lowered: &mut Vec<LoweredOp>,
) -> Result<(), String> {
    let mut add = |matrix: Option<ActivationMatrix>, packed: PackedWeight, place: [usize; 3]| {
        let (Some(matrix), Some(target)) = (matrix, out.row_pointer(place)) else {
            return Err("its activations cannot be read as a matrix".to_owned());
        };
        let format = ActivationFormat::choose(context.isa, w.view.dtype, matrix.rows)
            .map_err(|error| error.to_string())?;
        let source = context.source.clone();
        let mut accesses = vec![Access::writes(out), Access::range(packed.range(), false)];
        match &source {
            None => accesses.push(Access::reads(x)),
            Some(source) => accesses.extend(source.prologue.inputs().map(Access::reads)),
        }
        lowered.push(LoweredOp::MatMul(PackedMatMul::new(
            matrix,
            *x,
            packed,
            target.cast(),
            context.isa,
            format,
            context.fuse && is_small(matrix.rows, matrix.columns),
            source,
            accesses,
        )));
        Ok(())
    };
    let [wb, wh, ..] = w.view.dims;
    let [b, h, ..] = x.dims;
    if let (1, 1, Some(matrix)) = (wb, wh, ActivationMatrix::of(x)) {
        return add(Some(matrix), packed, [0; 3]);
    }
    for i0 in 0..b {
        for i1 in 0..h {
            let (w0, w1) = (i0 / (b / wb.max(1)).max(1), i1 / (h / wh.max(1)).max(1));
            add(ActivationMatrix::at(x, i0, i1), packed.matrix(w0 * wh + w1)?, [i0, i1, 0])?;
        }
    }
    Ok(())
}

impl Kernel for MatMulKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
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
                        // SAFETY: a matmul never works in place: its input is not written while it runs.
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
fn load_row(from: &TensorView, place: [usize; 3], out: &mut [f32]) {
    for columns in segments(from.cols()) {
        if let Some(values) = out.get_mut(columns.clone()) {
            from.load_at(place, columns.start, values);
        }
    }
}

struct ExpertMatMulKernel {
    isa: Isa,
    w: TensorView,
    x: TensorView,
    ids: TensorView,
    out: TensorView,
}

pub(super) fn mul_mat_id(
    w: Option<&Operand>,
    x: &TensorView,
    ids: &TensorView,
    out: &TensorView,
    context: &LoweringContext<'_>,
    lowered: &mut Vec<LoweredOp>,
) -> Result<(), String> {
    let w = w.ok_or("an input is missing")?;
    if let Some(packed) = w.packed {
        lowered.push(LoweredOp::Experts(ExpertMatMul::new(packed, x, ids, out, context.isa)?));
        return Ok(());
    }
    let [_, t, u, n] = out.dims;
    let accesses = vec![Access::reads(&w.view), Access::reads(x), Access::reads(ids), Access::writes(out)];
    let cost = (t * u * n).saturating_mul(x.cols().max(1));
    let kernel = ExpertMatMulKernel { isa: context.isa, w: w.view, x: *x, ids: *ids, out: *out };
    lowered.push(LoweredOp::Part(StepPart::new(kernel, t * u * n.div_ceil(UNIT), cost, accesses)));
    Ok(())
}

impl Kernel for ExpertMatMulKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, used, n] = self.out.dims;
        let k = self.x.cols();
        let blocks = n.div_ceil(UNIT);
        with_floats(k + k, |floats| {
            let (weights, activations) = floats.split_at_mut(k);
            for unit in units {
                let (block, row) = (unit % blocks, unit / blocks);
                let (u, t) = (row % used, row / used);
                let Some(expert) = expert(&self.ids, t, u, self.w.dims[1])? else {
                    let zeros = [0.0; UNIT];
                    let columns = block * UNIT..((block + 1) * UNIT).min(n);
                    self.out.store_at([0, t, u], columns.start, zeros.get(..columns.len()).unwrap_or(&zeros));
                    continue;
                };
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

struct OuterProductKernel {
    isa: Isa,
    a: TensorView,
    b: TensorView,
    out: TensorView,
}

/// Sums of outer products: a row of the result is the sum of the rows of `a`, each times an element of `b`.
pub(super) fn out_prod(a: &TensorView, b: &TensorView, out: &TensorView, isa: Isa) -> StepPart {
    let accesses =
        vec![Access::reads(a), Access::reads(b), Access::writes_own(out, Partition::equal(out.rows()))];
    let cost = out.elements().saturating_mul(a.dims[2].max(1));
    StepPart::new(OuterProductKernel { isa, a: *a, b: *b, out: *out }, out.rows(), cost, accesses)
}

impl Kernel for OuterProductKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
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
