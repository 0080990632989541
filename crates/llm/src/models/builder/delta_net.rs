//! Linear attention by the gated delta rule, behind a short convolution.

use quadriga_graph::{Gate, GatedDeltaRule, Value};

use super::LayerBuilder;
use super::recurrent::{LinearInputs, heads_at};
use crate::Result;
use crate::hyperparameters::LinearAttention;

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
        let (linear, state) = self.linear_attention()?;
        let (qkv, z) = self.delta_projections(linear, x)?;
        let (betas, alphas) = self.beta_and_alpha(linear, x, layout)?;
        let LinearAttention { key_heads, value_heads, key_length, value_length } = linear;
        let normed = {
            let _scope = self.model.g.scope(&self.name("delta"));
            let convolved = self.convolved("ssm_conv1d.weight", qkv)?.silu();
            let keys = linear.key_width();
            let eps = self.model.hyper.norm_epsilon;
            let bias = self.model.weights.vector(&self.name("ssm_dt.bias"), value_heads)?;
            let decay = self.model.weights.vector(&self.name("ssm_a"), value_heads)?;
            let inputs = LinearInputs {
                queries: heads_at(convolved, 0, key_heads, key_length).l2_norm(eps),
                keys: heads_at(convolved, keys, key_heads, key_length).l2_norm(eps),
                values: heads_at(convolved, 2 * keys, value_heads, value_length),
                gates: alphas.add(bias).softplus().mul(decay),
                betas: betas.sigmoid(),
            };
            let scale = 1.0 / (key_length as f32).sqrt();
            let rule = GatedDeltaRule { scale, tiled: layout == DeltaLayout::Tiled, delta: true };
            let results = self.attend_linearly(linear, state, inputs, rule);
            if self.ends_here() {
                return Ok(None);
            }
            results
        };
        let n = self.model.shape.tokens;
        let z = z.reshape([n, value_heads, value_length]);
        let gated = z.gated(Gate::Swiglu, self.norm("ssm_norm", normed)?);
        let gated = self.output_rows(gated.reshape([n, linear.value_width()]));
        self.linear("ssm_out", self.model.hyper.width, gated).map(Some)
    }

    /// Queries, keys and values `[n, conv_width]`, and the output gate `[n, value_width]`: two matrices, or one that is
    /// grouped by key head.
    fn delta_projections(&self, linear: LinearAttention, x: Value<'g>) -> Result<(Value<'g>, Value<'g>)> {
        if !self.model.weights.has(&self.name("ssm_in.weight")) {
            let width = 2 * linear.key_width() + linear.value_width();
            let qkv = self.linear("attn_qkv", width, x)?;
            return Ok((qkv, self.linear("attn_gate", linear.value_width(), x)?));
        }
        let (n, heads, d) = (self.model.shape.tokens, linear.key_heads, linear.key_length);
        let values = linear.value_width() / heads;
        let group = 2 * (d + values);
        let all = self.linear("ssm_in", heads * group, x)?.reshape([n, heads, group]);
        let part = |first: usize, len: usize| all.slice(2, first, len).cont().reshape([n, heads * len]);
        let qkv = part(0, d).concat(1, &[part(d, d), part(2 * d, values)]);
        Ok((qkv, part(2 * d + values, values)))
    }

    /// The inputs of the learning rate and of the decay, `[n, value_heads]` each.
    fn beta_and_alpha(
        &self,
        linear: LinearAttention,
        x: Value<'g>,
        layout: DeltaLayout,
    ) -> Result<(Value<'g>, Value<'g>)> {
        let (n, heads) = (self.model.shape.tokens, linear.value_heads);
        if layout == DeltaLayout::Tiled {
            return Ok((self.linear("ssm_beta", heads, x)?, self.linear("ssm_alpha", heads, x)?));
        }
        let each = heads / linear.key_heads;
        let both = self.linear("ssm_ba", 2 * heads, x)?.reshape([n, linear.key_heads, 2 * each]);
        let part = |first: usize| both.slice(2, first, each).cont().reshape([n, heads]);
        Ok((part(0), part(each)))
    }
}
