//! Many requests at once: whatever arrives, is cancelled, put back or fails, every answer is the one that the request gets alone,
//! and no page is lost or shared while it is written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::serving::{
    Answer, Answers, CONTEXT, Spec, alone, answer, batcher, options, random_stream, random_stream_on, recipe,
    specs, stream_through,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::placement::offload;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request, RequestId, Service};
use quadriga_llm::{EngineOptions, Error, Finish, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

#[test]
fn every_request_is_answered_as_if_it_were_alone() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        let model = recipe(architecture).model();
        for seed in 0..4 {
            random_stream(&model, options(1 + 3 * seed as usize, 40), DType::F32, seed, 20);
        }
    }
}

#[test]
fn a_full_pool_puts_sequences_back_and_loses_nothing() {
    let model = recipe("llama").model();
    let mut preempted = 0;
    for seed in 10..16 {
        let batcher = random_stream(&model, options(8, 9), DType::F32, seed, 24);
        preempted += batcher.state().preempted;
    }
    assert!(preempted > 0, "the pool was never full");
}

/// Requests for the most probable tokens, some with stop strings.
fn greedy_specs(seed: u64, count: usize, model: &Model) -> Vec<Spec> {
    let mut specs = specs(&mut Rng::new(seed), count, model.hyperparameters().vocabulary);
    for spec in &mut specs {
        (spec.sampling.temperature, spec.sampling.repeat_penalty) = (0.0, 1.0);
    }
    specs
}

#[test]
fn steps_that_run_ahead_of_the_host_change_no_answer() {
    let model = recipe("llama").model();
    let mut ahead = 0;
    for (seed, (sequences, pages)) in (60..).zip([(1, 40), (4, 40), (8, 40), (8, 9), (6, 12)]) {
        let specs = greedy_specs(seed, 20, &model);
        let sim = Sim::new("sim:0").build();
        let options = BatcherOptions { cache_ram: 1 << 20, ..options(sequences, pages) };
        let wanted = alone(&model, &specs, DType::F32);
        let batcher = random_stream_on(&model, sim, options, seed, &specs, &wanted);
        let state = batcher.state();
        ahead += state.steps_ahead;
        // Beside the prompts, nearly every step follows another one.
        assert!(sequences > 1 || 2 * state.steps_ahead > state.steps, "seed {seed}: {state:?}");
    }
    assert!(ahead > 200, "{ahead}");
    // Where some request needs more than the argmax, and on the host, no step does.
    let sampled = random_stream(&model, options(4, 40), DType::F32, 60, 8);
    assert_eq!(sampled.state().steps_ahead, 0);
}

#[test]
fn a_device_that_finds_the_largest_logits_changes_no_answer() {
    // More tokens than the device reports: some requests need the others, too.
    let model = Recipe { vocabulary: 400, text: false, ..recipe("llama") }.model();
    for seed in 90..93 {
        let mut rng = Rng::new(seed);
        let mut specs = specs(&mut rng, 14, 100);
        for spec in &mut specs {
            spec.stops.clear();
            let everything = SamplingOptions { top_k: 0, top_p: 1.0, min_p: 0.0, ..spec.sampling.clone() };
            let by_mass = SamplingOptions { top_k: 0, top_p: 0.7, ..spec.sampling.clone() };
            match rng.below(5) {
                0 => spec.sampling = everything,
                1 => spec.sampling = by_mass,
                2 => spec.sampling.logit_bias = [(rng.below(400) as u32, 2.0)].into(),
                _ => {}
            }
        }
        // On the host, tokens are sampled from all logits.
        let mut host = batcher(&model, cpu(1), options(1, 40));
        let wanted: Vec<Answer> = specs.iter().map(|spec| answer(&mut host, spec).0).collect();
        random_stream_on(&model, Sim::new("sim:0").build(), options(5, 40), seed, &specs, &wanted);
    }
}

#[test]
fn a_step_that_runs_ahead_and_fails_delays_requests_and_fails_none() {
    let model = recipe("llama").model();
    let specs = greedy_specs(70, 5, &model);
    let wanted = alone(&model, &specs, DType::F32);
    for point in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in (0..60).step_by(5) {
            let sim = Sim::new("sim:0").device();
            let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(5, 24));
            let ids: Vec<RequestId> =
                specs.iter().map(|spec| batcher.submit(spec.request()).unwrap()).collect();
            let start = sim.counts().of(point);
            sim.fail(point, after);
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!(answers.failed, [], "{point:?} {after}");
            assert_eq!(sim.unordered_access(), None, "{point:?} {after}");
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "{point:?} {after}");
            }
            // Nobody else hears of it.
            let failed = batcher.state().failed_steps;
            assert_eq!(failed > 0, sim.counts().of(point) > start + after, "{point:?} {after}: {failed}");
        }
    }
}

