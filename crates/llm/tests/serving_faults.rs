//! Many requests at once on a device that fails: in every third step, with every kind of fault. Answers are those of requests alone, and
//! nothing is lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::serving::{
    Answer, Answers, CONTEXT, Spec, alone, answer, batcher, faulty_stream_through, options, recipe, specs,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::Model;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{BatcherOptions, Request, RequestId};
use quadriga_sim::{FaultPoint, Sim};

/// A recipe of each way to keep a sequence: all tokens, windows, recurrent states.
fn recipes() -> [Recipe; 3] {
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let windows = Recipe { text: true, context: CONTEXT as u32, window: Some(30), ..windows };
    [recipe("llama"), windows, Recipe { layers: 5, ..recipe("qwen35") }]
}

fn model(recipe: &Recipe) -> Model {
    match recipe.architecture {
        "qwen35" => crate::common::recurrent::parts_of(recipe).model().unwrap(),
        _ => recipe.model(),
    }
}

fn models() -> [Model; 3] {
    recipes().map(|recipe| model(&recipe))
}

/// A stream on a device of which every third step fails, at any of its operations, and the next two do not: one that ran ahead may
/// notice it later. Returns how many steps failed.
fn faulty_stream(model: &Model, options: BatcherOptions, seed: u64, requests: (&[Spec], &[Answer])) -> u64 {
    let sim = Sim::new("sim:0").device();
    let batcher = batcher(model, Arc::clone(&sim) as _, options);
    let mut step = 0;
    let mut before = sim.counts();
    let mut before_step = |rng: &mut Rng| {
        sim.clear_faults();
        step += 1;
        let counts = sim.counts();
        if step % 3 == 1 {
            let point = FaultPoint::ALL[rng.below(FaultPoint::ALL.len())];
            // As many as the step before had; more than a plan that is there has for one that is yet to be made.
            let operations = (counts.of(point) - before.of(point)).max(6);
            sim.fail(point, rng.below(operations as usize) as u64);
        }
        before = counts;
    };
    let state = faulty_stream_through(batcher, seed, requests, &mut before_step).state();
    assert_eq!(sim.unordered_access(), None, "seed {seed}");
    state.failed_steps
}

#[test]
fn a_device_that_fails_in_every_third_step_delays_requests_and_fails_none() {
    for (kind, model) in models().iter().enumerate() {
        let mut failed = 0;
        for seed in 0..4 {
            let seed = 200 + 10 * kind as u64 + seed;
            // With few pages sequences are put back, and prefixes go to host memory and return.
            let (pages, cache_ram) = if seed.is_multiple_of(2) { (30, 0) } else { (9, 1 << 20) };
            let options = BatcherOptions { cache_ram, lookup: 3, ..options(4, pages) };
            let specs = specs(&mut Rng::new(seed), 8, model.hyperparameters().vocabulary);
            let wanted = alone(model, &specs, DType::F32);
            failed += faulty_stream(model, options, seed, (&specs, &wanted));
        }
        assert!(failed > 0, "kind {kind}");
    }
}

/// The device reports the largest logits of a large vocabulary; some requests need the others, which are read when that turns out.
#[test]
fn a_device_that_fails_while_further_logits_are_read_fails_no_request() {
    for (kind, recipe) in recipes().into_iter().enumerate() {
        let model = model(&Recipe { vocabulary: 400, text: false, ..recipe });
        for seed in 0..4 {
            let seed = 260 + 10 * kind as u64 + seed;
            let mut specs = specs(&mut Rng::new(seed), 8, 100);
            for (at, spec) in specs.iter_mut().enumerate() {
                spec.stops.clear();
                // More than the device finds; and so many recent tokens lowered that too few of those are left.
                let many = SamplingOptions { top_k: 200, ..spec.sampling.clone() };
                let lowered = SamplingOptions { top_k: 120, repeat_penalty: 1.3, ..spec.sampling.clone() };
                match at % 3 {
                    0 => spec.sampling = SamplingOptions { temperature: 0.9, ..many },
                    1 => spec.sampling = SamplingOptions { temperature: 0.9, ..lowered },
                    _ => {}
                }
            }
            let mut host = batcher(&model, cpu(1), options(1, 40));
            let wanted: Vec<Answer> = specs.iter().map(|spec| answer(&mut host, spec).0).collect();
            let options = BatcherOptions { lookup: 3, ..options(4, 30) };
            faulty_stream(&model, options, seed, (&specs, &wanted));
        }
    }
}

/// One read of further logits after another fails.
#[test]
fn every_read_of_further_logits_may_fail_once() {
    for recipe in recipes() {
        let model = model(&Recipe { vocabulary: 400, text: false, ..recipe });
        let sampling =
            SamplingOptions { top_k: 200, temperature: 0.9, seed: 5, ..SamplingOptions::default() };
        let spec = Spec { prompt: vec![1, 2, 3], sampling, max_tokens: 4, stops: Vec::new() };
        let wanted = answer(&mut batcher(&model, cpu(1), options(1, 8)), &spec).0;
        for after in 0.. {
            let sim = Sim::new("sim:0").device();
            let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(1, 8));
            let before = sim.counts().of(FaultPoint::Transfer);
            sim.fail(FaultPoint::Transfer, after);
            let id = batcher.submit(spec.request()).unwrap();
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!((answers.failed.len(), sim.unordered_access()), (0, None), "{after}");
            assert_eq!(answers.answers[&id], wanted, "{after}");
            if sim.counts().of(FaultPoint::Transfer) - before <= after {
                break;
            }
        }
    }
}

#[test]
fn a_device_that_keeps_failing_ends_its_requests_and_serves_the_next() {
    for model in models() {
        let mut rng = Rng::new(240);
        let specs = specs(&mut rng, 4, 100);
        let wanted = alone(&model, &specs, DType::F32);
        let sim = Sim::new("sim:0").device();
        let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(3, 24));
        for point in [FaultPoint::Run, FaultPoint::Transfer] {
            for spec in &specs {
                batcher.submit(Request { max_tokens: Some(60), ..spec.request() }).unwrap();
            }
            for _ in 0..5 {
                batcher.step();
            }
            let mut answers = Answers::default();
            for _ in 0..100 {
                sim.fail(point, 0);
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert!(!batcher.is_busy() && !answers.failed.is_empty(), "{point:?}");
            assert_eq!(sim.unordered_access(), None, "{point:?}");
            assert_eq!(batcher.state().used_pages, 0);
            sim.clear_faults();
            let ids: Vec<RequestId> =
                specs.iter().map(|spec| batcher.submit(spec.request()).unwrap()).collect();
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "{point:?}");
            }
        }
    }
}
