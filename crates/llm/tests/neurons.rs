//! Models with few active neurons: skipping inactive ones gives the results of computing all, predictors skip what they
//! predict, and counts belong to the model that they were collected with.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::reference::Reference;
use crate::common::{Parts, Recipe, distance, distances, engine, logits_of};
use quadriga_conformance::Rng;
use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_llm::models::{NeuronMode, Neurons};
use quadriga_llm::{EngineOptions, Error, Model, NeuronCounts};

fn options(mode: NeuronMode) -> EngineOptions {
    let neurons = Neurons { mode, observe: true, ..Neurons::default() };
    EngineOptions { context: 64, batch: 8, neurons, ..EngineOptions::default() }.cache(DType::F32)
}

/// A prompt, then tokens one by one.
fn run(model: &Model, options: EngineOptions, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut engine = engine(model.clone(), options);
    let mut rows = logits_of(&mut engine, &tokens[..5]);
    tokens[5..].iter().for_each(|token| rows.extend(logits_of(&mut engine, &[*token])));
    rows
}

/// Adds predictors of this rank, whose scores are random.
fn with_predictors(recipe: &Recipe, rank: usize) -> Parts {
    let mut parts = recipe.parts();
    for layer in 0..recipe.layers {
        parts.matrix(&format!("blk.{layer}.fc1.weight"), DType::F32, [rank, recipe.width], 1.0);
        parts.matrix(&format!("blk.{layer}.fc2.weight"), DType::F32, [recipe.feed_forward, rank], 1.0);
    }
    parts.set("powerinfer.sparse_threshold", 0.1f32);
    parts
}

#[test]
fn every_rectified_architecture_agrees_with_the_reference_whatever_is_skipped() {
    for (name, recipe) in Recipe::rectified() {
        let tokens = recipe.tokens(12);
        let wanted: Vec<Vec<f64>> = Reference::new(&recipe).run(&tokens).1;
        let model = recipe.model();
        for mode in [NeuronMode::Exact, NeuronMode::Dense] {
            let found = distances(&run(&model, options(mode), &tokens), &wanted);
            assert!(found.1 < 1e-4, "{name}, {mode:?}: off by {found:?}");
        }
    }
}

/// Gemma 3n's first layers have cut gates: what is skipped there changes nothing, and is counted.
#[test]
fn neurons_of_cut_gates_are_skipped_and_counted() {
    let cut = Recipe::with_cut_gates();
    for recipe in [Recipe { transposed: false, ..cut.clone() }, cut] {
        let tokens = recipe.tokens(12);
        let wanted: Vec<Vec<f64>> = Reference::new(&recipe).run(&tokens).1;
        let model = recipe.model();
        for mode in [NeuronMode::Exact, NeuronMode::Dense] {
            let found = distances(&run(&model, options(mode), &tokens), &wanted);
            assert!(found.1 < 1e-4, "{mode:?}: off by {found:?}");
        }
        let mut exact = engine(model, options(NeuronMode::Exact));
        tokens.iter().for_each(|token| drop(logits_of(&mut exact, &[*token])));
        let usage = exact.neuron_use().unwrap();
        let (layers, _) = recipe.streams.unwrap().cut;
        assert_eq!(usage.neurons, (12 * layers * recipe.feed_forward) as u64, "{usage:?}");
        assert!(usage.active > 0 && usage.active < usage.neurons, "{usage:?}");
        assert!(usage.bytes < usage.dense_bytes, "{usage:?}");
        let counts = exact.neuron_counts().unwrap();
        for (layer, counts) in counts.layers.iter().enumerate() {
            assert_eq!(counts.iter().any(|count| *count > 0), layer < layers, "layer {layer}");
        }
    }
}

