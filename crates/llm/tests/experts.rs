//! Models whose experts are copies or parts of a dense network compute what the dense model does, and errors about experts and
//! latent attention name the key or tensor.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::ops::ControlFlow;

use crate::common::experts::ExpertRecipe;
use crate::common::{Parts, Recipe, cpu, distance, engine, engine_on, logits_of};
use quadriga_gguf::{File, OwnedValue};
use quadriga_graph::{DType, blocks, layer_of};
use quadriga_llm::{EngineOptions, Error, Model, default_model};

fn options() -> EngineOptions {
    EngineOptions { context: 64, ..EngineOptions::default() }.cache(DType::F32)
}

/// A prompt at once, then tokens one by one.
fn run(model: Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut engine = engine_on(cpu(2), model, options());
    let mut rows = logits_of(&mut engine, &tokens[..tokens.len() - 3]);
    for token in &tokens[tokens.len() - 3..] {
        rows.extend(logits_of(&mut engine, &[*token]));
    }
    rows
}

/// All tokens one by one: kernels for many rows round activations of quantized weights further, and an expert has fewer
/// rows than a dense network.
fn run_alone(model: Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut engine = engine_on(cpu(2), model, options());
    tokens.iter().flat_map(|token| logits_of(&mut engine, &[*token])).collect()
}

/// Gives a dense model the keys of experts.
fn set_experts(parts: &mut Parts, architecture: &str, count: usize, used: usize) {
    parts.set(&format!("{architecture}.expert_count"), count as u32);
    parts.set(&format!("{architecture}.expert_used_count"), used as u32);
}

/// Experts that are all used, with a weight of 1: the sigmoid of 0 is a half.
fn set_sum(parts: &mut Parts, architecture: &str, count: usize, width: usize) {
    set_experts(parts, architecture, count, count);
    parts.set(&format!("{architecture}.expert_feed_forward_length"), (width / count) as u32);
    parts.set(&format!("{architecture}.expert_gating_func"), 2u32);
    parts.set(&format!("{architecture}.expert_weights_norm"), false);
    parts.set(&format!("{architecture}.expert_weights_scale"), 2f32);
}

#[test]
fn copies_of_a_dense_network_give_its_results() {
    for (count, used) in [(1, 1), (4, 1), (4, 3), (7, 2), (5, 5)] {
        let recipe = Recipe { layers: 3, seed: count as u64, ..Recipe::new("llama") };
        let tokens = recipe.tokens(15);
        let mut parts = recipe.parts();
        parts.clone_experts(recipe.layers, count, 9);
        set_experts(&mut parts, "llama", count, used);
        let found = distance(&run(parts.model().unwrap(), &tokens), &run(recipe.model(), &tokens));
        assert!(found < 1e-5, "{used} of {count} experts: off by {found:.2e}");
    }
}

#[test]
fn parts_of_a_dense_network_add_up_to_it() {
    for count in [1, 2, 3, 6, 12] {
        let recipe = Recipe { seed: 50 + count as u64, ..Recipe::new("llama") };
        let tokens = recipe.tokens(15);
        let mut parts = recipe.parts();
        parts.cut_experts(recipe.layers, count);
        set_sum(&mut parts, "llama", count, recipe.feed_forward);
        let found = distance(&run(parts.model().unwrap(), &tokens), &run(recipe.model(), &tokens));
        assert!(found < 1e-5, "{count} experts: off by {found:.2e}");
    }
}

/// The contents of the default model's file, without its vocabulary.
fn default_parts() -> Parts {
    let path = default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    Parts::of(&File::open(path).unwrap(), |key| !key.starts_with("tokenizer."))
}

#[test]
fn the_default_model_with_experts_gives_its_results() {
    let tokens: Vec<u32> = (0..24).map(|i| i * 997 % 49_152).collect();
    let dense = run_alone(default_parts().model().unwrap(), &tokens);
    // In a batch, the networks of the dense model and of the experts convert activations to formats of their own.
    let prefilled = run(default_parts().model().unwrap(), &tokens);
    let layers = default_parts().model().unwrap().hyperparameters().layers.len();
    let mut copies = default_parts();
    copies.clone_experts(layers, 3, 1);
    set_experts(&mut copies, "llama", 3, 2);
    let found = distance(&run_alone(copies.model().unwrap(), &tokens), &dense);
    println!("copies: {found:.2e}");
    assert!(found < 0.01, "copies: off by {found:.2e}");
    let found = distance(&run(copies.model().unwrap(), &tokens), &prefilled);
    println!("copies, as a batch: {found:.2e}");
    assert!(found < 0.1, "copies, as a batch: off by {found:.2e}");
    // 1536 rows are cut at whole blocks of 32.
    let mut cut = default_parts();
    cut.cut_experts(layers, 4);
    set_sum(&mut cut, "llama", 4, 1536);
    let found = distance(&run_alone(cut.model().unwrap(), &tokens), &dense);
    println!("parts: {found:.2e}");
    assert!(found < 0.03, "parts: off by {found:.2e}");
    let found = distance(&run(cut.model().unwrap(), &tokens), &prefilled);
    println!("parts, as a batch: {found:.2e}");
    assert!(found < 0.1, "parts, as a batch: off by {found:.2e}");
}

