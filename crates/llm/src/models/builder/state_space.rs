//! The state space of Mamba 2: linear attention whose state decays, and learns values as they are.

use quadriga_graph::{Gate, GatedDeltaRule, Value};

use super::LayerBuilder;
use super::recurrent::{LinearInputs, heads_at};
use crate::Result;
use crate::hyperparameters::LinearAttention;

impl<'g> LayerBuilder<'_, 'g> {
    /// With keys `B`, queries `C` and values `x` of a short convolution and a step `Δ` of each head, the state is
    /// `S ← e^(Δ·A) · S + Δ · B ⊗ x`, and the result `Sᵀ C + D · x`. `None` if no token of the batch is an output and this is
    /// the last layer.
    pub(in crate::models) fn state_space(&self, x: Value<'g>) -> Result<Option<Value<'g>>> {
        let (linear, state) = self.linear_attention()?;
        let LinearAttention { key_heads, value_heads, key_length, value_length } = linear;
        let (inner, keys) = (linear.value_width(), linear.key_width());
        let (n, conv_width) = (self.model.shape.tokens, inner + 2 * keys);
        let all = self.linear("ssm_in", inner + conv_width + value_heads, x)?;
        let gated = {
            let _scope = self.model.g.scope(&self.name("ssm"));
            let weights = &self.model.weights;
            let bias = weights.vector(&self.name("ssm_conv1d.bias"), conv_width)?;
            let xbc = self.convolved("ssm_conv1d.weight", all.slice(1, inner, conv_width))?.add(bias).silu();
            let values = heads_at(xbc, 0, value_heads, value_length);
            let of_heads = |part: &str| weights.elements(&self.name(part), &[value_heads, 1]);
            let steps = all.slice(1, inner + conv_width, value_heads);
            let steps = steps.add(weights.vector(&self.name("ssm_dt.bias"), value_heads)?).softplus();
            let inputs = LinearInputs {
                queries: heads_at(xbc, inner + keys, key_heads, key_length),
                keys: heads_at(xbc, inner, key_heads, key_length),
                values,
                gates: steps.mul(of_heads("ssm_a")?.reshape([value_heads])),
                betas: steps,
            };
            let rule = GatedDeltaRule { scale: 1.0, tiled: false, delta: false };
            let results = self.attend_linearly(linear, state, inputs, rule);
            if self.ends_here() {
                return Ok(None);
            }
            let results = results.add(values.mul(of_heads("ssm_d")?));
            all.slice(1, 0, inner).gated(Gate::Swiglu, results.reshape([n, inner]))
        };
        let grouped = gated.reshape([n, key_heads, inner / key_heads]);
        let normed = self.norm_each_head("ssm_norm", grouped)?.reshape([n, inner]);
        self.linear("ssm_out", self.width(), self.output_rows(normed)).map(Some)
    }
}
