//! Recurrent layers: causal convolution and the gated delta rule.

use std::ops::Range;

use quadriga_graph::GatedDeltaRule;

use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::delta_chunk::{CHUNK, DeltaChunk, delta_chunk};
use crate::kernels::recurrent::{DeltaToken, STRIP, delta_rule};
use crate::kernels::vec;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView};

/// Tokens of a unit of the convolution: they share the transposed kernel.
const TOKENS: usize = 64;

struct ConvKernel {
    isa: Isa,
    x: TensorView,
    kernel: TensorView,
    out: TensorView,
}

/// A unit takes a segment of the channels of some tokens.
pub(super) fn ssm_conv(x: &TensorView, kernel: &TensorView, out: &TensorView, isa: Isa) -> StepPart {
    let units = out.rows().div_ceil(TOKENS) * out.cols().div_ceil(SEGMENT);
    let accesses = vec![Access::reads(x), Access::reads(kernel), Access::writes(out)];
    let cost = out.elements().saturating_mul(kernel.cols());
    StepPart::new(ConvKernel { isa, x: *x, kernel: *kernel, out: *out }, units, cost, accesses)
}

impl ConvKernel {
    /// Some channels of the kernel, transposed: a row of channels for each tap.
    fn transposed(&self, channels: &Range<usize>, one: &mut [f32], columns: &mut [f32]) {
        let count = channels.len().max(1);
        for (i, channel) in channels.clone().enumerate() {
            self.kernel.load(channel, 0, one);
            for (column, value) in columns.chunks_mut(count).zip(one.iter()) {
                column.iter_mut().skip(i).take(1).for_each(|to| *to = *value);
            }
        }
    }
}

impl Kernel for ConvKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (all, taps) = (self.out.cols(), self.kernel.cols());
        let segments = all.div_ceil(SEGMENT).max(1);
        with_floats(SEGMENT * (taps + 2) + taps, |floats| {
            for unit in units {
                let first = unit % segments * SEGMENT;
                let channels = first..(first + SEGMENT).min(all);
                let count = channels.len();
                let (one, rest) = floats.split_at_mut(taps);
                let (values, rest) = rest.split_at_mut(count);
                let (sums, rest) = rest.split_at_mut(count);
                let columns = rest.get_mut(..count * taps).unwrap_or_default();
                self.transposed(&channels, one, columns);
                let token = unit / segments * TOKENS;
                for row in token..(token + TOKENS).min(self.out.rows()) {
                    sums.fill(0.0);
                    for (tap, column) in columns.chunks(count.max(1)).enumerate() {
                        self.x.load(row + tap, first, values);
                        vec::multiply_add(self.isa, values, column, sums);
                    }
                    self.out.store(row, first, sums);
                }
            }
        });
        Ok(())
    }
}

struct DeltaRuleKernel {
    isa: Isa,
    parameters: GatedDeltaRule,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    gates: TensorView,
    betas: TensorView,
    state: TensorView,
    out: TensorView,
}

/// A unit takes a strip of the columns of one head's state through all tokens.
pub(super) fn gated_delta_rule(
    parameters: &GatedDeltaRule,
    [q, k, v, gates, betas, state]: [&TensorView; 6],
    out: &TensorView,
    isa: Isa,
) -> StepPart {
    let units = v.dims[2] * v.cols().div_ceil(STRIP);
    let mut accesses: Vec<Access> = [q, k, v, gates, betas, state].into_iter().map(Access::reads).collect();
    accesses.push(Access::writes(out));
    let kernel = DeltaRuleKernel {
        isa,
        parameters: *parameters,
        q: *q,
        k: *k,
        v: *v,
        gates: *gates,
        betas: *betas,
        state: *state,
        out: *out,
    };
    let cost = state.elements().saturating_mul(4 * v.dims[1] + 1);
    StepPart::new(kernel, units, cost, accesses)
}

impl DeltaRuleKernel {
    fn key_head(&self, head: usize) -> usize {
        let key_heads = self.q.dims[2].max(1);
        if self.parameters.tiled { head % key_heads } else { head / (self.v.dims[2] / key_heads).max(1) }
    }

    /// All tokens of a strip of one head: in chunks, or in a step if there is one. Both round differently, and a token's result
    /// must not depend on how many tokens without effect follow the sequence's last one.
    fn strip(&self, head: usize, columns: &Range<usize>, state: &mut [[f32; STRIP]], rows: &mut [f32]) {
        let tokens = self.v.dims[1];
        if tokens == 1 {
            return self.step(head, columns, 0, state, rows);
        }
        for first in (0..tokens).step_by(CHUNK) {
            self.chunk(head, columns, first..(first + CHUNK).min(tokens), state, rows);
        }
    }

