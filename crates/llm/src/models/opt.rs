//! OPT: positions are embedded, norms are layer norms with biases, and the feed-forward network is a rectified one without
//! gate.

use quadriga_graph::{Pairing, Unary};

use super::architecture::Architecture;
use super::builder::{FeedForward, ModelBuilder};
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, require_bias};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "opt",
    models: "OPT",
    pairing: Pairing::Half,
    norm: NormKind::Layer,
    activation: Activation::Relu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    let parts = ["attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"];
    hyper.require_biases(keys, &parts)?;
    require_bias(keys, "output_norm")?;
    // Positions are embedded.
    hyper.layers.iter_mut().for_each(|layer| layer.rope = None);
    hyper.rectified = true;
    hyper.read_predictors(keys)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed_offset_position(model.embed()?)?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(query, key, value)? else {
            return Ok(());
        };
        x = layer.residual(x, attended);
        let normed = layer.norm("ffn_norm", x)?;
        let fed = layer.feed_forward_of(x, normed, FeedForward::Plain(Unary::Relu))?;
        x = layer.residual(x, fed);
    }
    model.finish(x)
}
