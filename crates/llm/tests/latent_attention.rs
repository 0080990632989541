//! Latent attention in its absorbed and its expanded form: both compute what a transformer written out in f64 does, over the
//! same KV cache, whichever of both file layouts the matrices are in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::experts::ExpertRecipe;
use crate::common::latent::LatentRecipe;
use crate::common::reference::Reference;
use crate::common::{Parts, Recipe, distance, distances, engine, logits_of};
use quadriga_graph::DType;
use quadriga_llm::{Engine, EngineOptions, Model};

const CONTEXT: usize = 128;

/// The random models with latent attention: both layouts of files.
fn recipes() -> Vec<(&'static str, Recipe)> {
    let all: Vec<_> =
        Recipe::with_experts().into_iter().filter(|(_, recipe)| recipe.latent.is_some()).collect();
    for separate in [false, true] {
        assert!(all.iter().any(|(_, recipe)| recipe.latent.unwrap().separate == separate));
    }
    all
}

/// The model with a dense network in every layer.
fn dense(recipe: &Recipe) -> Recipe {
    let experts = recipe.experts.map(|experts| ExpertRecipe { dense: recipe.layers, ..experts });
    Recipe { experts, ..recipe.clone() }
}

fn options(cache: DType) -> EngineOptions {
    EngineOptions { context: CONTEXT, cache_keys: cache, cache_values: cache, ..EngineOptions::default() }
}

/// Whether the graph of a batch expands what is cached.
fn expands(model: &Model, tokens: usize, visible: usize) -> bool {
    let options = options(DType::F32).resolve(model).unwrap();
    let graph = model.graph(options.shape(model, tokens, 1, visible)).unwrap();
    let is = |form: &str| graph.to_string().contains(form);
    let expanded = is("k_expanded");
    let absorbed = is("k_absorbed") || (is("attn_k_b.weight") && !expanded);
    assert_ne!(expanded, absorbed, "{tokens} tokens, {visible} slots");
    expanded
}

fn all_logits(engine: &mut Engine, parts: &[&[u32]]) -> Vec<Vec<f32>> {
    parts.iter().flat_map(|tokens| logits_of(engine, tokens)).collect()
}

#[test]
fn long_batches_are_expanded_and_short_ones_absorbed() {
    for (name, recipe) in recipes() {
        let model = recipe.model();
        assert!(expands(&model, 60, 60) && expands(&model, 60, CONTEXT), "{name}");
        assert!(!expands(&model, 1, 60) && !expands(&model, 8, CONTEXT), "{name}");
    }
}

#[test]
fn both_forms_continue_the_same_cache() {
    for (number, (name, recipe)) in recipes().into_iter().enumerate() {
        for (cache, limit) in [(DType::F32, 1e-4), (DType::F16, 0.02)] {
            // Rounding the cache may choose other experts.
            let recipe = if cache == DType::F32 { recipe.clone() } else { dense(&recipe) };
            let recipe = Recipe { seed: 900 + number as u64, ..recipe };
            let tokens = recipe.tokens(100);
            let (_, wanted) = Reference::new(&recipe).run(&tokens);
            let context = format!("{name}, {cache} (seed {})", recipe.seed);
            // Expanded at once; absorbed token by token; the one after the other in both orders.
            let batches: [&[usize]; 4] =
                [&[100], &[1; 100], &[60, 1, 1, 3, 35], &[1, 1, 8, 8, 2, 60, 1, 1, 18]];
            for lengths in batches {
                let mut engine = engine(recipe.model(), options(cache));
                let mut rest = tokens.as_slice();
                let mut found = Vec::new();
                for length in lengths {
                    let (batch, after) = rest.split_at(*length);
                    found.extend(logits_of(&mut engine, batch));
                    rest = after;
                }
                // The largest difference where nothing is rounded, else the root mean square.
                let (largest, average) = distances(&found, &wanted);
                let off = if cache == DType::F32 { largest } else { average };
                assert!(off < limit, "{context}, batches of {lengths:?}: off by {off:.2e}");
            }
        }
    }
}