#[test]
fn active_neurons_and_the_bytes_that_they_cost_are_counted() {
    for (name, recipe) in Recipe::rectified() {
        let (model, tokens) = (recipe.model(), recipe.tokens(12));
        let mut exact = engine(model.clone(), options(NeuronMode::Exact));
        tokens.iter().for_each(|token| drop(logits_of(&mut exact, &[*token])));
        let usage = exact.neuron_use().unwrap();
        assert_eq!(usage.batches, 12, "{name}");
        assert_eq!(usage.neurons, (12 * recipe.layers * recipe.feed_forward) as u64, "{name}");
        assert!(usage.active > 0 && usage.active < usage.neurons, "{name}: {usage:?}");
        let counts = exact.neuron_counts().unwrap();
        let counted: u64 = counts.layers.iter().flatten().map(|count| u64::from(*count)).sum();
        assert_eq!((counts.tokens, counted), (12, usage.active), "{name}");
        // With one token a batch, every active neuron is a row of each sparse matrix.
        assert_eq!(usage.rows % usage.active, 0, "{name}: {usage:?}");
        let skipped = (usage.neurons * (usage.rows / usage.active) - usage.rows) * recipe.width as u64 * 4;
        assert_eq!(usage.dense_bytes - usage.bytes, skipped, "{name}: {usage:?}");
        assert!(engine(model, EngineOptions::default()).neuron_use().is_none());
    }
}

#[test]
fn predictors_decide_in_predicted_mode_only_and_what_they_miss_is_counted() {
    for (name, recipe) in Recipe::rectified() {
        let tokens = recipe.tokens(12);
        let plain = run(&recipe.model(), options(NeuronMode::Exact), &tokens);
        let mut parts = with_predictors(&recipe, 24);
        let model = parts.model().unwrap();
        assert!(distance(&run(&model, options(NeuronMode::Exact), &tokens), &plain) < 1e-6, "{name}");
        let mut predicted = engine(model.clone(), options(NeuronMode::Predicted));
        let rows: Vec<Vec<f32>> =
            tokens.iter().flat_map(|token| logits_of(&mut predicted, &[*token])).collect();
        assert!(distance(&rows, &plain) > 1e-3, "{name}: nothing was skipped");
        let usage = predicted.neuron_use().unwrap();
        assert!(usage.missed > 0 && usage.predicted < usage.neurons, "{name}: {usage:?}");
        assert!(usage.active <= usage.predicted, "{name}: {usage:?}");
        // A threshold below all scores predicts every neuron: nothing is missed.
        parts.set("powerinfer.sparse_threshold", -1e9f32);
        let model = parts.model().unwrap();
        assert!(distance(&run(&model, options(NeuronMode::Predicted), &tokens), &plain) < 1e-5, "{name}");
        let mut all = engine(model, options(NeuronMode::Predicted));
        logits_of(&mut all, &tokens[..3]);
        assert_eq!(all.neuron_use().unwrap().missed, 0, "{name}");
    }
    let (_, recipe) = Recipe::rectified().swap_remove(0);
    let refused = quadriga_llm::Engine::new(
        recipe.model(),
        &quadriga_runtime::Scheduler::new([crate::common::cpu(1)]),
        options(NeuronMode::Predicted),
        &mut |_| {},
    );
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("no predictors"), "{error}");
}

#[test]
fn a_gate_threshold_skips_neurons_of_any_gated_model() {
    let recipe = Recipe::new("qwen3");
    let (model, tokens) = (recipe.model(), recipe.tokens(12));
    let exact = run(&model, options(NeuronMode::Exact), &tokens);
    let cut = |threshold: f32| {
        let mut options = options(NeuronMode::Exact);
        options.neurons = options.neurons.cut(threshold);
        run(&model, options, &tokens)
    };
    assert_eq!(cut(0.0), exact);
    let [small, large] = [1e-6, 0.2].map(|threshold| distance(&cut(threshold), &exact));
    assert!(small < 1e-4 && large > 1e-3, "{small:.2e} {large:.2e}");
}

/// The bytes of a model in PowerInfer's container.
fn contained(parts: &Parts) -> Vec<u8> {
    let mut writer = Writer::powerinfer();
    for (key, value) in &parts.keys {
        writer.set(key, value.clone()).unwrap();
    }
    for (name, dtype, dims, bytes) in &parts.tensors {
        let shape = quadriga_graph::Shape::new(dims).unwrap();
        writer.tensor_bytes(name, *dtype, shape, bytes).unwrap();
    }
    let mut out = Vec::new();
    writer.write_to(&mut out).unwrap();
    out
}

