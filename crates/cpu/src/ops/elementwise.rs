//! Operations on each element alone.

use std::ops::Range;

use quadriga_graph::{Binary, Gate, Unary};

use super::functions;
use crate::isa::Isa;
use crate::step::{Access, Kernel, Part, Work};
use crate::view::{SEGMENT, View, segments};

/// Rows are cut into pieces of this many columns where there are few, long rows.
const PIECE: usize = 16 * SEGMENT;

/// How rows are cut into units.
#[derive(Clone, Copy)]
struct Cut {
    pieces: usize,
    cols: usize,
}

impl Cut {
    fn new(out: &View) -> Cut {
        let pieces = if out.rows() < 16 { out.cols().div_ceil(PIECE).max(1) } else { 1 };
        Cut { pieces, cols: out.cols() }
    }

    /// Row and columns of each segment of some units.
    fn segments(self, units: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        units.flat_map(move |unit| {
            let (row, piece) = (unit / self.pieces, unit % self.pieces);
            let first = if self.pieces == 1 { 0 } else { piece * PIECE };
            let end = if self.pieces == 1 { self.cols } else { (first + PIECE).min(self.cols) };
            segments(end - first).map(move |s| (row, first + s.start..first + s.end))
        })
    }

    fn part(self, kernel: impl Kernel + 'static, inputs: &[&View], out: &View, weight: usize) -> Part {
        let units = out.rows() * self.pieces;
        let mut accesses = vec![Access::writes_own(out, units)];
        for input in inputs {
            accesses.push(if input.dims == out.dims {
                Access::reads_own(input, units)
            } else {
                Access::reads(input)
            });
        }
        Part::new(kernel, units, out.elements() * weight, accesses)
    }
}

/// A function of segments: the first is changed in place, by the second.
type Pair = fn(&mut [f32], &[f32]);

struct BinaryKernel {
    apply: Pair,
    a: View,
    b: View,
    out: View,
    cut: Cut,
}

pub(super) fn binary(binary: Binary, a: &View, b: &View, out: &View) -> Part {
    fn pairs(a: &mut [f32], b: &[f32], apply: impl Fn(f32, f32) -> f32) {
        for (a, b) in a.iter_mut().zip(b) {
            *a = apply(*a, *b);
        }
    }
    let apply: Pair = match binary {
        Binary::Add => |a, b| pairs(a, b, |a, b| a + b),
        Binary::Sub => |a, b| pairs(a, b, |a, b| a - b),
        Binary::Mul => |a, b| pairs(a, b, |a, b| a * b),
        Binary::Div => |a, b| pairs(a, b, |a, b| a / b),
    };
    let cut = Cut::new(out);
    cut.part(BinaryKernel { apply, a: *a, b: *b, out: *out, cut }, &[a, b], out, 1)
}

impl Kernel for BinaryKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let (mut first, mut second) = ([0.0; SEGMENT], [0.0; SEGMENT]);
        for (row, columns) in self.cut.segments(units) {
            let (Some(x), Some(y)) = (first.get_mut(..columns.len()), second.get_mut(..columns.len())) else {
                continue;
            };
            let place = self.a.place(row);
            self.a.load_at(place, columns.start, x);
            load_repeated(&self.b, place, columns.start, y);
            (self.apply)(x, y);
            self.out.store_at(place, columns.start, x);
        }
        Ok(())
    }
}

/// Loads from a tensor that is repeated along every dimension.
fn load_repeated(from: &View, place: [usize; 3], first: usize, out: &mut [f32]) {
    let [d0, d1, d2, cols] = from.dims;
    let [i0, i1, i2] = place;
    let place = [i0 % d0.max(1), i1 % d1.max(1), i2 % d2.max(1)];
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

/// A function of a segment.
type Map = Box<dyn Fn(&mut [f32]) + Send + Sync>;

struct MapKernel {
    apply: Map,
    x: View,
    out: View,
    cut: Cut,
}

fn map(apply: Map, x: &View, out: &View, weight: usize) -> Part {
    let cut = Cut::new(out);
    cut.part(MapKernel { apply, x: *x, out: *out, cut }, &[x], out, weight)
}

impl Kernel for MapKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        for (row, columns) in self.cut.segments(units) {
            let Some(x) = values.get_mut(..columns.len()) else { continue };
            self.x.load(row, columns.start, x);
            (self.apply)(x);
            self.out.store(row, columns.start, x);
        }
        Ok(())
    }
}

pub(super) fn scale(scale: f32, bias: f32, x: &View, out: &View) -> Part {
    map(Box::new(move |x| x.iter_mut().for_each(|x| *x = scale * *x + bias)), x, out, 1)
}

pub(super) fn clamp(min: f32, max: f32, x: &View, out: &View) -> Part {
    map(Box::new(move |x| x.iter_mut().for_each(|x| *x = x.max(min).min(max))), x, out, 1)
}

pub(super) fn unary(unary: Unary, x: &View, out: &View, _isa: Isa) -> Part {
    let function = functions::unary(unary);
    map(Box::new(move |x| x.iter_mut().for_each(|x| *x = function(*x))), x, out, 4)
}

struct GatedKernel {
    activation: fn(f32) -> f32,
    gate: View,
    gate_column: usize,
    up: View,
    up_column: usize,
    out: View,
    cut: Cut,
}

pub(super) fn gated(gate: Gate, swapped: bool, inputs: &[View], out: &View, _isa: Isa) -> Part {
    let half = out.cols();
    let [(gate_view, gate_column), (up, up_column)] = match (inputs, swapped) {
        ([a, b], false) => [(*a, 0), (*b, 0)],
        ([a, b], true) => [(*b, 0), (*a, 0)],
        ([x, ..], false) => [(*x, 0), (*x, half)],
        ([x, ..], true) => [(*x, half), (*x, 0)],
        ([], _) => [(*out, 0), (*out, 0)],
    };
    let activation = functions::gate(gate);
    let cut = Cut::new(out);
    let kernel = GatedKernel { activation, gate: gate_view, gate_column, up, up_column, out: *out, cut };
    let mut part = cut.part(kernel, &[&gate_view, &up], out, 4);
    if inputs.len() == 1 && cut.pieces == 1 {
        // A row of the result needs the row of the one input, which is twice as long.
        part.accesses = vec![Access::writes_own(out, part.units), Access::reads_own(&gate_view, part.units)];
    }
    part
}

impl Kernel for GatedKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
        let (mut first, mut second) = ([0.0; SEGMENT], [0.0; SEGMENT]);
        for (row, columns) in self.cut.segments(units) {
            let (Some(g), Some(u)) = (first.get_mut(..columns.len()), second.get_mut(..columns.len())) else {
                continue;
            };
            self.gate.load(row, self.gate_column + columns.start, g);
            self.up.load(row, self.up_column + columns.start, u);
            for (g, u) in g.iter_mut().zip(u) {
                *g = (self.activation)(*g) * *u;
            }
            self.out.store(row, columns.start, g);
        }
        Ok(())
    }
}
