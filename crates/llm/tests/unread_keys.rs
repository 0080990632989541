//! Keys that would change what a model computes are refused by architectures that do not read them; values that change nothing
//! are taken.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Parts, Recipe};
use crate::encoders;
use quadriga_gguf::OwnedValue;

/// A small model of an architecture.
fn parts(architecture: &'static str) -> Parts {
    let families = Recipe::families().into_iter();
    match architecture {
        "bert" | "nomic-bert" => encoders::parts(architecture, 1),
        "llama" | "qwen2" | "qwen3" => Recipe::new(architecture).parts(),
        "falcon" => {
            let (_, recipe) = Recipe::rectified().into_iter().find(|(name, _)| *name == "falcon").unwrap();
            let mut parts = recipe.parts();
            parts.remove("falcon.hidden_activation");
            parts
        }
        _ => {
            let all = families.chain(Recipe::with_experts().into_iter().map(|(_, recipe)| recipe));
            all.into_iter().find(|recipe| recipe.architecture == architecture).unwrap().parts()
        }
    }
}

fn with(architecture: &'static str, key: &str, value: impl Into<OwnedValue>) -> Parts {
    let mut parts = parts(architecture);
    parts.set(&format!("{architecture}.{key}"), value);
    parts
}

/// Keys with values that change the model: an architecture, the key, and the value.
fn refused() -> Vec<(&'static str, &'static str, OwnedValue)> {
    vec![
        ("llama", "attention.clamp_kqv", 8.0f32.into()),
        ("llama", "logit_scale", 8.0f32.into()),
        ("llama", "residual_scale", 0.3f32.into()),
        ("llama", "embedding_scale", 12.0f32.into()),
        ("llama", "attention.max_alibi_bias", 8.0f32.into()),
        ("llama", "final_logit_softcapping", 30.0f32.into()),
        ("llama", "attention.temperature_scale", 0.1f32.into()),
        ("llama", "interleave_moe_layer_step", 2u32.into()),
        ("llama", "swin_norm", true.into()),
        ("llama", "attention.clamp_kqv", f32::NAN.into()),
        ("llama", "residual_scale", vec![1.0f32, 0.5].into()),
        ("qwen3", "attention.scale", 0.5f32.into()),
        ("gemma3", "attn_logit_softcapping", 20.0f32.into()),
        ("gemma3", "embedding_scale", 3.0f32.into()),
        ("gemma3", "attention.shared_kv_layers", 2u32.into()),
        ("bert", "logit_scale", 2.0f32.into()),
        ("command-r", "residual_scale", 0.5f32.into()),
        ("deepseek2", "attention.scale", 0.5f32.into()),
        ("llama", "attention.relative_buckets_count", 32u32.into()),
        ("llama", "attention.output_scale", 0.5f32.into()),
        ("deepseek2", "attention.output_scale", 0.25f32.into()),
        ("llama", "attention.value_scale", 0.5f32.into()),
        ("llama", "attention.value_scale", vec![1.0f32, 2.0].into()),
        ("llama", "router_logit_softcapping", 30.0f32.into()),
        ("llama", "moe_every_n_layers", 2u32.into()),
        ("llama", "ssm.dt_b_c_rms", true.into()),
        ("qwen3moe", "swiglu_clamp_exp", 7.0f32.into()),
        ("qwen3moe", "swiglu_clamp_exp", vec![0.0f32, 7.0].into()),
        ("qwen3moe", "swiglu_clamp_shexp", vec![7.0f32, 0.0].into()),
        ("qwen3moe", "expert_group_scale", 0.05f32.into()),
        ("llama", "rope.scaling.alpha", 1000.0f32.into()),
        ("llama", "attention.rope_pattern", vec![1u32, 0].into()),
        ("llama", "attention.rope_pattern", 0u32.into()),
        ("smollm3", "attention.rope_pattern", vec![true; 5].into()),
        ("qwen3", "hidden_activation", "gelu".into()),
        ("qwen3", "hidden_activation", 1u32.into()),
        ("gemma3", "hidden_activation", "silu".into()),
        ("bert", "hidden_activation", "gelu_new".into()),
        ("bert", "hidden_activation", "relu".into()),
        ("nomic-bert", "hidden_activation", "gelu".into()),
        ("smallthinker", "hidden_activation", "silu".into()),
    ]
}

