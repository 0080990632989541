//! Matmuls with the rows of active neurons: rows of inactive ones are not read.
//!
//! A neuron's row is contiguous in the file, and few rows are read, so weights stay as they are in the file. One token's rows of
//! the usual types are multiplied straight from there (kernels/vec/row_sums.rs); otherwise a row is dequantized into the
//! thread's own memory, which its core's cache holds. Sums are taken in the order of the rows: neither threads nor skipped
//! rows change a bit.

use std::ops::Range;

use super::operand::LoweringContext;
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::vec;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{TensorView, segments};

/// Rows of a unit of [`MulMatKernel`].
const UNIT: usize = 64;

/// The most tokens for which the matmul runs as the epilogue of the gates' matmul.
const EPILOGUE_TOKENS: usize = 4;

/// Rows whose factors are looked at before the active ones are read, so that these can be prefetched.
const LIST: usize = 1024;

/// Active rows from one that is read to the one that is prefetched.
const AHEAD: usize = 8;

/// Tokens that a unit of [`AxpyKernel`] sums for at a time.
const TOKENS: usize = 64;

/// About how many of the elements are read; for the size of work units.
const ACTIVE_SHARE: usize = 8;

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

struct MulMatKernel {
    isa: Isa,
    skip: bool,
    w: TensorView,
    x: TensorView,
    gates: TensorView,
    ids: Option<TensorView>,
    out: TensorView,
}

pub(super) fn mul_mat(
    [w, x, gates]: [&TensorView; 3],
    ids: Option<&TensorView>,
    out: &TensorView,
    context: &LoweringContext<'_>,
) -> StepPart {
    let mut accesses = vec![Access::reads(w), Access::reads(x), Access::reads(gates), Access::writes(out)];
    accesses.extend(ids.map(Access::reads));
    let [_, _, tokens, rows] = out.dims;
    let cost = out.elements().saturating_mul(w.cols()) / ACTIVE_SHARE;
    let (isa, skip) = (context.isa, context.skip);
    let kernel = MulMatKernel { isa, skip, w: *w, x: *x, gates: *gates, ids: ids.copied(), out: *out };
    let mut part = StepPart::new(kernel, rows.div_ceil(UNIT), cost, accesses);
    if ids.is_none() && gates.is_contiguous() && tokens <= EPILOGUE_TOKENS {
        // A neuron needs its own gate only: the thread that has computed some gates goes on with their rows.
        part.by_columns = Some([tokens, rows]);
        part.large_epilogue = true;
    }
    part
}

impl MulMatKernel {
    /// The neuron of a row, if it has one.
    fn neuron(&self, row: usize) -> Result<Option<usize>, String> {
        let Some(ids) = &self.ids else { return Ok(Some(row)) };
        let (id, neurons) = (ids.index([0; 3], row), self.gates.cols());
        match usize::try_from(id).ok().filter(|neuron| *neuron < neurons) {
            None if id != -1 => Err(format!("neuron {id} of row {row} is outside 0..{neurons}")),
            neuron => Ok(neuron),
        }
    }

    fn gate(&self, token: usize, neuron: Option<usize>) -> f32 {
        let mut gate = [0.0];
        if let Some(neuron) = neuron {
            self.gates.load_at([0, 0, token], neuron, &mut gate);
        }
        gate[0]
    }

