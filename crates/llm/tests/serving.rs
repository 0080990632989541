//! Many requests at once: whatever arrives, is cancelled, put back or fails, every answer is the one that the request gets alone,
//! and no page is lost or shared while it is written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::serving::{
    Answer, Answers, CONTEXT, Spec, alone, answer, batcher, engine_options, options, random_stream,
    random_stream_on, recipe, specs,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, CacheFile, Event, Request, RequestId, Service};
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
            sim.fail(point, after);
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!(answers.failed, [], "{point:?} {after}");
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "{point:?} {after}");
            }
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
fn prefixes_are_computed_once() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(4, 40));
    let prompt: Vec<u32> = recipe("llama").tokens(300);
    let mut run = |salt: u64, tail: u32| {
        let prompt: Vec<u32> = prompt.iter().copied().chain([tail]).collect();
        batcher.submit(Request { max_tokens: Some(2), salt, ..Request::new(prompt) }).unwrap();
        let mut cached = None;
        while batcher.is_busy() {
            for (_, event) in batcher.step() {
                if let Event::Finished(finished) = event {
                    cached = Some(finished.counts.cached);
                }
            }
        }
        cached.unwrap()
    };
    assert_eq!([run(0, 1), run(0, 2), run(1, 3), run(1, 4), run(0, 5)], [0, 256, 0, 256, 256]);
}

#[test]
fn a_prefix_is_shared_while_it_is_in_use() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(4, 16));
    let prompt: Vec<u32> = recipe("llama").tokens(257);
    let request = || Request { max_tokens: Some(60), ..Request::new(prompt.clone()) };
    batcher.submit(request()).unwrap();
    while batcher.state().running == 0 || batcher.state().computed < 257 {
        batcher.step();
    }
    let before = batcher.state().used_pages;
    for _ in 0..3 {
        batcher.submit(request()).unwrap();
    }
    batcher.step();
    batcher.check().unwrap();
    // Of each, only the page after the prefix.
    assert_eq!(batcher.state().used_pages, before + 3);
    assert_eq!(batcher.state().cached, 3 * 256);
}

#[test]
fn several_answers_to_a_prompt_compute_it_once() {
    let model = recipe("llama").model();
    for (backend, length) in
        [(cpu(2), 200), (Sim::new("sim:0").build(), 200), (cpu(1), 193), (cpu(1), 192), (cpu(1), 30)]
    {
        let prompt = recipe("llama").tokens(length);
        let spec = |seed: u64| Spec {
            prompt: prompt.clone(),
            sampling: SamplingOptions { seed, ..SamplingOptions::default() },
            max_tokens: 30,
            stops: Vec::new(),
        };
        let specs: Vec<Spec> = (0..5).map(spec).collect();
        let wanted = alone(&model, &specs, DType::F32);
        let mut batcher = batcher(&model, backend, options(4, 40));
        let ids = batcher.submit_choices(specs.iter().map(Spec::request).collect()).unwrap();
        let mut answers = Answers::default();
        while batcher.is_busy() {
            answers.add(batcher.step());
            batcher.check().unwrap();
        }
        for (id, wanted) in ids.iter().zip(&wanted) {
            assert_eq!(answers.answers[id], *wanted, "{length}");
        }
        // All but the last token, four times, from the first answer while it runs and from its full pages afterwards.
        assert!(batcher.state().cached >= 3 * (length as u64 - 1), "{length}: {:?}", batcher.state());
    }
    let mut batcher = batcher(&model, cpu(1), options(4, 40));
    let different = vec![Request::new(vec![1, 2]), Request::new(vec![1, 3])];
    assert!(matches!(batcher.submit_choices(different), Err(Error::Option { .. })));
    assert!(!batcher.is_busy());
}

