//! Many requests at once through an expert cache: answers are those of requests alone on the CPU, whatever is in the slots and
//! whenever an upload arrives or fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::experts::{ExpertRecipe, Layout};
use crate::common::serving::{
    Answers, Spec, alone, answer, assert_no_failures, faulty_stream_through, options, recipe, specs,
    stream_through,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::placement::{Devices, ExpertCache, expert_bytes};
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions};
use quadriga_llm::{EngineOptions, GpuLayers, Model, Placement};
use quadriga_runtime::{Backend, Rates, ReadCurve};
use quadriga_sim::{FaultPoint, Sim};

fn mixture(layout: Layout) -> Recipe {
    Recipe { experts: Some(ExpertRecipe { layout, ..ExpertRecipe::new(12, 2) }), ..recipe("llama") }
}

/// A model with all experts on the CPU, all else on a device, and slots there for some experts.
fn divided(model: &Model, device: Arc<dyn Backend>, slots: usize, options: BatcherOptions) -> Batcher {
    let engine = EngineOptions { expert_slots: slots, ..options.engine.clone() };
    let options = BatcherOptions { engine, ..options }.for_model(model).unwrap();
    let placement =
        Placement { gpu_layers: GpuLayers::All, cpu_expert_layers: usize::MAX, ..Placement::default() };
    let placed =
        placement.plan(model, &Devices::new([device], cpu_backend()).unwrap(), &options.engine).unwrap();
    Batcher::new(model.clone(), &placed.scheduler, options, &mut |_| {}).unwrap()
}

fn cpu_backend() -> Arc<quadriga_cpu::Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap())
}

/// Random requests, and some that repeat one token: those use the same experts again and again.
fn mixed_specs(seed: u64, model: &Model) -> Vec<Spec> {
    let mut rng = Rng::new(seed);
    let vocabulary = model.hyperparameters().vocabulary;
    let mut all = specs(&mut rng, 6, vocabulary);
    let token = rng.below(vocabulary) as u32;
    let sampling =
        SamplingOptions { temperature: 0.0, logit_bias: [(token, 1e3)].into(), ..SamplingOptions::default() };
    let repeated = Spec { prompt: vec![token; 3], sampling, max_tokens: 60, stops: Vec::new() };
    all.extend([repeated.clone(), repeated]);
    all
}

#[test]
fn a_stream_of_requests_through_slots_gets_the_answers_of_the_cpu() {
    let (mut uploads, mut missed) = (0, 0);
    for (kind, layout) in [Layout::Stacked, Layout::Fused].into_iter().enumerate() {
        let model = mixture(layout).model();
        for seed in 0..6 {
            let seed = 900 + 10 * kind as u64 + seed;
            println!("seed {seed}");
            let specs = mixed_specs(seed, &model);
            let wanted = alone(&model, &specs, DType::F32);
            // Fewer pages put sequences back; guesses make steps of several tokens of a sequence.
            let (sequences, pages, lookup) = [(1, 30, 0), (3, 30, 0), (6, 9, 3)][seed as usize % 3];
            let sim = match seed % 2 {
                0 => Sim::new("sim:0").build(),
                // An expert is on its way for several steps.
                _ => Sim::new("sim:0").timed_polls().copy_seconds(0.0, 1e-6).build(),
            };
            let slots = [4, 6, 1000][(seed / 2) as usize % 3];
            let with = BatcherOptions { lookup, ..options(sequences, pages) };
            let batcher = divided(&model, sim, slots, with);
            let batcher = stream_through(batcher, seed, (&specs, &wanted), &mut |_| {});
            let usage = batcher.state().expert_cache.expect("there are slots");
            println!("{usage:?}");
            assert!(usage.slots > 0 && usage.slots <= slots as u64, "seed {seed}: {usage:?}");
            assert!(usage.lookups > 0 && usage.hits <= usage.lookups, "seed {seed}: {usage:?}");
            if slots == 1000 {
                assert_eq!((usage.hits, usage.uploads), (usage.lookups, 0), "seed {seed}: {usage:?}");
            }
            uploads += usage.uploads;
            missed += usage.lookups - usage.hits;
        }
    }
    assert!(uploads > 0 && missed > 0, "{uploads} uploads, {missed} missed");
}

#[test]
fn a_device_that_fails_in_every_third_step_loses_no_request_and_no_expert() {
    let model = mixture(Layout::Stacked).model();
    for seed in 940..946 {
        println!("seed {seed}");
        let specs = mixed_specs(seed, &model);
        let wanted = alone(&model, &specs, DType::F32);
        let settings = Sim::new("sim:0");
        let settings = if seed % 2 == 0 { settings } else { settings.timed_polls().copy_seconds(0.0, 1e-6) };
        let sim = settings.device();
        let batcher = divided(&model, Arc::clone(&sim) as _, 4, options(3, 30));
        let mut step = 0;
        let mut before_step = |rng: &mut Rng| {
            sim.clear_faults();
            step += 1;
            if step % 3 == 1 {
                let point = FaultPoint::ALL[rng.below(FaultPoint::ALL.len())];
                sim.fail(point, rng.below(24) as u64);
            }
        };
        faulty_stream_through(batcher, seed, (&specs, &wanted), &mut before_step);
        assert_eq!(sim.unordered_access(), None, "seed {seed}");
    }
}

