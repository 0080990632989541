//! Many requests at once of models with recurrent layers: their states belong to sequences, and those of prefixes are found again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::serving::{
    Answers, CONTEXT, Spec, alone, answer, batcher, options, random_stream, random_stream_with, recipe,
};
use crate::common::{Recipe, cpu};
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request};
use quadriga_llm::{EngineOptions, Model};
use quadriga_sim::{FaultPoint, Sim};

fn qwen35() -> Model {
    crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") }).model().unwrap()
}

/// Models with each kind of recurrent layer: delta rule, state space, convolutions, these with windows.
fn models() -> Vec<Model> {
    let family = |architecture: &str| {
        let recipe =
            Recipe::families().into_iter().find(|recipe| recipe.architecture == architecture).unwrap();
        Recipe { text: true, context: CONTEXT as u32, ..recipe }
    };
    let windows = Recipe { window: Some(70), ..family("lfm2") };
    vec![qwen35(), family("mamba2").model(), family("lfm2").model(), windows.model()]
}

fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Spec {
    let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    Spec { prompt, sampling, max_tokens, stops: Vec::new() }
}

#[test]
fn two_tokens_of_one_sequence_and_one_of_each_of_two_are_different_steps() {
    for model in models() {
        // All log-probabilities of a prompt of two tokens: a step with as many tokens and outputs as one of two sequences.
        let prompt = || Request {
            max_tokens: Some(1),
            prompt_logprobs: Some(1),
            logprobs: Some(1),
            ..Request::new(vec![5, 9])
        };
        let pair = [greedy(vec![7], 6), greedy(vec![11], 6)];
        let wanted = alone(&model, &pair, DType::F32);
        for prompt_first in [true, false] {
            let mut batcher = batcher(&model, cpu(1), options(4, 8));
            let mut answers = Answers::default();
            for asks_prompt in [prompt_first, !prompt_first] {
                let mut ids = Vec::new();
                if asks_prompt {
                    ids.push((batcher.submit(prompt()).unwrap(), None));
                } else {
                    let submitted = pair.iter().map(|spec| batcher.submit(spec.request()).unwrap());
                    ids.extend(submitted.zip(wanted.iter().map(Some)));
                }
                while batcher.is_busy() {
                    answers.add(batcher.step());
                }
                assert!(answers.failed.is_empty());
                crate::common::serving::assert_no_failures(&batcher);
                for (id, wanted) in ids {
                    let found = &answers.answers[&id];
                    assert!(wanted.is_none_or(|wanted| wanted == found), "{found:?}");
                }
            }
        }
    }
}

#[test]
fn every_request_is_answered_as_if_it_were_alone() {
    for (kind, model) in models().iter().enumerate() {
        let mut found = 0;
        for seed in 0..3 {
            let seed = 70 + 10 * kind as u64 + seed;
            // The smaller pool puts sequences back.
            let pages = if seed.is_multiple_of(2) { 24 } else { 9 };
            found += random_stream(model, options(5, pages), DType::F32, seed, 10).state().cached;
        }
        assert!(found > 0, "kind {kind}: no prefix was ever found");
    }
}

#[test]
fn one_token_of_each_sequence_is_one_run() {
    let model = qwen35();
    let runs = |sequences: usize| {
        let sim = Sim::new("sim:0").device();
        let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(8, 24));
        for at in 0..sequences as u32 {
            batcher.submit(Request { max_tokens: Some(30), ..Request::new(vec![1, 2, 3 + at]) }).unwrap();
        }
        while batcher.state().computed < 3 * sequences as u64 {
            batcher.step();
        }
        // The plan is known after the first of them.
        batcher.step();
        let before = sim.counts().of(FaultPoint::Run);
        (0..5).for_each(|_| drop(batcher.step()));
        sim.counts().of(FaultPoint::Run) - before
    };
    assert_eq!((runs(3), runs(8)), (runs(1), runs(1)));
}

