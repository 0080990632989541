//! The memory of many requests at once is that of the plan, and of the reads in flight: a device that has exactly so much serves any stream of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::serving::{
    Answers, CONTEXT, alone, assert_no_failures, batcher, options, random_stream_with, recipe, specs,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::serving::{Batcher, BatcherOptions, Request, Service};
use quadriga_llm::{Engine, Model, Pooling};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

/// A model of each way to keep a sequence: all tokens, windows, recurrent states, latent vectors in both layouts of files.
fn recipes() -> Vec<Recipe> {
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let windows = Recipe { text: true, context: CONTEXT as u32, window: Some(30), ..windows };
    let mut all = vec![recipe("llama"), windows, Recipe { layers: 5, ..recipe("qwen35") }];
    all.extend(crate::serving_latent::recipes());
    all
}

fn model(recipe: &Recipe) -> Model {
    match recipe.architecture {
        "qwen35" => crate::common::recurrent::parts_of(recipe).model().unwrap(),
        _ => recipe.model(),
    }
}

fn models() -> Vec<Model> {
    recipes().iter().map(model).collect()
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
fn outputs_of_prompts_and_guesses_take_no_more_memory_than_the_plan() {
    for (seed, small) in (450..).zip(recipes()) {
        println!("seed {seed}");
        // Logits take more memory than anything else.
        let model = model(&Recipe { text: false, vocabulary: 1500, ..small });
        for (lookup, draft) in [(0, 0), (3, 0), (0, 5)] {
            let options = BatcherOptions { lookup, draft, ..options(6, 60) }.for_model(&model).unwrap();
            let rows = options.engine.output_rows;
            let unlimited: Arc<dyn Backend> = Sim::new("sim:0").build();
            let plan =
                Engine::forecast(&model, &Scheduler::new([unlimited]), options.engine.clone()).unwrap();
            let planned: u64 = plan.bytes().iter().map(|bytes| bytes.total()).sum();
            // Reads that do not wait, as above.
            let planned = planned + 2 * (rows as u64 * 128 * 8 + 64);
            let sim = Sim::new("sim:0").capacity(planned).build();
            let mut batcher = batcher(&model, sim, options);
            let other = Scheduler::new([Sim::new("sim:1").build() as Arc<dyn Backend>]);
            // Models with recurrent layers have no draft model.
            let has_draft = batcher.set_draft(model.clone(), &other, &mut |_| {}).is_ok();
            let text = |length: usize| Request {
                max_tokens: Some(40),
                ..Request::new(recipe("llama").tokens(length))
            };
            let mut rng = Rng::new(seed);
            for round in 0..3 {
                let length = rng.range(1, 350);
                batcher.submit(Request { prompt_logprobs: Some(2), salt: round, ..text(length) }).unwrap();
                batcher.submit(Request { embedding: Some(Pooling::Mean), ..text(length) }).unwrap();
                batcher
                    .submit_choices((0..3).map(|_| Request { salt: round, ..text(length) }).collect())
                    .unwrap();
                // It repeats itself, so that there is something to look up.
                let hook =
                    |tokens: &[u32], logits: &mut [f32]| logits[tokens[tokens.len() - 9] as usize] = 1e9;
                let prompt = (0..60).map(|at| at % 9 + 20).collect();
                let request = Request { max_tokens: Some(60), past_end: true, ..Request::new(prompt) };
                batcher.submit(Request { hook: Some(Box::new(hook)), ..request }).unwrap();
            }
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!(answers.failed, [], "look-up {lookup}, draft {draft}");
            // Nor was a step refused memory, and then computed with what an earlier one had given back.
            assert_no_failures(&batcher);
            let guesses = batcher.options().lookup > 0 || has_draft;
            assert_eq!(batcher.state().guessed > 0, guesses, "look-up {lookup}, draft {draft}");
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
        let mut batcher =
            batcher(&model, Arc::clone(&backend), BatcherOptions { draft: 2, ..options(40, 240) });
        batcher.set_draft(model.clone(), &Scheduler::new([backend]), &mut |_| {}).ok();
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