#[test]
fn prefixes_that_were_moved_to_host_memory_come_back() {
    let model = recipe("llama").model();
    let spec = |tokens: &[u32]| Spec {
        prompt: tokens.to_vec(),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: 20,
        stops: Vec::new(),
    };
    let tokens = recipe("llama").tokens(900);
    let specs: Vec<Spec> = tokens.chunks(300).map(spec).collect();
    let wanted = alone(&model, &specs, DType::F32);
    for backend in [cpu(2), Sim::new("sim:0").build()] {
        for (cache_ram, cached) in [(1 << 30, 256), (0, 0), (1, 0)] {
            let options = BatcherOptions { cache_ram, ..options(1, 7) };
            let mut batcher = batcher(&model, Arc::clone(&backend), options);
            for round in 0..2 {
                for (spec, wanted) in specs.iter().zip(&wanted) {
                    let mut answers = Answers::default();
                    let id = batcher.submit(spec.request()).unwrap();
                    let mut found = 0;
                    while batcher.is_busy() {
                        let events = batcher.step();
                        for (_, event) in &events {
                            if let Event::Finished(finished) = event {
                                found = finished.counts.cached;
                            }
                        }
                        answers.add(events);
                        batcher.check().unwrap();
                    }
                    assert_eq!(answers.answers[&id], *wanted, "round {round}, {cache_ram} bytes");
                    assert_eq!(
                        found,
                        if round == 0 { 0 } else { cached },
                        "round {round}, {cache_ram} bytes"
                    );
                }
            }
            assert_eq!(batcher.state().host_bytes > 0, cached > 0);
        }
    }
}