/// The first layers of the default model as floats: neither weights nor activations are rounded to another format.
fn float_parts(layers: usize) -> Parts {
    let mut parts = default_parts();
    parts.tensors.retain(|(name, ..)| layer_of(name).is_none_or(|layer| layer < layers));
    for (name, dtype, dims, bytes) in &mut parts.tensors {
        let mut values = vec![0f32; dims.iter().product()];
        blocks::dequantize(*dtype, bytes, &mut values).unwrap_or_else(|error| panic!("{name}: {error}"));
        (*dtype, *bytes) = (DType::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect());
    }
    parts.set("llama.block_count", layers as u32);
    parts
}

#[test]
fn the_default_model_as_floats_with_experts_gives_its_results_but_for_the_order_of_sums() {
    let tokens: Vec<u32> = (0..24).map(|i| i * 997 % 49_152).collect();
    let layers = 4;
    let dense = float_parts(layers);
    // A prompt in a batch, then single tokens.
    let wanted = run(dense.model().unwrap(), &tokens);
    let mut copies = float_parts(layers);
    copies.clone_experts(layers, 3, 1);
    set_experts(&mut copies, "llama", 3, 2);
    let mut cut = float_parts(layers);
    cut.cut_experts(layers, 4);
    set_sum(&mut cut, "llama", 4, 1536);
    for (name, parts) in [("copies", copies), ("parts", cut)] {
        let found = distance(&run(parts.model().unwrap(), &tokens), &wanted);
        println!("{name}: {found:.2e}");
        assert!(found < 1e-5, "{name}: off by {found:.2e}");
    }
}

/// The error of a model with experts after a change; it must contain a name.
fn refused(number: usize, change: impl Fn(&mut Parts), name: &str) -> Error {
    let (_, recipe) = &Recipe::with_experts()[number];
    let mut parts = recipe.parts();
    assert!(recipe.parts().model().is_ok());
    change(&mut parts);
    let error = parts.model().err().unwrap_or_else(|| panic!("{name}: taken"));
    assert!(error.to_string().contains(name), "{name} is not in: {error}");
    error
}

/// A model with experts after a change that leaves it one.
fn refused_not(number: usize, change: impl Fn(&mut Parts)) {
    let mut parts = Recipe::with_experts()[number].1.parts();
    change(&mut parts);
    parts.model().unwrap();
}

/// The number of a model among those with experts.
fn model(architecture: &str, name: &str) -> usize {
    let find = |(found, recipe): &(&str, Recipe)| recipe.architecture == architecture && *found == name;
    Recipe::with_experts().iter().position(find).unwrap()
}

#[test]
fn expert_counts_that_do_not_fit_are_named() {
    let glm = model("glm4moe", "leading dense layer, selection bias");
    let hyper = |number: usize, key: &str, value: OwnedValue| {
        let error = refused(number, |parts| _ = parts.set(key, value.clone()), key);
        assert!(matches!(error, Error::Hyperparameter { .. }), "{error}");
    };
    for used in [0u32, 7, u32::MAX] {
        hyper(glm, "glm4moe.expert_used_count", used.into());
    }
    hyper(glm, "glm4moe.expert_count", 0u32.into());
    hyper(glm, "glm4moe.expert_count", u32::MAX.into());
    for function in [4u32, 5, u32::MAX] {
        hyper(glm, "glm4moe.expert_gating_func", function.into());
    }
    for scale in [-1f32, f32::NAN, f32::INFINITY] {
        hyper(glm, "glm4moe.expert_weights_scale", scale.into());
    }
    hyper(glm, "glm4moe.leading_dense_block_count", 4u32.into());
    hyper(glm, "glm4moe.expert_feed_forward_length", u32::MAX.into());
    let groups = model("deepseek2", "groups");
    for count in [5u32, 7, 24, u32::MAX] {
        hyper(groups, "deepseek2.expert_group_count", count.into());
    }
    for used in [0u32, 5, u32::MAX] {
        hyper(groups, "deepseek2.expert_group_used_count", used.into());
    }
    refused(groups, |parts| _ = parts.remove("deepseek2.expert_group_used_count"), "expert_group_used_count");
    // One group of three experts is not enough for four.
    let change = |parts: &mut Parts| {
        parts.set("deepseek2.expert_group_used_count", 1u32).set("deepseek2.expert_used_count", 4u32);
    };
    refused(groups, change, "expert_group_used_count");
    // Groups by sigmoid come with a selection bias.
    let unbiased = |parts: &mut Parts| parts.tensors.retain(|(name, ..)| !name.ends_with("exp_probs_b.bias"));
    refused(groups, unbiased, "blk.1.exp_probs_b.bias");
    for key in ["expert_count", "expert_used_count"] {
        let key = format!("glm4moe.{key}");
        refused(glm, |parts| _ = parts.remove(&key), &key);
    }
    // DeepSeek V2 has no bias; without groups there need not be one.
    refused_not(model("deepseek2", "groups by softmax"), |_| ());
    refused_not(groups, |parts| {
        unbiased(parts);
        parts.set("deepseek2.expert_group_count", 1u32);
    });
    // A dense model of an architecture that has none.
    let mut parts = Recipe::new("qwen2").parts();
    set_experts(&mut parts, "qwen2", 4, 2);
    assert!(parts.model().err().unwrap().to_string().contains("qwen2.expert_count"));
}