#[test]
fn parts_of_several_prompts_and_single_tokens_are_one_run() {
    for model in models() {
        let sim = Sim::new("sim:0").device();
        let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(8, 40));
        for at in 0..3 {
            batcher
                .submit(Request { max_tokens: Some(60), past_end: true, ..Request::new(vec![1, 2, at]) })
                .unwrap();
        }
        let runs = |batcher: &mut Batcher, lengths: &[usize]| {
            for length in lengths {
                let prompt = recipe("llama").tokens(*length);
                batcher
                    .submit(Request { max_tokens: Some(1), salt: *length as u64, ..Request::new(prompt) })
                    .unwrap();
            }
            let (computed, before) = (batcher.state().computed, sim.counts().of(FaultPoint::Run));
            batcher.step();
            let all = lengths.iter().sum::<usize>() as u64 + 3;
            assert_eq!(batcher.state().computed - computed, all, "{lengths:?}");
            sim.counts().of(FaultPoint::Run) - before
        };
        batcher.step();
        // Plans are made in the first steps of their shape.
        for _ in 0..2 {
            runs(&mut batcher, &[]);
        }
        let single = runs(&mut batcher, &[]);
        for lengths in [&[30, 25][..], &[40], &[17, 20, 23]] {
            runs(&mut batcher, lengths);
            assert_eq!(runs(&mut batcher, lengths), single, "{lengths:?}");
        }
    }
}

#[test]
fn a_device_that_finds_tokens_changes_no_answer() {
    for (seed, model) in (170..).zip(models()) {
        let sim = Sim::new("sim:0").build();
        random_stream_with(&model, sim, options(5, 24), DType::F32, seed, 10, &mut |_| {});
    }
}

#[test]
fn a_step_that_fails_on_a_device_is_computed_again_from_the_same_states() {
    let model = qwen35();
    let specs: Vec<Spec> = (0..4).map(|at| greedy(recipe("llama").tokens(3 + 20 * at), 12)).collect();
    let wanted = alone(&model, &specs, DType::F32);
    for point in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in (0..60).step_by(7) {
            let sim = Sim::new("sim:0").device();
            let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(4, 24));
            let ids: Vec<_> = specs.iter().map(|spec| batcher.submit(spec.request()).unwrap()).collect();
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
        }
    }
}

/// The tokens of each request that were found.
fn found(batcher: &mut Batcher, prompts: &[Vec<u32>]) -> Vec<usize> {
    prompts.iter().map(|prompt| answer(batcher, &greedy(prompt.clone(), 2)).1).collect()
}

#[test]
fn a_prefix_is_computed_twice_and_then_found() {
    for model in models() {
        let mut batcher = batcher(&model, cpu(1), options(4, 40));
        let shared = recipe("llama").tokens(200);
        let prompts: Vec<Vec<u32>> =
            (0..4).map(|tail| shared.iter().copied().chain([tail; 70]).collect()).collect();
        // The first keeps a state after its own last page only; the second learns that others begin alike.
        assert_eq!(found(&mut batcher, &prompts), [0, 0, 192, 192]);
        // Again the whole prompt: the state after its last page.
        assert_eq!(found(&mut batcher, &prompts[3..]), [256]);
    }
}

#[test]
fn a_conversation_goes_on_from_its_last_page() {
    for model in models() {
        let mut batcher = batcher(&model, cpu(1), options(4, 40));
        let first = greedy(recipe("llama").tokens(150), 100);
        let id = batcher.submit(Request { past_end: true, ..first.request() }).unwrap();
        let mut answers = Answers::default();
        while batcher.is_busy() {
            answers.add(batcher.step());
            batcher.check().unwrap();
        }
        let reply = &answers.answers[&id].tokens;
        let tokens: Vec<u32> = first.prompt.iter().chain(reply).copied().chain([5; 30]).collect();
        let second = greedy(tokens, 20);
        let wanted = alone(&model, std::slice::from_ref(&second), DType::F32);
        // 249 tokens were computed: three whole pages.
        assert_eq!(answer(&mut batcher, &second), (wanted[0].clone(), 192));
    }
}

