//! Guessed tokens of many requests, by look-up and by a draft model: they change no answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::serving::{Answers, Spec, alone, batcher, options, random_stream, recipe, specs};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{BatcherOptions, Request, RequestId};
use quadriga_llm::{Error, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

#[test]
fn guesses_change_no_answer() {
    let model = recipe("llama").model();
    let mut right = 0;
    for seed in 20..24 {
        let options = BatcherOptions { lookup: 6, ..options(5, 40) };
        right += random_stream(&model, options, DType::F32, seed, 16).state().guessed_right;
    }
    println!("{right} guesses were right");
}

/// How often each token is the third one of an answer, of so many answers with seeds from `first` on, each guessed or not.
fn third_tokens(model: &Model, lookup: usize, draft: bool, first: u64) -> Vec<f64> {
    let mut batcher = batcher(model, cpu(1), BatcherOptions { lookup, ..options(16, 80) });
    if draft {
        batcher
            .set_draft(model.clone(), &Scheduler::new([Sim::new("sim:0").build()]), 3, &mut |_| {})
            .unwrap();
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
            let mut batcher = batcher(&model, cpu(2), options(5, pages));
            // The device computes the argmax alone; on a CPU, a guess must be probable.
            let backend = if right { Sim::new("sim:0").build() } else { cpu(1) };
            batcher.set_draft(draft.clone(), &Scheduler::new([backend]), 5, &mut |_| {}).unwrap();
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
            let state = batcher.state();
            if right && pages == 40 {
                assert!(state.guessed > 50 && state.guessed_right * 2 > state.guessed, "{state:?}");
            }
        }
    }
    let mut batcher = batcher(&model, cpu(1), options(2, 10));
    let larger = Recipe { text: false, vocabulary: 400, ..recipe("llama") }.model();
    let recurrent =
        crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") }).model().unwrap();
    for wrong in [larger, recurrent] {
        let refused = batcher.set_draft(wrong, &Scheduler::new([cpu(1)]), 4, &mut |_| {});
        assert!(matches!(refused, Err(Error::Option { .. })), "{refused:?}");
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
    let mut batcher = batcher(&model, cpu(1), options(2, 10));
    batcher
        .set_draft(model.clone(), &Scheduler::new([Arc::clone(&faulty) as Arc<dyn Backend>]), 4, &mut |_| {})
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
    assert!(batcher.state().guessed_right > 0);
}
