//! Layers with a sliding window keep their latest keys and values only: results are those of a full KV cache, however
//! sequences grow, are truncated, saved and restored.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, all_outputs, cpu, distance, engine, engine_on};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::placement::offload;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::{BatchToken, Engine, EngineOptions, Generator, GeneratorOptions, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

const CONTEXT: usize = 72;

fn recipes() -> Vec<Recipe> {
    let experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let with_windows = Recipe::families().into_iter().chain(experts).filter(|recipe| recipe.window.is_some());
    let all_windows = Recipe { window: Some(5), ..Recipe::new("llama") };
    with_windows.chain([all_windows, Recipe { window: Some(1), ..Recipe::new("qwen3") }]).collect()
}

fn options(recipe: &Recipe, batch: usize, slack: usize) -> EngineOptions {
    let window = recipe.window.unwrap() as usize;
    EngineOptions {
        context: CONTEXT,
        sequences: 2,
        batch,
        window_slots: window - 1 + batch + slack,
        checkpoints: 2,
        ..EngineOptions::default()
    }
    .cache(DType::F32)
}

/// The rows of logits after each token of a text, by an engine that keeps everything.
fn judge(model: &Model, text: &[u32]) -> Vec<Vec<f32>> {
    let options = EngineOptions { context: CONTEXT, window_slots: CONTEXT, ..EngineOptions::default() };
    let mut engine = engine(model.clone(), options.cache(DType::F32));
    engine.extend(&all_outputs(0, text)).unwrap();
    (0..text.len()).map(|row| engine.logits(row).to_vec()).collect()
}

/// Appends tokens to both sequences in one call, and compares all their logits.
fn extend(engine: &mut Engine, texts: &mut [Vec<u32>; 2], added: &[(usize, u32)], context: &str) {
    let batch: Vec<BatchToken> = added
        .iter()
        .map(|(sequence, token)| BatchToken { sequence: *sequence, token: *token, output: true })
        .collect();
    engine.extend(&batch).unwrap();
    for (sequence, text) in texts.iter_mut().enumerate() {
        let before = text.len();
        text.extend(added.iter().filter(|(of, _)| *of == sequence).map(|(_, token)| *token));
        if text.len() == before {
            continue;
        }
        let rows = added.iter().enumerate().filter(|(_, (of, _))| *of == sequence);
        let found: Vec<Vec<f32>> = rows.map(|(row, _)| engine.logits(row).to_vec()).collect();
        let off = distance(&found, &judge(engine.model(), text)[before..]);
        assert!(
            off < 1e-4,
            "{context}: sequence {sequence} from {before} to {} is off by {off:.2e}",
            text.len()
        );
    }
}

#[test]
fn random_calls_give_the_logits_of_a_full_cache() {
    for seed in 0..18 {
        let mut rng = Rng::new(seed);
        let recipes = recipes();
        let recipe = Recipe { seed, ..recipes[seed as usize % recipes.len()].clone() };
        let model = recipe.model();
        let options = options(&recipe, rng.range(1, 9), rng.range(0, 9));
        let mut engine = engine(model.clone(), options.clone());
        let mut texts: [Vec<u32>; 2] = Default::default();
        let mut saved: Vec<(Vec<u8>, Vec<u32>)> = Vec::new();
        for step in 0..40 {
            let context = format!("{} seed {seed}, step {step}, {options:?}", recipe.architecture);
            let sequence = rng.below(2);
            match rng.below(10) {
                0 | 1 => {
                    let len = rng.range(0, texts[sequence].len() + 2);
                    let retained = engine.truncate(sequence, len);
                    assert!(retained <= len && retained <= texts[sequence].len(), "{context}: {retained}");
                    texts[sequence].truncate(retained);
                }
                2 => engine.checkpoint(sequence).unwrap(),
                3 => {
                    let mut bytes = Vec::new();
                    engine.save_state(sequence, &mut bytes).unwrap();
                    saved.push((bytes, texts[sequence].clone()));
                }
                4 if !saved.is_empty() => {
                    let (bytes, text) = rng.pick(&saved).unwrap();
                    engine.load_state(sequence, &mut bytes.as_slice()).unwrap();
                    texts[sequence].clone_from(text);
                }
                _ => {
                    let mut room = [0, 1].map(|sequence: usize| CONTEXT - texts[sequence].len());
                    let added: Vec<(usize, u32)> = (0..rng.range(1, 14))
                        .filter_map(|_| {
                            let of = if rng.chance(0.8) { sequence } else { 1 - sequence };
                            room[of] = room[of].checked_sub(1)?;
                            Some((of, rng.below(recipe.vocabulary) as u32))
                        })
                        .collect();
                    extend(&mut engine, &mut texts, &added, &context);
                }
            }
            for (sequence, text) in texts.iter().enumerate() {
                assert_eq!(engine.tokens(sequence), text, "{context}");
            }
        }
    }
}

#[test]
fn a_checkpoint_is_where_a_sequence_can_go_back_to() {
    let recipe = Recipe { window: Some(6), ..Recipe::new("llama") };
    let tokens = recipe.tokens(60);
    let mut engine = engine(recipe.model(), options(&recipe, 8, 0));
    engine.feed(&tokens[..20]).unwrap();
    engine.checkpoint(0).unwrap();
    engine.feed(&tokens[20..50]).unwrap();
    // Within the rows that are still there; then before them, at the checkpoint, and before that.
    assert_eq!(engine.truncate(0, 49), 49);
    assert_eq!(engine.truncate(0, 30), 20);
    assert_eq!(engine.truncate(0, 20), 20);
    let mut texts = [tokens[..20].to_vec(), Vec::new()];
    extend(&mut engine, &mut texts, &[(0, 7), (0, 8)], "after the checkpoint");
    assert_eq!(engine.truncate(0, 19), 0);
    // The third replaces the one whose loss costs least.
    for (from, to) in [(0, 18), (18, 20), (20, 40)] {
        engine.feed(&tokens[from..to]).unwrap();
        engine.checkpoint(0).unwrap();
    }
    engine.feed(&tokens[40..60]).unwrap();
    assert_eq!(engine.truncate(0, 45), 40);
    engine.feed(&tokens[40..60]).unwrap();
    assert_eq!(engine.truncate(0, 39), 18);
}

