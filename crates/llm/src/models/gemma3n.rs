//! Gemma 3n: Gemma 3's layers over parallel residual streams, with a low-rank branch beside attention, inputs of their own,
//! and gates of which most are cut to 0 in the first layers. The last layers attend to keys and values of earlier ones.

use quadriga_graph::{Gate, Pairing, Value};

use super::architecture::Architecture;
use super::builder::{KeyValues, LayerBuilder, ModelBuilder, first_stream};
use super::gemma;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, WindowPattern};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "gemma3n",
    models: "Gemma 3n (text)",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::GeluTanh,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    gemma::read(keys, hyper)?;
    hyper.attention_scale = Some(1.0);
    hyper.logit_soft_cap = Some(keys.positive("final_logit_softcapping", 30.0)?);
    hyper.require_windows(keys, None, WindowPattern::Period(5))?;
    let base = keys.positive("rope.freq_base_swa", 10_000.0)?;
    hyper.window_ropes().for_each(|rope| {
        rope.base = base;
        rope.scale = 1.0;
    });
    hyper.read_streams(keys)?;
    hyper.read_gate_cuts(keys)?;
    hyper.read_shared_caches(keys)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let x = model.embed()?;
    let inputs = model.layer_inputs(x)?;
    let mut streams = model.split_streams(x)?;
    let mut caches = Vec::new();
    for layer in model.layers() {
        let router = layer.stream_router()?;
        let predictions = layer.predict_streams(router, streams)?;
        let active = first_stream(predictions);
        let normed = layer.norm("attn_norm", active)?;
        let Some(attended) = attention(&layer, normed, &mut caches)? else { return Ok(()) };
        let attended = layer.output_rows(active).add(layer.norm("post_attention_norm", attended)?);
        let laurel = layer.laurel(layer.output_rows(normed))?;
        let mixed = attended.add(laurel).scale(std::f32::consts::FRAC_1_SQRT_2);
        let fed = layer.feed_forward_with_cut(layer.norm("ffn_norm", mixed)?, Gate::Geglu)?;
        let computed = mixed.add(layer.norm("post_ffw_norm", fed)?);
        let corrected = layer.correct_streams(router, layer.output_streams(predictions), computed)?;
        streams = layer.add_layer_input(corrected, inputs)?;
    }
    model.finish(model.join_streams(streams)?)
}

/// Attention with norms of queries, keys and values, over the layer's own KV cache or one of those before it.
fn attention<'g>(
    layer: &LayerBuilder<'_, 'g>,
    x: Value<'g>,
    caches: &mut Vec<KeyValues<'g>>,
) -> Result<Option<Value<'g>>> {
    let shape = layer.shape();
    let cached = shape.shares_cache_of.and_then(|source| caches.get(source).copied());
    let (query, cached) = match cached {
        Some(cached) => (layer.heads(layer.linear("attn_q", shape.query_width(), x)?), cached),
        None => {
            let (query, key, value) = layer.query_key_value(x)?;
            let key = layer.rope(layer.norm("attn_k_norm", key)?);
            let (n, width) = (value.shape().rows(), shape.value_width());
            let value = layer.plain_norm(value.reshape([n, shape.kv_heads, shape.value_length]));
            let cached = layer.cache_key_value(key, value.reshape([n, width]))?;
            caches.push(cached);
            (query, cached)
        }
    };
    if layer.ends_here() {
        return Ok(None);
    }
    let query = layer.rope(layer.norm("attn_q_norm", query)?);
    let attended = layer.attend_to(query, cached)?;
    layer.linear("attn_output", layer.width(), attended).map(Some)
}
