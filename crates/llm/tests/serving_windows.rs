//! Many requests at once of models with sliding windows: their layers have pages of their own, which are given back when no window
//! reaches them any more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::serving::{
    Answers, CONTEXT, Spec, alone, answer, batcher, options, random_stream, recipe,
};
use crate::common::{Recipe, cpu};
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{BatcherOptions, Request};
use quadriga_llm::{EngineOptions, Model};
use quadriga_sim::Sim;

/// Every second layer has a window of so many tokens.
fn model(window: u32) -> Model {
    let family = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let recipe = Recipe { text: true, context: CONTEXT as u32, window: Some(window), ..family };
    recipe.model()
}

fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Spec {
    let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    Spec { prompt, sampling, max_tokens, stops: Vec::new() }
}

#[test]
fn every_request_is_answered_as_if_it_were_alone() {
    for (seed, window) in (100..).zip([1, 5, 63, 64, 65, 66, 129, 200]) {
        let batcher = random_stream(&model(window), options(4, 28), DType::F32, seed, 8);
        let state = batcher.state();
        assert!(state.window_pages > 0 && state.window_pages < state.pages, "window {window}: {state:?}");
        assert_eq!(state.used_window_pages, 0, "window {window}");
    }
    let mut preempted = 0;
    for seed in 110..114 {
        // Two pages of windows for each sequence, and hardly more of the others.
        preempted += random_stream(&model(1), options(8, 12), DType::F32, seed, 16).state().preempted;
    }
    assert!(preempted > 0);
}

#[test]
fn a_window_that_saves_nothing_has_no_pages_of_its_own() {
    let batcher = batcher(&model(390), cpu(1), options(4, 28));
    assert_eq!(batcher.state().window_pages, 0);
    // Pages in host memory have all layers.
    let kept = BatcherOptions { cache_ram: 1 << 20, ..options(4, 28) };
    let batcher = crate::common::serving::batcher(&model(5), cpu(1), kept);
    assert_eq!(batcher.state().window_pages, 0);
}

#[test]
fn pages_are_given_back_as_the_window_moves() {
    let model = model(100);
    let mut batcher = batcher(&model, cpu(1), options(2, 14));
    let endless = Request { max_tokens: None, past_end: true, ..Request::new(recipe("llama").tokens(10)) };
    batcher.submit(endless).unwrap();
    let mut most = 0;
    while batcher.is_busy() {
        batcher.step();
        batcher.check().unwrap();
        most = most.max(batcher.state().used_window_pages);
    }
    // 99 tokens before the next one are in three pages at most.
    assert_eq!(most, 3);
    // The memory of the window layers is that of their pages.
    let rows: Vec<usize> =
        batcher.session().states().iter().filter_map(|state| state.shape.dims().first().copied()).collect();
    let (few, many) = (*rows.iter().min().unwrap(), *rows.iter().max().unwrap());
    assert_eq!((few, many), (64 * (8 + batcher.state().window_pages), 64 * (8 + 14)));
}

#[test]
fn prefixes_are_found_with_the_pages_of_their_window() {
    for window in [5, 64, 130] {
        let model = model(window);
        let mut batcher = batcher(&model, cpu(1), options(3, 28));
        let shared = recipe("llama").tokens(300);
        let prompts: Vec<Vec<u32>> =
            (0..4).map(|tail| shared.iter().copied().chain([tail]).collect()).collect();
        let specs: Vec<Spec> = prompts.into_iter().map(|prompt| greedy(prompt, 5)).collect();
        let wanted = alone(&model, &specs, DType::F32);
        let mut found = Vec::new();
        for (spec, wanted) in specs.iter().zip(&wanted) {
            let (own, cached) = answer(&mut batcher, spec);
            assert_eq!(own, *wanted, "window {window}");
            found.push(cached);
        }
        assert_eq!(found, [0, 256, 256, 256], "window {window}");
        batcher.clear_prefixes();
        batcher.check().unwrap();
        assert_eq!(answer(&mut batcher, &specs[0]), (wanted[0].clone(), 0));
    }
}

