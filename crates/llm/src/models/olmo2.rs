//! OLMo 2 and 3: norms after attention and feed-forward instead of before, and a norm over all queries and all keys of a
//! token. OLMo 3 has windows in three of four layers; their rotary embedding is never scaled.

use quadriga_graph::{Gate, Pairing, Rope};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "olmo2",
    models: "OLMo 2 and 3",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    keys.require_tensor("output.weight")?;
    hyper.read_windows(keys, None, WindowPattern::Period(4))?;
    // It is not scaled.
    hyper.window_ropes().for_each(|rope| *rope = Rope::new(rope.dims, rope.pairing, rope.base));
    Ok(())
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let (query, key, value) = layer.projections(x)?;
        let (query, key) = layer.normed_projections(query, key)?;
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        x = x.add(layer.norm("post_attention_norm", attended)?);
        let fed = layer.feed_forward(x, Gate::Swiglu)?;
        x = x.add(layer.norm("post_ffw_norm", fed)?);
    }
    model.finish(x)
}
