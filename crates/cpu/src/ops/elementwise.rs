//! Elementwise operations: binary, unary, scale, clamp and gated linear units.

use std::ops::Range;

use quadriga_graph::{Binary, DType, Gate, Unary};

use super::functions;
use crate::isa::Isa;
use crate::kernels::vec::{self, Map, Zip};
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

/// A kernel whose units write their share of the result and read the same share of each input of its shape.
fn elementwise_part(
    partition: Partition,
    kernel: impl Kernel + 'static,
    inputs: &[&TensorView],
    out: &TensorView,
    weight: usize,
) -> StepPart {
    let mut accesses = vec![Access::writes_own(out, partition)];
    for input in inputs {
        accesses.push(if input.dims == out.dims {
            Access::reads_own(input, partition)
        } else {
            Access::reads(input)
        });
    }
    let mut part = StepPart::new(kernel, partition.units(), out.elements() * weight, accesses);
    part.by_rows = partition.is_by_rows().then_some(out.rows());
    part
}

struct ZipKernel {
    function: Zip,
    isa: Isa,
    a: TensorView,
    b: TensorView,
    out: TensorView,
    partition: Partition,
}

pub(super) fn binary(binary: Binary, a: &TensorView, b: &TensorView, out: &TensorView, isa: Isa) -> StepPart {
    let function = match binary {
        Binary::Add => Zip::Add,
        Binary::Sub => Zip::Sub,
        Binary::Mul => Zip::Mul,
        Binary::Div => Zip::Div,
    };
    let partition = Partition::by_pieces(out);
    let kernel = ZipKernel { function, isa, a: *a, b: *b, out: *out, partition };
    let mut part = elementwise_part(partition, kernel, &[a, b], out, 1);
    let plain =
        |view: &TensorView| view.dtype == DType::F32 && view.is_contiguous() && view.cols() == out.cols();
    if [a, b, out].into_iter().all(plain) && a.dims == out.dims {
        part.by_columns = Some([out.rows(), out.cols()]);
        part.large_epilogue = out.rows() == 1;
    }
    part
}

impl ZipKernel {
    /// Computes without conversion, if all rows are dense `f32`; returns whether it did.
    fn direct(&self, place: [usize; 3], columns: &Range<usize>) -> bool {
        if self.b.cols() != self.out.cols() {
            return false;
        }
        let (first, count) = (columns.start, columns.len());
        let (Some(a), Some(b), Some(out)) = (
            self.a.floats_at(place, first, count),
            self.b.floats_at(broadcast(&self.b, place), first, count),
            self.out.floats_at(place, first, count),
        ) else {
            return false;
        };
        // SAFETY: all three have `count` elements there; compilation has checked that the result is either exactly in
        // place of an input or does not overlap it.
        unsafe { vec::zip_raw(self.isa, self.function, a, b, out, count) };
        true
    }
}

impl Kernel for ZipKernel {
    fn run_block(&self, rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        for row in rows {
            let done = self.direct(self.a.place(row), &columns);
            debug_assert!(done, "rows are dense");
        }
        Ok(())
    }

    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (mut first, mut second) = ([0.0; SEGMENT], [0.0; SEGMENT]);
        for (row, columns) in units.map(|unit| self.partition.unit(unit)) {
            let place = self.a.place(row);
            if self.direct(place, &columns) {
                continue;
            }
            for part in segments(columns.len()) {
                let (start, len) = (columns.start + part.start, part.len());
                let (Some(x), Some(y)) = (first.get_mut(..len), second.get_mut(..len)) else { continue };
                self.a.load_at(place, start, x);
                load_broadcast(&self.b, place, start, y);
                // SAFETY: both have `len` elements.
                unsafe { vec::zip_raw(self.isa, self.function, x.as_ptr(), y.as_ptr(), x.as_mut_ptr(), len) };
                self.out.store_at(place, start, x);
            }
        }
        Ok(())
    }
}

/// The place of a row in a tensor that is broadcast along every dimension.
fn broadcast(from: &TensorView, [i0, i1, i2]: [usize; 3]) -> [usize; 3] {
    let [d0, d1, d2, _] = from.dims.map(|d| d.max(1));
    [i0 % d0, i1 % d1, i2 % d2]
}

/// Loads from a tensor that is broadcast along every dimension.
fn load_broadcast(from: &TensorView, place: [usize; 3], first: usize, out: &mut [f32]) {
    let cols = from.cols();
    let place = broadcast(from, place);
    if cols == 1 {
        let mut one = [0.0];
        from.load_at(place, 0, &mut one);
        out.fill(one[0]);
        return;
    }
    let mut column = first % cols.max(1);
    let mut rest = out;
    while !rest.is_empty() && cols > 0 {
        let len = (cols - column).min(rest.len());
        let (now, later) = rest.split_at_mut(len);
        from.load_at(place, column, now);
        rest = later;
        column = 0;
    }
}

/// A function that changes a segment in place.
type SegmentFunction = Box<dyn Fn(&mut [f32]) + Send + Sync>;

struct MapKernel {
    apply: SegmentFunction,
    x: TensorView,
    out: TensorView,
    partition: Partition,
}

fn map(apply: SegmentFunction, x: &TensorView, out: &TensorView, weight: usize) -> StepPart {
    let partition = Partition::by_pieces(out);
    let mut part =
        elementwise_part(partition, MapKernel { apply, x: *x, out: *out, partition }, &[x], out, weight);
    let plain = |view: &TensorView| view.dtype == DType::F32 && view.is_contiguous() && view.dims == out.dims;
    if plain(x) && plain(out) {
        part.by_columns = Some([out.rows(), out.cols()]);
        part.large_epilogue = out.rows() == 1;
    }
    part
}

