//! Random small models of every architecture and weight type compute what they should: the engine agrees with the
//! oracle on the same graph, and with transformers written out in f64 that know nothing of graphs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::recurrent::RecurrentRecipe;
use crate::common::reference::Reference;
use crate::common::streams::StreamRecipe;
use crate::common::{QueryNorms, Recipe, Scaling, distance, distances, engine, engine_on, logits_of};
use quadriga_conformance::{Oracle, Rng};
use quadriga_cpu::isa::Isa;
use quadriga_graph::DType;
use quadriga_llm::models::{GraphShape, NeuronMode, Neurons};
use quadriga_llm::{EngineOptions, Model, WindowSpan};

const EXACT_CACHE: EngineOptions = EngineOptions {
    pages: 0,
    context: 0,
    sequences: 1,
    batch: 512,
    output_rows: 1,
    cache_keys: DType::F32,
    cache_values: DType::F32,
    window_slots: 0,
    expert_slots: 0,
    resident_experts: quadriga_llm::models::LayerSet::EMPTY,
    upload_bytes: 0,
    neuron_counts: None,
    observed_tokens: usize::MAX,
    neurons: Neurons { mode: NeuronMode::Exact, threshold: 0, slots: 0, observe: false },
    checkpoints: 0,
    hidden: true,
    logits: true,
    greedy: false,
};

/// Every row of logits, by the oracle on the graph of one batch.
fn oracle(model: &Model, tokens: &[u32]) -> Vec<Vec<f64>> {
    let n = tokens.len();
    let hyper = model.hyperparameters();
    let shape =
        GraphShape { cache_keys: DType::F32, cache_values: DType::F32, ..GraphShape::new(n, hyper.context) };
    let graph = model.graph(GraphShape { visible_slots: n + 3, cache_slots: n + 9, ..shape }).unwrap();
    let window = hyper.window_span();
    let numbers: Vec<i32> = (0..n as i32).collect();
    let spans = |window: Option<WindowSpan>| -> Vec<i32> {
        (0..n).flat_map(|t| [window.map_or(0, |window| window.first(t)) as i32, t as i32 + 1]).collect()
    };
    let mut oracle = Oracle::new(&graph).unwrap();
    oracle.set_i32("tokens", &tokens.iter().map(|t| *t as i32).collect::<Vec<_>>()).unwrap();
    oracle.set_i32("positions", &numbers).unwrap();
    if let Some(temperature) = hyper.temperature {
        let factors: Vec<f32> = (0..n).map(|position| temperature.factor(position)).collect();
        oracle.set_f32("query_factors", &factors).unwrap();
    }
    if hyper.has_full_attention() || window.is_some() {
        oracle.set_i32("slots", &numbers).unwrap();
    }
    if let Some(recurrent) = &hyper.recurrent {
        for (name, pieces) in recurrent.piece_inputs(0, 1) {
            oracle.set_i32(name, &pieces.collect::<Vec<_>>()).unwrap();
        }
    }
    if hyper.has_full_attention() {
        oracle.set_i32("spans", &spans(None)).unwrap();
    }
    if window.is_some() {
        oracle.set_i32("window_spans", &spans(window)).unwrap();
    }
    oracle.run().unwrap();
    let all = oracle.read("logits").unwrap();
    all.chunks(hyper.vocabulary).map(<[f64]>::to_vec).collect()
}

