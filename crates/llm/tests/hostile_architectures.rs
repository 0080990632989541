//! Files of the architectures with experts, windows, latent attention and biases whose keys and tensors do not fit each
//! other: every error names the key or the tensor.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::latent::LatentRecipe;
use crate::common::recurrent::parts_of;
use crate::common::{Parts, QueryNorms, Recipe, Scaling};
use crate::recurrent_models::delta_recipes;
use quadriga_gguf::OwnedValue;
use quadriga_graph::DType;

/// A change must make the model unusable, with an error that has one of these names.
fn refused(recipe: &Recipe, what: &str, change: impl FnOnce(&mut Parts), names: &[&str]) {
    let mut parts = recipe.parts();
    change(&mut parts);
    let context = format!("{} with {what}", recipe.architecture);
    let error = parts.model().err().unwrap_or_else(|| panic!("{context}: taken")).to_string();
    assert!(names.iter().any(|name| error.contains(name)), "{context}: none of {names:?} is in: {error}");
}

/// The same with another value of a key.
fn refused_key(recipe: &Recipe, key: &str, value: impl Into<OwnedValue>, names: &[&str]) {
    let (whole, value) = (format!("{}.{key}", recipe.architecture), value.into());
    let what = format!("{key} = {value:?}");
    refused(recipe, &what, |parts| _ = parts.set(&whole, value), names);
}

#[test]
fn counts_of_experts_are_checked_in_every_architecture() {
    for (_, recipe) in Recipe::with_experts() {
        let experts = recipe.experts.unwrap();
        let key = format!("{}.expert_used_count", recipe.architecture);
        for used in [0, experts.count as u32 + 1, u32::MAX] {
            refused_key(&recipe, "expert_used_count", used, &[&key]);
        }
        for count in [experts.count as u32 + 1, 2 * experts.count as u32] {
            refused_key(&recipe, "expert_count", count, &["blk.", "expert_group"]);
        }
        if recipe.architecture != "llama" {
            let key = format!("{}.expert_count", recipe.architecture);
            refused_key(&recipe, "expert_count", 0u32, &[&key]);
        }
        refused_key(&recipe, "expert_feed_forward_length", 7u32, &["_exps.weight", "ffn_gate.0", "shexp"]);
        let layer = experts.dense + experts.step - 1;
        refused(
            &recipe,
            "no router",
            |parts| _ = parts.remove(&format!("blk.{layer}.ffn_gate_inp.weight")),
            &[&format!("blk.{layer}.ffn_gate_inp.weight")],
        );
    }
}

fn with_windows() -> Vec<Recipe> {
    let families = Recipe::families().into_iter().filter(|recipe| recipe.window.is_some());
    let experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let llama = Recipe { window: Some(9), ..Recipe::new("llama") };
    families.chain(experts.filter(|recipe| recipe.window.is_some())).chain([llama]).collect()
}

#[test]
fn windows_are_checked_in_every_architecture() {
    let (size, pattern) = ("attention.sliding_window", "attention.sliding_window_pattern");
    for recipe in with_windows() {
        // These are other models without windows; files of the others say so with 0.
        let needs = ["gemma2", "gemma3", "gpt-oss", "llama4", "gemma3n"].contains(&recipe.architecture);
        if needs {
            refused_key(&recipe, size, 0u32, &["sliding_window\""]);
        } else {
            let mut parts = recipe.parts();
            let key = format!("{}.{size}", recipe.architecture);
            assert_eq!(parts.set(&key, 0u32).model().unwrap().hyperparameters().window(), None);
        }
        refused_key(&recipe, size, u32::MAX, &["sliding_window\""]);
        refused_key(&recipe, pattern, 0u32, &["sliding_window_pattern"]);
        for count in [0, recipe.layers - 1, recipe.layers + 1] {
            refused_key(&recipe, pattern, vec![true; count], &["sliding_window_pattern"]);
        }
    }
}

