//! Mixtures of experts and recurrent layers in random graphs.

use quadriga_graph::{DeltaRuleInputs, ExpertWeights, Gate, GatedDeltaRule, SelectExperts, Unary, Value};

use super::generator::{COLUMNS, GraphGenerator, is_dense};
use crate::Rng;

/// The largest input of these operations.
const MAX_ELEMENTS: usize = 10_000;

/// Chooses mixtures that differ from the usual form.
const VARIED: u64 = 0x6d69_7874_7572_6502;

impl<'g> GraphGenerator<'g> {
    /// One more operation of this file, or none if the drawn one does not fit.
    pub(super) fn model_step(&mut self, x: Value<'g>) {
        let [_, _, rows, columns] = x.shape().dims4();
        let elements = x.shape().elements();
        if x.shape().rank() != 2 || !is_dense(x) || elements > MAX_ELEMENTS {
            return;
        }
        match self.rng.below(5) {
            0..=2 if rows <= 40 && columns <= 512 => self.mixture(x, rows, columns),
            3 => {
                let taps = self.rng.range(1, rows.min(5));
                let kernel = self.input([columns, taps]);
                self.add(x.ssm_conv(kernel), true);
            }
            4 if rows <= 24 => self.delta_rule(x, rows, columns),
            _ => {}
        }
    }

    /// A feed-forward of experts, or its first operations.
    fn mixture(&mut self, x: Value<'g>, tokens: usize, width: usize) {
        let experts = self.rng.range(1, 9);
        let used = self.rng.range(1, experts.min(4));
        // Which experts are used depends on given numbers only: rounding cannot change it much.
        let logits = self.input([tokens, experts]);
        let ids = logits.select_experts(SelectExperts::ungrouped(used));
        let softmax = self.rng.chance(0.5);
        let normalize = self.rng.chance(0.5);
        let probabilities = if softmax { logits } else { logits.soft_max(1.0, None, None) };
        let weights = probabilities.expert_weights(ids, ExpertWeights { softmax, normalize, scale: 1.5 });
        let hidden = *self.rng.pick(&COLUMNS).unwrap_or(&32);
        let biases = self.rng.chance(0.4);
        let rows = x.scale(1.0 / (width as f32).sqrt()).reshape([tokens, 1, width]);
        // Not from the sequence of numbers that the rest of the graph depends on, so that graphs without them stay as they are.
        let varied = Rng::new(self.rng.clone().next_u64() ^ VARIED).chance(0.5);
        if varied {
            return self.varied_mixture(x, rows, ids, weights, [experts, hidden], biases);
        }
        let gates = self.expert_matmul(rows, ids, [experts, hidden, width], biases);
        if self.rng.chance(0.2) {
            return self.add(gates.sum_experts(weights), true);
        }
        let ups = self.expert_matmul(rows, ids, [experts, hidden, width], biases);
        let gated = gates.gated(self.gate(), ups);
        let down = self.expert_matmul(gated, ids, [experts, width, hidden], biases);
        let sum = down.sum_experts(weights).scale(1.0 / (hidden as f32).sqrt());
        let made = if self.rng.chance(0.5) { x + sum } else { sum };
        self.add(made, true);
    }

    fn gate(&mut self) -> Gate {
        let all = [Gate::Swiglu, Gate::SwigluOai, Gate::Geglu, Gate::Reglu];
        *self.rng.pick(&all).unwrap_or(&Gate::Swiglu)
    }

