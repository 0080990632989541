//! Sequences on several ranks grow, are truncated, saved and restored as on one: windows and recurrent states, too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::{Arc, Mutex};

use crate::common::every_architecture::{SmallModel, small_models};
use crate::common::recorded_rank::RecordedRank;
use crate::common::serving::{CONTEXT, Spec, alone, answer, batcher, options as serving_options, specs};
use crate::common::serving::{recipe, stream_through};
use crate::common::{Recipe, cpu, distance, engine_on, logits_of};
use crate::ranks::{SAME, f32_options, on_ranks};
use quadriga_cluster::{Communicator, InProcess, Limits, Operation, in_process};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Request};
use quadriga_llm::{BatchToken, Engine, EngineOptions, Model, Parallelism};

const GRIDS: [(usize, usize); 3] = [(2, 1), (1, 3), (2, 2)];
const LONGEST: usize = 72;

fn parallelism((tensor, pipeline): (usize, usize)) -> Parallelism {
    Parallelism { tensor: Some(tensor), pipeline: Some(pipeline), ..Parallelism::default() }
}

/// Models whose layers forget: with windows, with recurrent states, with both.
fn forgetful() -> Vec<SmallModel> {
    let mut models = small_models();
    models.retain(|of| {
        let recurrent = of.model.hyperparameters().recurrent.is_some();
        (of.window.is_some() || recurrent) && of.architecture != "gemma3n"
    });
    models
}

/// Random calls of an engine with two sequences: the lengths after each, and all logits.
fn history(engine: &mut Engine, seed: u64) -> (Vec<usize>, Vec<Vec<f32>>) {
    let mut rng = Rng::new(seed);
    let (mut lengths, mut rows) = (Vec::new(), Vec::new());
    let mut saved: Vec<Vec<u8>> = Vec::new();
    for _ in 0..30 {
        let sequence = rng.below(2);
        match rng.below(9) {
            0 | 1 => drop(engine.truncate(sequence, rng.below(engine.len(sequence) + 2))),
            2 => engine.checkpoint(sequence).unwrap(),
            3 => {
                saved.push(Vec::new());
                engine.save_state(sequence, saved.last_mut().unwrap()).unwrap();
            }
            4 if !saved.is_empty() => {
                let bytes = rng.pick(&saved).unwrap();
                engine.load_state(sequence, &mut bytes.as_slice()).unwrap();
            }
            _ => {
                let mut room = [0, 1].map(|sequence| LONGEST - engine.len(sequence));
                let batch: Vec<BatchToken> = (0..rng.range(1, 16))
                    .filter_map(|_| {
                        let of = if rng.chance(0.8) { sequence } else { 1 - sequence };
                        room[of] = room[of].checked_sub(1)?;
                        Some(BatchToken {
                            sequence: of,
                            token: rng.below(100) as u32,
                            output: rng.chance(0.7),
                        })
                    })
                    .collect();
                engine.extend(&batch).unwrap();
                let outputs = batch.iter().filter(|token| token.output).count();
                rows.extend((0..outputs).map(|row| engine.logits(row).to_vec()));
            }
        }
        lengths.extend([0, 1].map(|sequence| engine.len(sequence)));
    }
    (lengths, rows)
}

#[test]
fn sequences_are_truncated_and_restored_on_ranks_as_on_one() {
    for (seed, of) in (900..).zip(forgetful()) {
        let mut rng = Rng::new(seed);
        for apart in [true, false] {
            let batch = rng.range(2, 9);
            let window_slots = match of.window {
                Some(window) if apart => window - 1 + batch + rng.range(0, 5),
                _ => LONGEST,
            };
            let options = EngineOptions {
                context: LONGEST,
                sequences: 2,
                batch,
                window_slots,
                checkpoints: 2,
                ..f32_options()
            };
            let wanted = history(&mut engine_on(cpu(1), of.model.clone(), options.clone()), seed);
            for grid in GRIDS {
                let run = |engine: &mut Engine| history(engine, seed);
                let found = on_ranks(&of.model, grid.0 * grid.1, parallelism(grid), &options, run);
                let context = format!("{} on {grid:?}, seed {seed}, {window_slots} slots", of.name);
                assert_eq!(found.0, wanted.0, "{context}");
                let off = distance(&found.1, &wanted.1);
                assert!(off < SAME, "{context}: off by {off:.2e}");
            }
        }
    }
}

