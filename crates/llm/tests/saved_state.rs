//! Saving and restoring the KV cache of a sequence.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, cpu, engine_on};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::placement::offload;
use quadriga_llm::sampling::{SamplingOptions, argmax};
use quadriga_llm::{Engine, EngineOptions, Error, Generator, GeneratorOptions, Model, StateError};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

fn options(cache: DType) -> EngineOptions {
    EngineOptions {
        cache_keys: cache,
        cache_values: cache,
        batch: 8,
        context: 48,
        sequences: 2,
        ..EngineOptions::default()
    }
}

fn device() -> Arc<dyn Backend> {
    Sim::new("sim:0").alignment(256).build()
}

fn split(model: Model, on_device: usize, options: EngineOptions) -> Engine {
    let scheduler = Scheduler::new([device(), cpu(1)]).place(offload(model.hyperparameters(), on_device, 1));
    Engine::new(model, &scheduler, options, &mut |_| {}).unwrap()
}

fn saved(engine: &mut Engine, sequence: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    engine.save_state(sequence, &mut bytes).unwrap();
    bytes
}

fn reason(error: Error) -> StateError {
    match error {
        Error::SavedState { source, .. } => source,
        other => panic!("{other}"),
    }
}

/// Feeds the most probable token again and again; all logits.
fn continued(engine: &mut Engine, first: u32, steps: usize) -> Vec<Vec<f32>> {
    let mut token = first;
    (0..steps)
        .map(|_| {
            engine.feed(&[token]).unwrap();
            token = argmax(engine.logits(0)).unwrap();
            engine.logits(0).to_vec()
        })
        .collect()
}

#[test]
fn a_restored_sequence_continues_with_the_same_bits() {
    for (cache, architecture, window) in
        [(DType::F16, "llama", None), (DType::F32, "qwen3", None), (DType::Q8_0, "qwen2", Some(6))]
    {
        let recipe = Recipe { window, ..Recipe::wide(architecture, DType::F32) };
        let prompt = recipe.tokens(13);
        let engines: [fn(Model, EngineOptions) -> Engine; 4] = [
            |model, options| engine_on(cpu(1), model, options),
            |model, options| engine_on(device(), model, options),
            |model, options| split(model, 1, options),
            |model, options| split(model, 2, options),
        ];
        for (number, make) in engines.iter().enumerate() {
            let mut engine = make(recipe.model(), options(cache));
            engine.feed(&prompt).unwrap();
            let bytes = saved(&mut engine, 0);
            let wanted = continued(&mut engine, 7, 10);
            let mut restored = make(recipe.model(), options(cache));
            restored.feed(&recipe.tokens(3)).unwrap();
            restored.load_state(0, &mut bytes.as_slice()).unwrap();
            assert_eq!(restored.tokens(0), prompt, "the tokens are restored");
            assert_eq!(continued(&mut restored, 7, 10), wanted, "{cache} {architecture} engine {number}");
            // What was saved from the restored engine is what was saved first.
            restored.truncate(0, prompt.len());
            assert_eq!(saved(&mut restored, 0), bytes);
        }
    }
}

#[test]
fn devices_context_and_sequence_may_differ() {
    let recipe = Recipe::wide("llama", DType::F32);
    let prompt = recipe.tokens(11);
    let mut first = engine_on(cpu(1), recipe.model(), options(DType::F16));
    first.feed(&prompt).unwrap();
    let bytes = saved(&mut first, 0);
    let larger = EngineOptions { context: 64, sequences: 3, ..options(DType::F16) };
    let mut other = split(recipe.model(), 1, larger);
    other.load_state(2, &mut bytes.as_slice()).unwrap();
    assert_eq!((other.len(0), other.len(1), other.tokens(2)), (0, 0, &prompt[..]));
    assert_eq!(saved(&mut other, 2), bytes, "the same bytes from other devices, slots and sequence");
    let smaller = EngineOptions { context: 10, ..options(DType::F16) };
    let error = engine_on(cpu(1), recipe.model(), smaller).load_state(0, &mut bytes.as_slice()).unwrap_err();
    assert!(matches!(reason(error), StateError::TooLong { tokens: 11, context: 10 }));
    let error = other.load_state(3, &mut bytes.as_slice()).unwrap_err();
    assert!(matches!(error, Error::Sequence { sequence: 3, count: 3 }), "{error}");
    assert!(matches!(other.save_state(3, &mut Vec::new()), Err(Error::Sequence { .. })));
}