impl MapKernel {
    fn columns(&self, row: usize, columns: Range<usize>) {
        let mut values = [0.0; SEGMENT];
        for part in segments(columns.len()) {
            let start = columns.start + part.start;
            let Some(x) = values.get_mut(..part.len()) else { continue };
            self.x.load(row, start, x);
            (self.apply)(x);
            self.out.store(row, start, x);
        }
    }
}

impl Kernel for MapKernel {
    fn run_block(&self, rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        rows.for_each(|row| self.columns(row, columns.clone()));
        Ok(())
    }

    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        for (row, columns) in units.map(|unit| self.partition.unit(unit)) {
            self.columns(row, columns);
        }
        Ok(())
    }
}

pub(super) fn scale(scale: f32, bias: f32, x: &TensorView, out: &TensorView) -> StepPart {
    map(Box::new(move |x| x.iter_mut().for_each(|x| *x = scale * *x + bias)), x, out, 1)
}

pub(super) fn clamp(min: f32, max: f32, x: &TensorView, out: &TensorView) -> StepPart {
    map(Box::new(move |x| x.iter_mut().for_each(|x| *x = x.max(min).min(max))), x, out, 1)
}

pub(super) fn unary(unary: Unary, x: &TensorView, out: &TensorView, isa: Isa) -> StepPart {
    let fast = match unary {
        Unary::Exp => Some(Map::Exp),
        Unary::Sigmoid => Some(Map::Sigmoid),
        Unary::Silu => Some(Map::Silu),
        Unary::Tanh => Some(Map::Tanh),
        Unary::Gelu => Some(Map::Gelu),
        Unary::GeluQuick => Some(Map::GeluQuick),
        Unary::Relu => Some(Map::Relu),
        Unary::Sqr => Some(Map::Square),
        _ => None,
    };
    if let Some(function) = fast {
        return map(Box::new(move |x| vec::map_in_place(isa, function, x)), x, out, 2);
    }
    let function = functions::unary(unary);
    map(Box::new(move |x| x.iter_mut().for_each(|x| *x = function(*x))), x, out, 8)
}

struct GatedKernel {
    function: Zip,
    isa: Isa,
    gate: TensorView,
    gate_column: usize,
    up: TensorView,
    up_column: usize,
    out: TensorView,
    partition: Partition,
}

pub(super) fn gated(
    gate: Gate,
    swapped: bool,
    inputs: &[TensorView],
    out: &TensorView,
    isa: Isa,
) -> StepPart {
    let half = out.cols();
    let [(gate_view, gate_column), (up, up_column)] = match (inputs, swapped) {
        ([a, b], false) => [(*a, 0), (*b, 0)],
        ([a, b], true) => [(*b, 0), (*a, 0)],
        ([x, ..], false) => [(*x, 0), (*x, half)],
        ([x, ..], true) => [(*x, half), (*x, 0)],
        ([], _) => [(*out, 0), (*out, 0)],
    };
    let function = Zip::of(gate);
    let partition = Partition::by_pieces(out);
    let kernel =
        GatedKernel { function, isa, gate: gate_view, gate_column, up, up_column, out: *out, partition };
    let mut part = elementwise_part(partition, kernel, &[&gate_view, &up], out, 4);
    let plain = |view: &TensorView| view.dtype == DType::F32 && view.is_contiguous() && view.dims == out.dims;
    if inputs.len() == 2 && [&gate_view, &up, out].into_iter().all(plain) {
        part.by_columns = Some([out.rows(), out.cols()]);
    }
    if inputs.len() == 1 && partition.is_by_rows() {
        // Both factors are in the same row of the one input, which is twice as long.
        part.accesses = vec![Access::writes_own(out, partition), Access::reads_own(&gate_view, partition)];
    }
    part
}

impl GatedKernel {
    /// Computes without conversion, if all rows are dense `f32`; returns whether it did.
    fn direct(&self, place: [usize; 3], columns: &Range<usize>) -> bool {
        let (first, count) = (columns.start, columns.len());
        let (Some(gate), Some(up), Some(out)) = (
            self.gate.floats_at(place, self.gate_column + first, count),
            self.up.floats_at(place, self.up_column + first, count),
            self.out.floats_at(place, first, count),
        ) else {
            return false;
        };
        // SAFETY: all three have `count` elements there; compilation has checked that the result is either exactly in
        // place of an input of the same shape or does not overlap it.
        unsafe { vec::zip_raw(self.isa, self.function, gate, up, out, count) };
        true
    }
}

impl Kernel for GatedKernel {
    fn run_block(&self, rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        for row in rows {
            let done = self.direct(self.out.place(row), &columns);
            debug_assert!(done, "rows are dense");
        }
        Ok(())
    }

    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (mut first, mut second) = ([0.0; SEGMENT], [0.0; SEGMENT]);
        for (row, columns) in units.map(|unit| self.partition.unit(unit)) {
            let place = self.out.place(row);
            if self.direct(place, &columns) {
                continue;
            }
            for part in segments(columns.len()) {
                let (start, len) = (columns.start + part.start, part.len());
                let (Some(g), Some(u)) = (first.get_mut(..len), second.get_mut(..len)) else { continue };
                self.gate.load_at(place, self.gate_column + start, g);
                self.up.load_at(place, self.up_column + start, u);
                // SAFETY: both have `len` elements.
                unsafe { vec::zip_raw(self.isa, self.function, g.as_ptr(), u.as_ptr(), g.as_mut_ptr(), len) };
                self.out.store_at(place, start, g);
            }
        }
        Ok(())
    }
}
