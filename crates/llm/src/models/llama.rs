//! Llama 1 to 3, Mistral, Mixtral, SmolLM and others: pre-norm layers of grouped-query attention and a gated feed-forward
//! network or, in Mixtral, experts.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::{FeedForward, ModelBuilder};
use crate::Result;
use crate::hyperparameters::{Activation, ExpertDefaults, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "llama",
    models: "Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM 1 and 2, ReluLLaMA, ProSparse",
    pairing: Pairing::Adjacent,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read: read_rectified,
    build,
};

/// The same for models whose feed-forward networks may be rectified.
fn read_rectified(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    read(keys, hyper)?;
    hyper.read_rectified(keys, ARCHITECTURE.activation)?;
    hyper.read_predictors(keys)
}

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
    let gate = if model.hyper().rectified { Gate::Reglu } else { Gate::Swiglu };
    build_with(model, FeedForward::Gated(gate))
}

/// The same with another feed-forward network.
pub(super) fn build_with(model: &ModelBuilder<'_>, kind: FeedForward) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        x = layer.residual(x, attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward_of(x, normed, kind)?);
    }
    model.finish(x)
}
