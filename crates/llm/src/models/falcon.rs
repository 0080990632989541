//! Falcon: attention and a feed-forward network without gate side by side, behind a layer norm that both share or, in the
//! larger models, behind one each. The networks of PowerInfer's files are rectified.

use quadriga_graph::{Pairing, Unary};

use super::architecture::Architecture;
use super::builder::{FeedForward, ModelBuilder};
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, require_bias};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "falcon",
    models: "Falcon 7B and 40B",
    pairing: Pairing::Half,
    norm: NormKind::Layer,
    activation: Activation::Gelu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.require_biases(keys, &["attn_norm", "attn_norm_2"])?;
    require_bias(keys, "output_norm")?;
    hyper.read_rectified(keys, ARCHITECTURE.activation)?;
    hyper.read_predictors(keys)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    let activation = if model.hyper().rectified { Unary::Relu } else { Unary::GeluErf };
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let attention = if layer.has_norm("attn_norm_2") { layer.norm("attn_norm_2", x)? } else { normed };
        let (query, key, value) = layer.query_key_value(attention)?;
        let (normed, input) = (layer.output_rows(normed), layer.output_rows(x));
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        let fed = layer.feed_forward_of(input, normed, FeedForward::Plain(activation))?;
        x = input.add(attended).add(fed);
    }
    model.finish(x)
}
