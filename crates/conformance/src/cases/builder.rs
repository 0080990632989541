//! Builds the graph of one case: inputs with random values and various memory layouts.

use std::cell::RefCell;
use std::fmt;

use quadriga_graph::{DType, GraphBuilder, Shape, Value, Weight, blocks};

use super::fill::{self, Fill};
use crate::Rng;

/// The memory layout of an input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InputLayout {
    /// Contiguous.
    Plain,
    /// A slice from the middle of a larger tensor, along all but the outermost dimension.
    Offset,
    /// Rows with gaps between them.
    Gaps,
    /// The outer three dimensions stored in another order.
    Permuted,
    /// The inner two dimensions transposed: rows are not contiguous.
    Transposed,
}

impl InputLayout {
    /// The layouts with contiguous rows.
    pub(crate) const DENSE: [InputLayout; 4] =
        [InputLayout::Plain, InputLayout::Offset, InputLayout::Gaps, InputLayout::Permuted];
    /// All layouts.
    pub(crate) const ALL: [InputLayout; 5] = [
        InputLayout::Plain,
        InputLayout::Offset,
        InputLayout::Gaps,
        InputLayout::Permuted,
        InputLayout::Transposed,
    ];

    /// One of the layouts with contiguous rows, by index.
    pub(crate) fn dense(index: usize) -> InputLayout {
        InputLayout::DENSE.get(index % 4).copied().unwrap_or(InputLayout::Plain)
    }

    /// One of all layouts, by index.
    pub(crate) fn any(index: usize) -> InputLayout {
        InputLayout::ALL.get(index % 5).copied().unwrap_or(InputLayout::Plain)
    }
}

impl fmt::Display for InputLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            InputLayout::Plain => "",
            InputLayout::Offset => " offset",
            InputLayout::Gaps => " gaps",
            InputLayout::Permuted => " permuted",
            InputLayout::Transposed => " transposed",
        })
    }
}

/// A shape without the outer dimensions of 1, at least one-dimensional.
fn shape(dims: [usize; 4]) -> Shape {
    let outer = dims.iter().take(3).take_while(|d| **d == 1).count();
    Shape::new(dims.get(outer..).unwrap_or(&dims)).unwrap_or(Shape::from(dims))
}

/// A case under construction.
pub(crate) struct CaseBuilder<'g> {
    graph: &'g GraphBuilder,
    rng: RefCell<Rng>,
    inputs: RefCell<Vec<(String, Vec<u8>)>>,
    leaves: RefCell<usize>,
    outputs: RefCell<usize>,
}

impl<'g> CaseBuilder<'g> {
    pub(crate) fn new(graph: &'g GraphBuilder, seed: u64) -> CaseBuilder<'g> {
        CaseBuilder {
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

    /// An input with these bytes.
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

    /// An input with random values, contiguous, of exactly this shape.
    pub(crate) fn shaped_input(&self, dtype: DType, shape: Shape, fill: Fill) -> Value<'g> {
        let bytes = fill::bytes(dtype, fill, shape.elements(), &mut self.rng.borrow_mut());
        self.given(dtype, shape, bytes)
    }

    /// An input with random values in this layout.
    pub(crate) fn strided_input(
        &self,
        dtype: DType,
        dims: [usize; 4],
        layout: InputLayout,
        fill: Fill,
    ) -> Value<'g> {
        let [a, b, c, d] = dims;
        let block = dtype.block_len();
        match layout {
            InputLayout::Plain => self.input(dtype, dims, fill),
            InputLayout::Gaps => {
                let pad = if block == 1 { 3 } else { block };
                self.input_of_rank_4(dtype, [a, b, c, d + pad], fill).slice(3, 0, d)
            }
            InputLayout::Offset => {
                let inner = self.input_of_rank_4(dtype, [a, b + 1, c + 2, d + 2 * block], fill);
                inner.slice(1, 1, b).slice(2, 1, c).slice(3, block, d)
            }
            InputLayout::Permuted => self.input_of_rank_4(dtype, [b, c, a, d], fill).permute([2, 0, 1, 3]),
            InputLayout::Transposed => self.input_of_rank_4(dtype, [a, b, d, c], fill).permute([0, 1, 3, 2]),
        }
    }

    /// An input of rank 4.
    fn input_of_rank_4(&self, dtype: DType, dims: [usize; 4], fill: Fill) -> Value<'g> {
        let bytes = fill::bytes(dtype, fill, dims.iter().product(), &mut self.rng.borrow_mut());
        self.given(dtype, Shape::from(dims), bytes)
    }

