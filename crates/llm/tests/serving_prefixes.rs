//! Prefixes of many requests: computed once, shared, moved to host memory and to a file, and saved.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::serving::{
    Answers, Spec, alone, answer, assert_no_failures, batcher, engine_options, options, recipe,
};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, CacheFile, Event, Request, Service};
use quadriga_llm::{EngineOptions, Error, Model};
use quadriga_runtime::Scheduler;
use quadriga_sim::{FaultPoint, Sim};

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
        assert_no_failures(&batcher);
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
            assert_no_failures(&batcher);
        }
    }
}

/// A page that cannot be moved is computed again; only the count of failures tells.
#[test]
fn pages_that_cannot_be_moved_are_counted_and_computed_again() {
    let model = recipe("llama").model();
    let specs = [greedy(11), greedy(22)];
    let wanted = alone(&model, &specs, DType::F32);
    let mut failed = 0;
    for after in 0..24 {
        let sim = Sim::new("sim:0").device();
        let kept = BatcherOptions { cache_ram: 1 << 30, ..options(1, 5) };
        let mut batcher = batcher(&model, Arc::clone(&sim) as _, kept);
        assert_eq!(answer(&mut batcher, &specs[0]).0, wanted[0]);
        // The pages of the first text go to host memory.
        sim.fail(FaultPoint::Transfer, after);
        let mut answers = Answers::default();
        let id = batcher.submit(specs[1].request()).unwrap();
        while batcher.is_busy() {
            answers.add(batcher.step());
            batcher.check().unwrap();
        }
        assert_eq!(answers.answers[&id], wanted[1], "{after}");
        let state = batcher.state();
        assert!(state.failed_page_moves + state.failed_steps <= 1, "{after}: {state:?}");
        failed += state.failed_page_moves;
        // What went there is found, and the rest computed.
        let id = batcher.submit(specs[0].request()).unwrap();
        while batcher.is_busy() {
            answers.add(batcher.step());
        }
        assert_eq!(answers.answers[&id], wanted[0], "{after}");
        assert_eq!(sim.unordered_access(), None);
    }
    assert!(failed > 0, "none of the transfers was that of a page");
}

/// A choice for which there is no room yet has nothing copied for it: it would be copied in every step until there is.
#[test]
fn a_choice_that_waits_for_pages_costs_the_device_nothing() {
    let model = recipe("llama").model();
    // The prompt fills a page: its copy would be the last one that is left, and the next token needs another.
    let request = |seed: u64| Request {
        max_tokens: Some(30),
        past_end: true,
        sampling: SamplingOptions { seed, ..SamplingOptions::default() },
        ..Request::new(recipe("llama").tokens(64))
    };
    let runs = |choices: u64| {
        let sim = Sim::new("sim:0").device();
        let mut batcher = batcher(&model, Arc::clone(&sim) as _, options(2, 2));
        let ids = batcher.submit_choices((0..choices).map(request).collect()).unwrap();
        loop {
            let events = batcher.step();
            batcher.check().unwrap();
            assert_eq!(batcher.state().waiting as u64, choices - 1);
            if events.iter().any(|(id, event)| *id == ids[0] && matches!(event, Event::Finished(_))) {
                break;
            }
        }
        sim.counts().of(FaultPoint::Run)
    };
    assert_eq!(runs(2), runs(1));
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
    assert!(std::fs::metadata(&path).unwrap().len() <= 60_000);
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

/// A request for the most probable tokens after 200 tokens that begin with `first`.
fn greedy(first: u32) -> Spec {
    let mut prompt: Vec<u32> =
        recipe("llama").tokens(200).into_iter().map(|token| (token + first) % 100).collect();
    prompt[0] = first;
    Spec {
        prompt,
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: 20,
        stops: Vec::new(),
    }
}

#[test]
fn a_cache_file_that_shrinks_and_grows_mixes_up_no_texts() {
    let model = recipe("llama").model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prefixes");
    let with = |bytes| BatcherOptions {
        cache_file: Some(CacheFile { path: path.clone(), bytes }),
        ..options(2, 12)
    };
    let length = || std::fs::metadata(&path).unwrap().len();
    let run = |bytes: u64, specs: &[Spec]| {
        let mut batcher = batcher(&model, cpu(1), with(bytes));
        assert!(length() <= bytes, "{} of {bytes} bytes", length());
        let answers: Vec<_> = specs.iter().map(|spec| answer(&mut batcher, spec)).collect();
        assert!(batcher.save_prefixes());
        assert!(length() <= bytes, "{} of {bytes} bytes", length());
        answers
    };
    let (first, second, third) = (greedy(11), greedy(22), greedy(33));
    run(1 << 20, &[first, second.clone()]);
    // Room for one page: the first one of the third text, which is saved last.
    let page = (length() - 64) / 6;
    run(64 + page, std::slice::from_ref(&third));
    // The beginning of the third text, and what followed the beginning of the second.
    let prompt = [&third.prompt[..64], &second.prompt[64..]].concat();
    let mixed = Spec { prompt, ..third };
    let wanted = alone(&model, std::slice::from_ref(&mixed), DType::F32).remove(0);
    assert_eq!(run(1 << 20, &[mixed]), [(wanted, 64)]);
}

#[test]
fn a_service_that_stops_writes_prefixes_to_the_cache_file() {
    let model = recipe("llama").model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prefixes");
    for (round, cached) in [0, 192].into_iter().enumerate() {
        let file = CacheFile { path: path.clone(), bytes: 1 << 20 };
        let kept = BatcherOptions { cache_ram: 1 << 20, cache_file: Some(file), ..options(2, 12) };
        let service = Service::start(batcher(&model, cpu(1), kept)).unwrap();
        // One request is still being answered: its prompt is kept, too.
        let endless = Request { max_tokens: None, past_end: true, ..greedy(11).request() };
        let running = service.submit(endless).unwrap();
        assert!(
            matches!(service.submit(greedy(22).request()).unwrap().last(), Some(Event::Finished(finished))
            if finished.counts.cached == cached),
            "round {round}"
        );
        drop((service, running));
        let file = CacheFile { path: path.clone(), bytes: 1 << 20 };
        let reopened = batcher(&model, cpu(1), BatcherOptions { cache_file: Some(file), ..options(2, 12) });
        assert!(reopened.state().file_pages >= 6, "round {round}");
    }
}

#[test]
fn prefixes_that_are_cleared_are_found_nowhere() {
    let model = recipe("llama").model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prefixes");
    for cache_ram in [0, 1 << 20] {
        let file = CacheFile { path: path.clone(), bytes: 1 << 20 };
        let kept = BatcherOptions { cache_ram, cache_file: Some(file), ..options(1, 5) };
        let mut batcher = batcher(&model, cpu(1), kept);
        // Five pages hold one of them: the other is in host memory or in the file.
        for (first, cached) in [(11, 0), (22, 0), (11, 192), (22, 192)] {
            assert_eq!(answer(&mut batcher, &greedy(first)).1, cached, "{cache_ram} bytes, text {first}");
        }
        batcher.clear_prefixes();
        assert_eq!((batcher.state().host_bytes, batcher.state().file_pages), (0, 0));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 64);
        for (first, cached) in [(22, 0), (11, 0), (22, 192), (11, 192)] {
            assert_eq!(answer(&mut batcher, &greedy(first)).1, cached, "{cache_ram} bytes, text {first}");
        }
        batcher.clear_prefixes();
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