#[test]
fn windows_that_save_nothing_are_kept_whole() {
    let recipe = Recipe { window: Some(40), ..Recipe::new("llama") };
    let model = recipe.model();
    let resolved = |options: EngineOptions| options.resolve(&model).unwrap();
    let small = resolved(EngineOptions { context: 100, ..EngineOptions::default() });
    assert_eq!((small.window_slots, small.checkpoints), (100, 0));
    let large = resolved(EngineOptions { context: 10_000, ..EngineOptions::default() });
    assert_eq!((large.window_slots, large.checkpoints), (576, 4));
    assert_eq!(resolved(large.clone()), large);
    let savings = large.window_savings(&model).unwrap();
    assert_eq!((savings.layers, savings.own, savings.full), (2, (576 + 4 * 39) * 256, 10_000 * 256));
    let whole =
        resolved(EngineOptions { context: 10_000, window_slots: usize::MAX, ..EngineOptions::default() });
    assert_eq!((whole.window_slots, whole.checkpoints, whole.window_savings(&model)), (10_000, 0, None));
    let few = EngineOptions { context: 10_000, window_slots: 500, ..EngineOptions::default() };
    assert!(few.resolve(&model).unwrap_err().to_string().contains("window slots"));
}

/// An edited last message and a repeated request compute little again.
#[test]
fn a_conversation_returns_to_its_checkpoints() {
    let recipe = Recipe { window: Some(6), text: true, context: 400, ..Recipe::new("llama") };
    let scheduler = Scheduler::new([cpu(1)]);
    let options = GeneratorOptions {
        engine: EngineOptions { context: 400, batch: 16, window_slots: 24, ..EngineOptions::default() },
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        ..GeneratorOptions::default()
    };
    let mut generator = Generator::on(recipe.model(), &scheduler, options, &mut |_| {}).unwrap();
    let tokens = recipe.tokens(90).into_iter().map(|token| token % 94).collect::<Vec<_>>();
    let cached = |generator: &mut Generator, tokens: &[u32]| {
        let mut answer = generator.continue_tokens(tokens).unwrap();
        let pieces = answer.by_ref().take(20).map(|piece| piece.unwrap().text).collect::<String>();
        (answer.counts().cached, pieces)
    };
    let (none, first) = cached(&mut generator, &tokens[..60]);
    assert_eq!(none, 0);
    assert_eq!(cached(&mut generator, &tokens[..60]), (59, first.clone()), "the same prompt again");
    // A longer conversation, whose last message is then edited.
    assert_eq!(cached(&mut generator, &tokens[..90]).0, 59);
    let mut edited = tokens.clone();
    edited[80] = (edited[80] + 1) % 94;
    assert_eq!(cached(&mut generator, &edited).0, 59);
    assert_eq!(cached(&mut generator, &tokens[..60]), (59, first));
}

#[test]
fn greedy_decoding_on_a_device_does_not_run_ahead_over_a_full_window() {
    for recipe in recipes() {
        let model = recipe.model();
        let sim: Arc<dyn Backend> = Sim::new("sim:0").alignment(256).build();
        let layers = model.hyperparameters().layers.len() + 1;
        let scheduler = Scheduler::new([sim, cpu(1)]).place(offload(model.hyperparameters(), layers, 1));
        let options = EngineOptions { greedy: true, ..options(&recipe, 4, 1) };
        let mut greedy = Engine::new(model.clone(), &scheduler, options.clone(), &mut |_| {}).unwrap();
        let whole = EngineOptions { window_slots: CONTEXT, greedy: false, ..options };
        let mut plain = engine_on(cpu(1), model, whole);
        let prompt = recipe.tokens(9);
        greedy.feed(&prompt).unwrap();
        plain.feed(&prompt).unwrap();
        for step in 0..50 {
            greedy.run_ahead().unwrap();
            let (token, wanted) = (greedy.argmax(0).unwrap(), plain.argmax(0).unwrap());
            assert_eq!(token, wanted, "{} at step {step}", recipe.architecture);
            greedy.feed(&[token]).unwrap();
            plain.feed(&[token]).unwrap();
        }
    }
}

/// Checkpoints that would take more than the window saves are given up one after the other, the window is not.
#[test]
fn checkpoints_are_reduced_before_the_window_is_given_up() {
    let recipe = Recipe { window: Some(40), ..Recipe::new("llama") };
    let model = recipe.model();
    let resolved = |context: usize, checkpoints: usize| {
        let options = EngineOptions { context, checkpoints, batch: 64, ..EngineOptions::default() };
        let options = options.resolve(&model).unwrap();
        (options.window_slots, options.checkpoints)
    };
    // 128 slots, and 39 rows for each checkpoint.
    assert_eq!(resolved(128 + 4 * 39 + 1, 4), (128, 4));
    assert_eq!(resolved(128 + 4 * 39, 4), (128, 2));
    assert_eq!(resolved(128 + 2 * 39, 4), (128, 1));
    assert_eq!(resolved(128 + 39, 4), (128 + 39, 0));
    assert_eq!(resolved(128 + 3 * 39, 3), (128, 2));
    assert_eq!(resolved(128 + 1, 0), (128, 0));
}
