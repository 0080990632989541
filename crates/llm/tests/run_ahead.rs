//! Device-side argmax and run-ahead decoding give the same tokens as argmax on the host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, cpu, engine_on};
use quadriga_graph::DType;
use quadriga_llm::placement::offload;
use quadriga_llm::sampling::{SamplingOptions, argmax};
use quadriga_llm::{Engine, EngineOptions, Error, Finish, Generator, GeneratorOptions, Model};
use quadriga_runtime::{Backend, Detail, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

fn options(greedy: bool) -> EngineOptions {
    EngineOptions {
        cache_keys: DType::F32,
        cache_values: DType::F32,
        batch: 8,
        context: 40,
        greedy,
        ..EngineOptions::default()
    }
}

fn device() -> Arc<dyn Backend> {
    Sim::new("sim:0").alignment(256).build()
}

fn split(model: Model, on_device: usize, greedy: bool) -> Engine {
    let scheduler = Scheduler::new([device(), cpu(1)]).place(offload(model.hyperparameters(), on_device, 1));
    Engine::new(model, &scheduler, options(greedy), &mut |_| {}).unwrap()
}

/// The greedy continuation of a prompt until an error, and the error.
fn continued(engine: &mut Engine, prompt: &[u32]) -> (Vec<u32>, String) {
    engine.truncate(0, 0);
    let mut tokens = Vec::new();
    let mut go = || -> quadriga_llm::Result<()> {
        engine.feed(prompt)?;
        loop {
            engine.run_ahead()?;
            let token = engine.argmax(0)?;
            if !engine.options().greedy {
                assert_eq!(argmax(engine.logits(0))?, token);
            }
            tokens.push(token);
            engine.feed(&[token])?;
        }
    };
    let end = go().unwrap_err().to_string();
    (tokens, end)
}

#[test]
fn the_argmax_of_a_device_is_that_of_the_host() {
    for (seed, architecture) in [(1, "llama"), (2, "qwen2"), (3, "qwen3")] {
        let recipe = Recipe { seed, window: (seed == 2).then_some(6), ..Recipe::new(architecture) };
        let prompt = recipe.tokens(11);
        let wanted = continued(&mut engine_on(device(), recipe.model(), options(false)), &prompt);
        assert_eq!(wanted.0.len(), 30, "{architecture}: {}", wanted.1);
        let mut engine = engine_on(device(), recipe.model(), options(true));
        assert!(engine.options().greedy);
        assert_eq!(continued(&mut engine, &prompt), wanted, "{architecture}");
        assert!(engine.logits(0).is_empty(), "logits are not copied");
        assert_eq!(continued(&mut engine, &prompt), wanted, "{architecture}, again");
        assert_eq!(continued(&mut engine_on(cpu(1), recipe.model(), options(true)), &prompt), wanted);
        for on_device in 0..=recipe.layers + 1 {
            let mut engine = split(recipe.model(), on_device, true);
            assert_eq!(engine.options().greedy, on_device > 0, "where the logits are on the device");
            assert_eq!(continued(&mut engine, &prompt), wanted, "{architecture}, {on_device} layers");
        }
    }
}

#[test]
fn every_output_row_has_an_argmax() {
    let recipe = Recipe::new("llama");
    let tokens = recipe.tokens(19);
    let mut plain = engine_on(device(), recipe.model(), options(false));
    let mut greedy = engine_on(device(), recipe.model(), options(true));
    for engine in [&mut plain, &mut greedy] {
        engine.extend(&crate::common::all_outputs(0, &tokens)).unwrap();
    }
    assert!(matches!(greedy.argmax(0), Err(Error::BatchInFlight)));
    greedy.wait().unwrap();
    for row in 0..tokens.len() {
        assert_eq!(greedy.argmax(row).unwrap(), argmax(plain.logits(row)).unwrap(), "row {row}");
    }
    assert!(greedy.argmax(19).is_err(), "there is no twentieth row");
}

#[test]
fn a_step_that_ran_ahead_is_used_only_if_its_token_is_fed() {
    let recipe = Recipe::new("llama");
    let prompt = recipe.tokens(5);
    let mut plain = engine_on(device(), recipe.model(), options(false));
    let mut greedy = engine_on(device(), recipe.model(), options(true));
    let feed = |plain: &mut Engine, greedy: &mut Engine, tokens: &[u32]| {
        plain.feed(tokens).unwrap();
        greedy.feed(tokens).unwrap();
        assert_eq!(plain.len(0), greedy.len(0));
    };
    feed(&mut plain, &mut greedy, &prompt);
    for round in 0..8 {
        let wanted = argmax(plain.logits(0)).unwrap();
        let before = greedy.len(0);
        for _ in 0..2 {
            greedy.run_ahead().unwrap();
            assert_eq!(greedy.argmax(0).unwrap(), wanted, "round {round}");
        }
        assert_eq!(greedy.len(0), before, "nothing is appended yet");
        match round % 4 {
            0 => feed(&mut plain, &mut greedy, &[wanted]),
            1 => feed(&mut plain, &mut greedy, &[(wanted + 1) % 100]),
            2 => feed(&mut plain, &mut greedy, &[wanted, (wanted + 7) % 100]),
            _ => {
                let keep = before - 2;
                plain.truncate(0, keep);
                greedy.truncate(0, keep);
                // The same token at another place is another computation.
                feed(&mut plain, &mut greedy, &[wanted]);
            }
        }
    }
    greedy.observe(Some((Detail::Splits, Box::new(|_| {}))));
    greedy.run_ahead().unwrap();
    assert_eq!(greedy.argmax(0).unwrap(), argmax(plain.logits(0)).unwrap(), "observed");
}

#[test]
fn logits_that_are_not_finite_are_errors_as_for_the_sampler() {
    let recipe = Recipe { seed: 9, ..Recipe::new("llama") };
    let prompt = recipe.tokens(6);
    let mut ends = Vec::new();
    let infinities = (0..12).flat_map(|column| [(f32::INFINITY, column), (f32::NEG_INFINITY, column)]);
    for (value, column) in std::iter::once((f32::NAN, 0)).chain(infinities) {
        let mut parts = recipe.parts();
        let (.., bytes) = parts.tensors.iter_mut().find(|(name, ..)| name == "output.weight").unwrap();
        // One token's logit is an infinity whose sign follows one hidden value, or NaN.
        let row = &mut bytes[17 * recipe.width * 4..][..recipe.width * 4];
        row.fill(0);
        row[column * 4..][..4].copy_from_slice(&value.to_ne_bytes());
        let model = || parts.model().unwrap();
        let wanted = continued(&mut engine_on(device(), model(), options(false)), &prompt);
        let mut engine = engine_on(device(), model(), options(true));
        assert_eq!(continued(&mut engine, &prompt), wanted, "{value} at {column}");
        ends.push((wanted.0.len(), wanted.1));
    }
    assert!(ends[0].1.contains("token 17 is NaN"), "{ends:?}");
    let later = ends.iter().filter(|(len, end)| *len > 1 && end.contains("token 17 is inf"));
    assert!(later.count() > 2, "in some the token is excluded for a while: {ends:?}");
}

#[test]
fn a_failing_device_leaves_the_sequence_unchanged() {
    let recipe = Recipe::new("llama");
    let prompt = recipe.tokens(5);
    let wanted = continued(&mut engine_on(device(), recipe.model(), options(false)), &prompt).0;
    for what in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in 0..12 {
            let sim = Sim::new("sim:0").device();
            let mut engine = engine_on(Arc::clone(&sim) as _, recipe.model(), options(true));
            engine.feed(&prompt).unwrap();
            engine.wait().unwrap();
            sim.fail(what, after);
            let mut fed = Vec::new();
            for _ in 0..20 {
                let mut next = || {
                    engine.run_ahead()?;
                    let token = engine.argmax(0)?;
                    engine.feed(&[token]).map(|()| token)
                };
                match next() {
                    Ok(token) => fed.push(token),
                    Err(_) => {
                        sim.clear_faults();
                        // What is appended is known to be computed: the rest is fed again.
                        let kept = engine.len(0);
                        assert!(kept <= prompt.len() + fed.len() && kept + 2 > prompt.len() + fed.len());
                        fed.truncate(kept - prompt.len());
                        let last = fed.pop().unwrap_or(prompt[prompt.len() - 1]);
                        engine.truncate(0, kept - 1);
                        engine.feed(&[last]).unwrap();
                        if kept > prompt.len() {
                            fed.push(last);
                        }
                    }
                }
            }
            assert_eq!(fed, wanted[..fed.len()], "{what:?} {after}");
            assert!(fed.len() >= 18, "{what:?} {after}");
        }
    }
}