#[test]
fn expert_tensors_that_do_not_fit_are_named() {
    let glm = model("glm4moe", "leading dense layer, selection bias");
    let oss = model("gpt-oss", "sinks and windows");
    let fused = model("llama", "fused");
    let qwen = model("qwen2moe", "shared expert with a gate");
    for (number, name) in [
        (glm, "blk.1.ffn_gate_inp.weight"),
        (glm, "blk.1.ffn_gate_exps.weight"),
        (glm, "blk.2.ffn_up_exps.weight"),
        (glm, "blk.2.ffn_down_exps.weight"),
        (glm, "blk.1.ffn_gate_shexp.weight"),
        (glm, "blk.1.ffn_down_shexp.weight"),
        (glm, "blk.0.ffn_gate.weight"),
        (glm, "blk.1.post_attention_norm.weight"),
        (oss, "blk.0.attn_sinks.weight"),
    ] {
        refused(number, |parts| _ = parts.remove(name), name);
    }
    for (number, name) in [
        (glm, "blk.1.exp_probs_b.bias"),
        (glm, "blk.1.ffn_up_exps.weight"),
        (oss, "blk.0.ffn_gate_exps.bias"),
        (oss, "blk.1.ffn_down_exps.bias"),
        (oss, "blk.2.ffn_gate_inp.bias"),
        (oss, "blk.2.attn_sinks.weight"),
        (fused, "blk.1.ffn_gate_up_exps.weight"),
        (qwen, "blk.0.ffn_gate_inp_shexp.weight"),
        (qwen, "blk.1.ffn_up_shexp.weight"),
    ] {
        for change in [1usize, 2] {
            let error = refused(number, |parts| parts.resize(name, change), name);
            assert!(matches!(error, Error::TensorShape { .. }), "{name}: {error}");
        }
    }
    // The count and the tensors disagree.
    for (number, key) in [(glm, "glm4moe.expert_count"), (glm, "glm4moe.expert_feed_forward_length")] {
        let error = refused(number, |parts| _ = parts.set(key, 8u32), "blk.1.ffn_");
        assert!(matches!(error, Error::TensorShape { .. }), "{error}");
    }
    // One tensor for each expert.
    let apart = model("llama", "apart");
    refused(apart, |parts| _ = parts.remove("blk.1.ffn_up.3.weight"), "blk.1.ffn_up.3.weight");
    refused(apart, |parts| _ = parts.remove("blk.1.ffn_gate.0.weight"), "blk.1.ffn_gate_exps.weight");
    refused(apart, |parts| parts.resize("blk.0.ffn_down.5.weight", 2), "blk.0.ffn_down.5.weight");
    let error = refused(apart, |parts| parts.retype("blk.0.ffn_down.2.weight", DType::F16), "ffn_down.2");
    assert!(matches!(error, Error::TensorType { .. }), "{error}");
    // A bias of the selection reaches no result: its NaN would go unnoticed.
    let error = refused(
        glm,
        |parts| {
            let (.., bytes) =
                parts.tensors.iter_mut().find(|(name, ..)| name == "blk.1.exp_probs_b.bias").unwrap();
            bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
        },
        "blk.1.exp_probs_b.bias",
    );
    assert!(matches!(error, Error::TensorValue { index: 1, .. }), "{error}");
    // Biases are F32.
    let error =
        refused(oss, |parts| parts.retype("blk.0.ffn_up_exps.bias", DType::F16), "blk.0.ffn_up_exps.bias");
    assert!(matches!(error, Error::TensorType { .. }), "{error}");
}

