//! Gemma 2: a norm before and after both parts of a layer, every other layer with a window, soft-capped attention scores
//! and logits.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use super::gemma;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "gemma2",
    models: "Gemma 2",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::GeluTanh,
    read,
    build,
};

/// The number of layers of the 27B model.
const LARGEST: usize = 46;

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    gemma::read(keys, hyper)?;
    gemma::read_attention_scale(hyper, LARGEST);
    hyper.attention_soft_cap = Some(keys.positive("attn_logit_softcapping", 50.0)?);
    hyper.logit_soft_cap = Some(keys.positive("final_logit_softcapping", 30.0)?);
    hyper.require_windows(keys, Some(4096), WindowPattern::Period(2))
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        x = x.add(layer.norm("post_attention_norm", attended)?);
        let fed = layer.feed_forward(layer.norm("ffn_norm", x)?, Gate::Geglu)?;
        x = x.add(layer.norm("post_ffw_norm", fed)?);
    }
    model.finish(x)
}