#[test]
fn a_failure_does_not_undo_a_truncation() {
    let recipe = Recipe::new("llama");
    let sim = Sim::new("sim:0").device();
    let mut engine = engine_on(Arc::clone(&sim) as _, recipe.model(), options(true));
    engine.feed(&recipe.tokens(9)).unwrap();
    engine.wait().unwrap();
    engine.feed(&[3]).unwrap();
    engine.truncate(0, 4);
    sim.fail(FaultPoint::Transfer, 0);
    assert!(engine.wait().is_err());
    sim.clear_faults();
    assert_eq!(engine.len(0), 4);
    engine.feed(&[3]).unwrap();
    assert!(engine.session_mut().plan().is_some());
    engine.wait().unwrap();
    assert!(engine.argmax(0).is_ok());
}

#[test]
fn answers_are_the_same_with_run_ahead() {
    let recipe = Recipe { text: true, seed: 5, context: 60, ..Recipe::new("llama") };
    let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let generator = |backend: Arc<dyn Backend>, most: Option<usize>, stops: &[&str]| {
        let options = GeneratorOptions {
            sampling: sampling.clone(),
            max_tokens: most,
            stops: stops.iter().map(|stop| (*stop).to_owned()).collect(),
            ..GeneratorOptions::default()
        };
        Generator::on(recipe.model(), &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
    };
    let answer = |generator: &mut Generator, prompt: &str| {
        let mut answer = generator.answer(prompt).unwrap();
        let pieces: Vec<_> = answer.by_ref().map(Result::unwrap).collect();
        (pieces, answer.finish())
    };
    let (pieces, _) = answer(&mut generator(cpu(1), Some(30), &[]), "the cat");
    let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    let stop: String = text.chars().skip(text.chars().count() / 2).take(3).collect();
    for (most, stops) in
        [(Some(1), vec![]), (Some(12), vec![]), (None, vec![]), (Some(30), vec![stop.as_str()])]
    {
        let mut on_host = generator(cpu(1), most, &stops);
        let mut on_device = generator(device(), most, &stops);
        for prompt in ["the cat", "the cat", "the dog", "the cat sat"] {
            let wanted = answer(&mut on_host, prompt);
            assert_eq!(answer(&mut on_device, prompt), wanted, "{most:?} {stops:?} {prompt}");
            assert!(most.is_some() || wanted.1 == Some(Finish::Context) || wanted.1 == Some(Finish::End));
        }
    }
}

#[test]
fn a_batch_that_fails_after_the_next_one_was_given_takes_its_tokens_back() {
    let recipe = Recipe::new("llama");
    let (prompt, more) = (recipe.tokens(5), recipe.tokens(30));
    let mut plain = engine_on(device(), recipe.model(), options(false));
    plain.feed(&prompt).unwrap();
    let mut wanted = Vec::new();
    for token in &more {
        plain.feed(&[*token]).unwrap();
        wanted.push(argmax(plain.logits(0)).unwrap());
    }
    let mut failures = 0;
    for what in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in 0..16 {
            let sim = Sim::new("sim:0").device();
            let mut engine = engine_on(Arc::clone(&sim) as _, recipe.model(), options(true));
            engine.feed(&prompt).unwrap();
            engine.wait().unwrap();
            sim.fail(what, after);
            // Nobody waits for a batch before the next one is given.
            let failed = more.iter().take(12).any(|token| engine.feed(&[*token]).is_err());
            let failed = failed || engine.wait().is_err();
            sim.clear_faults();
            if !failed {
                continue;
            }
            failures += 1;
            // All tokens that are left were computed: the rest can be given as if nothing had happened.
            let kept = engine.len(0) - prompt.len();
            for (token, wanted) in more.iter().zip(&wanted).skip(kept) {
                engine.feed(&[*token]).unwrap();
                engine.wait().unwrap();
                assert_eq!(engine.argmax(0).unwrap(), *wanted, "{what:?} {after}, {kept} kept");
            }
        }
    }
    assert!(failures > 10, "{failures}");
}