#[test]
fn a_batcher_goes_on_after_all_requests_of_a_step_ahead_were_cancelled() {
    let model = recipe("llama").model();
    let specs = greedy_specs(80, 6, &model);
    let wanted = alone(&model, &specs, DType::F32);
    let mut batcher = batcher(&model, Sim::new("sim:0").build(), options(3, 24));
    for round in 0..4 {
        let endless = Request { past_end: true, ..Request::new(vec![3, 5, round]) };
        let greedy = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
        let id = batcher.submit(Request { sampling: greedy, ..endless }).unwrap();
        for _ in 0..5 {
            batcher.step();
        }
        assert!(batcher.cancel(id) && !batcher.is_busy());
        let spec = &specs[round as usize];
        assert_eq!(answer(&mut batcher, spec).0, wanted[round as usize], "round {round}");
    }
    assert!(batcher.state().steps_ahead > 0);
}

#[test]
fn windows_experts_and_latent_attention_are_answered_alike() {
    let mut recipes: Vec<Recipe> = Recipe::families();
    let some = [
        "apart",
        "sinks and windows",
        "groups",
        "keys and values of one matrix",
        "short convolutions",
        "weighted inputs",
    ];
    let experts = Recipe::with_experts().into_iter().filter(|(name, _)| some.contains(name));
    recipes.extend(experts.map(|(_, recipe)| recipe));
    for (seed, recipe) in (30..).zip(recipes) {
        let recipe = Recipe { text: true, context: CONTEXT as u32, ..recipe };
        random_stream(&recipe.model(), options(5, 24), DType::F32, seed, 4);
    }
}

#[test]
fn a_device_that_fails_once_delays_requests_and_fails_none() {
    let model = recipe("llama").model();
    let mut rng = Rng::new(50);
    let specs = specs(&mut rng, 6, 100);
    let wanted = alone(&model, &specs, DType::F32);
    for point in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in (0..120).step_by(7) {
            let sim = Sim::new("sim:0").device();
            let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(4, 24));
            let ids: Vec<RequestId> =
                specs.iter().map(|spec| batcher.submit(spec.request()).unwrap()).collect();
            let start = sim.counts().of(point);
            sim.fail(point, after);
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!(answers.failed, [], "{point:?} {after}");
            assert_eq!(sim.unordered_access(), None, "{point:?} {after}");
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "{point:?} {after}");
            }
            // Nobody else hears of it.
            let failed = batcher.state().failed_steps;
            assert_eq!(failed > 0, sim.counts().of(point) > start + after, "{point:?} {after}: {failed}");
        }
    }
}

#[test]
fn requests_that_cannot_be_answered_are_refused() {
    let model = recipe("llama").model();
    let options = BatcherOptions { queue: 2, ..options(1, 3) };
    let mut batcher = batcher(&model, cpu(1), options);
    // Three pages are all that a sequence can have.
    assert_eq!(batcher.options().engine.context, 192);
    assert!(matches!(batcher.submit(Request::new(Vec::new())), Err(Error::EmptyPrompt)));
    assert!(matches!(
        batcher.submit(Request::new(vec![1; 192])),
        Err(Error::ContextFull { wanted: 193, .. })
    ));
    assert!(matches!(batcher.submit(Request::new(vec![100])), Err(Error::Token { token: 100, .. })));
    let hot = SamplingOptions { temperature: -1.0, ..SamplingOptions::default() };
    assert!(batcher.submit(Request { sampling: hot, ..Request::new(vec![1]) }).is_err());
    let many = Request { logprobs: Some(1001), ..Request::new(vec![1]) };
    assert!(matches!(batcher.submit(many), Err(Error::Option { .. })));
    let choices = (0..4).map(|_| Request::new(vec![1])).collect();
    assert!(matches!(batcher.submit_choices(choices), Err(Error::Option { .. })), "they never fit");
    // One can start at once, and two wait.
    for _ in 0..3 {
        batcher.submit(Request::new(vec![1; 191])).unwrap();
    }
    assert!(matches!(batcher.submit(Request::new(vec![1])), Err(Error::QueueFull { waiting: 2 })));
    let mut answers = Answers::default();
    while batcher.is_busy() {
        answers.add(batcher.step());
    }
    assert!(answers.answers.values().all(|answer| answer.finish == Some(Finish::Context)));
}

