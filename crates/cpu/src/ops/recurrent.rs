//! Recurrent layers: causal convolution and the gated delta rule.

use std::ops::Range;

use quadriga_graph::GatedDeltaRule;

use super::scratch::with_floats;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::TensorView;

struct ConvKernel {
    x: TensorView,
    kernel: TensorView,
    out: TensorView,
}

pub(super) fn ssm_conv(x: &TensorView, kernel: &TensorView, out: &TensorView) -> StepPart {
    let units = out.rows();
    let accesses =
        vec![Access::reads(x), Access::reads(kernel), Access::writes_own(out, Partition::equal(units))];
    let cost = out.elements().saturating_mul(2 * kernel.cols());
    StepPart::new(ConvKernel { x: *x, kernel: *kernel, out: *out }, units, cost, accesses)
}

impl Kernel for ConvKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (channels, taps) = (self.out.cols(), self.kernel.cols());
        with_floats(channels * (taps + 2), |floats| {
            let (values, rest) = floats.split_at_mut(channels);
            let (sums, columns) = rest.split_at_mut(channels);
            // The kernel transposed: a row of channels for each tap.
            let mut one = vec![0.0; taps];
            for channel in 0..channels {
                self.kernel.load(channel, 0, &mut one);
                for (column, value) in columns.chunks_mut(channels.max(1)).zip(&one) {
                    column.iter_mut().skip(channel).take(1).for_each(|to| *to = *value);
                }
            }
            for row in units {
                sums.fill(0.0);
                for (tap, column) in columns.chunks(channels.max(1)).enumerate() {
                    self.x.load(row + tap, 0, values);
                    for ((sum, value), factor) in sums.iter_mut().zip(values.iter()).zip(column) {
                        *sum += value * factor;
                    }
                }
                self.out.store(row, 0, sums);
            }
        });
        Ok(())
    }
}

struct DeltaRuleKernel {
    parameters: GatedDeltaRule,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    gates: TensorView,
    betas: TensorView,
    state: TensorView,
    out: TensorView,
}

pub(super) fn gated_delta_rule(
    parameters: &GatedDeltaRule,
    [q, k, v, gates, betas, state]: [&TensorView; 6],
    out: &TensorView,
) -> StepPart {
    let units = v.dims[2];
    let mut accesses: Vec<Access> = [q, k, v, gates, betas, state].into_iter().map(Access::reads).collect();
    accesses.push(Access::writes(out));
    let kernel = DeltaRuleKernel {
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

    /// Computes one head, with its state in `memory`.
    fn head(&self, head: usize, memory: &mut [f32], rows: &mut [f32]) {
        let [_, tokens, heads, width] = self.v.dims;
        let (depth, key_head) = (self.q.cols(), self.key_head(head));
        let (query, rest) = rows.split_at_mut(depth);
        let (key, rest) = rest.split_at_mut(depth);
        let (change, result) = rest.split_at_mut(width);
        for t in 0..tokens {
            self.q.load_at([0, t, key_head], 0, query);
            self.k.load_at([0, t, key_head], 0, key);
            let (mut gate, mut beta) = ([0.0], [0.0]);
            self.gates.load(t, head, &mut gate);
            self.betas.load(t, head, &mut beta);
            let decay = gate[0].exp();
            // What the decayed state predicts for the key.
            result.fill(0.0);
            for (row, key) in memory.chunks_mut(width.max(1)).zip(key.iter()) {
                for (state, sum) in row.iter_mut().zip(result.iter_mut()) {
                    *state *= decay;
                    *sum += key * *state;
                }
            }
            self.v.load_at([0, t, head], 0, change);
            for (value, predicted) in change.iter_mut().zip(result.iter_mut()) {
                *value = beta[0] * (*value - *predicted);
                *predicted = 0.0;
            }
            for ((row, key), query) in memory.chunks_mut(width.max(1)).zip(key.iter()).zip(query.iter()) {
                let query = query * self.parameters.scale;
                for ((state, change), sum) in row.iter_mut().zip(change.iter()).zip(result.iter_mut()) {
                    *state += key * change;
                    *sum += query * *state;
                }
            }
            self.out.store(t * heads + head, 0, result);
        }
    }
}

impl Kernel for DeltaRuleKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, tokens, heads, width] = self.v.dims;
        let depth = self.q.cols();
        with_floats(depth * width + 2 * (depth + width), |floats| {
            let (memory, rows) = floats.split_at_mut(depth * width);
            for head in units {
                for (i, row) in memory.chunks_mut(width.max(1)).enumerate() {
                    self.state.load_at([0, head, i], 0, row);
                }
                self.head(head, memory, rows);
                for (i, row) in memory.chunks(width.max(1)).enumerate() {
                    self.out.store((tokens * heads) + head * depth + i, 0, row);
                }
            }
        });
        Ok(())
    }
}