#[test]
fn files_in_powerinfers_container_are_rectified() {
    let (_, recipe) = Recipe::rectified().swap_remove(0);
    assert_eq!(recipe.architecture, "llama");
    let tokens = recipe.tokens(10);
    let wanted = run(&recipe.model(), options(NeuronMode::Exact), &tokens);
    let mut parts = recipe.parts();
    parts.remove("llama.hidden_activation");
    let bytes = contained(&parts);
    assert_eq!(&bytes[..4], b"PWRI");
    let file = File::from_bytes(bytes).unwrap();
    assert!(file.is_powerinfer());
    let model = Model::from_file(file).unwrap();
    assert!(model.hyperparameters().rectified);
    assert_eq!(run(&model, options(NeuronMode::Exact), &tokens), wanted);
    // Without container, key and transposed matrices, it is an ordinary Llama.
    assert!(!Recipe::new("llama").model().hyperparameters().rectified);
}

#[test]
fn predictors_that_do_not_fit_are_refused_by_name() {
    let (_, recipe) = Recipe::rectified().swap_remove(0);
    type Change = fn(&mut Parts);
    let changes: [(&str, Change); 6] = [
        ("blk.1.fc2.weight", |parts| _ = parts.remove("blk.1.fc2.weight")),
        ("blk.0.fc1.weight", |parts| _ = parts.remove("blk.0.fc1.weight")),
        ("blk.0.fc1.weight", |parts| reshape(parts, "blk.0.fc1.weight", vec![32, 48])),
        ("blk.0.fc2.weight", |parts| reshape(parts, "blk.0.fc2.weight", vec![24, 96])),
        ("blk.1.fc2.weight", |parts| reshape(parts, "blk.1.fc2.weight", vec![96 * 24])),
        ("powerinfer.sparse_threshold", |parts| {
            parts.set("powerinfer.sparse_threshold", f32::NAN);
        }),
    ];
    for (name, change) in changes {
        let mut parts = with_predictors(&recipe, 24);
        change(&mut parts);
        let error = parts.model().err().unwrap_or_else(|| panic!("{name}: taken")).to_string();
        assert!(error.contains(name), "{name} is not in: {error}");
    }
}

fn reshape(parts: &mut Parts, name: &str, dims: Vec<usize>) {
    parts.tensors.iter_mut().find(|(tensor, ..)| tensor == name).unwrap().2 = dims;
}

