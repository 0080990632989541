//! GLM 4 (dense): a norm before and after both parts of a layer, biases on queries, keys and values, a fused feed-forward
//! network and RoPE on a part of each head.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "glm4",
    models: "GLM 4 (dense)",
    pairing: Pairing::Adjacent,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.skip_predicting_blocks(keys)?;
    // Models that see images rotate in sections, which for text are all the same, and pair the halves of a head.
    if let Some([first, second, ..]) = keys.find_counts("rope.dimension_sections", 4)?.as_deref()
        && *first > 0
        && *second > 0
    {
        hyper
            .layers
            .iter_mut()
            .filter_map(|layer| layer.rope.as_mut())
            .for_each(|rope| rope.pairing = Pairing::Half);
    }
    Ok(())
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
        let fed = layer.feed_forward(layer.norm("ffn_norm", x)?, Gate::Swiglu)?;
        x = x.add(layer.norm("post_ffw_norm", fed)?);
    }
    model.finish(x)
}