/// A key that is misspelled in the list is refused by no row here, which is written apart.
#[test]
fn every_key_of_the_list_has_a_row() {
    let source = include_str!("../src/hyperparameters/unread.rs");
    let listed = |line: &'static str| line.strip_prefix("    (\"")?.split_once("\", Neutral::");
    let keys: Vec<&str> = source.lines().filter_map(listed).map(|(key, _)| key).collect();
    assert!(keys.len() >= 20, "{keys:?}");
    let rows = refused();
    for key in &keys {
        assert!(rows.iter().any(|(_, refused, _)| refused == key), "{key} has no row");
    }
    for (_, key, _) in &rows {
        assert!(keys.contains(key), "{key} is not in the list");
    }
}

#[test]
fn keys_that_change_the_mathematics_are_refused_by_name() {
    for (architecture, key, value) in refused() {
        let named = format!("{architecture}.{key}");
        let error = with(architecture, key, value.clone()).model().err();
        let error = error.unwrap_or_else(|| panic!("{named} = {value:?}: taken")).to_string();
        assert!(error.contains(&named) && error.contains("does not use it"), "{named}: {error}");
    }
}

#[test]
fn values_that_change_nothing_are_taken() {
    for (architecture, key, value) in [
        ("llama", "attention.clamp_kqv", OwnedValue::from(0.0f32)),
        ("llama", "logit_scale", 1.0f32.into()),
        ("llama", "logit_scale", 0.0f32.into()),
        ("llama", "residual_scale", 1.0f32.into()),
        ("llama", "embedding_scale", 1.0f32.into()),
        ("llama", "swin_norm", false.into()),
        ("llama", "interleave_moe_layer_step", 1u32.into()),
        // 1 / √16.
        ("qwen3", "attention.scale", 0.25f32.into()),
        ("qwen3", "attention.scale", 0.0f32.into()),
        // The root of the width.
        ("gemma3", "embedding_scale", 8.0f32.into()),
        ("gemma3", "attn_logit_softcapping", 0.0f32.into()),
        // Configurations name windows that are switched off.
        ("qwen3moe", "attention.sliding_window", 16u32.into()),
        ("phi3", "attention.sliding_window", 6u32.into()),
        ("llama", "attention.output_scale", 1.0f32.into()),
        ("llama", "attention.value_scale", 0.0f32.into()),
        ("qwen3moe", "swiglu_clamp_exp", vec![0.0f32, 0.0].into()),
        ("qwen3moe", "swiglu_clamp_shexp", 0.0f32.into()),
        ("qwen3moe", "expert_group_scale", 1.0f32.into()),
        ("llama", "rope.scaling.alpha", 0.0f32.into()),
        ("llama", "attention.rope_pattern", vec![1u32, 2].into()),
        ("smollm3", "attention.rope_pattern", vec![true, true, true, false, true].into()),
        ("qwen3", "hidden_activation", "silu".into()),
        ("llama", "hidden_activation", "silu".into()),
        ("llama", "hidden_activation", "swish".into()),
        ("falcon", "hidden_activation", "gelu".into()),
        ("gemma3", "hidden_activation", "gelu_pytorch_tanh".into()),
        ("bert", "hidden_activation", "gelu".into()),
        ("nomic-bert", "hidden_activation", "swiglu".into()),
        ("smallthinker", "hidden_activation", "relu".into()),
        // Nobody knows this key.
        ("llama", "moon_phase", 3u32.into()),
    ] {
        let plain = parts(architecture).model().unwrap();
        let found = with(architecture, key, value.clone()).model();
        let found = found.unwrap_or_else(|error| panic!("{architecture}.{key} = {value:?}: {error}"));
        assert_eq!(found.hyperparameters(), plain.hyperparameters(), "{architecture}.{key}");
    }
}

/// Architectures that may be rectified name the activations that they compute.
#[test]
fn activations_that_are_read_are_checked() {
    for (architecture, other) in [("llama", "gelu"), ("falcon", "silu")] {
        let error = with(architecture, "hidden_activation", other).model().err();
        let error = error.unwrap_or_else(|| panic!("{architecture} with {other}: taken")).to_string();
        assert!(error.contains(&format!("{architecture}.hidden_activation")), "{error}");
        let rectified = with(architecture, "hidden_activation", "relu").model().unwrap();
        assert!(rectified.hyperparameters().rectified, "{architecture}");
    }
}