/// Variations of the plain model, each of which changes its graph.
fn variations() -> Vec<(&'static str, Recipe)> {
    let mut all = Vec::new();
    for architecture in ["llama", "qwen2", "qwen3"] {
        let plain = Recipe::new(architecture);
        all.extend([
            ("plain", plain.clone()),
            ("tied", Recipe { tied: true, ..plain.clone() }),
            ("one layer", Recipe { layers: 1, ..plain.clone() }),
            ("three layers, a key head each", Recipe { layers: 3, kv_heads: 4, ..plain.clone() }),
            ("one key head", Recipe { kv_heads: 1, ..plain.clone() }),
            ("five heads", Recipe { width: 80, heads: 5, kv_heads: 1, ..plain.clone() }),
            ("long keys", Recipe { key_length: 32, rope_dims: 32, ..plain.clone() }),
            (
                "long keys, short values",
                Recipe { key_length: 48, rope_dims: 48, value_length: 8, ..plain.clone() },
            ),
            ("RoPE on half a head", Recipe { rope_dims: 8, ..plain.clone() }),
            ("another base", Recipe { rope_base: 1_000_000.0, ..plain.clone() }),
            ("linear scaling", Recipe { scaling: Scaling::Linear(4.0), ..plain.clone() }),
            (
                "yarn",
                Recipe {
                    scaling: Scaling::Yarn { factor: 4.0, original: 4096 },
                    key_length: 64,
                    rope_dims: 64,
                    ..plain.clone()
                },
            ),
            ("frequency factors", Recipe { rope_factors: true, ..plain.clone() }),
            ("sliding window", Recipe { window: Some(5), ..plain.clone() }),
            ("biases everywhere", Recipe { biases: true, output_bias: true, ..plain.clone() }),
            ("no biases", Recipe { biases: false, ..plain }),
        ]);
    }
    all
}

/// Models of other families, with what their files may have besides.
fn families() -> Vec<(&'static str, Recipe)> {
    let mut all = Vec::new();
    for plain in Recipe::families() {
        let dims = plain.rope_dims.min(10);
        // Its models have an output matrix of their own.
        let tied = plain.architecture != "olmo2";
        all.extend([
            ("untied", Recipe { tied: false, ..plain.clone() }),
            ("tied, a layer more", Recipe { tied, layers: plain.layers + 1, ..plain.clone() }),
            ("odd widths", Recipe { width: 72, heads: 6, kv_heads: 3, feed_forward: 88, ..plain.clone() }),
            ("biases", Recipe { biases: true, output_bias: true, ..plain.clone() }),
            ("RoPE on a part", Recipe { rope_dims: dims, rope_base: 500_000.0, ..plain.clone() }),
        ]);
        if plain.streams.is_some() {
            let streams = plain.streams.map(|streams| StreamRecipe { count: 4, shared: 0, ..streams });
            all.push(("caches of their own", Recipe { streams, layers: 3, ..plain }));
            continue;
        }
        all.push(("fused", Recipe { fused_attention: true, fused_feed_forward: true, ..plain.clone() }));
        if plain.window.is_some() {
            let named = Recipe { window_period: 3, names_period: true, layers: 4, ..plain.clone() };
            all.push(("period 3", named));
        }
        match plain.architecture {
            "phi3" => {
                let long = Recipe { long_factors: true, rope_magnitude: 1.19, ..plain.clone() };
                all.push(("long factors", long));
                all.push(("separate", Recipe { fused_attention: false, fused_feed_forward: false, ..plain }));
            }
            "command-r" => {
                let norms = Recipe { layers: 64, query_norms: QueryNorms::EachHead, width: 32, ..plain };
                all.push(("norms of heads", norms));
            }
            "gemma3" => {
                all.push(("no windows", Recipe { window: None, window_rope_base: None, ..plain.clone() }));
                let scale = Some(1.0 / (64f32 / 4.0).sqrt());
                let largest = Recipe { layers: 62, key_length: 8, rope_dims: 8, ..plain };
                all.push(("27B", Recipe { attention_scale: scale, ..largest }));
            }
            "lfm2" => {
                let windows = Recipe { window: Some(5), ..plain.clone() };
                all.push(("windows", windows));
                let kernel = RecurrentRecipe::ShortConvolutions { kernel: 2 };
                all.push(("a kernel of two", Recipe { recurrent: Some(kernel), ..plain }));
            }
            "olmo2" => {
                let yarn = Scaling::Yarn { factor: 4.0, original: 64 };
                let windows = Recipe { window: Some(5), window_period: 4, layers: 5, ..plain };
                all.push(("3", Recipe { scaling: yarn, window_rope_base: Some(10_000.0), ..windows }));
            }
            _ => {}
        }
    }
    // Gemma scales the embedding by the root of its width.
    for (_, recipe) in all.iter_mut().filter(|(_, recipe)| recipe.architecture.starts_with("gemma")) {
        recipe.embedding_scale = (recipe.width as f32).sqrt();
    }
    all
}

