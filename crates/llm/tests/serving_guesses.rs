//! Guessed tokens of many requests, by look-up and by a draft model: they change no answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::common::serving::{
    Answers, Spec, alone, assert_no_failures, batcher, faulty_stream_through, options, random_stream_on,
    recipe, specs,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{BatcherOptions, Event, Request, RequestId};
use quadriga_llm::{Error, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

#[test]
fn guesses_change_no_answer() {
    let model = recipe("llama").model();
    for seed in 20..24 {
        let options = BatcherOptions { lookup: 6, ..options(5, 40) };
        let mut specs = specs(&mut Rng::new(seed), 16, model.hyperparameters().vocabulary);
        // What is most probable repeats itself sooner or later, and some prompts do from the beginning.
        for spec in specs.iter_mut().step_by(2) {
            (spec.sampling.temperature, spec.sampling.repeat_penalty, spec.max_tokens) = (0.0, 1.0, 60);
            let first: Vec<u32> = spec.prompt.iter().copied().take(6).collect();
            spec.prompt = first.iter().copied().cycle().take(spec.prompt.len()).collect();
        }
        let wanted = alone(&model, &specs, DType::F32);
        let state = random_stream_on(&model, cpu(2), options, seed, &specs, &wanted).state();
        assert!(state.guessed_right > 0, "seed {seed}: {state:?}");
    }
}

#[test]
fn guesses_leave_room_for_prompts() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), BatcherOptions { lookup: 40, ..options(6, 60) });
    // They repeat themselves, so that there is much to look up.
    let next = |token: u32| (token + 1) % 50;
    for _ in 0..5 {
        let hook = move |tokens: &[u32], logits: &mut [f32]| {
            logits.fill(f32::NEG_INFINITY);
            logits[next(tokens[tokens.len() - 1]) as usize] = 0.0;
        };
        let prompt = (0..120).map(|at| at % 50).collect();
        batcher
            .submit(Request { hook: Some(Box::new(hook)), past_end: true, ..Request::new(prompt) })
            .unwrap();
    }
    let mut answered = HashSet::new();
    while answered.len() < 5 || batcher.state().guessed_right < 100 {
        answered.extend(batcher.step().into_iter().map(|(id, _)| id));
    }
    let id =
        batcher.submit(Request { max_tokens: Some(1), ..Request::new(recipe("llama").tokens(150)) }).unwrap();
    let mut computed = Vec::new();
    loop {
        let before = batcher.state();
        let events = batcher.step();
        let (after, guessed) = (batcher.state(), batcher.state().guessed - before.guessed);
        computed.push((after.computed - before.computed, guessed));
        if events.iter().any(|(of, event)| *of == id && matches!(event, Event::Token { .. })) {
            break;
        }
    }
    assert!(computed.len() <= 5, "{computed:?}");
}

/// The mode without guesses is tried after some steps, whether guesses pay or not: steps run ahead then as without look-up.
#[test]
fn steps_without_guesses_run_ahead_of_the_host() {
    let model = recipe("llama").model();
    for draft in [0, 3] {
        let lookup = if draft > 0 { 0 } else { 4 };
        let options = BatcherOptions { lookup, draft, ..options(1, 10) };
        let mut batcher = batcher(&model, Sim::new("sim:0").build(), options);
        if draft > 0 {
            batcher.set_draft(model.clone(), &Scheduler::new([cpu(1)]), &mut |_| {}).unwrap();
        }
        let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
        let spec = Spec { prompt: vec![1, 2, 3], sampling, max_tokens: 380, stops: Vec::new() };
        let wanted = alone(&model, std::slice::from_ref(&spec), DType::F32);
        let mut answers = Answers::default();
        // One answer may end before the first trial.
        while batcher.state().steps < 100 {
            let id = batcher.submit(spec.request()).unwrap();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!(answers.answers[&id], wanted[0]);
        }
        assert!(batcher.state().steps_ahead > 0, "draft {draft}: {:?}", batcher.state());
        assert_no_failures(&batcher);
    }
}