#[test]
fn ranks_of_latent_attention_are_checked() {
    for (_, recipe) in Recipe::with_experts() {
        let Some(latent) = recipe.latent else { continue };
        refused_key(&recipe, "attention.kv_lora_rank", 0u32, &["kv_lora_rank"]);
        let other = latent.rank as u32 + 1;
        refused_key(&recipe, "attention.kv_lora_rank", other, &["kv_lora_rank", "attn_kv_a_mqa.weight"]);
        refused_key(&recipe, "attention.q_lora_rank", u32::MAX, &["q_lora_rank"]);
        match latent.query_rank {
            Some(rank) => {
                refused_key(&recipe, "attention.q_lora_rank", rank as u32 + 1, &["attn_q_a.weight"]);
                refused_key(&recipe, "attention.q_lora_rank", 0u32, &["attn_q.weight"]);
            }
            None => refused_key(&recipe, "attention.q_lora_rank", 24u32, &["q_lora_rank"]),
        }
        refused_key(&recipe, "rope.dimension_count", recipe.key_length as u32, &["attention.key_length"]);
        for heads in [0, 2, 3, recipe.heads as u32 + 1] {
            refused_key(&recipe, "attention.head_count_kv", heads, &["attention.head_count_kv"]);
        }
        // Both are written; what is cached is the same.
        for heads in [1, recipe.heads as u32] {
            let mut parts = recipe.parts();
            parts.set(&format!("{}.attention.head_count_kv", recipe.architecture), heads);
            assert_eq!(parts.model().unwrap().hyperparameters(), recipe.model().hyperparameters());
        }
    }
}

/// Errors that a graph finds first are not hidden behind tensors that are right.
#[test]
fn the_first_error_is_the_one_that_is_named() {
    // The gates of attention are as long as queries.
    for recipe in delta_recipes() {
        let whole = format!("{}.attention.value_length", recipe.architecture);
        for length in [recipe.key_length - 4, recipe.key_length + 4] {
            let error = parts_of(&recipe).set(&whole, length as u32).model().err();
            let error = error.unwrap_or_else(|| panic!("{whole} = {length}: taken")).to_string();
            assert!(error.contains(&whole), "{whole} = {length}: {error}");
        }
    }
    for (_, recipe) in Recipe::with_experts() {
        let Some(latent) = recipe.latent else { continue };
        let latent = Some(LatentRecipe { log_multiplier: Some(0.1), ..latent });
        let yarn = Recipe { scaling: Scaling::Yarn { factor: 4.0, original: 64 }, latent, ..recipe };
        assert!(yarn.parts().model().is_ok());
        let key = "rope.scaling.yarn_log_multiplier";
        for multiplier in [1e30f32, f32::MAX, f32::INFINITY] {
            refused_key(&yarn, key, multiplier, &[key]);
        }
    }
}

#[test]
fn a_bias_that_only_others_have_is_named() {
    let qwen = Recipe { biases: true, layers: 3, ..Recipe::new("qwen2") };
    let find = |architecture| {
        let mut all = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
        all.find(|recipe| recipe.architecture == architecture).unwrap()
    };
    let (oss, glm) = (find("gpt-oss"), find("glm4moe"));
    for (recipe, name) in [
        (&qwen, "blk.0.attn_q.bias"),
        (&qwen, "blk.1.attn_v.bias"),
        (&qwen, "blk.2.attn_k.bias"),
        (&glm, "blk.1.attn_k.bias"),
        (&glm, "blk.2.exp_probs_b.bias"),
        (&oss, "blk.1.attn_v.bias"),
        (&oss, "blk.2.attn_output.bias"),
        (&oss, "blk.0.ffn_gate_inp.bias"),
        (&oss, "blk.1.ffn_up_exps.bias"),
    ] {
        refused(recipe, &format!("no {name}"), |parts| _ = parts.remove(name), &[name]);
    }
    // Of all layers, or of a whole layer.
    let everywhere = |parts: &mut Parts| parts.tensors.retain(|(name, ..)| !name.ends_with("attn_v.bias"));
    refused(&qwen, "no attn_v.bias", everywhere, &["blk.0.attn_v.bias"]);
    let layer = |parts: &mut Parts| {
        parts.tensors.retain(|(name, ..)| !(name.starts_with("blk.1.attn") && name.ends_with("bias")));
    };
    refused(&qwen, "no biases in layer 1", layer, &["blk.1.attn_k.bias", "blk.1.attn_q.bias"]);
    let none = |parts: &mut Parts| parts.tensors.retain(|(name, ..)| !name.ends_with(".bias"));
    refused(&oss, "no biases", none, &["blk.0.attn_q.bias"]);
    // Without any, a model of this architecture is another one.
    let mut parts = qwen.parts();
    none(&mut parts);
    assert!(parts.model().is_ok());
}