/// Some files have the matrices of keys and values in both layouts; the keys of the metadata tell which is used.
#[test]
fn files_with_both_layouts_use_the_one_that_their_keys_name() {
    for (name, recipe) in recipes() {
        let tokens = recipe.tokens(40);
        let (mut parts, latent) = (recipe.parts(), recipe.latent.unwrap());
        let Recipe { heads, key_length, value_length, rope_dims, .. } = recipe;
        let plain = key_length - rope_dims;
        for layer in 0..recipe.layers {
            let of = |part: &str| format!("blk.{layer}.{part}.weight");
            if latent.separate {
                parts.matrix(
                    &of("attn_kv_b"),
                    DType::F32,
                    [heads * (plain + value_length), latent.rank],
                    1.0,
                );
            } else {
                parts.stack(&of("attn_k_b"), DType::F32, heads, [latent.rank, plain]);
                parts.stack(&of("attn_v_b"), DType::F32, heads, [value_length, latent.rank]);
            }
        }
        let both = parts.model().unwrap_or_else(|error| panic!("{name}: {error}"));
        let found = logits_of(&mut engine(both, options(DType::F32)), &tokens);
        assert_eq!(found, logits_of(&mut engine(recipe.model(), options(DType::F32)), &tokens), "{name}");
    }
}

#[test]
fn truncated_and_restored_caches_are_expanded_alike() {
    for (number, (name, recipe)) in recipes().into_iter().enumerate() {
        let recipe = Recipe { seed: 950 + number as u64, ..recipe };
        let (tokens, others) = (recipe.tokens(70), recipe.tokens(120).split_off(70));
        let edited: Vec<u32> = tokens[..23].iter().chain(&others).copied().collect();
        let (_, wanted) = Reference::new(&recipe).run(&edited);
        let mut first = engine(recipe.model(), options(DType::F32));
        all_logits(&mut first, &[&tokens]);
        assert_eq!(first.truncate(0, 23), 23, "{name}");
        let mut bytes = Vec::new();
        first.save_state(0, &mut bytes).unwrap();
        let mut second = engine(recipe.model(), options(DType::F32));
        second.load_state(0, &mut bytes.as_slice()).unwrap();
        for engine in [&mut first, &mut second] {
            let off = distance(&logits_of(engine, &others), &wanted[23..]);
            assert!(off < 1e-4, "{name} (seed {}): off by {off:.2e}", recipe.seed);
        }
    }
}

#[test]
fn quantized_matrices_are_transposed_exactly_enough() {
    for (name, recipe) in recipes() {
        for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0] {
            let latent = recipe.latent.map(|latent| LatentRecipe { query_rank: None, ..latent });
            let recipe = Recipe {
                latent,
                dtype,
                width: 64,
                feed_forward: 96,
                key_length: 40,
                value_length: 32,
                ..dense(&recipe)
            };
            let tokens = recipe.tokens(64);
            let whole = logits_of(&mut engine(recipe.model(), options(DType::F16)), &tokens);
            let mut steps = engine(recipe.model(), options(DType::F16));
            let single: Vec<_> = tokens.iter().flat_map(|token| logits_of(&mut steps, &[*token])).collect();
            let (_, off) = distances(&whole, &single);
            assert!(off < 0.02, "{name} {dtype}: off by {off:.2e}");
        }
    }
}

/// NVFP4 files have a number beside a matrix that its products are multiplied with.
#[test]
fn products_with_keys_and_values_are_scaled() {
    for (name, recipe) in recipes() {
        let tokens = recipe.tokens(64);
        let forms = |parts: &Parts| {
            let mut engine = engine(parts.model().unwrap(), options(DType::F32));
            all_logits(&mut engine, &[&tokens[..60], &tokens[60..61], &tokens[61..]])
        };
        let mut parts = recipe.parts();
        let wanted = forms(&parts);
        let mut scales = Vec::new();
        for (tensor, _, _, bytes) in &mut parts.tensors {
            let Some(matrix) = tensor.strip_suffix("_b.weight").filter(|name| !name.ends_with("_q")) else {
                continue;
            };
            for four in bytes.chunks_exact_mut(4) {
                let value = f32::from_le_bytes(four.try_into().unwrap());
                four.copy_from_slice(&(value / 4.0).to_le_bytes());
            }
            scales.push((format!("{matrix}_b.scale"), DType::F32, vec![1], 4.0f32.to_le_bytes().to_vec()));
        }
        assert!(scales.len() >= 3, "{name}");
        parts.tensors.extend(scales);
        assert_eq!(forms(&parts), wanted, "{name}");
    }
}
