//! Gemma 3: Gemma 2's layers with a norm of each query and key head in place of the soft cap. Five of six layers have a
//! window and a rotary embedding of their own, which is never scaled.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use super::gemma;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "gemma3",
    models: "Gemma 3 (text)",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::GeluTanh,
    read,
    build,
};

/// The number of layers of the 27B model.
const LARGEST: usize = 62;

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    gemma::read(keys, hyper)?;
    gemma::read_attention_scale(hyper, LARGEST);
    hyper.logit_soft_cap = keys.find_factor("final_logit_softcapping")?;
    hyper.require_windows(keys, None, WindowPattern::Period(6))?;
    let base = keys.positive("rope.freq_base_swa", 10_000.0)?;
    hyper.window_ropes().for_each(|rope| {
        rope.base = base;
        rope.scale = 1.0;
    });
    Ok(())
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        let query = layer.rope(layer.norm("attn_q_norm", query)?);
        let key = layer.rope(layer.norm("attn_k_norm", key)?);
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(query, key, value)? else { return Ok(()) };
        x = x.add(layer.norm("post_attention_norm", attended)?);
        let fed = layer.feed_forward(layer.norm("ffn_norm", x)?, Gate::Geglu)?;
        x = x.add(layer.norm("post_ffw_norm", fed)?);
    }
    model.finish(x)
}