#[test]
fn a_draft_model_computes_prompts_in_small_parts_beside_answers() {
    let model = recipe("llama").model();
    let paced = BatcherOptions { token_time: Some(Duration::ZERO), draft: 3, ..options(4, 28) };
    let mut batcher = batcher(&model, cpu(1), paced);
    batcher.set_draft(model.clone(), &Scheduler::new([cpu(1)]), &mut |_| {}).unwrap();
    let request = |length| Request {
        max_tokens: Some(30),
        past_end: true,
        ..Request::new(recipe("llama").tokens(length))
    };
    let mut most = 0;
    // The pace is learned from a first one.
    for length in [64, 300, 200] {
        batcher.submit(request(length)).unwrap();
        for _ in 0..12 {
            let before = batcher.state().drafted_prompts;
            batcher.step();
            batcher.check().unwrap();
            most = most.max(if length > 64 { batcher.state().drafted_prompts - before } else { 0 });
        }
    }
    assert!((1..=32).contains(&most), "{most} tokens at once");
}

/// How often each token is the third one of an answer, of so many answers with seeds from `first` on, each guessed or not.
fn third_tokens(model: &Model, lookup: usize, draft: bool, first: u64) -> Vec<f64> {
    let mut batcher = batcher(model, cpu(1), BatcherOptions { lookup, draft: 3, ..options(16, 80) });
    if draft {
        batcher.set_draft(model.clone(), &Scheduler::new([Sim::new("sim:0").build()]), &mut |_| {}).unwrap();
    }
    // It repeats itself, so that there is something to look up.
    let prompt: Vec<u32> = (0..40).map(|k| k % 5 + 20).collect();
    let mut answers = Answers::default();
    for seed in first..first + 1000 {
        let sampling = SamplingOptions { temperature: 0.8, seed, ..SamplingOptions::default() };
        let request =
            Request { sampling, max_tokens: Some(3), past_end: true, ..Request::new(prompt.clone()) };
        batcher.submit(request).unwrap();
        while batcher.state().waiting > 900 {
            answers.add(batcher.step());
        }
    }
    while batcher.is_busy() {
        answers.add(batcher.step());
    }
    assert!(batcher.state().guessed > 0 || lookup == 0 && !draft);
    assert_no_failures(&batcher);
    let mut counts = vec![0.0; model.hyperparameters().vocabulary];
    for token in answers.answers.values().filter_map(|answer| answer.tokens.get(2)) {
        counts[*token as usize] += 1.0;
    }
    counts
}

#[test]
fn guesses_leave_the_distribution_of_tokens_as_it_is() {
    let model = recipe("llama").model();
    let plain = third_tokens(&model, 0, false, 1);
    for (lookup, draft, first) in [(4, false, 10_001), (0, true, 20_001), (0, false, 30_001)] {
        let other = third_tokens(&model, lookup, draft, first);
        let (n, m): (f64, f64) = (plain.iter().sum(), other.iter().sum());
        // Two samples of one distribution: χ² is about its degrees of freedom, give or take √(2 f).
        let mut freedom = -1.0_f64;
        let mut chi_squared = 0.0_f64;
        for (a, b) in plain.iter().zip(&other).filter(|(a, b)| **a + **b >= 10.0) {
            freedom += 1.0;
            chi_squared += (a * (m / n).sqrt() - b * (n / m).sqrt()).powi(2) / (a + b);
        }
        assert!(freedom > 3.0, "{plain:?}");
        assert!(chi_squared < freedom + 4.0 * (2.0 * freedom).sqrt(), "{chi_squared} of {freedom}");
    }
}

