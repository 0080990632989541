//! Mixtures of experts and recurrent layers as methods of a value.

use crate::ops::{ExpertWeights, GatedDeltaRule, Op, SelectExperts};
use crate::value::Value;

/// Methods for mixtures of experts: `t` tokens, of which each uses `u` of `e` experts.
impl<'g> Value<'g> {
    /// The experts of each token, by these scores `[t, e]`; see [`Op::SelectExperts`].
    #[track_caller]
    pub fn select_experts(self, parameters: SelectExperts) -> Value<'g> {
        self.op(Op::SelectExperts(parameters), &[self])
    }

    /// The weights of the experts `ids [t, u]`, from these probabilities `[t, e]`; see [`Op::ExpertWeights`].
    #[track_caller]
    pub fn expert_weights(self, ids: Value<'g>, parameters: ExpertWeights) -> Value<'g> {
        self.op(Op::ExpertWeights(parameters), &[self, ids])
    }

    /// Adds to each row of `[t, u, n]` the bias `[e, n]` of its expert in `ids [t, u]`.
    #[track_caller]
    pub fn add_id(self, biases: Value<'g>, ids: Value<'g>) -> Value<'g> {
        self.op(Op::AddId, &[self, biases, ids])
    }

    /// The sum over `u` of `[t, u, n]`, each row times its weight in `[t, u]`.
    #[track_caller]
    pub fn sum_experts(self, weights: Value<'g>) -> Value<'g> {
        self.op(Op::SumExperts, &[self, weights])
    }
}

/// The inputs of [`Value::gated_delta_rule`] besides the queries.
#[derive(Clone, Copy)]
pub struct DeltaRuleInputs<'g> {
    /// The keys `[t, g, d]`.
    pub keys: Value<'g>,
    /// The values `[t, h, e]`.
    pub values: Value<'g>,
    /// The logarithm of the state's decay `[t, h]`.
    pub gates: Value<'g>,
    /// The rates at which the state learns `[t, h]`.
    pub betas: Value<'g>,
    /// The state before the first token `[h, d, e]`.
    pub state: Value<'g>,
}

/// Methods for recurrent layers.
impl<'g> Value<'g> {
    /// Causal convolution of each channel of `[k − 1 + t, c]` with a kernel `[c, k]`.
    #[track_caller]
    pub fn ssm_conv(self, kernel: Value<'g>) -> Value<'g> {
        self.op(Op::SsmConv, &[self, kernel])
    }

    /// The gated delta rule with these queries `[t, g, d]`; see [`Op::GatedDeltaRule`]. Returns the results `[t, h, e]`
    /// and the state after the last token `[h, d, e]`.
    #[track_caller]
    pub fn gated_delta_rule(
        self,
        inputs: DeltaRuleInputs<'g>,
        parameters: GatedDeltaRule,
    ) -> (Value<'g>, Value<'g>) {
        let DeltaRuleInputs { keys, values, gates, betas, state } = inputs;
        let both = self.op(Op::GatedDeltaRule(parameters), &[self, keys, values, gates, betas, state]);
        let ([_, t, h, e], [_, _, d, _]) = (values.shape().dims4(), state.shape().dims4());
        let results = both.slice(0, 0, t.saturating_mul(h)).reshape([t, h, e]);
        let state = both.slice(0, t.saturating_mul(h), h.saturating_mul(d)).reshape([h, d, e]);
        (results, state)
    }
}