    /// The results of some rows for one token, straight from the rows; `false` if types or layouts do not allow that.
    fn rows_of_one(&self, token: usize, rows: &Range<usize>) -> bool {
        let (place, columns) = ([0, 0, token], 0..self.w.cols());
        let (Some(gates), Some(out), None) = (
            self.gates.floats_at(place, rows.start, rows.len()),
            self.out.floats_at(place, rows.start, rows.len()),
            self.ids,
        ) else {
            return false;
        };
        // SAFETY: the operation does not write its input, and no other part of the step does.
        let Some(x) = (unsafe { self.x.row_f32(place) }) else { return false };
        if !self.w.is_dense() || !vec::reads_rows_of(self.w.dtype, columns.len()) || rows.len() > LIST {
            return false;
        }
        // SAFETY: so many elements from there on; the gates of these rows are complete, and only this unit has these results.
        let (gates, out) = unsafe {
            (std::slice::from_raw_parts(gates, rows.len()), std::slice::from_raw_parts_mut(out, rows.len()))
        };
        let (mut list, mut len) = ([0; LIST], 0);
        for (i, gate) in gates.iter().enumerate() {
            if let Some(to) = list.get_mut(len) {
                *to = i;
            }
            len += usize::from(*gate != 0.0 || !self.skip);
        }
        out.fill(0.0);
        let active = list.get(..len).unwrap_or_default();
        active.iter().take(2).for_each(|row| prefetch(self.isa, &self.w, rows.start + row, &columns));
        for (i, row) in active.iter().enumerate() {
            if let Some(next) = active.get(i + 2) {
                prefetch(self.isa, &self.w, rows.start + next, &columns);
            }
            let (Some(from), Some(gate), Some(out)) =
                (self.w.row_pointer([0, 0, rows.start + row]), gates.get(*row), out.get_mut(*row))
            else {
                continue;
            };
            // SAFETY: a dense row of as many elements as `x`, which is not written.
            let product = gate * unsafe { vec::dot_row(self.isa, self.w.dtype, from, x) };
            *out = if *gate != 0.0 { product } else { 0.0 };
        }
        true
    }

    /// The results of some rows for some tokens.
    fn rows(&self, tokens: Range<usize>, rows: Range<usize>) -> Result<(), String> {
        let columns = 0..self.w.cols();
        if tokens.len() == 1 && self.rows_of_one(tokens.start, &rows) {
            return Ok(());
        }
        if tokens.len() == 1 {
            for row in rows.clone() {
                if self.gate(tokens.start, self.neuron(row)?) != 0.0 {
                    prefetch(self.isa, &self.w, row, &columns);
                }
            }
        }
        with_floats(columns.len(), |weights| {
            for row in rows {
                let neuron = self.neuron(row)?;
                let mut loaded = false;
                for token in tokens.clone() {
                    let gate = self.gate(token, neuron);
                    let is_active = gate != 0.0;
                    let mut result = 0.0;
                    if is_active || !self.skip {
                        if !loaded {
                            load(self.isa, &self.w, row, 0, weights);
                            loaded = true;
                        }
                        // SAFETY: the operation does not write its inputs, and no other part of the step does.
                        let x = unsafe { self.x.row_f32([0, 0, token]) }.unwrap_or_default();
                        let product = gate * vec::dot(self.isa, weights, x);
                        result = if is_active { product } else { 0.0 };
                    }
                    self.out.store_at([0, 0, token], row, &[result]);
                }
            }
            Ok(())
        })
    }
}

impl Kernel for MulMatKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, tokens, rows] = self.out.dims;
        self.rows(0..tokens, units.start * UNIT..(units.end * UNIT).min(rows))
    }

    fn run_block(&self, rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        self.rows(rows, columns)
    }
}

struct AxpyKernel {
    isa: Isa,
    skip: bool,
    w: TensorView,
    factors: TensorView,
    out: TensorView,
    /// Columns of a unit: whole blocks.
    columns: usize,
}

pub(super) fn axpy(
    w: &TensorView,
    factors: &TensorView,
    out: &TensorView,
    context: &LoweringContext<'_>,
) -> StepPart {
    let block = w.dtype.block_len().max(32);
    // Enough pieces for several threads, none much shorter than what a memory access transfers.
    let pieces = if w.cols() < 2048 { 6 } else { 16 };
    let columns = (w.cols() / pieces).max(64).next_multiple_of(block);
    let accesses = vec![Access::reads(w), Access::reads(factors), Access::writes(out)];
    let cost = factors.elements().saturating_mul(w.cols()) / ACTIVE_SHARE;
    let (isa, skip) = (context.isa, context.skip);
    let kernel = AxpyKernel { isa, skip, w: *w, factors: *factors, out: *out, columns };
    StepPart::new(kernel, w.cols().div_ceil(columns), cost, accesses)
}