/// A folder of this test.
fn folder(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("quadriga-neurons-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn neurons_of_long_batches_are_not_observed_if_the_options_say_so() {
    let (_, recipe) = Recipe::rectified().swap_remove(0);
    let (model, tokens) = (recipe.model(), recipe.tokens(12));
    let use_of = |observed_tokens: usize, tokens: &[u32]| {
        let options = EngineOptions { observed_tokens, ..options(NeuronMode::Exact) };
        let mut engine = engine(model.clone(), options);
        let mut rows = logits_of(&mut engine, &tokens[..5]);
        tokens[5..].iter().for_each(|token| rows.extend(logits_of(&mut engine, &[*token])));
        (rows, engine.neuron_use().unwrap())
    };
    let (all, (few, one)) = (use_of(usize::MAX, &tokens), use_of(1, &tokens));
    assert!(distance(&all.0, &few) < 1e-6);
    assert_eq!((all.1.batches, one.batches), (8, 7));
    assert_eq!(one.neurons, (7 * recipe.layers * recipe.feed_forward) as u64);
    assert!(one.active < all.1.active, "{one:?} {:?}", all.1);
}

#[test]
fn counts_of_one_text_are_judged_by_another() {
    let counts = |layers: Vec<Vec<u32>>| NeuronCounts { tokens: 10, layers };
    let own = counts(vec![vec![8, 0, 1, 1], vec![0, 0, 5, 5]]);
    assert_eq!(own.share_of_most_active_by(&own, 0.5), own.share_of_most_active(0.5));
    // The other text's half: neurons 0 and 1, then 2 and 3.
    let other = counts(vec![vec![3, 9, 0, 0], vec![1, 0, 2, 4]]);
    assert_eq!(own.share_of_most_active_by(&other, 0.5), 18.0 / 20.0);
    assert_eq!(own.share_of_most_active(0.5), 19.0 / 20.0);
    assert_eq!(counts(vec![vec![0; 4]]).share_of_most_active_by(&other, 0.5), 0.0);
}

#[test]
fn counts_are_read_back_and_those_of_another_model_are_refused() {
    let (_, recipe) = Recipe::rectified().swap_remove(0);
    let model = recipe.model();
    let mut engine = engine(model.clone(), options(NeuronMode::Exact));
    logits_of(&mut engine, &recipe.tokens(20));
    let counts = engine.neuron_counts().unwrap().clone();
    let path = folder("counts").join("counts.gguf");
    counts.write(&path, &model).unwrap();
    assert_eq!(NeuronCounts::open(&path, &model).unwrap(), counts);
    let other = Recipe { seed: 2, ..recipe }.model();
    let error = NeuronCounts::open(&path, &other).unwrap_err();
    assert!(matches!(error, Error::ForeignCounts { .. }), "{error}");
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
}

/// PowerInfer's file of hot neurons.
fn hot_file(layers: &[(Vec<i32>, Vec<i32>)]) -> File {
    let bytes = |values: &[i32]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
    let all: Vec<(String, Vec<u8>)> = layers
        .iter()
        .enumerate()
        .flat_map(|(layer, (index, bucket))| {
            [
                (format!("blk.{layer}.gpu_idx"), bytes(index)),
                (format!("blk.{layer}.gpu_bucket"), bytes(bucket)),
            ]
        })
        .collect();
    let mut writer = Writer::powerinfer();
    writer.set("general.architecture", "generic-gpu-index").unwrap();
    for (name, bytes) in all.iter().filter(|(_, bytes)| !bytes.is_empty()) {
        writer.tensor_bytes(name, DType::I32, [bytes.len() / 4], bytes).unwrap();
    }
    let mut out = Vec::new();
    writer.write_to(&mut out).unwrap();
    File::from_bytes(out).unwrap()
}

#[test]
fn powerinfers_hot_neurons_are_read_and_hostile_ones_are_refused_by_name() {
    let (_, recipe) = Recipe::rectified().swap_remove(0);
    let (model, neurons) = (recipe.model(), recipe.feed_forward);
    let seed = 5;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let hot: Vec<i32> = (0..neurons).map(|_| i32::from(rng.chance(0.3))).collect();
    let bucket = |hot: &[i32]| -> Vec<i32> {
        hot.iter().enumerate().filter(|(_, hot)| **hot == 1).map(|(neuron, _)| neuron as i32).collect()
    };
    let none = (vec![0; neurons], Vec::new());
    let read =
        |layer: (Vec<i32>, Vec<i32>)| NeuronCounts::from_file(&hot_file(&[layer, none.clone()]), &model);
    let counts = read((hot.clone(), bucket(&hot))).unwrap();
    assert!(counts.layers[0].iter().zip(&hot).all(|(count, hot)| *count as i32 == *hot));
    let refused = |index: Vec<i32>, rows: Vec<i32>, name: &str| {
        let error = read((index, rows)).unwrap_err().to_string();
        assert!(error.contains(name), "{name} is not in: {error}");
    };
    let (index, rows) = ("blk.0.gpu_idx", "blk.0.gpu_bucket");
    refused(hot[1..].to_vec(), bucket(&hot[1..]), index);
    refused([&[2], &hot[1..]].concat(), bucket(&hot), index);
    refused(hot.clone(), [bucket(&hot), vec![0]].concat(), rows);
    for wrong in [neurons as i32, -1, i32::MAX, bucket(&hot)[1]] {
        let mut bad = bucket(&hot);
        bad[0] = wrong;
        refused(hot.clone(), bad, rows);
    }
    refused(hot.clone(), vec![0; 2 * neurons], rows);
    refused(Vec::new(), Vec::new(), index);
}
