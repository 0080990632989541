//! gpt-oss: biases everywhere, attention sinks, a window in every other layer, YaRN, and experts with a clamped SwiGLU, whose
//! weights are the softmax over the selected ones.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{
    Activation, ExpertDefaults, Gating, Hyperparameters, Keys, NormKind, WindowPattern,
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "gpt-oss",
    models: "gpt-oss 20B and 120B",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

/// The window of files that do not name it.
const WINDOW: usize = 128;

/// The parts of a layer with biases.
const BIASES: &[&str] = &[
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_output",
    "ffn_gate_inp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_gate_up_exps",
    "ffn_down_exps",
];

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.attention_sinks = true;
    keys.require_tensor("output.weight")?;
    hyper.require_biases(keys, BIASES)?;
    hyper.require_windows(keys, Some(WINDOW), WindowPattern::Period(2))?;
    let (gating, normalize) = (Gating::SoftmaxOfSelected, false);
    hyper.read_experts(keys, ExpertDefaults { gating, normalize, ..ExpertDefaults::NORMALIZED_SOFTMAX })
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
        x = layer.residual(x, attended);
        let normed = layer.norm("post_attention_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::SwigluOai)?);
    }
    model.finish(x)
}