/// Saves and restores a sequence, returns to its middle as far as possible, and goes on.
fn restored(engine: &mut Engine) -> (usize, Vec<Vec<f32>>) {
    let tokens = recipe("llama").tokens(60);
    engine.feed(&tokens[..30]).unwrap();
    let mut saved = Vec::new();
    engine.save_state(0, &mut saved).unwrap();
    engine.load_state(0, &mut saved.as_slice()).unwrap();
    let kept = engine.truncate(0, 20);
    let rows = logits_of(engine, &tokens[30..45]);
    (kept, rows)
}

/// A stage without windows could return to any token, but the others cannot.
#[test]
fn stages_without_windows_forget_as_the_others_do() {
    for of in forgetful().into_iter().filter(|of| of.window.is_some()) {
        let window = of.window.unwrap();
        for slots in [window + 10, LONGEST] {
            let options = EngineOptions {
                context: LONGEST,
                batch: 8,
                window_slots: slots,
                checkpoints: 2,
                ..f32_options()
            };
            let wanted = restored(&mut engine_on(cpu(1), of.model.clone(), options.clone()));
            for stages in [2, 4] {
                let found = on_ranks(&of.model, stages, parallelism((1, stages)), &options, restored);
                assert!(found == wanted, "{} on {stages} stages, {slots} slots: {}", of.name, found.0);
            }
        }
    }
}

/// Runs a function with the batcher of the first of several ranks, which the others follow.
fn on_serving_ranks<T: Send>(
    grid: (usize, usize),
    model: &Model,
    options: &BatcherOptions,
    run: impl FnOnce(Batcher) -> T + Send,
) -> T {
    let of = |rank: InProcess| {
        let divided = model.clone().with_ranks(Arc::new(rank), parallelism(grid)).unwrap();
        batcher(&divided, cpu(1), options.clone())
    };
    let mut ranks = in_process(grid.0 * grid.1, Limits::default()).into_iter();
    let first = ranks.next().unwrap();
    std::thread::scope(|scope| {
        let of = &of;
        let others: Vec<_> =
            ranks.map(|rank| scope.spawn(move || of(rank).follow_ranks().unwrap())).collect();
        let result = run(of(first));
        others.into_iter().for_each(|other| other.join().unwrap());
        result
    })
}

/// Models that answer in text: with windows, with both and experts, and with each kind of recurrent layer.
fn serving_models() -> Vec<(&'static str, Model)> {
    let text = |recipe: Recipe| Recipe { text: true, context: CONTEXT as u32, ..recipe };
    let family = |architecture: &str| {
        let found = Recipe::families().into_iter().find(|recipe| recipe.architecture == architecture);
        text(found.unwrap())
    };
    let experts = |architecture: &str| {
        let mut all = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
        text(all.find(|recipe| recipe.architecture == architecture).unwrap())
    };
    let windows = |recipe: Recipe| Recipe { window: Some(70), layers: recipe.layers.max(4), ..recipe };
    let delta = Recipe { layers: 5, ..recipe("qwen35") };
    vec![
        ("gemma2", windows(family("gemma2")).model()),
        ("gpt-oss", windows(experts("gpt-oss")).model()),
        ("qwen35", crate::common::recurrent::parts_of(&delta).model().unwrap()),
        ("lfm2 with windows", windows(family("lfm2")).model()),
    ]
}

#[test]
fn many_requests_of_models_that_forget_are_answered_by_ranks_as_by_one() {
    for (seed, (name, model)) in (950..).zip(serving_models()) {
        let specs = specs(&mut Rng::new(seed), 10, model.hyperparameters().vocabulary);
        let wanted = alone(&model, &specs, DType::F32);
        for grid in GRIDS {
            // Few pages, so that sequences are put back.
            for pages in [24, 9] {
                let state = on_serving_ranks(grid, &model, &serving_options(5, pages), |batcher| {
                    stream_through(batcher, seed, (&specs, &wanted), &mut |_| {}).state()
                });
                assert_eq!(state.used_window_pages, 0, "{name} on {grid:?}");
            }
        }
    }
}