fn family(architecture: &str) -> Recipe {
    let experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let mut all = Recipe::families().into_iter().chain(experts);
    all.find(|recipe| recipe.architecture == architecture).unwrap()
}

#[test]
fn norms_without_their_biases_and_norms_of_some_layers_are_named() {
    let rectified = Recipe::rectified().into_iter().map(|(_, recipe)| recipe);
    let of_norms = rectified.filter(|recipe| ["falcon", "opt"].contains(&recipe.architecture));
    for recipe in of_norms {
        let without = |end: &'static str| {
            move |parts: &mut Parts| parts.tensors.retain(|(name, ..)| !name.ends_with(end))
        };
        refused(&recipe, "no bias of the last norm", without("output_norm.bias"), &["output_norm.bias"]);
        if recipe.architecture == "opt" && !recipe.transposed {
            refused(&recipe, "no ffn_down.bias", without("ffn_down.bias"), &["blk.0.ffn_down.bias"]);
        }
    }
    let glm = Recipe { query_norms: QueryNorms::Head, ..family("glm4moe") };
    glm.model();
    for missing in ["blk.1.attn_k_norm.weight", "blk.0.attn_q_norm.weight", "attn_k_norm.weight"] {
        let change = |parts: &mut Parts| parts.tensors.retain(|(name, ..)| !name.ends_with(missing));
        refused(&glm, missing, change, &[missing]);
    }
    let mut parts = glm.parts();
    let of_heads = |name: &str| name.ends_with("attn_q_norm.weight") || name.ends_with("attn_k_norm.weight");
    parts.tensors.retain(|(name, ..)| !of_heads(name));
    parts.model().unwrap();
}

#[test]
fn short_convolutions_are_checked() {
    for recipe in [family("lfm2"), family("lfm2moe")] {
        for kernel in [0u32, 1, 65, u32::MAX] {
            refused_key(&recipe, "shortconv.l_cache", kernel, &["shortconv.l_cache"]);
        }
        refused_key(&recipe, "shortconv.l_cache", 5u32, &["shortconv.conv.weight"]);
        // As many heads as the other layers, in none or all of them, or in a list of the wrong length.
        let (key, layers) = ("attention.head_count_kv", recipe.layers);
        refused_key(&recipe, key, recipe.kv_heads as u32, &["attn_q", "attn_k"]);
        refused_key(&recipe, key, 0u32, &["shortconv.in_proj.weight"]);
        for count in [0, layers - 1, layers + 1] {
            refused_key(&recipe, key, vec![0u32; count], &["head_count_kv"]);
        }
        refused_key(&recipe, key, vec![0u32, 0, 3, 0], &["head_count_kv"]);
        refused_key(&recipe, "attention.causal", false, &["attention.causal"]);
    }
    let recipe = family("lfm2moe");
    let none = |parts: &mut Parts| parts.tensors.retain(|(name, ..)| !name.ends_with("exp_probs_b.bias"));
    refused(&recipe, "no selection bias", none, &["exp_probs_b.bias"]);
}

#[test]
fn state_spaces_are_checked() {
    let recipe = family("mamba2");
    for (key, value, names) in [
        ("conv_kernel", 1u32, &["ssm.conv_kernel"][..]),
        ("conv_kernel", 3, &["ssm_conv1d.weight"]),
        ("group_count", 0, &["ssm.group_count"]),
        ("group_count", 4, &["ssm.time_step_rank"]),
        ("group_count", 3, &["ssm_in.weight"]),
        ("time_step_rank", 4, &["ssm_in.weight", "ssm.time_step_rank"]),
        ("state_size", 1 << 29, &["ssm.state_size"]),
        ("inner_size", 71, &["ssm.inner_size"]),
    ] {
        refused_key(&recipe, &format!("ssm.{key}"), value, names);
    }
    refused_key(&recipe, "expert_count", 2u32, &["expert_count"]);
}

