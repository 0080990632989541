//! Hyperparameters as the metadata of model files gives them: per layer, with the defaults of each architecture.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Recipe, Scaling};
use quadriga_graph::Rope;
use quadriga_llm::Hyperparameters;

/// The hyperparameters of a recipe's model after a change of its keys.
fn changed(recipe: &Recipe, keys: &[(&str, f32)]) -> Hyperparameters {
    let mut parts = recipe.parts();
    for (key, value) in keys {
        parts.set(&format!("{}.{key}", recipe.architecture), *value);
    }
    parts.model().unwrap().hyperparameters().clone()
}

fn windows(hyper: &Hyperparameters) -> Vec<bool> {
    hyper.layers.iter().map(|layer| layer.window.is_some()).collect()
}

#[test]
fn yarn_has_all_its_keys() {
    let scaling = Scaling::Yarn { factor: 4.0, original: 512 };
    let recipe = Recipe { scaling, ..Recipe::new("llama") };
    let rope = |keys: &[(&str, f32)]| changed(&recipe, keys).layers[0].rope.unwrap();
    // The factor of the result: what the embedding multiplies by itself, times the attention factor.
    let magnitude = |rope: Rope| rope.angle(0, 0, 1.0).1;
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
    let own = 1.0 + 0.1 * 4f64.ln();
    let plain = rope(&[]);
    assert_eq!((plain.ext_factor, plain.scale, plain.original_context), (1.0, 0.25, 512));
    assert_eq!((plain.beta_fast, plain.beta_slow), (32.0, 1.0));
    close(magnitude(plain), own);
    close(magnitude(rope(&[("rope.scaling.attn_factor", 1.5)])), 1.5 * own);
    close(magnitude(rope(&[("rope.scaling.yarn_log_multiplier", 1.0)])), 1.0);
    close(magnitude(rope(&[("rope.scaling.yarn_log_multiplier", 2.0)])), own / (1.0 + 0.2 * 4f64.ln()));
    let betas = rope(&[("rope.scaling.yarn_beta_fast", 16.0), ("rope.scaling.yarn_beta_slow", 2.0)]);
    assert_eq!((betas.beta_fast, betas.beta_slow), (16.0, 2.0));
    // Without extrapolation nothing is corrected.
    let none = rope(&[("rope.scaling.yarn_ext_factor", 0.0), ("rope.scaling.yarn_attn_factor", 1.25)]);
    close(magnitude(none), 1.25);
    // A factor of at most 1 does not change the magnitude.
    close(magnitude(rope(&[("rope.scaling.factor", 1.0)])), 1.0);
}

#[test]
fn windows_follow_the_file_or_the_architecture() {
    let recipe = |architecture: &str| {
        let found = Recipe::families().into_iter().find(|recipe| recipe.architecture == architecture);
        Recipe { layers: 7, ..found.unwrap() }
    };
    let gemma3 = recipe("gemma3");
    assert_eq!(windows(&changed(&gemma3, &[])), [true, true, true, true, true, false, true]);
    assert_eq!(windows(&changed(&recipe("gemma2"), &[])), [true, false, true, false, true, false, true]);
    let mut parts = gemma3.parts();
    let flags = vec![false, true, false, false, true, true, false];
    parts.set("gemma3.attention.sliding_window_pattern", flags.clone());
    let hyper = parts.model().unwrap().hyperparameters().clone();
    assert_eq!(windows(&hyper), flags);
    // Layers with a window have a rotary embedding of their own, which is not scaled.
    let [global, window] = [0, 1].map(|layer: usize| hyper.layers[layer].rope.unwrap());
    assert_eq!((global.base, global.scale), (1_000_000.0, 0.125));
    assert_eq!((window.base, window.scale), (10_000.0, 1.0));
    // Gemma 2 has a window even if the file does not name its size; Phi has none even if it does.
    let mut parts = recipe("gemma2").parts();
    parts.remove("gemma2.attention.sliding_window");
    assert_eq!(parts.model().unwrap().hyperparameters().window(), Some(4096));
    let mut parts = recipe("phi3").parts();
    parts.set("phi3.attention.sliding_window", 9u32);
    assert_eq!(parts.model().unwrap().hyperparameters().window(), None);
}

#[test]
fn layers_can_differ() {
    let mut parts = Recipe { layers: 2, kv_heads: 4, ..Recipe::new("llama") }.parts();
    parts.set("llama.attention.head_count_kv", vec![4u32, 4]);
    parts.set("llama.feed_forward_length", vec![96u32, 96]);
    let hyper = parts.model().unwrap().hyperparameters().clone();
    assert_eq!(hyper.layers.len(), 2);
    let mut fewer = Recipe { layers: 1, kv_heads: 2, ..Recipe::new("llama") }.parts();
    // A second layer with other heads and another width.
    let other = Recipe { layers: 2, kv_heads: 4, feed_forward: 64, ..Recipe::new("llama") }.parts();
    fewer.tensors.extend(other.tensors.into_iter().filter(|(name, ..)| name.starts_with("blk.1.")));
    fewer.set("llama.block_count", 2u32);
    fewer.set("llama.attention.head_count_kv", vec![2u32, 4]);
    fewer.set("llama.feed_forward_length", vec![96u32, 64]);
    let hyper = fewer.model().unwrap().hyperparameters().clone();
    assert_eq!(hyper.layers.iter().map(|layer| layer.kv_heads).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(hyper.layers.iter().map(|layer| layer.feed_forward).collect::<Vec<_>>(), [96, 64]);
}