impl AxpyKernel {
    /// Whether a row adds anything to the sums of some tokens.
    fn is_active(&self, tokens: &Range<usize>, row: usize) -> bool {
        !self.skip || tokens.clone().any(|token| self.factor(token, row) != 0.0)
    }

    fn factor(&self, token: usize, row: usize) -> f32 {
        let mut factor = [0.0];
        self.factors.load_at([0, 0, token], row, &mut factor);
        factor[0]
    }

    /// Some columns of the sums of one token, straight from the rows; `false` if types or layouts do not allow that.
    fn sum_of_one(&self, token: usize, columns: &Range<usize>, sums: &mut [f32]) -> bool {
        // SAFETY: the operation does not write its inputs.
        let factors = unsafe { self.factors.row_f32([0, 0, token]) };
        let (Some(factors), Some(base)) = (factors, self.w.row_pointer([0; 3])) else { return false };
        if !self.w.is_dense() || !vec::reads_rows_of(self.w.dtype, columns.len()) {
            return false;
        }
        let matrix = vec::RowMatrix { dtype: self.w.dtype, base, stride: self.w.strides[2] };
        let (mut rows, mut values) = ([0; LIST], [0.0; LIST]);
        sums.fill(0.0);
        for (chunk, factors) in factors.chunks(LIST).enumerate() {
            let mut len = 0;
            for (i, factor) in factors.iter().enumerate() {
                if let (Some(row), Some(value)) = (rows.get_mut(len), values.get_mut(len)) {
                    (*row, *value) = ((chunk * LIST + i) as u32, *factor);
                }
                len += usize::from(*factor != 0.0 || !self.skip);
            }
            let (rows, values) = (rows.get(..len).unwrap_or_default(), values.get(..len).unwrap_or_default());
            // SAFETY: rows and columns of the matrix, dense and not written; columns begin at whole blocks.
            unsafe { vec::axpy_rows(self.isa, matrix, rows, values, columns.start, sums) };
        }
        true
    }

    /// Some columns of the sums of some tokens.
    fn sum(&self, tokens: &Range<usize>, columns: &Range<usize>, sums: &mut [f32], values: &mut [f32]) {
        sums.fill(0.0);
        let (count, width) = (self.w.dims[2], columns.len());
        let mut list = [0; LIST];
        for first in (0..count).step_by(LIST) {
            let active = (first..(first + LIST).min(count)).filter(|row| self.is_active(tokens, *row));
            let len = list.iter_mut().zip(active).map(|(to, row)| *to = row).count();
            let rows = list.get(..len).unwrap_or_default();
            rows.iter().take(AHEAD).for_each(|row| prefetch(self.isa, &self.w, *row, columns));
            for (i, &row) in rows.iter().enumerate() {
                if let Some(next) = rows.get(i + AHEAD) {
                    prefetch(self.isa, &self.w, *next, columns);
                }
                load(self.isa, &self.w, row, columns.start, values);
                for (token, sums) in tokens.clone().zip(sums.chunks_mut(width.max(1))) {
                    let factor = self.factor(token, row);
                    if factor != 0.0 || !self.skip {
                        vec::axpy(self.isa, factor, values, sums);
                    }
                }
            }
        }
    }
}

impl Kernel for AxpyKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, all, width] = self.out.dims;
        for unit in units {
            let columns = unit * self.columns..((unit + 1) * self.columns).min(width);
            for first in (0..all).step_by(TOKENS) {
                let tokens = first..(first + TOKENS).min(all);
                with_floats((tokens.len() + 1) * columns.len(), |floats| {
                    let (values, sums) = floats.split_at_mut(columns.len());
                    if tokens.len() != 1 || !self.sum_of_one(first, &columns, sums) {
                        self.sum(&tokens, &columns, sums, values);
                    }
                    for (token, sums) in tokens.clone().zip(sums.chunks(columns.len().max(1))) {
                        self.out.store_at([0, 0, token], columns.start, sums);
                    }
                });
            }
        }
        Ok(())
    }
}
