//! Draws the graph of one case: inputs with random values, laid out in various ways.

use std::cell::RefCell;
use std::fmt;

use quadriga_graph::{DType, GraphBuilder, Shape, Value, Weight, blocks};

use super::fill::{self, Fill};
use crate::Rng;

/// How an input lies in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lay {
    /// Contiguous.
    Plain,
    /// In the middle of a larger tensor, along all but the outermost dimension.
    Offset,
    /// Rows that are parts of longer rows.
    Gaps,
    /// The outer three dimensions stored in another order.
    Permuted,
    /// The inner two dimensions stored the other way round: rows are not dense.
    Transposed,
}

impl Lay {
    /// Layouts whose rows are dense.
    pub(crate) const DENSE: [Lay; 4] = [Lay::Plain, Lay::Offset, Lay::Gaps, Lay::Permuted];
    /// All layouts.
    pub(crate) const ALL: [Lay; 5] = [Lay::Plain, Lay::Offset, Lay::Gaps, Lay::Permuted, Lay::Transposed];

    /// One of the dense layouts, in turn.
    pub(crate) fn dense(turn: usize) -> Lay {
        Lay::DENSE.get(turn % 4).copied().unwrap_or(Lay::Plain)
    }

    /// One of all layouts, in turn.
    pub(crate) fn any(turn: usize) -> Lay {
        Lay::ALL.get(turn % 5).copied().unwrap_or(Lay::Plain)
    }
}

impl fmt::Display for Lay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Lay::Plain => "",
            Lay::Offset => " offset",
            Lay::Gaps => " gaps",
            Lay::Permuted => " permuted",
            Lay::Transposed => " transposed",
        })
    }
}

/// A shape without the outer dimensions of 1, at least one-dimensional.
fn shape(dims: [usize; 4]) -> Shape {
    let outer = dims.iter().take(3).take_while(|d| **d == 1).count();
    Shape::new(dims.get(outer..).unwrap_or(&dims)).unwrap_or(Shape::from(dims))
}

/// A case under construction.
pub(crate) struct Sketch<'g> {
    graph: &'g GraphBuilder,
    rng: RefCell<Rng>,
    inputs: RefCell<Vec<(String, Vec<u8>)>>,
    leaves: RefCell<usize>,
    outputs: RefCell<usize>,
}

impl<'g> Sketch<'g> {
    pub(crate) fn new(graph: &'g GraphBuilder, seed: u64) -> Sketch<'g> {
        Sketch {
            graph,
            rng: RefCell::new(Rng::new(seed)),
            inputs: RefCell::default(),
            leaves: RefCell::default(),
            outputs: RefCell::default(),
        }
    }

    pub(crate) fn graph(&self) -> &'g GraphBuilder {
        self.graph
    }

    pub(crate) fn into_inputs(self) -> Vec<(String, Vec<u8>)> {
        self.inputs.into_inner()
    }

    fn name(&self, kind: &str) -> String {
        let mut leaves = self.leaves.borrow_mut();
        *leaves += 1;
        format!("{kind}{}", *leaves - 1)
    }

