//! Generates random graphs.

use quadriga_graph::{AttentionOptions, DType, GraphBuilder, Pairing, Rope, Shape, Unary, Value, Weight};

use crate::Rng;
use crate::cases::fill;

/// Column counts: around vector widths, blocks and chunk boundaries of kernels.
pub(super) const COLUMNS: [usize; 20] =
    [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 128, 160, 256, 257];

/// Weight types of random matmuls.
const WEIGHTS: [DType; 8] =
    [DType::F32, DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0];

/// Smooth functions, defined everywhere: rounding cannot change their results much.
const FUNCTIONS: [Unary; 9] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Tanh,
    Unary::Relu,
    Unary::Sigmoid,
    Unary::Gelu,
    Unary::GeluQuick,
    Unary::GeluErf,
    Unary::Silu,
];

/// A value of the graph under construction.
#[derive(Clone, Copy)]
pub(super) struct Known<'g> {
    pub(super) value: Value<'g>,
    /// A number that all values in one storage share.
    pub(super) storage: usize,
    /// Whether the storage may be written: it belongs to a computed value or a state.
    pub(super) writable: bool,
}

pub(super) struct GraphGenerator<'g> {
    pub(super) g: &'g GraphBuilder,
    pub(super) rng: Rng,
    known: Vec<Known<'g>>,
    storages: usize,
    pub(super) inputs: Vec<(String, Vec<f32>)>,
    pub(super) indices: Vec<(String, Vec<i32>)>,
    weights: usize,
    pub(super) rounding: f64,
}

/// Whether an F32 value has no gaps.
pub(super) fn is_dense(x: Value<'_>) -> bool {
    let [_, b, rows, columns] = x.shape().dims4();
    x.strides() == [4 * columns * rows * b, 4 * columns * rows, 4 * columns, 4]
}

impl<'g> GraphGenerator<'g> {
    pub(super) fn new(g: &'g GraphBuilder, seed: u64) -> GraphGenerator<'g> {
        GraphGenerator {
            g,
            rng: Rng::new(seed ^ 0x05ee_d0f9_a4d0),
            known: Vec::new(),
            storages: 0,
            inputs: Vec::new(),
            indices: Vec::new(),
            weights: 0,
            rounding: 3e-7,
        }
    }

    pub(super) fn build(&mut self) -> Vec<String> {
        let (rows, columns) = self.shape();
        self.input([rows, columns]);
        for _ in 0..self.rng.below(3) {
            let shape = if self.rng.chance(0.7) { [rows, columns] } else { [1, columns] };
            self.input(shape);
        }
        for _ in 0..self.rng.range(1, 14) {
            self.step();
        }
        let mut outputs = Vec::new();
        for (number, known) in self.known.clone().into_iter().enumerate() {
            let last = number + 1 == self.known.len();
            if (last || self.rng.chance(0.12)) && known.value.dtype() == DType::F32 {
                let name = format!("out{number}");
                let output = if is_dense(known.value) { known.value } else { known.value.cont() };
                self.g.output(&name, output);
                outputs.push(name);
            }
        }
        outputs
    }

    /// Mostly small; sometimes more elements than a kernel gives to one thread at a time.
    fn shape(&mut self) -> (usize, usize) {
        match self.rng.below(12) {
            0 => (1, self.rng.range(8000, 20_000)),
            1 => (self.rng.range(2, 6), 64 * self.rng.range(32, 100)),
            2 => (self.rng.range(16, 70), *self.rng.pick(&COLUMNS).unwrap_or(&32)),
            _ => (self.rng.range(1, 9), *self.rng.pick(&COLUMNS).unwrap_or(&32)),
        }
    }

    pub(super) fn input(&mut self, shape: [usize; 2]) -> Value<'g> {
        let name = format!("x{}", self.inputs.len());
        let value = self.g.input(&name, DType::F32, shape);
        let values = fill::values(fill::Fill::Range(-2.0, 2.0), shape.iter().product(), &mut self.rng);
        self.inputs.push((name, values));
        self.add(value, false);
        value
    }