#[test]
fn interleaved_experts_and_temperatures_are_checked() {
    let recipe = family("llama4");
    refused_key(&recipe, "interleave_moe_layer_step", 0u32, &["interleave_moe_layer_step"]);
    refused_key(&recipe, "interleave_moe_layer_step", 2u32, &["blk.0.ffn_"]);
    refused_key(&recipe, "attention.temperature_scale", -1.0f32, &["temperature_scale"]);
    refused_key(&recipe, "attention.temperature_length", 0u32, &["temperature_length"]);
    refused_key(&recipe, "rope.freq_base_swa", f32::NAN, &["freq_base_swa"]);
}

#[test]
fn streams_and_shared_caches_are_checked() {
    let recipe = family("gemma3n");
    for (key, value, names) in [
        ("altup.num_inputs", 1u32, &["altup.num_inputs"][..]),
        ("altup.num_inputs", 17, &["altup.num_inputs"]),
        ("altup.num_inputs", 4, &["altup_proj.weight"]),
        ("altup.active_idx", 1, &["altup.active_idx"]),
        ("embedding_length_per_layer_input", 0, &["embedding_length_per_layer_input"]),
        ("embedding_length_per_layer_input", 1 << 30, &["embedding_length_per_layer_input"]),
        ("embedding_length_per_layer_input", 25, &["per_layer_token_embd.weight"]),
        ("attention.shared_kv_layers", 7, &["shared_kv_layers"]),
        // The first layer has a window, and the last ones of the others would share its keys and values.
        ("attention.shared_kv_layers", 6, &["shared_kv_layers"]),
        ("attention.shared_kv_layers", 2, &["blk.4.attn_k"]),
    ] {
        refused_key(&recipe, key, value, names);
    }
    let key = "activation_sparsity_scale";
    refused_key(&recipe, key, vec![0.5f32; 3], &[key]);
    for value in [f32::NAN, f32::INFINITY] {
        refused_key(&recipe, key, vec![value; recipe.layers], &[key]);
    }
}

/// A recipe of every architecture that generates text, but for those with the delta rule.
fn generating() -> Vec<Recipe> {
    let experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let rectified = Recipe::rectified().into_iter().map(|(_, recipe)| recipe);
    let llama = ["llama", "qwen2", "qwen3"].map(|architecture| match architecture {
        "qwen3" => Recipe { query_norms: QueryNorms::Head, ..Recipe::new(architecture) },
        _ => Recipe::new(architecture),
    });
    Recipe::families().into_iter().chain(experts).chain(rectified).chain(llama).collect()
}

/// What a file says of its last block does not take a layer from the model.
#[test]
fn a_layer_does_not_become_a_block_that_predicts_further_tokens() {
    let key = "nextn_predict_layers";
    for recipe in generating() {
        assert!(recipe.parts().model().is_ok(), "{}", recipe.architecture);
        refused_key(&recipe, key, 1u32, &["nextn_predict_layers"]);
    }
    for recipe in delta_recipes() {
        let whole = format!("{}.{key}", recipe.architecture);
        let mut parts = parts_of(&recipe);
        parts.set(&whole, 1u32);
        let error = parts.model().err().unwrap().to_string();
        assert!(error.contains(&whole) && error.contains("nextn.eh_proj.weight"), "{error}");
        // With its matrix, the last block is one.
        let (block, width) = (recipe.layers - 1, recipe.width);
        parts.matrix(&format!("blk.{block}.nextn.eh_proj.weight"), DType::F32, [width, 2 * width], 1.0);
        assert_eq!(parts.model().unwrap().hyperparameters().layers.len(), block);
        // Each of several has one.
        let error = parts.set(&whole, 2u32).model().err().unwrap().to_string();
        assert!(error.contains(&format!("blk.{}.nextn.eh_proj", block - 1)), "{error}");
    }
}

/// Tokens of these models never see those that follow.
#[test]
fn decoders_that_are_not_causal_are_refused() {
    let key = "attention.causal";
    for recipe in generating() {
        refused_key(&recipe, key, false, &["attention.causal"]);
        let mut parts = recipe.parts();
        parts.set(&format!("{}.{key}", recipe.architecture), true);
        assert_eq!(parts.model().unwrap().hyperparameters(), recipe.model().hyperparameters());
    }
    for recipe in delta_recipes() {
        let whole = format!("{}.{key}", recipe.architecture);
        let error = parts_of(&recipe).set(&whole, false).model().err().unwrap().to_string();
        assert!(error.contains(&whole), "{error}");
    }
}

