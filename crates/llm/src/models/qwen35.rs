//! Qwen 3.5 and 3.6 (dense): three of four layers are linear attention by the gated delta rule, the others attention with
//! an output gate. The attention rotates a part of each head.

use quadriga_graph::{Gate, Pairing, Value};

use super::architecture::Architecture;
use super::builder::{DeltaLayout, LayerBuilder, ModelBuilder};
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen35",
    models: "Qwen 3.5 and 3.6 (dense)",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.skip_predicting_blocks(keys)?;
    keys.refuse_experts()?;
    read_layers(keys, hyper)
}

/// Reads which layers are recurrent. The others multiply the values of a head by a gate that is as long as its query.
pub(super) fn read_layers(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.read_recurrent(keys)?;
    for layer in hyper.layers.iter().filter(|layer| layer.attention) {
        let wanted = format!("{}, as attention.key_length", layer.key_length);
        keys.check(
            "attention.value_length",
            layer.value_length,
            layer.value_length == layer.key_length,
            &wanted,
        )?;
    }
    Ok(())
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    build_with(model, DeltaLayout::Tiled)
}

/// The graph, with the heads of the delta rule in any order.
pub(super) fn build_with(model: &ModelBuilder<'_>, layout: DeltaLayout) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let mixed = match layer.shape().attention {
            true => gated_attention(&layer, normed)?,
            false => layer.delta_net(normed, layout)?,
        };
        let Some(mixed) = mixed else { return Ok(()) };
        x = layer.residual(layer.output_rows(x), mixed);
        let normed = layer.norm("post_attention_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    model.finish(x)
}

/// Attention whose result is multiplied by a gate. Each head of `attn_q` has the query and then the gate.
fn gated_attention<'g>(layer: &LayerBuilder<'_, 'g>, x: Value<'g>) -> Result<Option<Value<'g>>> {
    let (shape, n) = (layer.shape(), x.shape().rows());
    let (heads, d) = (shape.heads, shape.key_length);
    let both = layer.linear("attn_q", 2 * shape.query_width(), x)?.reshape([n, heads, 2 * d]);
    let query = layer.rope(layer.norm("attn_q_norm", both.slice(2, 0, d))?);
    let key = layer.heads(layer.linear("attn_k", shape.key_width(), x)?);
    let key = layer.rope(layer.norm("attn_k_norm", key)?);
    let value = layer.linear("attn_v", shape.value_width(), x)?;
    let Some(attended) = layer.attend(query, key, value)? else { return Ok(None) };
    let gate = layer.output_rows(both.slice(2, d, d).cont().reshape([n, heads * d]));
    layer.linear("attn_output", layer.width(), attended.mul(gate.sigmoid())).map(Some)
}