    fn given(&self, dtype: DType, shape: Shape, bytes: Vec<u8>) -> Value<'g> {
        let name = self.name("x");
        let value = self.graph.input(&name, dtype, shape);
        self.inputs.borrow_mut().push((name, bytes));
        value
    }

    /// An input with random values, contiguous.
    pub(crate) fn input(&self, dtype: DType, dims: [usize; 4], fill: Fill) -> Value<'g> {
        let count = dims.iter().product();
        let bytes = fill::bytes(dtype, fill, count, &mut self.rng.borrow_mut());
        self.given(dtype, shape(dims), bytes)
    }

    /// An input with random values that lies as asked.
    pub(crate) fn laid(&self, dtype: DType, dims: [usize; 4], lay: Lay, fill: Fill) -> Value<'g> {
        let [a, b, c, d] = dims;
        let block = dtype.block_len();
        match lay {
            Lay::Plain => self.input(dtype, dims, fill),
            Lay::Gaps => {
                let pad = if block == 1 { 3 } else { block };
                self.whole(dtype, [a, b, c, d + pad], fill).slice(3, 0, d)
            }
            Lay::Offset => {
                let inner = self.whole(dtype, [a, b + 1, c + 2, d + 2 * block], fill);
                inner.slice(1, 1, b).slice(2, 1, c).slice(3, block, d)
            }
            Lay::Permuted => self.whole(dtype, [b, c, a, d], fill).permute([2, 0, 1, 3]),
            Lay::Transposed => self.whole(dtype, [a, b, d, c], fill).permute([0, 1, 3, 2]),
        }
    }

    /// An input that keeps all four dimensions in its shape.
    fn whole(&self, dtype: DType, dims: [usize; 4], fill: Fill) -> Value<'g> {
        let bytes = fill::bytes(dtype, fill, dims.iter().product(), &mut self.rng.borrow_mut());
        self.given(dtype, Shape::from(dims), bytes)
    }

    /// Weights with random values.
    pub(crate) fn weight(&self, dtype: DType, dims: [usize; 4]) -> Value<'g> {
        let bytes = fill::bytes(dtype, fill::UNIT, dims.iter().product(), &mut self.rng.borrow_mut());
        self.graph.weight(&self.name("w"), Weight::with_data(dtype, shape(dims), bytes))
    }

    /// Weights `w` and an input `x` for their product. Where there are few results, `x` leans towards the first
    /// row of weights: a sum that cancels to nearly nothing would say nothing about relative errors.
    pub(crate) fn product(
        &self,
        dtype: DType,
        w: [usize; 4],
        x: (DType, [usize; 4], Lay),
    ) -> (Value<'g>, Value<'g>) {
        let (x_type, dims, lay) = x;
        let [b, h, m, k] = dims;
        if lay != Lay::Plain || b * h * m * w[2] >= 16 || k == 0 || w.contains(&0) {
            return (self.weight(dtype, w), self.laid(x_type, dims, lay, fill::UNIT));
        }
        let mut rng = self.rng.borrow_mut();
        let weights = fill::bytes(dtype, fill::UNIT, w.iter().product(), &mut rng);
        let mut row = vec![0.0; k];
        let first = weights.get(..dtype.row_bytes(k).unwrap_or(0)).unwrap_or(&[]);
        let known = blocks::dequantize(dtype, first, &mut row).is_ok();
        let mut values = fill::values(fill::UNIT, dims.iter().product(), &mut rng);
        for (value, weight) in values.iter_mut().zip(row.iter().cycle()) {
            if known && rng.chance(0.75) {
                *value = value.abs() * if *weight < 0.0 { -1.0 } else { 1.0 };
            }
        }
        let mut bytes = vec![0; x_type.row_bytes(values.len()).unwrap_or(0)];
        if blocks::quantize(x_type, &values, &mut bytes).is_err() {
            bytes.fill(0);
        }
        drop(rng);
        let weights = self.graph.weight(&self.name("w"), Weight::with_data(dtype, shape(w), weights));
        (weights, self.given(x_type, shape(dims), bytes))
    }

    fn ints(&self, dims: [usize; 4], values: impl Iterator<Item = usize>) -> Value<'g> {
        let bytes = values.flat_map(|v| (v as i32).to_le_bytes()).collect();
        self.given(DType::I32, shape(dims), bytes)
    }

    /// Ids below `count`, repeated or not.
    pub(crate) fn ids(&self, dims: [usize; 4], count: usize) -> Value<'g> {
        let ids: Vec<usize> = {
            let mut rng = self.rng.borrow_mut();
            (0..dims.iter().product()).map(|_| rng.below(count)).collect()
        };
        self.ints(dims, ids.into_iter())
    }

    /// Ids below `count`, all different within each row of ids.
    pub(crate) fn distinct_ids(&self, dims: [usize; 4], count: usize) -> Value<'g> {
        let rows: usize = dims.iter().take(3).product();
        let ids: Vec<usize> = {
            let mut rng = self.rng.borrow_mut();
            (0..rows).flat_map(|_| fill::shuffled(count, &mut rng).into_iter().take(dims[3])).collect()
        };
        self.ints(dims, ids.into_iter())
    }

    /// Positions of consecutive tokens from a random one below `most` on.
    pub(crate) fn positions(&self, count: usize, most: usize) -> Value<'g> {
        let first = self.rng.borrow_mut().below(most);
        self.ints([1, 1, 1, count], first..first + count)
    }

    /// What each of `queries` sees of `keys`: causal from the end, some in a sliding window, some nothing.
    pub(crate) fn spans(&self, queries: usize, keys: usize) -> Value<'g> {
        let spans: Vec<usize> = {
            let mut rng = self.rng.borrow_mut();
            let window = if rng.chance(0.5) { keys } else { 1 + keys / 3 };
            (0..queries)
                .flat_map(|t| {
                    let end = (keys + t + 1).saturating_sub(queries).min(keys);
                    if rng.chance(0.05) { [0, 0] } else { [end.saturating_sub(window), end] }
                })
                .collect()
        };
        self.ints([1, 1, queries, 2], spans.into_iter())
    }

    /// A state, zero at first.
    pub(crate) fn state(&self, dtype: DType, dims: [usize; 4]) -> Value<'g> {
        self.graph.state(&self.name("s"), dtype, shape(dims))
    }

    /// Makes a value an output of the case.
    pub(crate) fn out(&self, value: Value<'g>) {
        let mut outputs = self.outputs.borrow_mut();
        self.graph.output(&format!("y{}", *outputs), value);
        *outputs += 1;
    }
}