#[test]
fn keys_of_heads_with_windows_are_read_or_refused() {
    for recipe in with_windows() {
        let base = "rope.freq_base_swa";
        for value in [f32::NAN, f32::INFINITY, -1.0] {
            refused_key(&recipe, base, value, &["freq_base_swa"]);
        }
        let mut parts = recipe.parts();
        parts.set(&format!("{}.{base}", recipe.architecture), 777.0f32);
        let hyper = parts.model().unwrap().hyperparameters().clone();
        for layer in hyper.layers.iter() {
            let found = layer.rope.map(|rope| rope.base);
            let wanted = if layer.window.is_some() { 777.0 } else { recipe.rope_base };
            assert!(found.is_none_or(|base| base == wanted), "{}: {found:?}", recipe.architecture);
        }
        for (key, length) in [
            ("attention.key_length_swa", recipe.key_length),
            ("attention.value_length_swa", recipe.value_length),
            ("rope.dimension_count_swa", recipe.rope_dims),
        ] {
            refused_key(&recipe, key, 0u32, &[key]);
            refused_key(&recipe, key, length as u32 + 2, &[key]);
            let mut parts = recipe.parts();
            parts.set(&format!("{}.{key}", recipe.architecture), length as u32);
            assert_eq!(parts.model().unwrap().hyperparameters(), recipe.model().hyperparameters());
        }
    }
}

/// Whatever a model does not read would be left out silently.
#[test]
fn tensors_that_the_model_does_not_use_are_refused() {
    let experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    for recipe in Recipe::families().into_iter().chain(experts) {
        let (name, width) = ("blk.1.of_another_model.weight", recipe.width);
        let add = |parts: &mut Parts| parts.vector(name, width, 0.0, 1.0);
        refused(&recipe, name, add, &[name]);
        let key = format!("{}.block_count", recipe.architecture);
        let fewer = recipe.layers as u32 - 1;
        // Arrays with a value for each layer do not fit fewer either.
        let own = format!("{}.", recipe.architecture);
        refused(&recipe, "a layer too many", |parts| _ = parts.set(&key, fewer), &[&key, &own]);
    }
    let llama = Recipe::new("llama");
    for part in ["post_attention_norm", "attn_q_norm", "attn_sinks"] {
        let name = format!("blk.0.{part}.weight");
        let add = |parts: &mut Parts| parts.vector(&name, llama.width, 0.0, 1.0);
        refused(&llama, part, add, &[&name]);
        refused(&llama, part, add, &["general.architecture"]);
    }
}

#[test]
fn shared_experts_that_the_metadata_denies_are_refused() {
    for (_, recipe) in Recipe::with_experts() {
        if recipe.experts.unwrap().shared == 0 || recipe.architecture == "llama4" {
            continue;
        }
        let key = |key: &str| format!("{}.{key}", recipe.architecture);
        let (width, count) = (key("expert_shared_feed_forward_length"), key("expert_shared_count"));
        refused(&recipe, "width 0", |parts| _ = parts.set(&width, 0u32), &["_shexp.weight"]);
        refused(&recipe, "width 0", |parts| _ = parts.set(&width, 0u32), &[&width]);
        if recipe.architecture == "glm4moe" {
            let none = |parts: &mut Parts| {
                parts.remove(&width);
                parts.set(&count, 0u32);
            };
            refused(&recipe, "count 0", none, &[&count]);
        }
    }
}

/// llama.cpp, too, runs files that have these.
#[test]
fn tensors_that_change_nothing_are_accepted() {
    let llama = Recipe::new("llama");
    let mut parts = llama.parts();
    for name in [
        "blk.0.attn_rot_embd.weight",
        "blk.1.attn_q.input_scale",
        "blk.0.gpu_idx",
        "v.blk.0.attn_q.weight",
        "mm.0.weight",
    ] {
        parts.vector(name, 8, 0.0, 1.0);
    }
    assert!(parts.model().is_ok(), "{:?}", parts.model().err());
    // The last layers attend to the keys and values of others, and have matrices for their own.
    let recipe = family("gemma3n");
    let mut parts = recipe.parts();
    let shared =
        recipe.model().hyperparameters().layers.iter().map(|layer| layer.shares_cache_of).collect::<Vec<_>>();
    assert!(shared.last().unwrap().is_some());
    for layer in (0..recipe.layers).filter(|layer| shared[*layer].is_some()) {
        for part in ["attn_k", "attn_v"] {
            let dims = [recipe.kv_heads * recipe.key_length, recipe.width];
            parts.matrix(&format!("blk.{layer}.{part}.weight"), DType::F32, dims, 1.0);
        }
        parts.vector(&format!("blk.{layer}.attn_k_norm.weight"), recipe.key_length, 1.0, 0.5);
    }
    assert!(parts.model().is_ok(), "{:?}", parts.model().err());
    // Not so in a layer with keys and values of its own.
    parts.vector("blk.0.attn_k_other.weight", 8, 0.0, 1.0);
    assert!(parts.model().is_err());
}

