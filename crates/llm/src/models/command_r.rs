//! Command R: attention and feed-forward side by side behind one layer norm, scaled logits. Command R+ norms each query and
//! key head with weights of its own.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "command-r",
    models: "Command R and R+",
    pairing: Pairing::Adjacent,
    norm: NormKind::Layer,
    activation: Activation::Silu,
    read,
    build,
};

/// Models of this many layers have norms of queries and keys.
const WITH_HEAD_NORMS: usize = 64;

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.logit_scale = keys.find_factor("logit_scale")?.unwrap_or(1.0);
    Ok(())
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    let head_norms = model.hyper().layers.len() >= WITH_HEAD_NORMS;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (mut query, mut key, value) = layer.query_key_value(normed)?;
        if head_norms {
            query = layer.norm_each_head("attn_q_norm", query)?;
            key = layer.norm_each_head("attn_k_norm", key)?;
        }
        let (normed, residual) = (layer.output_rows(normed), layer.output_rows(x));
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        let fed = layer.feed_forward(normed, Gate::Swiglu)?;
        x = residual.add(fed).add(attended);
    }
    model.finish(x)
}
