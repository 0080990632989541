//! Recurrent layers: a short convolution and the gated delta rule.
//!
//! A state tensor has a row for each state that is kept. A batch reads one row and writes another, in several pieces,
//! so that the state before the batch stays as it was: a batch that fails or is discarded changes nothing. Row 0 is never
//! written: it is the state of an empty sequence.

use quadriga_graph::{DType, DeltaRuleInputs, Gate, GatedDeltaRule, GraphBuilder, Value};

use super::LayerBuilder;
use crate::hyperparameters::RecurrentShape;
use crate::{Error, Result};

/// The state of the convolution: the tokens before the current one.
const CONV_STATE: &str = "conv_state";
/// The state of the delta rule.
const DELTA_STATE: &str = "delta_state";

/// Whether a state tensor has a row for each recurrent state, and not one for each slot of the KV cache.
pub(crate) fn is_recurrent_state(name: &str) -> bool {
    [CONV_STATE, DELTA_STATE].iter().any(|part| name.rsplit_once('.').is_some_and(|(_, last)| last == *part))
}

/// The pieces of the states that a batch reads and writes, `row · pieces + i` each.
#[derive(Clone, Copy)]
pub(super) struct RecurrentInputs<'g> {
    conv_from: Value<'g>,
    conv_to: Value<'g>,
    delta_from: Value<'g>,
    delta_to: Value<'g>,
}

impl<'g> RecurrentInputs<'g> {
    pub(super) fn new(g: &'g GraphBuilder, shape: &RecurrentShape) -> RecurrentInputs<'g> {
        let input = |name: &str, pieces: usize| g.input(name, DType::I32, [pieces]);
        RecurrentInputs {
            conv_from: input("conv_from", shape.conv_pieces()),
            conv_to: input("conv_to", shape.conv_pieces()),
            delta_from: input("delta_from", shape.delta_pieces()),
            delta_to: input("delta_to", shape.delta_pieces()),
        }
    }
}

/// What differs between architectures with the gated delta rule.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::models) enum DeltaLayout {
    /// Value heads of a key head are consecutive; beta and alpha are one matrix, grouped by key head (Qwen3-Next).
    Grouped,
    /// Value head `i` uses key head `i mod key_heads`; beta and alpha are two matrices (Qwen 3.5).
    Tiled,
}

