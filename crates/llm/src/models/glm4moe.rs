//! GLM 4.5, 4.6 and 4.7 with experts: biases on queries, keys and values, in some models norms of their heads, RoPE on a part of
//! each head; dense layers first, then experts with a selection bias, one of them for all tokens.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, ExpertDefaults, Gating, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "glm4moe",
    models: "GLM 4.5, 4.6 and 4.7 with experts",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.skip_predicting_blocks(keys)?;
    hyper.require_biases(keys, &["exp_probs_b"])?;
    hyper.require_all_or_none(keys, &["attn_q_norm", "attn_k_norm"])?;
    let defaults = ExpertDefaults {
        gating: Gating::Sigmoid,
        normalize: false,
        width: ExpertDefaults::SHARE_OF_DENSE,
        ..ExpertDefaults::NORMALIZED_SOFTMAX
    };
    hyper.read_experts(keys, defaults)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        let query = layer.rope(layer.find_norm("attn_q_norm", query)?);
        let key = layer.rope(layer.find_norm("attn_k_norm", key)?);
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(query, key, value)? else { return Ok(()) };
        x = layer.residual(x, attended);
        let normed = layer.norm("post_attention_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    model.finish(x)
}