#[test]
fn an_empty_sequence_can_be_saved() {
    let mut engine = engine_on(cpu(1), Recipe::new("llama").model(), options(DType::F16));
    let bytes = saved(&mut engine, 1);
    engine.feed(&[1, 2]).unwrap();
    engine.load_state(0, &mut bytes.as_slice()).unwrap();
    assert!(engine.is_empty());
}

#[test]
fn another_model_or_cache_type_is_refused() {
    let recipe = Recipe::new("llama");
    let mut engine = engine_on(cpu(1), recipe.model(), options(DType::F16));
    engine.feed(&recipe.tokens(5)).unwrap();
    let bytes = saved(&mut engine, 0);
    let mut wrong_type = engine_on(cpu(1), recipe.model(), options(DType::F32));
    let error = wrong_type.load_state(0, &mut bytes.as_slice()).unwrap_err();
    assert!(error.to_string().contains("F16") && error.to_string().contains("F32"), "{error}");
    assert!(matches!(reason(error), StateError::CacheType { wanted: DType::F32, .. }));
    // Other weights, one other value at the beginning or within a tensor, other hyperparameters.
    let fine_tuned = Recipe { seed: 2, ..Recipe::new("llama") }.model();
    let mut base = recipe.parts();
    base.set("llama.rope.freq_base", 9999.0f32);
    let mut changed = recipe.parts();
    let (.., tensor) =
        changed.tensors.iter_mut().find(|(name, ..)| name == "blk.1.attn_norm.weight").unwrap();
    tensor[0] ^= 1;
    let mut within = recipe.parts();
    let (.., tensor) = within.tensors.iter_mut().find(|(name, ..)| name == "blk.1.ffn_up.weight").unwrap();
    let sample = (tensor.len() - 64) / 65 * 16;
    assert!(sample > 64 && sample + 64 < tensor.len() / 2);
    tensor[sample] ^= 1;
    for model in [fine_tuned, base.model().unwrap(), changed.model().unwrap(), within.model().unwrap()] {
        let mut other = engine_on(cpu(1), model, options(DType::F16));
        other.feed(&[1, 2, 3]).unwrap();
        let error = other.load_state(0, &mut bytes.as_slice()).unwrap_err();
        assert!(matches!(reason(error), StateError::OtherModel));
        assert_eq!(other.tokens(0), [1, 2, 3], "unchanged");
    }
}

#[test]
fn damaged_bytes_are_refused_and_the_engine_goes_on() {
    let recipe = Recipe::new("llama");
    let prompt = recipe.tokens(6);
    let mut engine = engine_on(device(), recipe.model(), options(DType::F16));
    engine.feed(&prompt).unwrap();
    let bytes = saved(&mut engine, 0);
    let wanted = continued(&mut engine, 7, 3);
    let header = 8 + 4 + 32 + 4 + 4 + 8 + 4 * prompt.len() + 32;
    let seed = 31;
    let mut random = Rng::new(seed);
    let mut refused = |damaged: &[u8], case: &str| {
        engine.truncate(0, 0);
        engine.feed(&[3, 2, 1]).unwrap();
        let error = engine.load_state(0, &mut &damaged[..]).expect_err(case);
        let _ = reason(error).to_string();
        assert!(engine.len(0) == 0 || engine.tokens(0) == [3, 2, 1], "seed {seed}, {case}");
    };
    for length in (0..header + 8).chain([bytes.len() - 1, bytes.len() / 2]) {
        refused(&bytes[..length], &format!("{length} bytes"));
    }
    // Every byte of the header, and some of the rest, changed.
    let later: Vec<usize> = (0..150).map(|_| random.below(bytes.len())).collect();
    for at in (0..header).chain(later) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << random.below(8);
        refused(&damaged, &format!("a bit of byte {at}"));
    }
    // Counts that overflow, even with a right checksum.
    for (at, width) in [(44, 4), (48, 4), (52, 8)] {
        for value in [u64::MAX, 1 << 31, 49, 7] {
            let mut damaged = bytes.clone();
            damaged[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            if damaged != bytes {
                use sha2::Digest;
                let sum = sha2::Sha256::digest(&damaged[..header - 32]);
                damaged[header - 32..header].copy_from_slice(&sum);
                refused(&damaged, &format!("{value} at {at}"));
            }
        }
    }
    for _ in 0..200 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + random.below(5) {
            let (from, to) = (random.below(damaged.len()), random.below(damaged.len()));
            match random.below(3) {
                0 => damaged[to] = damaged[to].wrapping_add(1 + random.below(255) as u8),
                1 => damaged.swap(from, to),
                _ => damaged.truncate(to.max(1)),
            }
        }
        if damaged != bytes {
            refused(&damaged, "random damage");
        }
    }
    engine.load_state(0, &mut bytes.as_slice()).unwrap();
    assert_eq!(continued(&mut engine, 7, 3), wanted);
}