/// Rows that only fill up a step are no reason to move an expert, and do not count.
#[test]
fn only_tokens_of_requests_count() {
    let recipe = mixture(Layout::Stacked);
    let model = recipe.model();
    let layers = recipe.layers as u64;
    let mut batcher = divided(&model, Sim::new("sim:0").build(), 12, options(8, 60));
    let mut rng = Rng::new(960);
    let mut specs = specs(&mut rng, 3, model.hyperparameters().vocabulary);
    for spec in &mut specs {
        (spec.max_tokens, spec.stops) = (12, Vec::new());
        spec.prompt.truncate(20);
        spec.prompt.resize(20, 1);
        batcher.submit(spec.request()).unwrap();
    }
    let mut answers = Answers::default();
    // Prompts are in longer steps, which nobody observes; then there are three tokens in rows of four.
    let mut before = None;
    while batcher.is_busy() {
        let usage = batcher.state().expert_cache.unwrap();
        answers.add(batcher.step());
        let after = batcher.state().expert_cache.unwrap();
        let ended = answers.answers.values().any(|answer| answer.finish.is_some());
        if before.is_some() && !ended {
            assert_eq!(after.lookups - usage.lookups, 3 * 2 * layers, "two experts of three tokens");
        }
        let all = answers.answers.len() == 3 && answers.answers.values().all(|one| !one.tokens.is_empty());
        before = all.then_some(());
    }
    assert!(before.is_some());
    assert_no_failures(&batcher);
}

/// What `serve` and `batch` do with a GPU that is too small: the automatic placement has slots, within the budget to the byte,
/// and the batcher uses them.
#[test]
fn automatic_placement_has_slots_for_many_requests() {
    let recipe = mixture(Layout::Stacked);
    let recipe = Recipe { layers: 4, experts: Some(ExpertRecipe::new(40, 2)), ..recipe };
    let model = recipe.model();
    let specs = specs(&mut Rng::new(970), 3, model.hyperparameters().vocabulary);
    let wanted = alone(&model, &specs, DType::F32);
    let of = |read: f64| Rates {
        read,
        read_curve: ReadCurve::UNKNOWN,
        int8: 1e4 * read,
        bf16: 1e4 * read,
        f32: 1e4 * read,
        link: 1e9,
        rendezvous: 1e-6,
        launch: 0.0,
        measured: true,
    };
    let rates = vec![("sim:0".to_owned(), of(5e7)), ("cpu".to_owned(), of(1e6))];
    let one = expert_bytes(&model).unwrap();
    let with = options(3, 24).for_model(&model).unwrap();
    let plan = |budget: Option<u64>, expert_cache: ExpertCache, device: Arc<dyn Backend>| {
        let placement = Placement { budget, expert_cache, rates: rates.clone(), ..Placement::default() };
        let devices = Devices::new([device], cpu_backend()).unwrap();
        placement.plan_with_context(&model, &devices, &with.engine).unwrap()
    };
    let (whole, _) = plan(None, ExpertCache::Auto, Sim::new("sim:0").build());
    let all = whole.forecast.bytes()[0].total();
    let mut with_slots = 0;
    for part in 10..20 {
        let budget = all * part / 20;
        let device = Sim::new("sim:0").capacity(budget).build();
        let (placed, engine) = plan(Some(budget), ExpertCache::Auto, Arc::clone(&device));
        assert_eq!(engine.expert_slots, placed.expert_slots, "{part} of 20");
        let staging = placed.expert_staging_bytes.first().copied().unwrap_or(0);
        assert!(placed.forecast.bytes()[0].total() + staging <= budget, "{part} of 20");
        if placed.expert_slots == 0 {
            continue;
        }
        with_slots += 1;
        assert!(engine.upload_bytes >= one && engine.upload_bytes <= (budget / 16).max(one), "{part} of 20");
        let options = BatcherOptions { engine, ..options(3, 24) };
        let mut batcher = Batcher::new(model.clone(), &placed.scheduler, options, &mut |_| {}).unwrap();
        for (spec, wanted) in specs.iter().zip(&wanted) {
            assert_eq!(answer(&mut batcher, spec).0, *wanted, "{part} of 20");
        }
        let usage = batcher.state().expert_cache.expect("there are slots");
        assert_eq!(usage.slots, placed.expert_slots as u64, "{part} of 20");
        assert!(usage.lookups > 0, "{part} of 20");
    }
    assert!(with_slots > 0);
    assert_eq!(plan(Some(all / 2), ExpertCache::Bytes(0), Sim::new("sim:0").build()).0.expert_slots, 0);
}

#[test]
fn without_slots_nothing_is_counted() {
    let model = mixture(Layout::Stacked).model();
    let batcher = crate::common::serving::batcher(&model, cpu(2), options(2, 8));
    assert_eq!(batcher.state().expert_cache, None);
}
