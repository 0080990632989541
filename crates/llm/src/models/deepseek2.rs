//! DeepSeek V2 and V3, and models of their kind (Kimi K2, GLM 4.7 Flash): multi-head latent attention; dense layers first,
//! then experts, some of them for all tokens.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, ExpertDefaults, Gating, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "deepseek2",
    models: "DeepSeek V2, V2 Lite, V3 and R1, Kimi K2, GLM 4.7 Flash",
    pairing: Pairing::Adjacent,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.skip_predicting_blocks(keys)?;
    let key = "attention.temperature_scale";
    if let Some(scale) = keys.find_factor(key)? {
        return Err(keys.wrong(key, scale, "absent: attention of that kind is not supported"));
    }
    let latent = hyper.read_latent_attention(keys)?;
    let magnitude = read_yarn(keys, hyper)?;
    hyper.attention_scale = Some((magnitude.powi(2) / (latent.key_length() as f64).sqrt()) as f32);
    let gating = if is_glm_flash(hyper) { Gating::Sigmoid } else { Gating::Softmax };
    let defaults = ExpertDefaults { gating, normalize: false, ..ExpertDefaults::NORMALIZED_SOFTMAX };
    hyper.read_experts(keys, defaults)?;
    hyper.set_group_scores(keys)
}

/// YaRN scales attention scores instead of the rotated elements, by the square of the returned factor.
fn read_yarn(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<f64> {
    let key = "rope.scaling.yarn_log_multiplier";
    let Some(multiplier) = keys.find_factor(key)? else { return Ok(1.0) };
    let mut result = 1.0;
    let base = keys.positive("rope.scaling.attn_factor", 1.0)?;
    for rope in hyper.layers.iter_mut().filter_map(|layer| layer.rope.as_mut()) {
        if rope.ext_factor == 0.0 {
            continue;
        }
        let logarithm = (1.0 / f64::from(rope.scale)).max(1.0).ln();
        rope.attn_factor = (f64::from(base) / (1.0 + 0.1 * logarithm)) as f32;
        // Files have a tenth of the model's own multiplier.
        result = 1.0 + f64::from(multiplier) * logarithm;
    }
    if !(result.powi(2) as f32).is_finite() {
        return Err(keys.wrong(key, multiplier, "smaller: the factor of attention scores is not finite"));
    }
    Ok(result)
}

/// GLM 4.7 Flash, whose first files do not name the gating function.
fn is_glm_flash(hyper: &Hyperparameters) -> bool {
    (47..=48).contains(&hyper.layers.len()) && hyper.vocabulary == 154_880
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        x = layer.output_rows(x);
        let Some(attended) = layer.latent_attention(normed)? else { return Ok(()) };
        x = layer.residual(x, attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    model.finish(x)
}