/// The number of a model is its seed: further ones come last.
fn further() -> Vec<(&'static str, Recipe)> {
    let gemma = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let scale = Some(1.0 / (64f32 / 4.0).sqrt());
    let largest = Recipe { layers: 46, key_length: 8, rope_dims: 8, ..gemma };
    vec![("27B", Recipe { attention_scale: scale, ..largest })]
}

#[test]
fn every_architecture_agrees_with_the_reference() {
    let all = variations().into_iter().chain(families()).chain(Recipe::with_experts()).chain(further());
    for (number, (name, recipe)) in all.enumerate() {
        let recipe = Recipe { seed: 100 + number as u64, ..recipe };
        let context = format!("{} {name} (seed {})", recipe.architecture, recipe.seed);
        let tokens = recipe.tokens(21);
        let (hidden, wanted) = Reference::new(&recipe).run(&tokens);
        let by_oracle = distance(&oracle(&recipe.model(), &tokens), &wanted);
        assert!(by_oracle < 1e-6, "{context}: the graph is off by {by_oracle:.2e}");
        let mut engine = engine(recipe.model(), EXACT_CACHE);
        let found = distance(&logits_of(&mut engine, &tokens), &wanted);
        assert!(found < 1e-4, "{context}: logits are off by {found:.2e}");
        let rows: Vec<Vec<f32>> = (0..tokens.len()).map(|row| engine.hidden(row).to_vec()).collect();
        let found = distance(&rows, &hidden);
        assert!(found < 1e-4, "{context}: hidden values are off by {found:.2e}");
    }
}

/// Random combinations of all variations.
#[test]
fn random_shapes_agree_with_the_reference() {
    for seed in 0..24 {
        let mut rng = Rng::new(seed);
        let architecture = *rng.pick(&["llama", "qwen2", "qwen3"]).unwrap();
        let kv_heads = rng.range(1, 4);
        let key_length = 8 * rng.range(1, 8);
        let recipe = Recipe {
            layers: rng.range(1, 3),
            width: 8 * rng.range(8, 24),
            heads: kv_heads * rng.range(1, 4),
            kv_heads,
            key_length,
            value_length: 8 * rng.range(1, 8),
            feed_forward: 8 * rng.range(4, 40),
            vocabulary: rng.range(20, 300),
            tied: rng.chance(0.5),
            biases: rng.chance(0.5),
            output_bias: rng.chance(0.3),
            rope_dims: 2 * rng.range(1, key_length / 2),
            scaling: *rng
                .pick(&[Scaling::No, Scaling::Linear(2.0), Scaling::Yarn { factor: 8.0, original: 512 }])
                .unwrap(),
            rope_factors: rng.chance(0.3),
            window: rng.chance(0.3).then_some(7),
            seed,
            ..Recipe::new(architecture)
        };
        let tokens = recipe.tokens(rng.range(1, 40));
        let (_, wanted) = Reference::new(&recipe).run(&tokens);
        let by_oracle = distance(&oracle(&recipe.model(), &tokens), &wanted);
        assert!(by_oracle < 1e-6, "{recipe:?}: the graph is off by {by_oracle:.2e}");
        let found = distance(&logits_of(&mut engine(recipe.model(), EXACT_CACHE), &tokens), &wanted);
        assert!(found < 1e-4, "{recipe:?}: off by {found:.2e}");
    }
}

