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

/// The matrices of a layer's experts, and which of them each token uses.
#[derive(Clone, Copy)]
struct ExpertMatrices<'g> {
    /// The number of matrices.
    count: usize,
    /// Whether they are slots of a device, whose contents change, instead of the file's tensors.
    slots: bool,
    /// Numbers of matrices `[t, used]`; −1 for an expert that is not among them.
    ids: Value<'g>,
    route: Route<'g>,
}

impl<'g> LayerBuilder<'_, 'g> {
    /// The mixture of experts of normed rows `[t, width]`, which a router selects by rows of its own `[t, width]`; with the
    /// shared expert's result.
    ///
    /// With slots, experts that are in a slot are computed by its device, and the others by the processor that has the
    /// file's tensors, at the same time: nothing before the last addition needs the results of both. Of long batches a
    /// device may compute both, and streams those that are in no slot.
    pub(super) fn mixture(
        &self,
        experts: Experts,
        router: Value<'g>,
        x: Value<'g>,
        gate: Gate,
    ) -> Result<Value<'g>> {
        let (rows, route) = self.weighted_rows(experts, x, self.route(experts, router)?);
        let slots = self.model.expert_slots(self.index);
        if slots == 0 {
            let ranks = self.model.weights.ranks().and_then(|ranks| ranks.divided_experts(self.index));
            let (count, ids) = match &ranks {
                Some(ranks) => (ranks.count, route.ids.custom(&ranks.local, &[])),
                None => (experts.count, route.ids),
            };
            let all = ExpertMatrices { count, slots: false, ids, route };
            let mut result = self.routed(experts, rows, all, gate)?;
            if let Some(shared) = self.shared_expert(experts, x, gate)? {
                result = result.add(shared);
            }
            return Ok(match ranks {
                Some(divided) => result.all_reduce(divided.ranks),
                None => result,
            });
        }
        let [resident, absent] = self.divide(experts, slots, route)?;
        let host = self.routed(experts, rows, absent, gate)?;
        let mut device = self.routed(experts, rows, resident, gate)?;
        if let Some(shared) = self.shared_expert(experts, x, gate)? {
            device = device.add(shared);
        }
        Ok(device.add(host))
    }

    /// The selected experts that are in slots, and those that are not.
    fn divide(&self, experts: Experts, slots: usize, route: Route<'g>) -> Result<[ExpertMatrices<'g>; 2]> {
        let g = self.model.g;
        let _scope = g.scope(&self.name("ffn_experts"));
        let (tokens, used, count) = (route.ids.shape().rows(), route.ids.shape().cols(), experts.count);
        let look_up = |table: Value<'g>, ids: Value<'g>| table.reshape([count, 1]).get_rows(ids);
        let row = |table: Value<'g>| table.slice(0, self.index, 1);
        let ids = route.ids.reshape([tokens * used]);
        let (in_slots, absent) = if self.model.shape.observe_experts {
            let (in_slots, on_host, numbers) = self.model.expert_tables(count);
            // The host has the numbers then, so that it knows what is used.
            let seen = look_up(numbers, ids);
            g.output(&format!("experts.{}", self.index), seen);
            (in_slots, look_up(row(on_host), seen.reshape([tokens * used])))
        } else {
            let [in_slots, absent] = self.model.expert_tables_of_device(count);
            (in_slots, look_up(row(absent), ids))
        };
        let absent = absent.reshape([tokens, used]);
        let resident = look_up(row(in_slots), ids).reshape([tokens, used]);
        Ok([
            ExpertMatrices { count: slots, slots: true, ids: resident, route },
            ExpertMatrices { count, slots: false, ids: absent, route },
        ])
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
        // Llama 4 selects by the logits: different ones may have the same sigmoid.
        let unbiased = if experts.weighs_inputs { logits } else { probabilities };
        let scores =
            match self.model.weights.find_finite_vector(&self.name("exp_probs_b.bias"), experts.count)? {
                Some(bias) => probabilities.add(bias),
                None => unbiased,
            };
        let Experts { used, groups, groups_used, group_score, normalize, scale, .. } = experts;
        let ids = scores.select_experts(SelectExperts { used, groups, groups_used, group_score });
        let softmax = experts.gating == Gating::SoftmaxOfSelected;
        let weights = probabilities.expert_weights(ids, ExpertWeights { softmax, normalize, scale });
        Ok(Route { ids, weights })
    }

    /// What experts read `[t, 1, width]`, and how their results are summed. Where weights multiply inputs, each expert reads a
    /// row of its own `[t, used, width]`, and results count as they are.
    fn weighted_rows(&self, experts: Experts, x: Value<'g>, route: Route<'g>) -> (Value<'g>, Route<'g>) {
        let (tokens, width, used) = (x.shape().rows(), x.shape().cols(), experts.used);
        let rows = x.reshape([tokens, 1, width]);
        if !experts.weighs_inputs {
            return (rows, route);
        }
        let _scope = self.model.g.scope(&self.name("ffn_router"));
        let rows = rows.repeat([tokens, used, width]).mul(route.weights.reshape([tokens, used, 1]));
        (rows, Route { weights: route.weights.scale_bias(0.0, 1.0), ..route })
    }

    /// The weighted sum of the selected experts' results for rows `[t, used or 1, width]`.
    fn routed(
        &self,
        experts: Experts,
        x: Value<'g>,
        matrices: ExpertMatrices<'g>,
        gate: Gate,
    ) -> Result<Value<'g>> {
        let width = x.shape().cols();
        let inner = if self.model.weights.has(&self.name("ffn_gate_up_exps.weight")) {
            self.expert_linear("ffn_gate_up", experts, 2 * experts.width, x, matrices)?
                .gated_halves(gate, false)
        } else {
            let gated = self.expert_linear("ffn_gate", experts, experts.width, x, matrices)?;
            gated.gated(gate, self.expert_linear("ffn_up", experts, experts.width, x, matrices)?)
        };
        let results = self.expert_linear("ffn_down", experts, width, inner, matrices)?;
        let _scope = self.model.g.scope(&self.name("ffn_experts"));
        Ok(results.sum_experts(matrices.route.weights))
    }

    /// The product of each row `[t, used or 1, k]` with its expert's matrix, `[t, used, out]`, times the expert's scale and
    /// plus its bias where the file has them.
    fn expert_linear(
        &self,
        part: &str,
        experts: Experts,
        out: usize,
        x: Value<'g>,
        matrices: ExpertMatrices<'g>,
    ) -> Result<Value<'g>> {
        let name = self.name(&format!("{part}_exps"));
        let _scope = self.model.g.scope(&name);
        let ExpertMatrices { count: own, slots: in_slots, ids, route } = matrices;
        let (weights, count) = (&self.model.weights, experts.count);
        let (layer, columns) = (format!("blk.{}", self.index), x.shape().cols());
        let stack = if in_slots {
            weights.expert_slots(&layer, part, [count, out, columns], own)?
        } else {
            let first = weights.ranks().map_or(0, |ranks| ranks.first_expert(self.index));
            weights.experts(&layer, part, first, [own, out, columns])?
        };
        let mut y = stack.mul_mat_id(x, ids);
        if let Some(scales) = weights.find_vector(&format!("{name}.scale"), count)? {
            let (tokens, used) = (ids.shape().rows(), ids.shape().cols());
            let scales = scales.reshape([count, 1]).get_rows(route.ids.reshape([tokens * used]));
            y = y.mul(scales.reshape([tokens, used, 1]));
        }
        // Where adapters change experts, none are in slots.
        for added in weights.low_rank_experts(&format!("{name}.weight"), [count, out, columns], x, ids)? {
            y = y.add(added);
        }
        let biases = match in_slots {
            true => weights.find_vector_slots(&format!("{name}.bias"), [count, out], own)?,
            false => weights.find_vectors(&format!("{name}.bias"), [own, out])?,
        };
        Ok(match biases {
            Some(biases) => y.add_id(biases, ids),
            None => y,
        })
    }

    /// The result of the expert that all rows use, times the sigmoid of a gate where the model has one; `None` if there is
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
        if !experts.shared_gate {
            return Ok(Some(shared));
        }
        let weight = self.model.weights.row(&name, x.shape().cols())?;
        Ok(Some(shared.mul(weight.mul_mat(x).sigmoid())))
    }
}