#[test]
fn the_end_of_a_prompt_outlasts_a_long_answer() {
    let family = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let model = Recipe { text: true, context: 1500, window: Some(100), ..family }.model();
    let engine = EngineOptions { context: 1500, ..options(1, 40).engine };
    let mut batcher = batcher(&model, cpu(2), BatcherOptions { engine, ..options(1, 40) });
    let state = batcher.state();
    assert!(state.window_pages > 0 && state.window_pages < state.pages, "{state:?}");
    let prompt = recipe("llama").tokens(200);
    let long = Request { max_tokens: Some(900), past_end: true, ..Request::new(prompt.clone()) };
    batcher.submit(long).unwrap();
    while batcher.is_busy() {
        batcher.step();
        batcher.check().unwrap();
    }
    // The answer is generated again; the next message follows without it, as templates have it that leave reasoning out.
    let next = [prompt.clone(), vec![3; 90]].concat();
    for prompt in [prompt, next] {
        let spec = greedy(prompt, 3);
        let wanted = alone(&model, std::slice::from_ref(&spec), DType::F32);
        assert_eq!(answer(&mut batcher, &spec), (wanted[0].clone(), 192));
    }
}

#[test]
fn choices_copy_the_last_page_of_their_prompt() {
    let model = model(40);
    for backend in [cpu(2), Sim::new("sim:0").build()] {
        let specs: Vec<Spec> = (0..4)
            .map(|seed| Spec {
                sampling: SamplingOptions { seed, ..SamplingOptions::default() },
                ..greedy(recipe("llama").tokens(150), 20)
            })
            .collect();
        let wanted = alone(&model, &specs, DType::F32);
        let mut batcher = batcher(&model, backend, options(4, 28));
        let ids = batcher.submit_choices(specs.iter().map(Spec::request).collect()).unwrap();
        let mut answers = Answers::default();
        while batcher.is_busy() {
            answers.add(batcher.step());
            batcher.check().unwrap();
        }
        for (id, wanted) in ids.iter().zip(&wanted) {
            assert_eq!(answers.answers[id], *wanted);
        }
        assert_eq!(batcher.state().cached, 3 * 149);
        crate::common::serving::assert_no_failures(&batcher);
    }
}

/// Whoever plans a placement fills the options in, and the batcher does so again.
#[test]
fn options_that_are_filled_in_stay_as_they_are() {
    let mut rng = quadriga_conformance::Rng::new(17);
    for window in [1, 5, 64, 65, 200, 390, 399, 400, 1000] {
        let model = model(window);
        for round in 0..40 {
            let engine = EngineOptions {
                context: if rng.chance(0.5) { 0 } else { rng.range(1, CONTEXT) },
                sequences: rng.range(1, 9),
                pages: if rng.chance(0.5) { 0 } else { rng.range(1, 60) },
                // The default batch is larger than the window and what follows it in its pages.
                batch: if rng.chance(0.5) { EngineOptions::default().batch } else { rng.range(1, 700) },
                window_slots: if rng.chance(0.2) { usize::MAX } else { 0 },
                ..EngineOptions::default()
            };
            let cache_ram = if rng.chance(0.2) { 1 << 20 } else { 0 };
            let given = BatcherOptions { engine, cache_ram, ..BatcherOptions::default() };
            let once = given.clone().for_model(&model).unwrap();
            let twice = once.clone().for_model(&model).unwrap();
            assert_eq!(once, twice, "window {window}, round {round}: {given:?}");
        }
    }
    // Without pages they are for an engine.
    let paged = BatcherOptions::default().for_model(&model(100)).unwrap().engine;
    let [of_paged, own] = [paged, EngineOptions { sequences: 64, ..EngineOptions::default() }]
        .map(|options| options.without_pages().resolve(&model(100)).unwrap().window_slots);
    assert_eq!(of_paged, own);
    let given = BatcherOptions::default().for_model(&model(100)).unwrap();
    assert!(batcher(&model(100), cpu(1), given).state().window_pages > 0);
}

#[test]
fn the_plan_of_many_requests_counts_the_pages_of_windows() {
    let model = model(20);
    let full = EngineOptions { window_slots: usize::MAX, ..options(4, 28).engine };
    let [own, all] = [options(4, 28).engine, full].map(|engine| {
        let options = BatcherOptions { engine, ..options(4, 28) }.for_model(&model).unwrap().engine;
        (
            options.window_savings(&model),
            batcher(&model, cpu(1), BatcherOptions { engine: options, ..Default::default() }),
        )
    });
    let bytes = |batcher: &quadriga_llm::serving::Batcher| {
        batcher.session().states().iter().map(|state| state.bytes as u64).sum::<u64>()
    };
    let savings = own.0.unwrap();
    assert_eq!(all.0, None);
    assert_eq!(bytes(&all.1) - bytes(&own.1), savings.full - savings.own);
}