    /// Weights with random values.
    pub(crate) fn weight(&self, dtype: DType, dims: [usize; 4]) -> Value<'g> {
        self.filled_weight(dtype, dims, fill::UNIT)
    }

    pub(crate) fn filled_weight(&self, dtype: DType, dims: [usize; 4], fill: Fill) -> Value<'g> {
        let bytes = fill::bytes(dtype, fill, dims.iter().product(), &mut self.rng.borrow_mut());
        self.graph.weight(&self.name("w"), Weight::with_data(dtype, shape(dims), bytes))
    }

    /// Weights `w` and an input `x` of a matrix multiplication. If there are few results, `x` is correlated with the
    /// first row of weights: in a sum that cancels almost completely, relative errors mean nothing.
    pub(crate) fn mul_mat_inputs(
        &self,
        dtype: DType,
        w: [usize; 4],
        x: (DType, [usize; 4], InputLayout),
    ) -> (Value<'g>, Value<'g>) {
        let (x_type, dims, layout) = x;
        let [b, h, m, k] = dims;
        if layout != InputLayout::Plain || b * h * m * w[2] >= 16 || k == 0 || w.contains(&0) {
            return (self.weight(dtype, w), self.strided_input(x_type, dims, layout, fill::UNIT));
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

    /// A column of given integers.
    pub(crate) fn table(&self, values: Vec<i32>) -> Value<'g> {
        let rows = values.len();
        self.matrix([rows, 1], values)
    }

    /// A matrix of given integers.
    pub(crate) fn matrix(&self, dims: [usize; 2], values: Vec<i32>) -> Value<'g> {
        let bytes = values.into_iter().flat_map(i32::to_le_bytes).collect();
        self.given(DType::I32, Shape::from(dims), bytes)
    }

    /// The numbers below `count` in random order.
    pub(crate) fn shuffled(&self, count: usize) -> Vec<usize> {
        fill::shuffled(count, &mut self.rng.borrow_mut())
    }

    /// Random ids below `count`.
    pub(crate) fn ids(&self, dims: [usize; 4], count: usize) -> Value<'g> {
        let ids: Vec<usize> = {
            let mut rng = self.rng.borrow_mut();
            (0..dims.iter().product()).map(|_| rng.below(count)).collect()
        };
        self.ints(dims, ids.into_iter())
    }

    /// Random ids below `count`, distinct within each row of ids.
    pub(crate) fn distinct_ids(&self, dims: [usize; 4], count: usize) -> Value<'g> {
        let rows: usize = dims.iter().take(3).product();
        let ids: Vec<usize> = {
            let mut rng = self.rng.borrow_mut();
            (0..rows).flat_map(|_| fill::shuffled(count, &mut rng).into_iter().take(dims[3])).collect()
        };
        self.ints(dims, ids.into_iter())
    }

    /// Positions of consecutive tokens, from a random one below `limit`.
    pub(crate) fn positions(&self, count: usize, limit: usize) -> Value<'g> {
        let first = self.rng.borrow_mut().below(limit);
        self.ints([1, 1, 1, count], first..first + count)
    }

    /// The span of keys visible to each query: causal, with or without a sliding window; some are empty.
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

    /// A state with random values.
    pub(crate) fn filled_state(&self, dtype: DType, dims: [usize; 4], fill: Fill) -> Value<'g> {
        let name = self.name("s");
        let bytes = fill::bytes(dtype, fill, dims.iter().product(), &mut self.rng.borrow_mut());
        self.inputs.borrow_mut().push((name.clone(), bytes));
        self.graph.state(&name, dtype, shape(dims))
    }

    /// Makes a value an output of the case.
    pub(crate) fn out(&self, value: Value<'g>) {
        let mut outputs = self.outputs.borrow_mut();
        self.graph.output(&format!("y{}", *outputs), value);
        *outputs += 1;
    }
}
