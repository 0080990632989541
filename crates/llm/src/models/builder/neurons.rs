//! Feed-forward networks with few active neurons: rows of inactive ones are not read.

use quadriga_graph::{Gate, Unary, Value};

use super::LayerBuilder;
use super::weights::LowRank;
use crate::Result;
use crate::models::neurons::NeuronMode;

/// What a feed-forward network computes before its last matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::models) enum FeedForward {
    /// `activation(gate(x)) · up(x)`
    Gated(Gate),
    /// `relu(gate(x)) · relu(up(x))`
    RectifiedBoth,
    /// `activation(up(x))`
    Plain(Unary),
}

impl FeedForward {
    /// Whether inactive neurons are exactly 0.
    fn is_rectified(self) -> bool {
        matches!(
            self,
            FeedForward::Gated(Gate::Reglu) | FeedForward::RectifiedBoth | FeedForward::Plain(Unary::Relu)
        )
    }
}

/// A matrix with a row for each neuron, and what the file has beside it.
struct NeuronMatrix<'g> {
    part: String,
    weight: Value<'g>,
    scale: Option<Value<'g>>,
    bias: Option<Value<'g>>,
    /// What adapters add.
    added: Vec<LowRank<'g>>,
}

/// The output with the activations of a layer's neurons, of which the inactive ones are 0.
pub(crate) fn active_output(layer: usize) -> String {
    format!("neurons.{layer}")
}

/// The output with the activations of a layer's neurons that its predictor missed.
pub(crate) fn missed_output(layer: usize) -> String {
    format!("missed_neurons.{layer}")
}

/// The output that has 1 for each neuron of a layer that its predictor expects to be active.
pub(crate) fn predicted_output(layer: usize) -> String {
    format!("predicted_neurons.{layer}")
}

