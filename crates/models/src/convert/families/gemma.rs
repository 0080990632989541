//! Gemma 1 to 3n.

use super::super::builder::FileBuilder;
use super::super::common::{LayerRules, common_keys, window_rope_base};
use super::super::error::{ConvertError, ConvertResult};
use super::super::output::OutputTensor;
use super::{Family, USUAL};

pub(super) static FAMILIES: &[Family] = &[
    Family {
        classes: &["GemmaForCausalLM"],
        architecture: "gemma",
        ignored: &["lm_head."],
        keys,
        globals: |builder| PLUS_ONE.globals(builder),
        layer: |builder, layer| PLUS_ONE.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
    Family {
        classes: &["Gemma2ForCausalLM"],
        architecture: "gemma2",
        ignored: &["lm_head."],
        keys: gemma2_keys,
        globals: |builder| FOUR_NORMS.globals(builder),
        layer: |builder, layer| FOUR_NORMS.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
    Family {
        classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        architecture: "gemma3",
        ignored: &["lm_head."],
        cuts_embedding: true,
        keys: gemma3_keys,
        globals: |builder| FOUR_NORMS.globals(builder),
        layer: |builder, layer| FOUR_NORMS.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
    Family {
        classes: &["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
        architecture: "gemma3n",
        ignored: &["lm_head."],
        keys: gemma3n_keys,
        globals: gemma3n_globals,
        layer: |builder, layer| GEMMA3N.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
];

const PLUS_ONE: LayerRules = LayerRules { norms_plus_one: true, ..LayerRules::PLAIN };

const FOUR_NORMS: LayerRules = LayerRules {
    parts: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ],
    ..PLUS_ONE
};

const GEMMA3N: LayerRules = LayerRules {
    parts: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("altup.correction_coefs", "altup_correct_coef"),
        ("altup.prediction_coefs", "altup_predict_coef"),
        ("altup.modality_router", "altup_router"),
        ("altup.router_norm", "altup_router_norm"),
        ("laurel.linear_left", "laurel_l"),
        ("laurel.linear_right", "laurel_r"),
        ("laurel.post_laurel_norm", "laurel_post_norm"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("post_per_layer_input_norm", "post_norm"),
    ],
    ..LayerRules::PLAIN
};

fn keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let key = if builder.config.value(&["hidden_activation"]).is_some() {
        "hidden_activation"
    } else {
        "hidden_act"
    };
    builder.require(key, &["gelu", "gelu_pytorch_tanh"])?;
    builder.require("tie_word_embeddings", &["true"])?;
    common_keys(builder)?;
    let epsilon = builder.config.find_number(&["rms_norm_eps"])?.unwrap_or(1e-6);
    builder.set_number("attention.layer_norm_rms_epsilon", epsilon);
    let length = builder.config.find_count(&["head_dim"])?.unwrap_or(256);
    builder.set_count("attention.key_length", length);
    builder.set_count("attention.value_length", length);
    Ok(())
}

/// The layers whose windows slide, as a period where it is the usual one.
fn windows(builder: &mut FileBuilder<'_>, usual: usize, always: bool) -> ConvertResult<()> {
    let config = builder.config;
    let pattern: Vec<bool> = match config.texts("layer_types")? {
        Some(types) => types.iter().map(|kind| *kind == "sliding_attention").collect(),
        None => {
            let period = config
                .find_count(&["sliding_window_pattern", "_sliding_window_pattern"])?
                .unwrap_or(usual)
                .max(1);
            (0..builder.layers).map(|layer| !(layer + 1).is_multiple_of(period)).collect()
        }
    };
    let is_usual =
        pattern.iter().enumerate().all(|(layer, window)| *window != (layer + 1).is_multiple_of(usual));
    if always || !is_usual {
        builder.set("attention.sliding_window_pattern", pattern);
    }
    builder.copy_count("attention.sliding_window", &["sliding_window"])
}

/// An error if queries are scaled otherwise than the architecture does.
fn check_scale(builder: &FileBuilder<'_>, largest: usize) -> ConvertResult<()> {
    let Some(found) = builder.config.find_number(&["query_pre_attn_scalar"])? else { return Ok(()) };
    let length = builder.config.find_count(&["head_dim"])?.unwrap_or(256);
    let width = builder.config.count(&["hidden_size"])?;
    let expected = if builder.layers == largest { width / builder.heads.0.max(1) } else { length };
    if found == expected as f64 {
        Ok(())
    } else {
        Err(builder.config.unsupported("query_pre_attn_scalar", found))
    }
}

fn gemma2_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    keys(builder)?;
    check_scale(builder, 46)?;
    builder.copy_number("attn_logit_softcapping", &["attn_logit_softcapping"])?;
    builder.copy_number("final_logit_softcapping", &["final_logit_softcapping"])?;
    windows(builder, 2, false)
}

fn gemma3_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    keys(builder)?;
    check_scale(builder, 62)?;
    builder.require("attn_logit_softcapping", &["null"])?;
    builder.copy_number("final_logit_softcapping", &["final_logit_softcapping"])?;
    if !builder.keys.iter().any(|(key, _)| key.ends_with(".rope.freq_base")) {
        builder.set_number("rope.freq_base", 1e6);
    }
    if let Some(base) = window_rope_base(builder.config)? {
        builder.set_number("rope.freq_base_swa", base);
    }
    windows(builder, 6, false)
}

fn gemma3n_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    keys(builder)?;
    let config = builder.config;
    builder.copy_number("final_logit_softcapping", &["final_logit_softcapping"])?;
    if let Some(base) = window_rope_base(config)? {
        builder.set_number("rope.freq_base_swa", base);
    }
    if let Some(widths) = config.numbers("intermediate_size").ok().flatten() {
        let first = widths.first().copied().unwrap_or(0.0);
        if widths.iter().any(|width| *width != first) {
            return Err(config.unsupported("intermediate_size", "different in each layer"));
        }
        builder.set_count("feed_forward_length", first as usize);
    }
    builder.set_count("altup.active_idx", config.find_count(&["altup_active_idx"])?.unwrap_or(0));
    builder.set_count("altup.num_inputs", config.find_count(&["altup_num_inputs"])?.unwrap_or(4));
    let inputs = config.count(&["hidden_size_per_layer_input"])?;
    builder.set_count("embedding_length_per_layer_input", inputs);
    let shared = config.find_count(&["num_kv_shared_layers"])?.unwrap_or(0);
    builder.set_count("attention.shared_kv_layers", shared);
    let cuts = match config.value(&["activation_sparsity_pattern"]).and_then(serde_json::Value::as_f64) {
        Some(share) => vec![share; builder.layers],
        None => config.numbers("activation_sparsity_pattern")?.unwrap_or_else(|| vec![0.0; builder.layers]),
    };
    let cuts: Vec<f32> = cuts.into_iter().map(|share| normal_quantile(share) as f32).collect();
    builder.set("activation_sparsity_scale", cuts);
    windows(builder, 5, true)
}

