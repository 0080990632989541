//! Llama 4: three of four layers attend to chunks of the context, with rotary embedding and, in the smaller model, norms of
//! queries and keys after it; every fourth attends to everything, without rotary embedding, by queries that grow with
//! their position. In some layers experts, whose inputs are weighted by the sigmoid of the router, and one for all tokens.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{
    Activation, AttentionTemperature, ExpertDefaults, Gating, Hyperparameters, Keys, NormKind, WindowPattern,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "llama4",
    models: "Llama 4 (Scout, Maverick; text)",
    pairing: Pairing::Adjacent,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

/// Layers from one that attends to everything to the next.
const PERIOD: usize = 4;
/// The chunks of files that do not name their size.
const CHUNK: usize = 8192;
/// The growth of queries of files that do not name it.
const TEMPERATURE: AttentionTemperature = AttentionTemperature { scale: 0.1, length: 8192 };
/// The experts of the larger model, Maverick, which has no norms of queries and keys. No key tells.
const WITHOUT_NORMS: usize = 128;

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.chunked_windows = true;
    hyper.require_windows(keys, Some(CHUNK), WindowPattern::Period(PERIOD))?;
    hyper.layers.iter_mut().skip(PERIOD - 1).step_by(PERIOD).for_each(|layer| layer.rope = None);
    hyper.temperature = Some(AttentionTemperature::read(keys, TEMPERATURE)?);
    let defaults = ExpertDefaults {
        gating: Gating::Sigmoid,
        normalize: false,
        shared_width: |_, width| width,
        weighs_inputs: true,
        ..ExpertDefaults::NORMALIZED_SOFTMAX
    };
    hyper.read_interleaved_experts(keys, defaults)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let norms = model.hyper().experts().is_some_and(|experts| experts.count != WITHOUT_NORMS);
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (mut query, mut key, value) = layer.query_key_value(normed)?;
        if layer.shape().rope.is_none() {
            query = layer.tempered(query);
        } else {
            (query, key) = (layer.rope(query), layer.rope(key));
            if norms {
                (query, key) = (layer.plain_norm(query), layer.plain_norm(key));
            }
        }
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(query, key, value)? else { return Ok(()) };
        x = layer.residual(x, attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    model.finish(x)
}