#[test]
fn tensors_that_an_architecture_needs_are_named() {
    let cases = [
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight"),
        ("glm4moe", "blk.1.exp_probs_b.bias"),
        // Their models have an output matrix of their own, in place of which the embedding would be taken.
        ("gpt-oss", "output.weight"),
        ("qwen2moe", "output.weight"),
        ("olmoe", "output.weight"),
        ("olmo2", "output.weight"),
    ];
    for recipe in delta_recipes().into_iter().filter(|recipe| recipe.experts.is_some()) {
        let name = "blk.2.ffn_gate_inp_shexp.weight";
        let error = parts_of(&recipe).remove(name).model().err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains(name)), "{}", recipe.architecture);
    }
    for (architecture, name) in cases {
        let with_experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
        let mut all = with_experts.chain(Recipe::families());
        let recipe = all.find(|recipe| recipe.architecture == architecture).unwrap();
        refused(&recipe, name, |parts| _ = parts.remove(name), &[name]);
    }
}

#[test]
fn a_state_space_model_may_have_an_output_matrix_or_use_its_embedding() {
    let recipe = Recipe::families().into_iter().find(|recipe| recipe.architecture == "mamba2").unwrap();
    for tied in [false, true] {
        let parts = Recipe { tied, ..recipe.clone() }.parts();
        assert_eq!(parts.tensors.iter().any(|(name, ..)| name == "output.weight"), !tied);
        assert!(parts.model().is_ok(), "tied: {tied}");
    }
}

#[test]
fn the_delta_rule_with_experts_is_checked() {
    for recipe in delta_recipes() {
        let with = |change: &dyn Fn(&mut Parts)| {
            let mut parts = parts_of(&recipe);
            change(&mut parts);
            parts.model().err().map(|error| error.to_string()).unwrap_or_default()
        };
        let architecture = recipe.architecture;
        for (key, value) in [
            ("ssm.state_size", 0u32),
            ("ssm.state_size", 9),
            ("ssm.group_count", 0),
            ("ssm.group_count", 4),
            ("ssm.time_step_rank", 5),
            ("ssm.inner_size", 71),
            ("ssm.conv_kernel", 0),
            ("ssm.conv_kernel", 5),
        ] {
            let whole = format!("{architecture}.{key}");
            let error = with(&|parts| _ = parts.set(&whole, value));
            assert!(error.contains("ssm") || error.contains("attn_qkv"), "{whole} = {value}: {error:?}");
        }
        let mut missing =
            vec!["blk.1.ssm_conv1d.weight", "blk.1.ssm_a", "blk.1.ssm_dt.bias", "blk.3.attn_q.weight"];
        let mut wrong = vec![];
        if recipe.experts.is_some() {
            missing.extend([
                "blk.4.ffn_gate_inp.weight",
                "blk.4.ffn_up_shexp.weight",
                "blk.4.ffn_up_exps.weight",
            ]);
            wrong.extend([("expert_count", 7u32), ("expert_used_count", 0), ("expert_used_count", 7)]);
            wrong.extend([("expert_feed_forward_length", 41), ("expert_shared_feed_forward_length", 57)]);
        }
        for name in missing {
            let error = with(&|parts| _ = parts.remove(name));
            assert!(error.contains(name), "{architecture} without {name}: {error:?}");
        }
        for (key, value) in wrong {
            let whole = format!("{architecture}.{key}");
            let error = with(&|parts| _ = parts.set(&whole, value));
            assert!(error.contains(&whole) || error.contains("blk."), "{whole} = {value}: {error:?}");
        }
    }
}