    pub(super) fn index(&mut self, shape: &[usize], values: Vec<i32>) -> Value<'g> {
        let name = format!("i{}", self.indices.len());
        let value = match *shape {
            [rows, columns] => self.g.input(&name, DType::I32, [rows, columns]),
            _ => self.g.input(&name, DType::I32, [values.len()]),
        };
        self.indices.push((name, values));
        value
    }

    /// A type for weights with rows of this length.
    pub(super) fn weight_type(&mut self, columns: usize) -> DType {
        let dtype = *self.rng.pick(&WEIGHTS).unwrap_or(&DType::F32);
        if dtype == DType::F32 || !columns.is_multiple_of(dtype.block_len()) {
            return DType::F32;
        }
        self.rounding = self.rounding.max(4e-3);
        dtype
    }

    pub(super) fn weight<const N: usize>(&mut self, dtype: DType, shape: [usize; N]) -> Value<'g>
    where
        Shape: From<[usize; N]>,
    {
        let name = format!("w{}", self.weights);
        self.weights += 1;
        let data = fill::bytes(dtype, fill::UNIT, shape.iter().product(), &mut self.rng);
        self.g.weight(&name, Weight::with_data(dtype, shape, data))
    }

    /// A value in a storage of its own.
    pub(super) fn add(&mut self, value: Value<'g>, writable: bool) {
        self.known.push(Known { value, storage: self.storages, writable });
        self.storages += 1;
    }

    fn pick(&mut self) -> Known<'g> {
        let near = if self.rng.chance(0.6) { self.known.len().min(2) } else { self.known.len() };
        let index = self.known.len().saturating_sub(1 + self.rng.below(near));
        // There is at least the first input.
        #[expect(
            clippy::indexing_slicing,
            reason = "the list starts with an input and the index is below its length"
        )]
        self.known[index]
    }

    /// Another value of the same shape, if there is one.
    pub(super) fn partner(&mut self, x: Value<'g>) -> Option<Known<'g>> {
        let fitting: Vec<Known<'g>> = self
            .known
            .iter()
            .filter(|k| k.value.dtype() == DType::F32 && k.value.shape().dims4() == x.shape().dims4())
            .copied()
            .collect();
        self.rng.pick(&fitting).copied()
    }

    /// One more operation, or none if the drawn one does not fit.
    fn step(&mut self) {
        let Known { value: x, storage, writable } = self.pick();
        if x.dtype() != DType::F32 {
            let back = x.cast(DType::F32);
            return self.add(back, true);
        }
        let [_, _, rows, columns] = x.shape().dims4();
        let elements = x.shape().elements();
        let dense = is_dense(x);
        let shares = |value| Known { value, storage, writable };
        match self.rng.below(47) {
            0..=3 => {
                let function = *self.rng.pick(&FUNCTIONS).unwrap_or(&Unary::Neg);
                self.add(x.unary(function), true);
            }
            4 => self.add(x.scale(0.5), true),
            5 => self.add(x.scale_bias(-0.75, 0.25), true),
            6 => self.add(x.clamp(-0.8, 0.9), true),
            7..=9 => {
                if let Some(y) = self.partner(x) {
                    let made = match self.rng.below(4) {
                        0 => x + y.value,
                        1 => x - y.value,
                        2 => x.unary(Unary::Tanh) * y.value,
                        _ => x.swiglu(y.value),
                    };
                    self.add(made, true);
                }
            }
            10 => {
                let row = self.input([1, columns]);
                let made = if self.rng.chance(0.5) { x + row } else { x * row };
                self.add(made, true);
            }
            11 | 12 => self.add(x.rms_norm(1e-5), true),
            13 => self.add(x.norm(1e-3), true),
            14 => self.add(x.l2_norm(1e-3), true),
            15 => self.add(x.soft_max(0.7, None, None), true),
            16 | 17 if dense => {
                let reshaped = self.reshape(x, elements);
                self.known.push(shares(reshaped));
            }
            18 => {
                let start = self.rng.below(rows);
                let len = self.rng.range(1, rows - start);
                let axis = x.shape().rank().saturating_sub(2);
                if x.shape().rank() >= 2 {
                    self.known.push(shares(x.slice(axis, start, len)));
                }
            }
            19 if x.shape().rank() == 2 => self.known.push(shares(x.transpose())),
            20 => self.add(x.cont(), true),
            21 if elements < 20_000 && x.shape().rank() == 2 => self.add(x.concat(0, &[x]), true),
            22 if x.shape().rank() == 2 => self.add(x.pad([1, 2]), true),
            23 => self.add(x.sum_rows().scale(1.0 / columns as f32), true),
            24 | 25 if x.strides()[3] == 4 && columns <= 512 && rows <= 80 && x.shape().rank() == 2 => {
                let dtype = self.weight_type(columns);
                let outputs = *self.rng.pick(&COLUMNS).unwrap_or(&16);
                let w = self.weight(dtype, [outputs, columns]);
                self.add(w.mul_mat(x).scale(1.0 / (columns as f32).sqrt()), true);
            }
            26 if x.shape().rank() == 2 => {
                let count = self.rng.range(1, 6);
                let ids = (0..count).map(|_| self.rng.below(rows) as i32).collect();
                let ids = self.index(&[count], ids);
                if dense {
                    self.add(x.get_rows(ids), true);
                }
            }
            27 if dense && columns >= 2 && columns.is_multiple_of(2) && columns <= 256 => {
                let rows = elements / columns;
                let positions = (0..rows).map(|_| self.rng.below(3000) as i32).collect();
                let positions = self.index(&[rows], positions);
                let pairing = if self.rng.chance(0.5) { Pairing::Adjacent } else { Pairing::Half };
                let heads = x.reshape([rows, 1, columns]);
                self.rounding = self.rounding.max(1e-4);
                self.add(heads.rope(Rope::new(columns, pairing, 1e4), positions, None), true);
            }
            28 => {
                let others: Vec<Known<'g>> = self
                    .known
                    .iter()
                    .filter(|k| {
                        k.writable
                            && k.storage != storage
                            && k.value.dtype() == DType::F32
                            && k.value.shape().elements() == elements
                    })
                    .copied()
                    .collect();
                if let Some(target) = self.rng.pick(&others).copied() {
                    // The write makes every other value in the target's storage stale.
                    self.known.retain(|k| k.storage != target.storage);
                    let written = x.copy_into(target.value);
                    self.known.push(Known { value: written, ..target });
                }
            }
            29 if dense && columns <= 128 && columns.is_multiple_of(8) && elements <= 40 * columns => {
                self.attend(x, elements / columns, columns);
            }
            30..=37 => self.window_step(x),
            38 | 39 => self.own_step(x),
            40..=44 => self.model_step(x),
            _ => {
                self.rounding = self.rounding.max(1e-3);
                self.add(x.cast(DType::F16).cast(DType::F32), true);
            }
        }
    }

    fn reshape(&mut self, x: Value<'g>, elements: usize) -> Value<'g> {
        let divisors: Vec<usize> = (1..=64).filter(|d| elements.is_multiple_of(*d)).collect();
        let rows = *self.rng.pick(&divisors).unwrap_or(&1);
        if self.rng.chance(0.5) {
            x.reshape([rows, elements / rows])
        } else {
            x.reshape([elements / rows, rows])
        }
    }

    /// Attention of all rows over themselves, each seeing a random span.
    fn attend(&mut self, x: Value<'g>, rows: usize, columns: usize) {
        let spans = (0..rows).flat_map(|_| {
            let first = self.rng.below(rows);
            [first as i32, self.rng.range(first + 1, rows) as i32]
        });
        let spans: Vec<i32> = spans.collect();
        let spans = self.index(&[rows, 2], spans);
        let heads = x.reshape([1, rows, columns]);
        let keys = heads.unary(Unary::Tanh);
        let mut options = AttentionOptions::new().scale(1.0 / (columns as f32).sqrt()).spans(spans);
        if self.rng.chance(0.3) {
            options = options.sinks(self.input([1, 1]).reshape([1]));
        }
        self.add(heads.attention(keys, heads, options), true);
    }
}