impl<'g> LayerBuilder<'_, 'g> {
    /// Linear attention by the gated delta rule: `None` if no token of the batch is an output and this is the last layer.
    pub(in crate::models) fn delta_net(
        &self,
        x: Value<'g>,
        layout: DeltaLayout,
    ) -> Result<Option<Value<'g>>> {
        let (shape, state_inputs) = self.recurrent()?;
        let (qkv, z) = self.delta_projections(shape, x)?;
        let (betas, alphas) = self.beta_and_alpha(shape, x, layout)?;
        let normed = {
            let _scope = self.model.g.scope(&self.name("delta"));
            let convolved = self.convolved(shape, state_inputs, qkv)?;
            let [queries, keys, values] = split_heads(shape, convolved);
            let eps = self.model.hyper.norm_epsilon;
            let bias = self.model.weights.vector(&self.name("ssm_dt.bias"), shape.value_heads)?;
            let decay = self.model.weights.vector(&self.name("ssm_a"), shape.value_heads)?;
            let pieces = shape.delta_pieces();
            let states = self.states(DELTA_STATE, pieces, shape.delta_state());
            let dims = [shape.value_heads, shape.key_length, shape.value_length];
            let inputs = DeltaRuleInputs {
                keys: keys.l2_norm(eps),
                values,
                gates: alphas.add(bias).softplus().mul(decay),
                betas: betas.sigmoid(),
                state: states.get_rows(state_inputs.delta_from).reshape(dims),
            };
            let scale = 1.0 / (shape.key_length as f32).sqrt();
            let rule = GatedDeltaRule { scale, tiled: layout == DeltaLayout::Tiled };
            let (results, state) = queries.l2_norm(eps).gated_delta_rule(inputs, rule);
            let pieces = state.reshape([pieces, shape.delta_state() / pieces]);
            states.set_rows(pieces, state_inputs.delta_to);
            if self.ends_here() {
                return Ok(None);
            }
            results
        };
        let n = self.model.shape.tokens;
        let z = z.reshape([n, shape.value_heads, shape.value_length]);
        let gated = z.gated(Gate::Swiglu, self.norm("ssm_norm", normed)?);
        let gated = self.output_rows(gated.reshape([n, shape.value_width()]));
        self.linear("ssm_out", self.model.hyper.width, gated).map(Some)
    }

    fn recurrent(&self) -> Result<(&'g RecurrentShape, RecurrentInputs<'g>)> {
        self.model.hyper.recurrent.as_ref().zip(self.model.recurrent).ok_or_else(|| Error::Hyperparameter {
            key: format!("{}.ssm.state_size", self.model.hyper.architecture),
            value: "missing".to_owned(),
            wanted: "given for recurrent layers".to_owned(),
        })
    }

    /// Queries, keys and values `[n, conv_width]`, and the output gate `[n, value_width]`: two matrices, or one that is
    /// grouped by key head.
    fn delta_projections(&self, shape: &RecurrentShape, x: Value<'g>) -> Result<(Value<'g>, Value<'g>)> {
        if !self.model.weights.has(&self.name("ssm_in.weight")) {
            let qkv = self.linear("attn_qkv", shape.conv_width(), x)?;
            return Ok((qkv, self.linear("attn_gate", shape.value_width(), x)?));
        }
        let (n, heads, d) = (self.model.shape.tokens, shape.key_heads, shape.key_length);
        let values = shape.value_width() / heads;
        let group = 2 * (d + values);
        let all = self.linear("ssm_in", heads * group, x)?.reshape([n, heads, group]);
        let part = |first: usize, len: usize| all.slice(2, first, len).cont().reshape([n, heads * len]);
        let qkv = part(0, d).concat(1, &[part(d, d), part(2 * d, values)]);
        Ok((qkv, part(2 * d + values, values)))
    }

    /// The inputs of the learning rate and of the decay, `[n, value_heads]` each.
    fn beta_and_alpha(
        &self,
        shape: &RecurrentShape,
        x: Value<'g>,
        layout: DeltaLayout,
    ) -> Result<(Value<'g>, Value<'g>)> {
        let (n, heads) = (self.model.shape.tokens, shape.value_heads);
        if layout == DeltaLayout::Tiled {
            return Ok((self.linear("ssm_beta", heads, x)?, self.linear("ssm_alpha", heads, x)?));
        }
        let each = heads / shape.key_heads;
        let both = self.linear("ssm_ba", 2 * heads, x)?.reshape([n, shape.key_heads, 2 * each]);
        let part = |first: usize| both.slice(2, first, each).cont().reshape([n, heads]);
        Ok((part(0), part(each)))
    }

    /// The causal convolution of the tokens, after those that its state remembers.
    fn convolved(
        &self,
        shape: &RecurrentShape,
        inputs: RecurrentInputs<'g>,
        qkv: Value<'g>,
    ) -> Result<Value<'g>> {
        let (n, before, pieces) = (self.model.shape.tokens, shape.conv_kernel - 1, shape.conv_pieces());
        let states = self.states(CONV_STATE, pieces, shape.conv_state());
        let remembered = states.get_rows(inputs.conv_from).reshape([before, shape.conv_width()]);
        let all = remembered.concat(0, &[qkv]);
        let last = all.slice(0, n, before).reshape([pieces, shape.conv_state() / pieces]);
        states.set_rows(last, inputs.conv_to);
        let dims = [shape.conv_width(), shape.conv_kernel];
        let kernel = self.model.weights.elements(&self.name("ssm_conv1d.weight"), &dims)?;
        Ok(all.ssm_conv(kernel).silu())
    }

    /// A state tensor of the layer, as rows of its pieces.
    fn states(&self, part: &str, pieces: usize, len: usize) -> Value<'g> {
        let rows = self.model.shape.state_rows;
        let states = self.model.g.state(&self.name(part), DType::F32, [rows, pieces, len / pieces]);
        states.reshape([rows * pieces, len / pieces])
    }
}

/// Queries, keys and values `[n, heads, d]` as views of the convolution's result.
fn split_heads<'g>(shape: &RecurrentShape, all: Value<'g>) -> [Value<'g>; 3] {
    let (n, row) = (all.shape().rows(), 4 * shape.conv_width());
    let part =
        |first: usize, heads: usize, d: usize| all.view([n, heads, d], [n * row, row, 4 * d, 4], 4 * first);
    let (keys, d) = (shape.key_width(), shape.key_length);
    [
        part(0, shape.key_heads, d),
        part(keys, shape.key_heads, d),
        part(2 * keys, shape.value_heads, shape.value_length),
    ]
}
