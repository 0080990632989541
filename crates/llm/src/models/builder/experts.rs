//! Mixtures of experts.

use quadriga_graph::{ExpertWeights, Gate, SelectExperts, Value};

use super::LayerBuilder;
use crate::Result;
use crate::hyperparameters::{Experts, Gating};

/// The experts that each of `t` tokens uses.
#[derive(Clone, Copy)]
struct Route<'g> {
    /// Their numbers `[t, used]`.
    ids: Value<'g>,
    /// Their weights `[t, used]`.
    weights: Value<'g>,
}

impl<'g> LayerBuilder<'_, 'g> {
    /// The mixture of experts of normed rows `[t, width]`, which a router selects by rows of its own `[t, width]`; with the
    /// shared expert's result.
    pub(super) fn mixture(
        &self,
        experts: Experts,
        router: Value<'g>,
        x: Value<'g>,
        gate: Gate,
    ) -> Result<Value<'g>> {
        let routed = self.routed(experts, x, self.route(experts, router)?, gate)?;
        Ok(match self.shared_expert(experts, x, gate)? {
            Some(shared) => routed.add(shared),
            None => routed,
        })
    }

    /// Router logits → probabilities → the experts with the best scores, and their weights. A bias of the scores affects
    /// the selection only.
    fn route(&self, experts: Experts, x: Value<'g>) -> Result<Route<'g>> {
        let logits = self.linear("ffn_gate_inp", experts.count, x)?;
        let _scope = self.model.g.scope(&self.name("ffn_router"));
        let probabilities = match experts.gating {
            Gating::Softmax => logits.soft_max(1.0, None, None),
            Gating::Sigmoid => logits.sigmoid(),
            Gating::SoftmaxOfSelected => logits,
        };
        let scores = match self.model.weights.find_vector(&self.name("exp_probs_b.bias"), experts.count)? {
            Some(bias) => probabilities.add(bias),
            None => probabilities,
        };
        let Experts { used, groups, groups_used, normalize, scale, .. } = experts;
        let ids = scores.select_experts(SelectExperts { used, groups, groups_used });
        let softmax = experts.gating == Gating::SoftmaxOfSelected;
        let weights = probabilities.expert_weights(ids, ExpertWeights { softmax, normalize, scale });
        Ok(Route { ids, weights })
    }

    /// The weighted sum of the selected experts' results.
    fn routed(&self, experts: Experts, x: Value<'g>, route: Route<'g>, gate: Gate) -> Result<Value<'g>> {
        let (tokens, width) = (x.shape().rows(), x.shape().cols());
        let x = x.reshape([tokens, 1, width]);
        let inner = if self.model.weights.has(&self.name("ffn_gate_up_exps.weight")) {
            self.expert_linear("ffn_gate_up", experts.count, 2 * experts.width, x, route)?
                .gated_halves(gate, false)
        } else {
            let gated = self.expert_linear("ffn_gate", experts.count, experts.width, x, route)?;
            gated.gated(gate, self.expert_linear("ffn_up", experts.count, experts.width, x, route)?)
        };
        let results = self.expert_linear("ffn_down", experts.count, width, inner, route)?;
        let _scope = self.model.g.scope(&self.name("ffn_experts"));
        Ok(results.sum_experts(route.weights))
    }

    /// The product of each row `[t, used or 1, k]` with its expert's matrix, `[t, used, out]`, times the expert's scale and
    /// plus its bias where the file has them.
    fn expert_linear(
        &self,
        part: &str,
        count: usize,
        out: usize,
        x: Value<'g>,
        route: Route<'g>,
    ) -> Result<Value<'g>> {
        let name = self.name(&format!("{part}_exps"));
        let _scope = self.model.g.scope(&name);
        let dims = [count, out, x.shape().cols()];
        let matrices = self.model.weights.experts(&format!("blk.{}", self.index), part, dims)?;
        let mut y = matrices.mul_mat_id(x, route.ids);
        if let Some(scales) = self.model.weights.find_vector(&format!("{name}.scale"), count)? {
            let (tokens, used) = (route.ids.shape().rows(), route.ids.shape().cols());
            let scales = scales.reshape([count, 1]).get_rows(route.ids.reshape([tokens * used]));
            y = y.mul(scales.reshape([tokens, used, 1]));
        }
        Ok(match self.model.weights.find_vectors(&format!("{name}.bias"), [count, out])? {
            Some(biases) => y.add_id(biases, route.ids),
            None => y,
        })
    }

    /// The result of the expert that all rows use, times the sigmoid of a gate where the file has one; `None` if there is
    /// no such expert.
    fn shared_expert(&self, experts: Experts, x: Value<'g>, gate: Gate) -> Result<Option<Value<'g>>> {
        if experts.shared_width == 0 {
            return Ok(None);
        }
        let gated = self.linear("ffn_gate_shexp", experts.shared_width, x)?;
        let up = self.linear("ffn_up_shexp", experts.shared_width, x)?;
        let shared = self.linear("ffn_down_shexp", x.shape().cols(), gated.gated(gate, up))?;
        let name = self.name("ffn_gate_inp_shexp.weight");
        let _scope = self.model.g.scope(&self.name("ffn_gate_inp_shexp"));
        Ok(Some(match self.model.weights.find_row(&name, x.shape().cols())? {
            Some(weight) => shared.mul(weight.mul_mat(x).sigmoid()),
            None => shared,
        }))
    }
}