#[test]
fn a_draft_model_changes_no_answer() {
    let model = recipe("llama").model();
    // One that is always right, and one that hardly ever is.
    for (seed, right) in [(7, true), (8, false)] {
        let draft = Recipe { seed, ..recipe("llama") }.model();
        for stream in 0..3 {
            let mut rng = Rng::new(stream);
            let mut specs = specs(&mut rng, 12, model.hyperparameters().vocabulary);
            if right {
                // The draft model takes the argmax, without penalties.
                for SamplingOptions { temperature, repeat_penalty, .. } in
                    specs.iter_mut().map(|spec| &mut spec.sampling)
                {
                    (*temperature, *repeat_penalty) = (0.0, 1.0);
                }
            }
            let wanted = alone(&model, &specs, DType::F32);
            // The smaller pool puts sequences back.
            let pages = if stream == 0 { 10 } else { 40 };
            let mut batcher = batcher(&model, cpu(2), BatcherOptions { draft: 5, ..options(5, pages) });
            // The device computes the argmax alone; on a CPU, a guess must be probable.
            let backend = if right { Sim::new("sim:0").build() } else { cpu(1) };
            batcher.set_draft(draft.clone(), &Scheduler::new([backend]), &mut |_| {}).unwrap();
            let ids: Vec<RequestId> =
                specs.iter().map(|spec| batcher.submit(spec.request()).unwrap()).collect();
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap_or_else(|error| panic!("stream {stream}: {error}"));
            }
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "stream {stream}");
            }
            assert_no_failures(&batcher);
            let state = batcher.state();
            if right && pages == 40 {
                assert!(state.guessed > 50 && state.guessed_right * 2 > state.guessed, "{state:?}");
            }
        }
    }
    let mut none = batcher(&model, cpu(1), options(2, 10));
    let refused = none.set_draft(model.clone(), &Scheduler::new([cpu(1)]), &mut |_| {});
    assert!(matches!(refused, Err(Error::Option { .. })), "{refused:?}");
    let mut batcher = batcher(&model, cpu(1), BatcherOptions { draft: 4, ..options(2, 10) });
    let larger = Recipe { text: false, vocabulary: 400, ..recipe("llama") }.model();
    let recurrent =
        crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") }).model().unwrap();
    for wrong in [larger, recurrent] {
        let refused = batcher.set_draft(wrong, &Scheduler::new([cpu(1)]), &mut |_| {});
        assert!(matches!(refused, Err(Error::Option { .. })), "{refused:?}");
    }
}

#[test]
fn a_draft_model_changes_nothing_whatever_arrives_is_cancelled_or_fails() {
    let model = recipe("llama").model();
    for seed in 30..34 {
        println!("seed {seed}");
        let specs = specs(&mut Rng::new(seed), 12, model.hyperparameters().vocabulary);
        let wanted = alone(&model, &specs, DType::F32);
        // The smaller pool puts sequences back.
        let pages = if seed.is_multiple_of(2) { 10 } else { 40 };
        let mut batcher =
            batcher(&model, cpu(1), BatcherOptions { draft: 4, lookup: 2, ..options(5, pages) });
        let faulty = Sim::new("sim:0").device();
        let scheduler = Scheduler::new([Arc::clone(&faulty) as Arc<dyn Backend>]);
        batcher.set_draft(model.clone(), &scheduler, &mut |_| {}).unwrap();
        let mut before_step = |rng: &mut Rng| {
            faulty.clear_faults();
            if rng.chance(0.1) {
                faulty.fail(FaultPoint::ALL[rng.below(FaultPoint::ALL.len())], rng.below(4) as u64);
            }
        };
        let state = faulty_stream_through(batcher, seed, (&specs, &wanted), &mut before_step).state();
        assert!(state.guessed_right > 0 && state.failed_guesses > 0, "seed {seed}: {state:?}");
        assert_eq!((state.failed_steps, faulty.unordered_access()), (0, None), "seed {seed}");
    }
}

#[test]
fn a_draft_model_that_fails_costs_guesses_and_no_answer() {
    let model = recipe("llama").model();
    let spec = Spec {
        prompt: recipe("llama").tokens(20),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: 40,
        stops: Vec::new(),
    };
    let wanted = alone(&model, std::slice::from_ref(&spec), DType::F32);
    let faulty = Sim::new("sim:0").device();
    let mut batcher = batcher(&model, cpu(1), BatcherOptions { draft: 4, ..options(2, 10) });
    batcher
        .set_draft(model.clone(), &Scheduler::new([Arc::clone(&faulty) as Arc<dyn Backend>]), &mut |_| {})
        .unwrap();
    let id = batcher.submit(spec.request()).unwrap();
    let mut answers = Answers::default();
    for step in 0.. {
        if step % 3 == 1 {
            faulty.fail(FaultPoint::Run, 0);
        }
        answers.add(batcher.step());
        batcher.check().unwrap();
        if !batcher.is_busy() {
            break;
        }
    }
    assert_eq!(answers.answers[&id], wanted[0]);
    let state = batcher.state();
    assert!(state.guessed_right > 0 && state.failed_guesses > 0 && state.failed_steps == 0, "{state:?}");
    assert_eq!(faulty.unordered_access(), None);
}
