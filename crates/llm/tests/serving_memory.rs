//! The memory of many requests at once is that of the plan, and of the reads in flight: a device that has exactly so much serves any stream of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::serving::{Answers, CONTEXT, alone, batcher, options, random_stream_with, recipe, specs};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::serving::{Batcher, BatcherOptions, Service};
use quadriga_llm::{Engine, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

/// A model of each way to keep a sequence: all tokens, windows, recurrent states.
fn models() -> [Model; 3] {
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let windows = Recipe { text: true, context: CONTEXT as u32, window: Some(30), ..windows };
    let recurrent = crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") });
    [recipe("llama").model(), windows.model(), recurrent.model().unwrap()]
}

#[test]
fn a_device_with_the_memory_of_the_plan_serves_any_stream() {
    for (seed, model) in (400..).zip(models()) {
        for (sequences, pages) in [(12, 60), (5, 20)] {
            let options = BatcherOptions { lookup: 3, ..options(sequences, pages) };
            let options = options.for_model(&model).unwrap();
            let unlimited: Arc<dyn Backend> = Sim::new("sim:0").build();
            let plan =
                Engine::forecast(&model, &Scheduler::new([unlimited]), options.engine.clone()).unwrap();
            let planned: u64 = plan.bytes().iter().map(|bytes| bytes.total()).sum();
            // Reads that do not wait take memory of their own: of two steps, 128 logits and their tokens for each output, and a sum.
            let planned = planned + 2 * (options.engine.output_rows as u64 * 128 * 8 + 64);
            let sim = Sim::new("sim:0").capacity(planned).device();
            random_stream_with(&model, Arc::clone(&sim) as _, options, DType::F32, seed, 20, &mut |_| {
                assert!(sim.used_bytes() <= planned);
            });
        }
    }
}

#[test]
fn an_idle_batcher_keeps_few_plans_and_answers_as_before() {
    const KEPT: usize = 4;
    let mut most = 0;
    for (seed, model) in (500..).zip(models()) {
        println!("seed {seed}");
        let specs = specs(&mut Rng::new(seed), 80, model.hyperparameters().vocabulary);
        let wanted = alone(&model, &specs, DType::F32);
        let backend = cpu(2);
        let mut batcher = batcher(&model, Arc::clone(&backend), options(40, 240));
        batcher.set_draft(model.clone(), &Scheduler::new([backend]), 2, &mut |_| {}).ok();
        let plans = |batcher: &Batcher| batcher.session().plan_usage().plans;
        for round in 0..3 {
            let mut answers = Answers::default();
            let mut ids = Vec::new();
            for some in specs.chunks(40) {
                ids.extend(some.iter().map(|spec| batcher.submit(spec.request()).unwrap()));
                while batcher.is_busy() {
                    let before = plans(&batcher);
                    assert!(!batcher.release_memory().unwrap(), "requests are being answered");
                    assert_eq!(plans(&batcher), before);
                    answers.add(batcher.step());
                }
            }
            assert_eq!(answers.failed, []);
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "round {round}");
            }
            let before = plans(&batcher);
            most = most.max(before);
            assert!(batcher.release_memory().unwrap());
            assert_eq!(plans(&batcher), before.min(KEPT));
        }
    }
    assert!(most > KEPT, "{most} plans");
}

#[test]
fn a_service_gives_memory_back_only_without_requests() {
    let model = recipe("llama").model();
    let specs = specs(&mut Rng::new(510), 2, model.hyperparameters().vocabulary);
    let service = Service::start(batcher(&model, cpu(1), options(4, 30))).unwrap();
    let mut response = service.submit(specs[0].request()).unwrap();
    let (first, answered) = (response.next(), response.count());
    assert!(first.is_some() && answered > 0);
    assert!(service.release_memory().unwrap());
    assert!(service.submit(specs[1].request()).unwrap().count() > 0);
}
