//! Hyperparameters as the metadata of model files gives them: per layer, with the defaults of each architecture.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::recurrent::parts_of;
use crate::common::{Recipe, Scaling};
use crate::recurrent_models::delta_recipes;
use quadriga_gguf::OwnedValue;
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

/// Some writers have no arrays of truth values.
#[test]
fn patterns_of_layers_may_be_numbers() {
    let mut families = Recipe::families().into_iter();
    let gemma = families.find(|recipe| recipe.architecture == "gemma3").unwrap();
    let (window, linear) = (Recipe { layers: 3, ..gemma }, delta_recipes().swap_remove(0));
    let patterns = ["attention.sliding_window_pattern", "attention.recurrent_layers"];
    for (recipe, key) in [window, linear].iter().zip(patterns) {
        let key = format!("{}.{key}", recipe.architecture);
        let plain = || if recipe.window.is_some() { recipe.parts() } else { parts_of(recipe) };
        let of = |value: OwnedValue| {
            let mut parts = plain();
            parts.set(&key, value).model()
        };
        let recurrent = |hyper: &Hyperparameters| hyper.layers.iter().map(|layer| !layer.attention).collect();
        let kinds = |hyper: &Hyperparameters| -> Vec<bool> {
            if recipe.window.is_some() { windows(hyper) } else { recurrent(hyper) }
        };
        // Tensors of recurrent layers are others.
        let flags = match recipe.window {
            Some(_) => vec![false, true, true],
            None => kinds(plain().model().unwrap().hyperparameters()),
        };
        let numbers: Vec<i32> = flags.iter().map(|flag| i32::from(*flag)).collect();
        let unsigned: Vec<u32> = flags.iter().map(|flag| u32::from(*flag)).collect();
        for value in [OwnedValue::from(flags.clone()), numbers.clone().into(), unsigned.clone().into()] {
            assert_eq!(kinds(of(value.clone()).unwrap().hyperparameters()), flags, "{key} = {value:?}");
        }
        let mut others: Vec<OwnedValue> = Vec::new();
        for number in [2, -1, i32::MAX] {
            let mut changed = numbers.clone();
            changed[1] = number;
            others.push(changed.into());
        }
        others.push(vec![1.0f32; flags.len()].into());
        others.push(vec![1u32; flags.len() + 1].into());
        for value in others {
            let error = of(value.clone()).err().unwrap_or_else(|| panic!("{key} = {value:?}: taken"));
            assert!(error.to_string().contains(&key), "{key} = {value:?}: {error}");
        }
    }
}
