//! Files of the architectures with experts, windows, latent attention and biases whose keys and tensors do not fit each
//! other: every error names the key or the tensor.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Parts, Recipe};
use quadriga_gguf::OwnedValue;

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
        let layer = experts.dense;
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
        let needs = ["gemma2", "gemma3", "gpt-oss"].contains(&recipe.architecture);
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