#[test]
fn prefixes_in_a_file_outlast_the_process() {
    let model = recipe("llama").model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prefixes");
    let spec = |first: u32| Spec {
        prompt: recipe("llama").tokens(200).into_iter().map(|token| (token + first) % 100).collect(),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: 20,
        stops: Vec::new(),
    };
    let file = |bytes| Some(CacheFile { path: path.clone(), bytes });
    let with = |bytes| BatcherOptions { cache_file: file(bytes), ..options(2, 5) };
    let specs: Vec<Spec> = (0..4).map(|at| spec(11 * at)).collect();
    let wanted = alone(&model, &specs, DType::F32);
    let mut first = batcher(&model, cpu(1), with(1 << 24));
    for _ in 0..2 {
        for (spec, wanted) in specs.iter().zip(&wanted) {
            assert_eq!(answer(&mut first, spec).0, *wanted);
        }
    }
    // Five pages hold one of them: the others came from the file.
    assert!(first.state().cached >= 4 * 192, "{:?}", first.state());
    // Somebody uses it.
    let second = Batcher::new(model.clone(), &Scheduler::new([cpu(1)]), with(1 << 24), &mut |_| {});
    assert!(second.is_err_and(|error| error.to_string().contains("another process")));
    assert!(first.save_prefixes());
    drop(first);
    let mut again = batcher(&model, cpu(1), with(1 << 24));
    assert!(again.state().file_pages >= 12);
    for (spec, wanted) in specs.iter().zip(&wanted) {
        assert_eq!(answer(&mut again, spec), (wanted.clone(), 192));
    }
    drop(again);
    // Damaged pages are computed again.
    let mut bytes = std::fs::read(&path).unwrap();
    for at in (2000..bytes.len()).step_by(5000) {
        bytes[at] ^= 1;
    }
    std::fs::write(&path, &bytes).unwrap();
    let mut damaged = batcher(&model, cpu(1), with(1 << 24));
    for (spec, wanted) in specs.iter().zip(&wanted) {
        assert_eq!(answer(&mut damaged, spec).0, *wanted);
    }
    drop(damaged);
    // A file that is cut off, and one with room for a few pages.
    std::fs::write(&path, &bytes[..bytes.len() / 2 + 7]).unwrap();
    let mut small = batcher(&model, cpu(1), with(60_000));
    for (spec, wanted) in specs.iter().zip(&wanted).chain(specs.iter().zip(&wanted)) {
        assert_eq!(answer(&mut small, spec).0, *wanted);
    }
    assert!(std::fs::metadata(&path).unwrap().len() <= bytes.len() as u64);
    drop(small);
    // Another model, another type of the KV cache, another file, no room.
    let refused = |model: &Model, options: BatcherOptions, part: &str| {
        let error =
            Batcher::new(model.clone(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).err().unwrap();
        assert!(error.to_string().contains(part), "{error}");
    };
    refused(&Recipe { seed: 8, ..recipe("llama") }.model(), with(1 << 24), "another model");
    let f16 = EngineOptions { sequences: 2, pages: 5, ..engine_options(DType::F16) };
    refused(&model, BatcherOptions { engine: f16, ..with(1 << 24) }, "type");
    refused(&model, with(1000), "cache file");
    std::fs::write(&path, "some text that is somebody's own, and longer than a header of a cache file")
        .unwrap();
    refused(&model, with(1 << 24), "not a saved KV cache");
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
            sim.fail(point, after);
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
                batcher.check().unwrap();
            }
            assert_eq!(answers.failed, [], "{point:?} {after}");
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted, "{point:?} {after}");
            }
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(150);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let request = Request {
        max_tokens: Some(3),
        logprobs: Some(4),
        prompt_logprobs: Some(4),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        ..Request::new(prompt.clone())
    };
    batcher.submit(request).unwrap();
    let (mut of_prompt, mut of_tokens) = (Vec::new(), Vec::new());
    while batcher.is_busy() {
        for (_, event) in batcher.step() {
            match event {
                Event::Prompt { logprobs } => of_prompt = logprobs,
                Event::Token { piece, logprobs } => of_tokens.push((piece.token, logprobs.unwrap())),
                Event::Finished(_) | Event::Progress { .. } | Event::Embedding { .. } => {}
                Event::Failed(error) => panic!("{error}"),
            }
        }
    }
    let all: Vec<u32> = prompt.iter().copied().chain(of_tokens.iter().map(|(token, _)| *token)).collect();
    let mut engine = crate::common::engine(model, engine_options(DType::F32));
    let rows = crate::common::logits_of(&mut engine, &all);
    assert_eq!((of_prompt.len(), of_tokens.len()), (149, 3));
    let found = of_prompt.iter().chain(of_tokens.iter().map(|(_, logprobs)| logprobs));
    for ((row, token), found) in rows.iter().zip(&all[1..]).zip(found) {
        let wanted = quadriga_llm::sampling::log_probability(row, *token).unwrap();
        assert!((found.logprob - wanted).abs() < 1e-4, "{} {wanted}", found.logprob);
        let top = quadriga_llm::sampling::top_log_probabilities(row, 4).unwrap();
        assert_eq!(found.top.len(), 4);
        assert!((found.top[0].1 - top[0].1).abs() < 1e-4);
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
fn the_log_probabilities_of_a_prompt_come_once_however_often_it_is_put_back() {
    let model = recipe("llama").model();
    // Two sequences of four pages do not fit: one is put back again and again.
    let mut batcher = batcher(&model, cpu(1), options(4, 5));
    let lengths = [150, 150, 120, 1];
    let request = |length: usize| Request {
        max_tokens: Some(100),
        logprobs: Some(1),
        prompt_logprobs: Some(1),
        ..Request::new(recipe("llama").tokens(length))
    };
    let ids: Vec<RequestId> =
        lengths.iter().map(|length| batcher.submit(request(*length)).unwrap()).collect();
    let mut found: HashMap<RequestId, Vec<usize>> = HashMap::new();
    while batcher.is_busy() {
        for (id, event) in batcher.step() {
            match event {
                Event::Prompt { logprobs } => found.entry(id).or_default().push(logprobs.len()),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
    assert!(batcher.state().preempted > 0);
    for (id, length) in ids.iter().zip(lengths) {
        assert_eq!(found[id], [length - 1]);
    }
}

#[test]
fn tokens_that_were_found_count_once_however_long_the_request_waits() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(4, 6));
    let first = recipe("llama").tokens(129);
    batcher.submit(Request { max_tokens: Some(1), ..Request::new(first.clone()) }).unwrap();
    while batcher.is_busy() {
        batcher.step();
    }
    // The other one takes so many pages that the one with the known prefix has to wait.
    batcher.submit(Request { max_tokens: Some(150), ..Request::new(vec![9; 190]) }).unwrap();
    batcher.step();
    let long: Vec<u32> = first.iter().copied().chain([7; 130]).collect();
    let id = batcher.submit(Request { max_tokens: Some(1), ..Request::new(long) }).unwrap();
    let (mut waited, mut cached) = (0, None);
    while batcher.is_busy() {
        waited += usize::from(batcher.state().waiting > 0);
        for (of, event) in batcher.step() {
            if let (true, Event::Finished(finished)) = (of == id, event) {
                cached = Some(finished.counts.cached);
            }
        }
    }
    assert!(waited > 10);
    let state = batcher.state();
    assert_eq!((state.cached, state.cached), (cached.unwrap() as u64, cached.unwrap() as u64));
    assert!(state.cached <= 128);
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

#[test]
fn a_hook_that_panics_ends_its_own_request() {
    let model = recipe("llama").model();
    let service = Service::start(batcher(&model, cpu(1), options(2, 10))).unwrap();
    let other = service.submit(Request { max_tokens: Some(20), ..Request::new(vec![1, 2]) }).unwrap();
    let hook = |_: &[u32], _: &mut [f32]| panic!("a hook of the test");
    let broken = Request { hook: Some(Box::new(hook)), ..Request::new(vec![1, 3]) };
    let last = service.submit(broken).unwrap().last().unwrap();
    assert!(matches!(last, Event::Failed(error) if matches!(*error, Error::HookPanicked)));
    assert!(matches!(other.last(), Some(Event::Finished(finished)) if finished.counts.answer == 20));
}

#[test]
fn events_go_to_functions_and_a_function_that_declines_ends_its_request() {
    let model = recipe("llama").model();
    let service = Service::start(batcher(&model, cpu(1), options(4, 20))).unwrap();
    let (sender, events) = std::sync::mpsc::channel();
    let request = |seed: u64, most: usize| -> (Request, quadriga_llm::serving::EventSink) {
        let sampling = SamplingOptions { seed, ..SamplingOptions::default() };
        let request = Request { sampling, max_tokens: None, ..Request::new(vec![1, 2, 3]) };
        let (sender, mut taken) = (sender.clone(), 0);
        let sink = Box::new(move |event| {
            taken += 1;
            sender.send((seed, event)).is_ok() && taken < most
        });
        (request, sink)
    };
    let (reply, accepted) = std::sync::mpsc::channel();
    service
        .submit_to(vec![request(1, usize::MAX), request(2, 5)], move |ids| reply.send(ids).is_ok())
        .unwrap();
    let ids = accepted.recv().unwrap().unwrap();
    assert_eq!(ids.len(), 2);
    let mut all: Vec<(u64, Event)> = Vec::new();
    while !matches!(all.last(), Some((_, Event::Finished(_)))) {
        all.push(events.recv().unwrap());
    }
    assert_eq!(all.iter().filter(|(seed, _)| *seed == 2).count(), 5);
    assert!(matches!(all.last(), Some((1, Event::Finished(_)))));
    // Refused together.
    let (reply, refused) = std::sync::mpsc::channel();
    let empty = (Request::new(Vec::new()), request(3, 1).1);
    service.submit_to(vec![empty], move |ids| reply.send(ids).is_ok()).unwrap();
    assert!(matches!(refused.recv().unwrap(), Err(Error::EmptyPrompt)));
    // Nobody wants them.
    service.submit_to(vec![request(4, usize::MAX)], |_| false).unwrap();
    drop(service.submit(Request { max_tokens: Some(1), ..Request::new(vec![1]) }).unwrap().last());
    assert_eq!((service.state().running, service.state().waiting), (0, 0));
}

#[test]
fn the_state_has_no_request_whose_function_declined() {
    let model = recipe("llama").model();
    let service = Service::start(batcher(&model, cpu(1), options(2, 10))).unwrap();
    let (sender, dropped) = std::sync::mpsc::channel::<()>();
    let sink = Box::new(move |_| {
        let _ = &sender;
        false
    });
    let endless = Request { max_tokens: None, past_end: true, ..Request::new(vec![1, 2, 3]) };
    service.submit_to(vec![(endless, sink)], |ids| ids.is_ok()).unwrap();
    // The request has ended when its function is dropped, and nothing else happens that would count anew.
    assert!(dropped.recv().is_err());
    assert_eq!((service.state().running, service.state().waiting), (0, 0));
}

#[test]
fn prompts_are_reported_as_they_are_computed() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(250);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let request =
        || Request { max_tokens: Some(2), progress: true, past_end: true, ..Request::new(prompt.clone()) };
    let mut reports = || {
        batcher.submit(request()).unwrap();
        let mut all = Vec::new();
        while batcher.is_busy() {
            for (_, event) in batcher.step() {
                match event {
                    Event::Progress { cached, computed } => all.push(Some((cached, computed))),
                    Event::Token { .. } => all.push(None),
                    _ => {}
                }
            }
        }
        all
    };
    // A step has 96 tokens; then three pages of 64 are found.
    assert_eq!(reports(), [Some((0, 96)), Some((0, 192)), Some((0, 250)), None, None]);
    assert_eq!(reports(), [Some((192, 250)), None, None]);
}

#[test]
fn the_stop_string_that_was_found_is_known() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(20);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let mut ends = |stops: Vec<String>| {
        let sampling = SamplingOptions { temperature: 0.0, ignore_eos: true, ..SamplingOptions::default() };
        let request = Request { max_tokens: Some(40), stops, sampling, ..Request::new(prompt.clone()) };
        batcher.submit(request).unwrap();
        let (mut text, mut end) = (String::new(), None);
        while batcher.is_busy() {
            for (_, event) in batcher.step() {
                match event {
                    Event::Token { piece, .. } => text.push_str(&piece.text),
                    Event::Finished(finished) => end = Some(finished.finish),
                    _ => {}
                }
            }
        }
        (text, end.unwrap())
    };
    let (text, end) = ends(Vec::new());
    assert_eq!(end, Finish::Length);
    let part: String = text.chars().skip(text.chars().count() / 2).take(3).collect();
    let (before, end) = ends(vec!["\u{1f40e}".to_owned(), part.clone()]);
    assert_eq!(end, Finish::Stop(1));
    assert_eq!(Some(before.as_str()), text.split(&part).next());
}

#[test]
fn a_saved_prefix_is_found_by_another_batcher_and_changes_no_answer() {
    let model = recipe("llama").model();
    let mut rng = Rng::new(700);
    let spec = Spec {
        prompt: (0..200).map(|_| rng.below(model.hyperparameters().vocabulary) as u32).collect(),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: 12,
        stops: Vec::new(),
    };
    let new = |pages| batcher(&model, cpu(1), options(1, pages));
    let mut first = new(12);
    let (wanted, cached) = answer(&mut first, &spec);
    assert_eq!(cached, 0);
    let saved = first.save_prefix(&spec.prompt).unwrap();
    first.check().unwrap();

    let mut second = new(12);
    assert_eq!(second.restore_prefix(&saved).unwrap(), 192);
    // Again, it is there already.
    assert_eq!(second.restore_prefix(&saved).unwrap(), 192);
    second.check().unwrap();
    assert_eq!(answer(&mut second, &spec), (wanted.clone(), 192));

    // One bit of a page, of a token, of the number of pages and of the checksum; and the format before checksums.
    let flipped = |place: usize| {
        let mut damaged = saved.clone();
        damaged[place] ^= 1;
        damaged
    };
    let pages = saved.len() - 32 - 8 * 7;
    let damaged = [saved.len() / 2, pages, 64, 56, saved.len() - 1].map(flipped);
    let refused = |wrong: &[u8]| new(12).restore_prefix(wrong).unwrap_err().to_string();
    assert!(refused(&damaged[0]).contains("checksum"), "{}", refused(&damaged[0]));
    let older = [b"QDGPFX01", &saved[8..]].concat();
    assert!(refused(&older).contains("version 1"), "{}", refused(&older));
    let cut: [&[u8]; 5] =
        [&saved[..4], &saved[..60], &saved[..saved.len() - 1], b"something else entirely", &older];
    for wrong in damaged.iter().map(Vec::as_slice).chain(cut) {
        let mut third = new(12);
        assert!(matches!(third.restore_prefix(wrong), Err(Error::SavedState { .. })));
        third.check().unwrap();
        assert_eq!(answer(&mut third, &spec).0, wanted);
    }
    let other = Recipe { seed: 8, ..recipe("llama") }.model();
    let refused = batcher(&other, cpu(1), options(1, 12)).restore_prefix(&saved);
    assert!(matches!(refused, Err(Error::SavedState { .. })));
    let half = BatcherOptions { engine: options(1, 12).engine.cache(DType::F16), ..options(1, 12) };
    assert!(matches!(batcher(&model, cpu(1), half).restore_prefix(&saved), Err(Error::SavedState { .. })));
}