    /// The gate and beta of a token.
    fn rates(&self, token: usize, head: usize) -> (f32, f32) {
        let (mut gate, mut beta) = ([0.0], [0.0]);
        self.gates.load(token, head, &mut gate);
        self.betas.load(token, head, &mut beta);
        (gate[0].exp(), beta[0])
    }

    fn store(&self, token: usize, head: usize, columns: &Range<usize>, result: &[f32; STRIP]) {
        let result = result.get(..columns.len()).unwrap_or_default();
        self.out.store(token * self.v.dims[2] + head, columns.start, result);
    }

    fn step(
        &self,
        head: usize,
        columns: &Range<usize>,
        token: usize,
        state: &mut [[f32; STRIP]],
        rows: &mut [f32],
    ) {
        let (key_head, count) = (self.key_head(head), columns.len().min(STRIP));
        let (query, rest) = rows.split_at_mut(self.q.cols());
        let key = rest.get_mut(..self.q.cols()).unwrap_or_default();
        self.q.load_at([0, token, key_head], 0, query);
        self.k.load_at([0, token, key_head], 0, key);
        let mut value = [0.0; STRIP];
        self.v.load_at([0, token, head], columns.start, value.get_mut(..count).unwrap_or_default());
        let GatedDeltaRule { scale, delta, .. } = self.parameters;
        let (decay, beta) = self.rates(token, head);
        let token_inputs = DeltaToken { query, key, value: &value, decay, beta, scale, delta };
        let result = delta_rule(self.isa, state, &token_inputs);
        self.store(token, head, columns, &result);
    }

    fn chunk(
        &self,
        head: usize,
        columns: &Range<usize>,
        tokens: Range<usize>,
        state: &mut [[f32; STRIP]],
        rows: &mut [f32],
    ) {
        let (key_head, count, depth) = (self.key_head(head), columns.len().min(STRIP), self.q.cols());
        let mut values = [[0.0; STRIP]; CHUNK];
        let (mut decays, mut betas) = ([1.0; CHUNK], [0.0; CHUNK]);
        if tokens.len() < CHUNK {
            rows.fill(0.0);
        }
        let (keys, queries) = rows.split_at_mut(CHUNK * depth);
        let rows_of = keys.chunks_mut(depth.max(1)).zip(queries.chunks_mut(depth.max(1)));
        let rates = decays.iter_mut().zip(&mut betas).zip(&mut values);
        for ((token, (key, query)), ((decay, beta), value)) in tokens.clone().zip(rows_of).zip(rates) {
            self.k.load_at([0, token, key_head], 0, key);
            self.q.load_at([0, token, key_head], 0, query);
            self.v.load_at([0, token, head], columns.start, value.get_mut(..count).unwrap_or_default());
            (*decay, *beta) = self.rates(token, head);
        }
        let GatedDeltaRule { scale, delta, .. } = self.parameters;
        let chunk = DeltaChunk { rows, values: &values, decays, betas, scale, delta };
        let results = delta_chunk(self.isa, state, &chunk);
        for (token, result) in tokens.zip(&results) {
            self.store(token, head, columns, result);
        }
    }
}

impl Kernel for DeltaRuleKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, tokens, heads, width] = self.v.dims;
        let (depth, strips) = (self.q.cols(), width.div_ceil(STRIP).max(1));
        with_floats(depth * (STRIP + 2 * CHUNK), |floats| {
            let (state, rows) = floats.split_at_mut(depth * STRIP);
            let (state, _) = state.as_chunks_mut::<STRIP>();
            for unit in units {
                let (head, first) = (unit / strips, unit % strips * STRIP);
                let columns = first..(first + STRIP).min(width);
                for (i, row) in state.iter_mut().enumerate() {
                    let (row, rest) = row.split_at_mut(columns.len());
                    self.state.load_at([0, head, i], first, row);
                    rest.fill(0.0);
                }
                self.strip(head, &columns, state, rows);
                for (i, row) in state.iter().enumerate() {
                    let row = row.get(..columns.len()).unwrap_or_default();
                    self.out.store(tokens * heads + head * depth + i, first, row);
                }
            }
        });
        Ok(())
    }
}
