//! Gemma 1: Llama's layers with a scaled embedding and GELU.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "gemma",
    models: "Gemma 1",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::GeluTanh,
    read,
    build,
};

/// The embedding is scaled by the root of its width in all of the family.
pub(super) fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.embedding_scale = (hyper.width as f32).sqrt();
    Ok(())
}

/// The scale of attention scores in models of this many layers: by the width per query head instead of the head length.
pub(super) fn read_attention_scale(hyper: &mut Hyperparameters, layers: usize) {
    if let Some(first) = hyper.layers.first().filter(|_| hyper.layers.len() == layers) {
        let length = hyper.width / first.heads.max(1);
        hyper.attention_scale = Some(1.0 / (length.max(1) as f32).sqrt());
    }
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
        x = x.add(attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = x.add(layer.feed_forward(normed, Gate::Geglu)?);
    }
    model.finish(x)
}