/// The tolerance for logits, root mean square in standard deviations: activations are rounded to 15 bits for quantized
/// weights, or to bf16 on some instruction sets.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 | DType::BF16 => 0.05,
        _ => 0.1,
    }
}

#[test]
fn every_weight_type_agrees_with_the_oracle_on_every_instruction_set() {
    let backends: Vec<(Isa, Arc<quadriga_cpu::Backend>)> = Isa::available()
        .into_iter()
        .map(|isa| (isa, Arc::new(quadriga_cpu::Backend::builder().isa(isa).threads(2).build().unwrap())))
        .collect();
    for dtype in DType::all().filter(|dtype| dtype.is_computable()) {
        for (number, architecture) in ["llama", "qwen2", "qwen3"].into_iter().enumerate() {
            let seed = 500 + dtype.id() as u64 * 10 + number as u64;
            let recipe = Recipe { tied: number == 1, seed, ..Recipe::wide(architecture, dtype) };
            let tokens = recipe.tokens(19);
            let wanted = oracle(&recipe.model(), &tokens);
            for (isa, backend) in &backends {
                let mut engine = engine_on(Arc::clone(backend) as _, recipe.model(), EXACT_CACHE);
                // A prompt at once, then single tokens: matrix and vector kernels.
                let mut rows = logits_of(&mut engine, &tokens[..15]);
                for token in &tokens[15..] {
                    rows.extend(logits_of(&mut engine, &[*token]));
                }
                let (_, found) = distances(&rows, &wanted);
                println!("{dtype} {architecture} {isa}: {found:.2e}");
                assert!(
                    found < tolerance(dtype),
                    "{dtype} {architecture} on {isa} (seed {seed}): off by {found:.2e}"
                );
            }
        }
    }
}

/// NVFP4 files have a number beside each matrix, experts one each, that its products are multiplied with.
#[test]
fn products_are_multiplied_with_the_scale_beside_a_matrix() {
    let dense = Recipe::families().into_iter().chain([Recipe::new("llama")]);
    for recipe in dense.chain(Recipe::with_experts().into_iter().map(|(_, recipe)| recipe)) {
        let architecture = recipe.architecture;
        let tokens = recipe.tokens(7);
        let wanted = logits_of(&mut engine(recipe.model(), EXACT_CACHE), &tokens);
        let mut parts = recipe.parts();
        let mut scales = Vec::new();
        for (name, dtype, dims, bytes) in &mut parts.tensors {
            let Some(matrix) = name.strip_suffix(".weight").filter(|_| *dtype == DType::F32) else {
                continue;
            };
            let count = match dims[..] {
                // Kernels of convolutions and norms of groups are not matrices of products.
                [_, _]
                    if matrix.ends_with("conv") || matrix.contains("conv1d") || matrix.ends_with("norm") =>
                {
                    continue;
                }
                [_, _] if recipe.experts.is_none() && !matrix.ends_with("token_embd") => 1,
                [count, _, _] if matrix.ends_with("_exps") => count,
                _ => continue,
            };
            // Powers of two, so that the results are the same bits.
            let each: Vec<f32> = (0..count).map(|i| [4.0, 0.5, 16.0][i % 3]).collect();
            let stride = bytes.len() / count;
            for (scale, bytes) in each.iter().zip(bytes.chunks_exact_mut(stride)) {
                for four in bytes.chunks_exact_mut(4) {
                    let value = f32::from_le_bytes(four.try_into().unwrap());
                    four.copy_from_slice(&(value / scale).to_le_bytes());
                }
            }
            let bytes = each.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            scales.push((format!("{matrix}.scale"), DType::F32, vec![count], bytes));
        }
        println!("{architecture}: {} scales", scales.len());
        assert!(!scales.is_empty() || recipe.experts.is_some(), "{architecture}");
        parts.tensors.extend(scales);
        let found = logits_of(&mut engine(parts.model().unwrap(), EXACT_CACHE), &tokens);
        assert_eq!(found, wanted, "{architecture}");
    }
}