#[test]
fn a_service_answers_requests_of_many_threads() {
    let model = recipe("llama").model();
    let mut rng = Rng::new(60);
    let specs = specs(&mut rng, 12, 100);
    let wanted = alone(&model, &specs, DType::F32);
    let service = Service::start(batcher(&model, cpu(1), options(4, 30))).unwrap();
    std::thread::scope(|scope| {
        for (spec, wanted) in specs.iter().zip(&wanted) {
            let service = &service;
            scope.spawn(move || {
                let mut answers = Answers::default();
                let response = service.submit(spec.request()).unwrap();
                let id = response.id();
                answers.add(response.map(|event| (id, event)).collect());
                assert_eq!(answers.answers[&id], *wanted);
            });
        }
        // A response that is dropped is cancelled.
        let endless = Request { max_tokens: None, ..specs[0].request() };
        drop(service.submit(endless).unwrap());
    });
    // Handled after all that was sent before.
    drop(service.submit(Request { max_tokens: Some(1), ..specs[0].request() }).unwrap().last());
    assert_eq!((service.state().running, service.state().waiting), (0, 0));
}

#[test]
fn a_batch_smaller_than_the_sequences_leaves_none_behind() {
    let model = recipe("llama").model();
    let small = EngineOptions { batch: 4, ..options(12, 80).engine };
    let mut batcher = batcher(&model, cpu(1), BatcherOptions { engine: small, lookup: 8, ..options(12, 80) });
    assert!(batcher.options().engine.batch > 12);
    let ids: Vec<RequestId> = (0..12)
        .map(|at| batcher.submit(Request { max_tokens: Some(60), ..Request::new(vec![5, at]) }).unwrap())
        .collect();
    while batcher.state().running < 12 {
        batcher.step();
    }
    // From now on, every step has a token for everyone.
    let mut tokens: HashMap<RequestId, usize> = HashMap::new();
    for _ in 0..10 {
        for (id, event) in batcher.step() {
            *tokens.entry(id).or_default() += usize::from(matches!(event, Event::Token { .. }));
        }
    }
    assert!(ids.iter().all(|id| tokens.get(id).is_some_and(|tokens| *tokens >= 10)), "{tokens:?}");
}

#[test]
fn a_request_of_low_priority_is_answered_in_the_end() {
    let model = recipe("llama").model();
    let patient = BatcherOptions { patience: 40, ..options(1, 10) };
    let mut batcher = batcher(&model, cpu(1), patient);
    let urgent = || Request { priority: 1, max_tokens: Some(2), ..Request::new(vec![3]) };
    batcher.submit(urgent()).unwrap();
    let low = batcher.submit(Request { max_tokens: Some(2), ..Request::new(vec![4]) }).unwrap();
    let answered = (0..200).any(|_| {
        batcher.submit(urgent()).unwrap();
        batcher.step().iter().any(|(id, _)| *id == low)
    });
    assert!(answered);
}

#[test]
fn an_urgent_answer_does_not_wait_for_a_less_urgent_one_to_its_prompt() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(1, 10));
    batcher.submit(Request { priority: 3, max_tokens: Some(5), ..Request::new(vec![1]) }).unwrap();
    let between =
        batcher.submit(Request { priority: 4, max_tokens: Some(5), ..Request::new(vec![2]) }).unwrap();
    let choice = |priority| Request { priority, max_tokens: Some(5), ..Request::new(vec![3, 4]) };
    let ids = batcher.submit_choices(vec![choice(0), choice(9)]).unwrap();
    let mut ended = Vec::new();
    while batcher.is_busy() {
        ended.extend(
            batcher
                .step()
                .into_iter()
                .filter(|(_, event)| matches!(event, Event::Finished(_)))
                .map(|(id, _)| id),
        );
    }
    let place = |id: RequestId| ended.iter().position(|ended| *ended == id).unwrap();
    assert!(place(ids[1]) < place(between), "{ended:?}");
}

/// As every access of a stream on a device alone; the host that has the other layers is simulated, too, so that the happens-before
/// checker sees its memory.
#[test]
fn a_stream_on_a_device_and_its_host_orders_every_access() {
    for (seed, recipe) in (110..).zip([recipe("llama"), Recipe { layers: 3, ..recipe("qwen3") }]) {
        let model = recipe.model();
        let specs = greedy_specs(seed, 6, &model);
        let wanted = alone(&model, &specs, DType::F32);
        let (device, host) = (Sim::new("sim:0").device(), Sim::new("cpu").synchronous().host().device());
        let scheduler = Scheduler::new([Arc::clone(&device) as Arc<dyn Backend>, Arc::clone(&host) as _])
            .place(offload(model.hyperparameters(), 1, 1));
        let options = BatcherOptions { cache_ram: 1 << 20, ..options(4, 12) };
        let batcher = Batcher::new(model.clone(), &scheduler, options, &mut |_| {}).unwrap();
        stream_through(batcher, seed, (&specs, &wanted), &mut |_| {});
        assert!(host.counts().of(FaultPoint::Run) > 0 && device.counts().of(FaultPoint::Run) > 0);
        assert_eq!((device.unordered_access(), host.unordered_access()), (None, None), "seed {seed}");
    }
}