    /// A feed-forward of experts that are not all here, that read rows of their own, or that have gate and up in one matrix or
    /// no gate.
    fn varied_mixture(
        &mut self,
        x: Value<'g>,
        mut rows: Value<'g>,
        ids: Value<'g>,
        weights: Value<'g>,
        [experts, hidden]: [usize; 2],
        biases: bool,
    ) {
        let ([_, _, tokens, used], width) = (ids.shape().dims4(), x.shape().cols());
        let here = if self.rng.chance(0.4) { self.rng.range(1, experts) } else { experts };
        let ids = if here < experts { self.those_here(ids, [tokens, used], experts, here) } else { ids };
        if self.rng.chance(0.3) {
            rows = rows.repeat([tokens, used, width]).mul(weights.reshape([tokens, used, 1]));
        }
        let gate = self.gate();
        let inner = match self.rng.below(4) {
            0 | 1 => {
                let both = self.expert_matmul(rows, ids, [here, 2 * hidden, width], biases);
                both.gated_halves(gate, self.rng.chance(0.5))
            }
            2 => self.expert_matmul(rows, ids, [here, hidden, width], biases).unary(Unary::Relu),
            _ => {
                let gates = self.expert_matmul(rows, ids, [here, hidden, width], biases);
                gates.gated(gate, self.expert_matmul(rows, ids, [here, hidden, width], biases))
            }
        };
        let down = self.expert_matmul(inner, ids, [here, width, hidden], biases);
        let sum = down.sum_experts(weights).scale(1.0 / (hidden as f32).sqrt());
        let made = match self.rng.below(3) {
            0 => sum,
            1 => sum + x,
            _ => x + sum,
        };
        self.add(made, true);
        // Another reader of a result on the way.
        if self.rng.chance(0.2) {
            self.add(inner.reshape([tokens * used, hidden]).scale(0.5), true);
        }
    }

    /// The numbers of experts `[tokens, used]`, −1 for those that are not among the first `here`.
    fn those_here(
        &mut self,
        ids: Value<'g>,
        [tokens, used]: [usize; 2],
        experts: usize,
        here: usize,
    ) -> Value<'g> {
        let table = (0..experts).map(|expert| if expert < here { expert as i32 } else { -1 }).collect();
        let table = self.index(&[experts, 1], table);
        table.get_rows(ids.reshape([tokens * used])).reshape([tokens, used])
    }

    fn expert_matmul(
        &mut self,
        x: Value<'g>,
        ids: Value<'g>,
        [experts, outputs, columns]: [usize; 3],
        biases: bool,
    ) -> Value<'g> {
        let dtype = self.weight_type(columns);
        let made = self.weight(dtype, [experts, outputs, columns]).mul_mat_id(x, ids);
        if biases { made.add_id(self.input([experts, outputs]), ids) } else { made }
    }

    /// The gated delta rule with these values.
    fn delta_rule(&mut self, x: Value<'g>, tokens: usize, columns: usize) {
        let divisors: Vec<usize> = (1..=4).filter(|heads| columns.is_multiple_of(*heads)).collect();
        let heads = *self.rng.pick(&divisors).unwrap_or(&1);
        let key_heads = if self.rng.chance(0.5) { heads } else { 1 };
        let (width, depth) = (columns / heads, self.rng.range(1, 40));
        let keys = |generator: &mut Self| {
            let row = generator.input([tokens, key_heads * depth]);
            row.reshape([tokens, key_heads, depth]).l2_norm(1e-3)
        };
        let (queries, keys) = (keys(self), keys(self));
        let inputs = DeltaRuleInputs {
            keys,
            values: x.reshape([tokens, heads, width]),
            gates: self.input([tokens, heads]).unary(Unary::Abs).scale(-0.5),
            betas: self.input([tokens, heads]).unary(Unary::Sigmoid),
            state: self.input([heads * depth, width]).reshape([heads, depth, width]),
        };
        let parameters =
            GatedDeltaRule { scale: 0.5, tiled: self.rng.chance(0.5), delta: self.rng.chance(0.7) };
        self.rounding = self.rounding.max(1e-6);
        let (results, state) = queries.gated_delta_rule(inputs, parameters);
        self.add(results.reshape([tokens * heads, width]).cont(), true);
        self.add(state.reshape([heads * depth, width]).cont(), true);
    }
}
