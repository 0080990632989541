//! Granite 3 and 4 (dense): Llama's layers, with factors of the embedding, of attention scores, of each branch and of the
//! logits.

use quadriga_graph::Pairing;

use super::architecture::Architecture;
use super::llama;
use crate::Result;
use crate::hyperparameters::{Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "granite",
    models: "Granite 3 and 4 (dense)",
    pairing: Pairing::Adjacent,
    read,
    ..llama::ARCHITECTURE
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    read_scales(keys, hyper)
}

/// Granite's factors, and whether it has rotary embedding at all.
pub(super) fn read_scales(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.embedding_scale = keys.find_factor("embedding_scale")?.unwrap_or(1.0);
    hyper.residual_scale = keys.find_factor("residual_scale")?.unwrap_or(1.0);
    hyper.attention_scale = keys.find_factor("attention.scale")?;
    // The logits are divided by it.
    hyper.logit_scale = 1.0 / keys.find_factor("logit_scale")?.unwrap_or(1.0);
    if keys.find_flag("rope.scaling.finetuned")? == Some(false) {
        hyper.layers.iter_mut().for_each(|layer| layer.rope = None);
    }
    Ok(())
}