#[test]
fn a_single_sequence_returns_to_the_ends_of_its_prompts_and_answers() {
    for model in models() {
        let mut batcher = batcher(&model, cpu(1), options(1, 14));
        let mut conversation = recipe("llama").tokens(130);
        // What is found of a prompt, whose answer becomes part of the conversation.
        let mut turn = |prompt: &[u32], max_tokens: usize| {
            let request = Request { past_end: true, ..greedy(prompt.to_vec(), max_tokens).request() };
            let id = batcher.submit(request).unwrap();
            let (mut answers, mut cached) = (Answers::default(), 0);
            while batcher.is_busy() {
                let events = batcher.step();
                for (_, event) in &events {
                    if let Event::Finished(finished) = event {
                        cached = finished.counts.cached;
                    }
                }
                answers.add(events);
                batcher.check().unwrap();
            }
            (cached, answers.answers.remove(&id).unwrap().tokens)
        };
        let (found, reply) = turn(&conversation, 100);
        assert_eq!(found, 0);
        // The answer is generated again, and the next message follows without its reasoning.
        assert_eq!(turn(&conversation, 100), (128, reply.clone()));
        assert_eq!(turn(&[&conversation[..], &[7; 20]].concat(), 2).0, 128);
        conversation.extend(reply);
        assert_eq!(turn(&[&conversation[..], &[5; 40]].concat(), 80).0, 192);
        // The second message is edited.
        assert_eq!(turn(&[&conversation[..], &[6; 40]].concat(), 2).0, 192);
    }
}

#[test]
fn checkpoints_are_as_many_as_were_asked_for() {
    let model = qwen35();
    // The number of checkpoints, the bytes of states in the plan, and those of all states that there are.
    let of = |sequences: usize, checkpoints: usize| {
        let given = options(sequences, 40);
        let engine = EngineOptions { checkpoints, ..given.engine.clone() };
        let options = BatcherOptions { engine, ..given }.for_model(&model).unwrap();
        let (kept, states) = (options.engine.kept_states(), options.engine.recurrent_states(&model).unwrap());
        let batcher = batcher(&model, cpu(1), options);
        (kept, states.bytes, batcher.session().states().iter().map(|state| state.bytes as u64).sum::<u64>())
    };
    let none = of(1, 0);
    assert_eq!(none.0, 0);
    for (sequences, checkpoints, kept) in [(1, 1, 2), (1, 16, 17), (3, 4, 7)] {
        let some = of(sequences, checkpoints);
        assert_eq!((some.0, some.1 - none.1), (kept, some.2 - none.2), "{sequences} {checkpoints}");
    }
}

#[test]
fn choices_share_the_pages_of_their_prompt() {
    let model = qwen35();
    let specs: Vec<Spec> = (0..4)
        .map(|seed| Spec {
            sampling: SamplingOptions { seed, ..SamplingOptions::default() },
            ..greedy(recipe("llama").tokens(150), 20)
        })
        .collect();
    let wanted = alone(&model, &specs, DType::F32);
    let mut batcher = batcher(&model, cpu(2), options(4, 24));
    let ids = batcher.submit_choices(specs.iter().map(Spec::request).collect()).unwrap();
    let mut answers = Answers::default();
    while batcher.is_busy() {
        answers.add(batcher.step());
        batcher.check().unwrap();
    }
    for (id, wanted) in ids.iter().zip(&wanted) {
        assert_eq!(answers.answers[id], *wanted);
    }
    assert_eq!(batcher.state().cached, 3 * 128);
}

#[test]
fn without_checkpoints_nothing_is_found() {
    let model = qwen35();
    let options = options(4, 40);
    let none = EngineOptions { checkpoints: 0, ..options.engine.clone() };
    let mut batcher = batcher(&model, cpu(1), BatcherOptions { engine: none, ..options });
    let prompt = recipe("llama").tokens(200);
    assert_eq!(found(&mut batcher, &[prompt.clone(), prompt.clone(), prompt]), [0, 0, 0]);
}

#[test]
fn the_log_probabilities_of_a_prompt_are_not_cut_by_states_that_are_kept() {
    let model = qwen35();
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let prompt = recipe("llama").tokens(150);
    let request = Request { max_tokens: Some(1), prompt_logprobs: Some(0), ..Request::new(prompt) };
    batcher.submit(request).unwrap();
    let mut counts = Vec::new();
    while batcher.is_busy() {
        for (_, event) in batcher.step() {
            if let Event::Prompt { logprobs } = event {
                counts.push(logprobs.len());
            }
        }
        batcher.check().unwrap();
    }
    assert_eq!(counts, [149]);
}
