//! Many requests at once on a device that fails: at every step, with every kind of fault. Answers are those of requests alone, and
//! nothing is lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::Recipe;
use crate::common::serving::{Answers, CONTEXT, alone, batcher, options, random_stream_with, recipe, specs};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::Model;
use quadriga_llm::serving::{BatcherOptions, Request, RequestId};
use quadriga_sim::{FaultPoint, Sim};

/// A model of each way to keep a sequence: all tokens, windows, recurrent states.
fn models() -> [Model; 3] {
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let windows = Recipe { text: true, context: CONTEXT as u32, window: Some(30), ..windows };
    let recurrent = crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") });
    [recipe("llama").model(), windows.model(), recurrent.model().unwrap()]
}

#[test]
fn a_device_that_fails_at_every_step_delays_requests_and_fails_none() {
    for (kind, model) in models().iter().enumerate() {
        for seed in 0..4 {
            let seed = 200 + 10 * kind as u64 + seed;
            // With few pages sequences are put back, and prefixes go to host memory and return.
            let (pages, cache_ram) = if seed.is_multiple_of(2) { (30, 0) } else { (9, 1 << 20) };
            let options = BatcherOptions { cache_ram, lookup: 3, ..options(4, pages) };
            let sim = Sim::new("sim:0").device();
            let mut step = 0;
            // A step fails, at one of its operations, and then not: one that ran ahead may notice it later.
            let mut before_step = |rng: &mut Rng| {
                sim.clear_faults();
                step += 1;
                if step % 3 == 1 {
                    let point = FaultPoint::ALL[rng.below(FaultPoint::ALL.len())];
                    sim.fail(point, rng.below(6) as u64);
                }
            };
            let backend = Arc::clone(&sim) as _;
            random_stream_with(model, backend, options, DType::F32, seed, 8, &mut before_step);
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
