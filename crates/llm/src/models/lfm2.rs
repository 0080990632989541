//! LFM 2: most layers are short convolutions with gates, the others attention with norms of queries and keys.

use quadriga_graph::{Gate, Pairing, Value};

use super::architecture::Architecture;
use super::builder::{LayerBuilder, ModelBuilder};
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "lfm2",
    models: "LFM2 (dense)",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    read_layers(keys, hyper)
}

/// The layers without their feed-forward networks.
pub(super) fn read_layers(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.read_short_convolutions(keys)?;
    hyper.read_windows(keys, None, WindowPattern::All)
}

pub(super) fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let mixed = match layer.shape().attention {
            true => attention(&layer, normed)?,
            false => layer.short_convolution(normed)?,
        };
        let Some(mixed) = mixed else { return Ok(()) };
        x = layer.residual(layer.output_rows(x), mixed);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    // Files have the last norm under the name of the first.
    model.finish_with_norm("token_embd_norm", x)
}

fn attention<'g>(layer: &LayerBuilder<'_, 'g>, x: Value<'g>) -> Result<Option<Value<'g>>> {
    let (query, key, value) = layer.query_key_value(x)?;
    let query = layer.rope(layer.norm("attn_q_norm", query)?);
    let key = layer.rope(layer.norm("attn_k_norm", key)?);
    layer.attention(query, key, value)
}
