//! SmallThinker: every fourth layer attends to everything and has no rotary embedding, the others have both window and
//! rotary embedding. The router reads the layer's input, so that the experts are known before attention; their gates are
//! rectified.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, ExpertDefaults, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "smallthinker",
    models: "SmallThinker",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Relu,
    read,
    build,
};

/// Layers from one that attends to everything to the next.
const PERIOD: usize = 4;

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.read_windows(keys, None, WindowPattern::PeriodGlobalFirst(PERIOD))?;
    if hyper.window().is_some() {
        hyper.layers.iter_mut().step_by(PERIOD).for_each(|layer| layer.rope = None);
    }
    hyper.read_experts(keys, ExpertDefaults::NORMALIZED_SOFTMAX)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        let input = layer.output_rows(x);
        let Some(attended) = layer.attention(layer.rope(query), layer.rope(key), value)? else {
            return Ok(());
        };
        x = layer.residual(input, attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward_routed_by(input, normed, Gate::Reglu)?);
    }
    model.finish(x)
}