#[test]
fn latent_attention_is_expanded_by_ranks_as_by_one() {
    for (seed, recipe) in (970..).zip(crate::serving_latent::recipes()) {
        let model = recipe.model();
        let specs = specs(&mut Rng::new(seed), 8, model.hyperparameters().vocabulary);
        let wanted = alone(&model, &specs, DType::F32);
        for grid in GRIDS {
            on_serving_ranks(grid, &model, &serving_options(5, 24), |batcher| {
                stream_through(batcher, seed, (&specs, &wanted), &mut |_| {});
            });
        }
    }
}

/// The tokens of each prompt that were found, and the answers.
fn found(batcher: &mut Batcher, prompts: &[Vec<u32>]) -> Vec<(Vec<u32>, usize)> {
    let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let ask = |prompt: &Vec<u32>| {
        let spec =
            Spec { prompt: prompt.clone(), sampling: sampling.clone(), max_tokens: 4, stops: Vec::new() };
        let (answer, cached) = answer(batcher, &spec);
        (answer.tokens, cached)
    };
    prompts.iter().map(ask).collect()
}

#[test]
fn prefixes_of_models_that_forget_are_found_on_ranks_as_on_one() {
    let shared = recipe("llama").tokens(200);
    let mut prompts: Vec<Vec<u32>> =
        (0..4).map(|tail| shared.iter().copied().chain([tail; 70]).collect()).collect();
    prompts.push(prompts[3].clone());
    for (name, model) in serving_models() {
        let options = serving_options(3, 28);
        let wanted = found(&mut batcher(&model, cpu(1), options.clone()), &prompts);
        assert!(wanted.iter().any(|(_, cached)| *cached > 0), "{name}");
        for grid in GRIDS {
            let found = on_serving_ranks(grid, &model, &options, |mut batcher| found(&mut batcher, &prompts));
            assert_eq!(found, wanted, "{name} on {grid:?}");
        }
    }
}

/// Pages of windows suffice for one step; more are in flight on a pipeline, and wait for those that the window leaves behind.
#[test]
fn long_prompts_on_a_pipeline_wait_for_pages_of_their_windows() {
    let (_, model) = serving_models().swap_remove(0);
    let prompts = [recipe("llama").tokens(390)];
    for sequences in [1, 2] {
        let mut options = serving_options(sequences, 28);
        options.engine.batch = 64;
        let wanted = found(&mut batcher(&model, cpu(1), options.clone()), &prompts);
        for stages in [2, 4] {
            on_serving_ranks((1, stages), &model, &options, |mut batcher| {
                assert!(batcher.state().window_pages > 0);
                assert_eq!(found(&mut batcher, &prompts), wanted, "{stages} stages");
                assert_eq!(batcher.state().preempted, 0, "{stages} stages");
            });
        }
    }
}

#[test]
fn stages_of_recurrent_models_compute_different_requests_at_once() {
    let (_, model) = serving_models().swap_remove(2);
    let in_flight = Arc::new(Mutex::new([0, 0]));
    let options = serving_options(4, 28);
    let of = |rank: Arc<dyn Communicator>| {
        batcher(&model.clone().with_ranks(rank, parallelism((1, 2))).unwrap(), cpu(1), options.clone())
    };
    let [first, second]: [InProcess; 2] = in_process(2, Limits::default()).try_into().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| of(Arc::new(second)).follow_ranks().unwrap());
        let counts = Arc::clone(&in_flight);
        let note = move |operation: &Operation<'_>| {
            let [now, most] = &mut *counts.lock().unwrap();
            match operation {
                // Activations are the only messages of this tag; of the argmax, there is one for each step.
                Operation::Send { tag: 1, .. } => *now += 1,
                Operation::Receive { tag: 3 | 4 | 6, .. } => *now -= 1,
                _ => {}
            }
            *most = (*now).max(*most);
        };
        let mut batcher = of(Arc::new(RecordedRank { rank: first, note }));
        for i in 0..4 {
            let prompt = vec![i + 1; 9];
            batcher.submit(Request { max_tokens: Some(12), ..Request::new(prompt) }).unwrap();
        }
        while batcher.is_busy() {
            batcher.step();
            batcher.check().unwrap();
        }
    });
    let [now, most] = *in_flight.lock().unwrap();
    assert_eq!(now, 0);
    assert!(most > 1, "{most}");
}