fn gemma3n_globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    GEMMA3N.globals(builder)?;
    builder.copy("embed_tokens_per_layer.weight", "per_layer_token_embd.weight")?;
    builder.copy("per_layer_model_projection.weight", "per_layer_model_proj.weight")?;
    builder.copy("per_layer_projection_norm.weight", "per_layer_proj_norm.weight")?;
    for layer in 0..builder.layers {
        builder.copy(
            &format!("layers.{layer}.altup.correct_output_scale"),
            &format!("blk.{layer}.altup_correct_scale.weight"),
        )?;
    }
    for (from, to) in
        [("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")]
    {
        let mut matrices = Vec::new();
        while let Some(matrix) = builder.find(&format!("{from}.{}.weight", matrices.len()))? {
            matrices.push(matrix);
        }
        if matrices.is_empty() {
            return Err(ConvertError::MissingTensor {
                name: format!("{from}.0.weight"),
                architecture: builder.architecture.to_owned(),
            });
        }
        builder.push(OutputTensor::stacked(&format!("{to}.weight"), matrices)?);
    }
    Ok(())
}

/// The value that a share of the standard normal distribution is below.
fn normal_quantile(share: f64) -> f64 {
    if share <= 0.0 {
        return f64::NEG_INFINITY;
    }
    if share >= 1.0 {
        return f64::INFINITY;
    }
    let mut x = 0.0f64;
    // Newton's method on the distribution function, which is smooth and monotone.
    for _ in 0..60 {
        let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
        let step = (distribution(x) - share) / density.max(1e-12);
        x -= step.clamp(-1.0, 1.0);
    }
    x
}

/// The standard normal distribution function, by its series around 0.
fn distribution(x: f64) -> f64 {
    let x = x.clamp(-8.0, 8.0);
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while n < 400.0 {
        term *= -x * x / (2.0 * n) * (2.0 * n - 1.0) / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    0.5 + sum / std::f64::consts::TAU.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (share, value) in
            [(0.5, 0.0), (0.95, 1.6448536269514722), (0.1, -1.2815515655446004), (0.99, 2.3263478740408408)]
        {
            assert!((normal_quantile(share) - value).abs() < 1e-9, "{share}: {}", normal_quantile(share));
        }
        assert_eq!(normal_quantile(0.0), f64::NEG_INFINITY);
    }
}