#[test]
fn a_file_appears_when_it_is_complete_and_names_itself_in_errors() {
    let recipe = Recipe::new("llama");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.cache");
    let mut engine = engine_on(cpu(1), recipe.model(), options(DType::F16));
    let missing = engine.load_state_file(0, &path).unwrap_err().to_string();
    assert!(missing.contains("prompt.cache"), "{missing}");
    engine.feed(&recipe.tokens(5)).unwrap();
    engine.save_state_file(0, &path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), saved(&mut engine, 0));
    engine.feed(&[1]).unwrap();
    // A process that was killed has left one.
    let left = std::fs::File::create(folder.path().join(".quadriga-Xy12zQ.tmp")).unwrap();
    left.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(60)).unwrap();
    engine.save_state_file(0, &path).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    engine.truncate(0, 0);
    engine.load_state_file(0, &path).unwrap();
    assert_eq!(engine.len(0), 6);
    let mut longer = std::fs::read(&path).unwrap();
    longer.push(0);
    std::fs::write(&path, longer).unwrap();
    let error = engine.load_state_file(0, &path).unwrap_err().to_string();
    assert!(error.contains("prompt.cache") && error.contains("after the end"), "{error}");
    assert!(engine.save_state_file(0, folder.path().join("none/at/all")).is_err());
}

#[test]
fn a_generator_does_not_compute_a_restored_prefix_again() {
    let recipe = Recipe { text: true, seed: 5, context: 200, ..Recipe::new("llama") };
    let long = "a long story of the cat and the dog and the bird and the fish";
    for greedy in [true, false] {
        for backend in [cpu as fn(usize) -> Arc<dyn Backend>, |_| device()] {
            let generator = || {
                let temperature = if greedy { 0.0 } else { 0.9 };
                let options = GeneratorOptions {
                    sampling: SamplingOptions { temperature, ..SamplingOptions::default() },
                    max_tokens: Some(16),
                    raw: true,
                    ..GeneratorOptions::default()
                };
                Generator::on(recipe.model(), &Scheduler::new([backend(1)]), options, &mut |_| {}).unwrap()
            };
            let mut first = generator();
            let wanted = first.answer(long).unwrap().complete().unwrap();
            let mut saved = Vec::new();
            first.save_state(&mut saved).unwrap();
            let mut restored = generator();
            restored.load_state(&mut saved.as_slice()).unwrap();
            let mut batches = 0;
            let answer = restored.answer(long).unwrap();
            assert_eq!(answer.counts().cached, answer.counts().prompt - 1, "only the last token is computed");
            assert_eq!(answer.prompt_speed().0, 1);
            let answer = answer.stream(|_| {
                batches += 1;
                std::ops::ControlFlow::Continue(())
            });
            assert_eq!((answer.unwrap().tokens, batches), (wanted.tokens.clone(), 16));
            // The answer was saved, too: a prompt that continues it computes only what is new.
            let continued = format!("{long}{} and more", wanted.text);
            let mut again = generator();
            again.load_state(&mut saved.as_slice()).unwrap();
            assert!(again.answer(&continued).unwrap().prompt_speed().0 <= 10);
        }
    }
}