impl<'g> LayerBuilder<'_, 'g> {
    /// The feed-forward network of normed rows `[t, width]`, or the layer's experts. A predictor reads the rows before the
    /// norm, `input`.
    pub(in crate::models) fn feed_forward_of(
        &self,
        input: Value<'g>,
        x: Value<'g>,
        kind: FeedForward,
    ) -> Result<Value<'g>> {
        match (kind, self.shape.experts) {
            (FeedForward::Gated(gate), Some(experts)) => self.mixture(experts, x, x, gate),
            (FeedForward::Gated(gate), None) if self.has_fused_gate()? => self.fused_dense(x, gate),
            _ => self.neurons(input, x, kind),
        }
    }

    /// A feed-forward network with a row for each neuron in every matrix.
    pub(super) fn neurons(&self, input: Value<'g>, x: Value<'g>, kind: FeedForward) -> Result<Value<'g>> {
        let neurons = self.model.shape.neurons;
        let mask = match neurons.mode {
            NeuronMode::Predicted if kind.is_rectified() => self.predict(input)?,
            _ => None,
        };
        let skips = match neurons.mode {
            NeuronMode::Dense => false,
            _ => kind.is_rectified() || neurons.gate_threshold() > 0.0,
        };
        let columns = x.shape().cols();
        let inner = match kind {
            FeedForward::Plain(activation) => {
                let up = self.matrix("ffn_up", columns)?;
                let active = self.cut(self.rows_of(&up, x, mask).unary(activation));
                self.observe(&up, x, active, mask, activation);
                active
            }
            FeedForward::Gated(_) | FeedForward::RectifiedBoth => {
                let (gate, up) = (self.matrix("ffn_gate", columns)?, self.matrix("ffn_up", columns)?);
                let both = kind == FeedForward::RectifiedBoth;
                let gate_kind = if let FeedForward::Gated(gate) = kind { gate } else { Gate::Reglu };
                // A gate is not negative, so that the product's sign is that of the other factor.
                let rectified = |value: Value<'g>| if both { value.unary(Unary::Relu) } else { value };
                if skips {
                    let activation = activation_of(gate_kind);
                    let gates = self.cut(self.rows_of(&gate, x, mask).unary(activation));
                    if let Some(slots) = self.slots_beside(&up).filter(|_| mask.is_none()) {
                        return self.divided(x, gates, &up, rectified, slots);
                    }
                    self.observe(&gate, x, gates, mask, activation);
                    rectified(self.rows_of(&up, x, Some(gates)))
                } else {
                    let gates = self.rows_of(&gate, x, None);
                    gates.gated(gate_kind, rectified(self.rows_of(&up, x, None)))
                }
            }
        };
        self.down(inner)
    }

    /// A gated feed-forward network whose activated gates are known, and 0 for inactive neurons: rows of these are not read.
    pub(super) fn active_rows(&self, x: Value<'g>, gates: Value<'g>) -> Result<Value<'g>> {
        let up = self.matrix("ffn_up", x.shape().cols())?;
        if let Some(slots) = self.slots_beside(&up) {
            return self.divided(x, gates, &up, |value| value, slots);
        }
        if self.model.shape.neurons.observe {
            self.model.g.output(&active_output(self.index), gates);
        }
        self.down(self.rows_of(&up, x, Some(gates)))
    }

    /// The slots for rows of this layer's neurons, if it has some and its matrices have nothing beside their rows.
    fn slots_beside(&self, up: &NeuronMatrix<'g>) -> Option<usize> {
        let plain = up.scale.is_none() && up.bias.is_none() && up.added.is_empty() && self.has_transposed();
        Some(self.model.neuron_slots(self.index)).filter(|slots| *slots > 0 && plain)
    }

    fn has_transposed(&self) -> bool {
        self.model.weights.has(&self.name("ffn_down_t.weight"))
    }

    /// A feed-forward network whose active neurons a device computes as far as their rows are in its slots, and the host the
    /// others, at the same time: nothing before the last addition needs the results of both.
    fn divided(
        &self,
        x: Value<'g>,
        gates: Value<'g>,
        up: &NeuronMatrix<'g>,
        rectified: impl Fn(Value<'g>) -> Value<'g>,
        slots: usize,
    ) -> Result<Value<'g>> {
        let (g, weights, neurons) = (self.model.g, &self.model.weights, gates.shape().cols());
        let [ids, on_host, all] = self.model.neuron_tables(neurons);
        let of_layer = |table: Value<'g>| table.slice(0, self.index, 1);
        // The host has the gates then, so that it knows which neurons are active.
        let seen = gates.mul(all);
        if self.model.shape.neurons.observe {
            g.output(&active_output(self.index), seen);
        }
        let host = self.down(rectified(self.rows_of(up, x, Some(seen.mul(of_layer(on_host))))))?;
        let _scope = g.scope(&self.name("ffn_neurons"));
        let dims = [neurons, x.shape().cols()];
        let ids = of_layer(ids).slice(1, 0, slots).reshape([slots]);
        let inner =
            weights.row_slots(&self.name("ffn_up.weight"), dims, slots)?.mul_mat_sparse(x, gates, Some(ids));
        let dims = [neurons, self.model.hyper.width];
        let device =
            weights.row_slots(&self.name("ffn_down_t.weight"), dims, slots)?.axpy_sparse(rectified(inner));
        let device = match weights.find_vector(&self.name("ffn_down_t.scale"), 1)? {
            Some(scale) => device.mul(scale),
            None => device,
        };
        Ok(device.add(host))
    }

    /// The last matrix of a feed-forward network, which files may have transposed: a row for each neuron.
    pub(super) fn down(&self, inner: Value<'g>) -> Result<Value<'g>> {
        let (width, neurons) = (self.model.hyper.width, inner.shape().cols());
        let (weights, transposed) = (&self.model.weights, self.name("ffn_down_t.weight"));
        if !self.has_transposed() {
            return self.linear("ffn_down", width, inner);
        }
        let _scope = self.model.g.scope(&self.name("ffn_down_t"));
        let mut y = weights.get(&transposed, &[neurons, width])?.axpy_sparse(inner);
        if let Some(scale) = weights.find_vector(&self.name("ffn_down_t.scale"), 1)? {
            y = y.mul(scale);
        }
        // Where ranks have rows of the matrix, each has a part of the sum.
        if let Some(ranks) = weights.ranks().and_then(|ranks| ranks.after_product(&self.name("ffn_down_t"))) {
            y = y.all_reduce(ranks);
        }
        for bias in ["ffn_down_t.bias", "ffn_down.bias"] {
            if let Some(bias) = weights.find_vector(&self.name(bias), width)? {
                y = y.add(bias);
            }
        }
        Ok(y)
    }

    /// A matrix with a row for each neuron.
    fn matrix(&self, part: &str, columns: usize) -> Result<NeuronMatrix<'g>> {
        let (weights, name, neurons) = (&self.model.weights, self.name(part), self.feed_forward_width()?);
        Ok(NeuronMatrix {
            weight: weights.get(&format!("{name}.weight"), &[neurons, columns])?,
            scale: weights.find_vector(&format!("{name}.scale"), 1)?,
            bias: weights.find_vector(&format!("{name}.bias"), neurons)?,
            added: weights.low_rank(&format!("{name}.weight"), [neurons, columns])?,
            part: name,
        })
    }

    /// The products of `x` with the rows of a matrix; with gates, times these, of the active neurons only.
    fn rows_of(&self, matrix: &NeuronMatrix<'g>, x: Value<'g>, gates: Option<Value<'g>>) -> Value<'g> {
        let _scope = self.model.g.scope(&matrix.part);
        let mut y = match gates {
            None => matrix.weight.mul_mat(x),
            Some(gates) => matrix.weight.mul_mat_sparse(x, gates, None),
        };
        if let Some(scale) = matrix.scale {
            y = y.mul(scale);
        }
        for added in &matrix.added {
            let product = added.product(x);
            y = y.add(gates.map_or(product, |gates| gates.mul(product)));
        }
        match (matrix.bias, gates) {
            (None, _) => y,
            (Some(bias), None) => y.add(bias),
            (Some(bias), Some(gates)) => y.add(gates.mul(bias)),
        }
    }

    /// Gates with those of small magnitude set to 0, if there is a threshold.
    fn cut(&self, gates: Value<'g>) -> Value<'g> {
        let threshold = self.model.shape.neurons.gate_threshold();
        if threshold > 0.0 && self.model.shape.neurons.mode != NeuronMode::Dense {
            gates.mul(gates.unary(Unary::Abs).scale_bias(1.0, -threshold).unary(Unary::Step))
        } else {
            gates
        }
    }

    /// For each neuron 1 if the layer's predictor expects it to be active, else 0; `None` without predictors.
    fn predict(&self, input: Value<'g>) -> Result<Option<Value<'g>>> {
        let weights = &self.model.weights;
        let Some(threshold) = self.model.hyper.predictor_threshold else { return Ok(None) };
        let (neurons, width) = (self.feed_forward_width()?, input.shape().cols());
        let first = self.name("fc1.weight");
        let _scope = self.model.g.scope(&self.name("predictor"));
        let rank = weights.rows(&first).unwrap_or(0);
        let inner = weights.get(&first, &[rank, width])?.mul_mat(input).unary(Unary::Relu);
        let scores = weights.get(&self.name("fc2.weight"), &[neurons, rank])?.mul_mat(inner);
        Ok(Some(scores.scale_bias(1.0, -threshold).unary(Unary::Step)))
    }

    /// Makes the activations of the neurons an output, if they are to be counted, and with a predictor those that it missed.
    fn observe(
        &self,
        matrix: &NeuronMatrix<'g>,
        x: Value<'g>,
        active: Value<'g>,
        mask: Option<Value<'g>>,
        activation: Unary,
    ) {
        if !self.model.shape.neurons.observe {
            return;
        }
        let g = self.model.g;
        g.output(&active_output(self.index), active);
        if let Some(mask) = mask {
            let all = self.rows_of(matrix, x, None).unary(activation);
            g.output(&predicted_output(self.index), mask);
            g.output(&missed_output(self.index), all.mul(mask.scale_bias(-1.0, 1.0)));
        }
    }
}

/// The activation of a gate.
pub(super) fn activation_of(gate: Gate) -> Unary {
    match gate {
        Gate::Reglu => Unary::Relu,
        Gate::Geglu => Unary::Gelu,
        Gate::Swiglu | Gate::SwigluOai => Unary::Silu,
    }
}