#[test]
fn ranks_that_do_not_fit_are_named() {
    let absorbed = model("deepseek2", "absorbed");
    let legacy = model("deepseek2", "keys and values of one matrix");
    let hyper = |number: usize, key: &str, value: u32| {
        let key = format!("deepseek2.{key}");
        let error = refused(number, |parts| _ = parts.set(&key, value), &key);
        assert!(matches!(error, Error::Hyperparameter { .. }), "{error}");
    };
    for value in [0, u32::MAX] {
        for key in ["attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla"] {
            hyper(absorbed, key, value);
        }
        hyper(absorbed, "rope.dimension_count", value);
    }
    // A key head needs elements without rotary embedding, too.
    hyper(absorbed, "attention.key_length_mla", 8);
    hyper(legacy, "attention.key_length", 8);
    // What is cached has the length of the ranks.
    hyper(absorbed, "attention.key_length", 48);
    hyper(absorbed, "attention.value_length", 16);
    for (number, key) in [(absorbed, "attention.kv_lora_rank"), (legacy, "attention.kv_lora_rank")] {
        let key = format!("deepseek2.{key}");
        refused(number, |parts| _ = parts.remove(&key), &key);
    }
    for (number, name) in [
        (absorbed, "blk.0.attn_k_b.weight"),
        (absorbed, "blk.1.attn_v_b.weight"),
        (absorbed, "blk.0.attn_q_a.weight"),
        (absorbed, "blk.0.attn_q_a_norm.weight"),
        (absorbed, "blk.2.attn_q_b.weight"),
        (absorbed, "blk.2.attn_kv_a_mqa.weight"),
        (absorbed, "blk.2.attn_kv_a_norm.weight"),
        (legacy, "blk.1.attn_kv_b.weight"),
    ] {
        let error = refused(number, |parts| parts.resize(name, 1), name);
        assert!(matches!(error, Error::TensorShape { .. }), "{name}: {error}");
        refused(number, |parts| _ = parts.remove(name), name.trim_end_matches("_a.weight"));
    }
    let scale = |parts: &mut Parts| _ = parts.set("deepseek2.attention.temperature_scale", 0.1f32);
    refused(absorbed, scale, "deepseek2.attention.temperature_scale");
}

#[test]
fn blocks_that_predict_further_tokens_are_not_used() {
    let (_, recipe) = Recipe::with_experts()[model("glm4moe", "leading dense layer, selection bias")].clone();
    let tokens = recipe.tokens(12);
    let mut parts = Recipe { layers: 4, ..recipe.clone() }.parts();
    parts.set("glm4moe.nextn_predict_layers", 1u32);
    parts.remove("blk.3.ffn_gate_exps.weight");
    let projection = "blk.3.nextn.eh_proj.weight";
    let error = parts.model().err().unwrap().to_string();
    assert!(error.contains("glm4moe.nextn_predict_layers") && error.contains(projection), "{error}");
    parts.matrix(projection, DType::F32, [recipe.width, 2 * recipe.width], 1.0);
    let model = parts.model().unwrap();
    assert_eq!(model.hyperparameters().layers.len(), 3);
    assert_eq!(
        run(model, &tokens),
        run(
            {
                let mut parts = Recipe { layers: 4, ..recipe }.parts();
                parts.set("glm4moe.block_count", 3u32);
                parts.tensors.retain(|(name, ..)| !name.starts_with("blk.3."));
                parts.model().unwrap()
            },
            &tokens
        )
    );
}

#[test]
fn hyperparameters_name_the_experts() {
    let recipe = Recipe {
        experts: Some(ExpertRecipe { width: 40, ..ExpertRecipe::new(6, 2) }),
        ..Recipe::new("qwen2moe")
    };
    let mut parts = recipe.parts();
    parts.remove("qwen2moe.expert_feed_forward_length");
    // A share of the dense network's 96, and a shared expert as wide as that.
    assert!(parts.model().err().unwrap().to_string().contains("[6, 48, 64]"));
    let experts = Recipe::with_experts()[0].1.model().hyperparameters().experts().unwrap();
    assert_eq!((experts.count, experts.used, experts.width, experts.shared_width), (6, 2, 96, 0));
    assert_eq!(Recipe::new("llama").model().hyperparameters().experts(), None);
}

#[test]
fn other_instruction_sets_and_numbers_of_threads_agree() {
    for (name, recipe) in Recipe::with_experts() {
        let tokens = recipe.tokens(14);
        let many = run(recipe.model(), &tokens);
        let one = logits_of(&mut engine(recipe.model(), options()), &tokens);
        let found = distance(&many, &one);
        assert!(found < 1e-4, "{} {name}: off by {found:.2e}", recipe.architecture);
    }
}
