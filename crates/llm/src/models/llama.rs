//! Llama 1 to 3, Mistral, Mixtral, SmolLM and others: pre-norm layers of grouped-query attention and a gated feed-forward
//! network or, in Mixtral, experts.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{ExpertDefaults, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "llama",
    models: "Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM 1 and 2",
    pairing: Pairing::Adjacent,
    norm: NormKind::Rms,
    read,
    build,
};

pub(super) fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.find_experts(keys, ExpertDefaults::NORMALIZED_SOFTMAX)?;
    hyper.read_windows(keys, None, WindowPattern::All)
}

/// The same for models without experts.
pub(super) fn read_dense(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    read(keys, hyper)
}

pub(super) fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed();
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        x = layer.residual(x, attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    model.finish(x)
}
