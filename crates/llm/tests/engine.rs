//! The engine: batches, sequences, KV cache, limits and errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::{Arc, Mutex};

use crate::common::{Recipe, all_outputs, cpu, distance, distances, engine, logits_of};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::evaluate::{EvalCase, ResultFields, evaluate};
use quadriga_llm::{Batch, BatchToken, Engine, EngineOptions, Error, Model};
use quadriga_runtime::{Detail, Scheduler};

/// The tolerance for rounding that differs with the batch size, in standard deviations of the logits.
const SAME: f64 = 1e-4;

fn f32_options() -> EngineOptions {
    EngineOptions { cache_keys: DType::F32, cache_values: DType::F32, ..EngineOptions::default() }
}

/// Llama with a sliding window, which batches cross, and Qwen 3.
fn recipes() -> [Recipe; 2] {
    [
        Recipe { window: Some(9), layers: 3, ..Recipe::new("llama") },
        Recipe { key_length: 32, rope_dims: 32, ..Recipe::new("qwen3") },
    ]
}

#[test]
fn batches_of_any_size_give_the_same_logits() {
    for recipe in recipes() {
        let tokens = recipe.tokens(37);
        let wanted = logits_of(&mut engine(recipe.model(), f32_options()), &tokens);
        for batch in [1, 2, 3, 8, 16, 36, 37, 64] {
            let mut engine = engine(recipe.model(), EngineOptions { batch, ..f32_options() });
            let found = distance(&logits_of(&mut engine, &tokens), &wanted);
            assert!(found < SAME, "batches of {batch}: off by {found:.2e}");
            assert_eq!(engine.len(0), 37);
        }
        let mut pieces = engine(recipe.model(), f32_options());
        let mut rows = Vec::new();
        let mut rest = &tokens[..];
        for size in [5, 1, 1, 13, 2, 15] {
            rows.extend(logits_of(&mut pieces, &rest[..size]));
            rest = &rest[size..];
        }
        assert!(rest.is_empty());
        assert!(distance(&rows, &wanted) < SAME, "in calls of several sizes");
    }
}

#[test]
fn sequences_in_one_batch_do_not_see_each_other() {
    for recipe in recipes() {
        let seed = 3;
        let mut rng = Rng::new(seed);
        let tokens: Vec<Vec<u32>> = [12, 1, 30]
            .iter()
            .zip(1..)
            .map(|(n, seed)| Recipe { seed, ..recipe.clone() }.tokens(*n))
            .collect();
        let alone: Vec<Vec<Vec<f32>>> =
            tokens.iter().map(|t| logits_of(&mut engine(recipe.model(), f32_options()), t)).collect();
        let options = EngineOptions { sequences: 3, context: 40, batch: 7, ..f32_options() };
        let mut together = engine(recipe.model(), options);
        // Shuffled like cards: any sequence may be next.
        let mut next = [0; 3];
        let (mut entries, mut wanted) = (Vec::new(), Vec::new());
        while let Some(sequence) = {
            let open: Vec<usize> = (0..3).filter(|s| next[*s] < tokens[*s].len()).collect();
            rng.pick(&open).copied()
        } {
            entries.push(BatchToken { sequence, token: tokens[sequence][next[sequence]], output: true });
            wanted.push(alone[sequence][next[sequence]].clone());
            next[sequence] += 1;
        }
        together.extend(&entries).unwrap();
        let rows: Vec<Vec<f32>> = (0..entries.len()).map(|row| together.logits(row).to_vec()).collect();
        let found = distance(&rows, &wanted);
        assert!(found < SAME, "seed {seed}: off by {found:.2e}");
        assert_eq!([together.len(0), together.len(1), together.len(2)], [12, 1, 30]);
    }
}

#[test]
fn observed_batches_give_the_same_logits_and_their_times() {
    let recipe = Recipe::new("llama");
    let tokens = recipe.tokens(11);
    let options = EngineOptions { batch: 8, ..f32_options() };
    let wanted = logits_of(&mut engine(recipe.model(), options.clone()), &tokens);
    let mut observed = engine(recipe.model(), options);
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    let observer = move |batch: &Batch<'_>| {
        let nodes: usize = batch.trace.operations.iter().map(|operation| operation.nodes.len()).sum();
        assert_eq!(nodes, batch.plan.splits().nodes.len());
        assert!(batch.trace.seconds > 0.0 && batch.visible > 0.0 && batch.visible <= 1.0);
        list.lock().unwrap().push((batch.tokens.len(), batch.position));
    };
    observed.observe(Some((Detail::Operations, Box::new(observer))));
    assert_eq!(logits_of(&mut observed, &tokens), wanted);
    observed.observe(None);
    observed.feed(&tokens[..1]).unwrap();
    assert_eq!(*told.lock().unwrap(), [(8, 0), (3, 8)]);
}

#[test]
fn only_output_rows_have_logits_in_order() {
    let recipe = &recipes()[0];
    let tokens = recipe.tokens(20);
    let all = logits_of(&mut engine(recipe.model(), f32_options()), &tokens);
    for batch in [1, 6, 20] {
        let mut engine = engine(recipe.model(), EngineOptions { batch, ..f32_options() });
        let picked = [0, 1, 7, 13, 18];
        let entries: Vec<BatchToken> = (0..20)
            .map(|row| BatchToken { sequence: 0, token: tokens[row], output: picked.contains(&row) })
            .collect();
        engine.extend(&entries).unwrap();
        let rows: Vec<Vec<f32>> = (0..5).map(|row| engine.logits(row).to_vec()).collect();
        let wanted: Vec<Vec<f32>> = picked.iter().map(|row| all[*row].clone()).collect();
        assert!(distance(&rows, &wanted) < SAME, "batches of {batch}");
        assert!(engine.logits(5).is_empty(), "there is no sixth row");
        assert!(engine.logits(usize::MAX).is_empty());
        assert!(engine.hidden(0).is_empty(), "hidden states are not an output");
    }
}

#[test]
fn a_batch_without_outputs_fills_the_cache() {
    // One layer is the special case: then nothing of the graph but the cache is left.
    for layers in [1, 2] {
        let recipe = Recipe { layers, ..Recipe::new("llama") };
        let tokens = recipe.tokens(15);
        let all = logits_of(&mut engine(recipe.model(), f32_options()), &tokens);
        let mut engine = engine(recipe.model(), f32_options());
        let silent: Vec<BatchToken> = tokens[..14]
            .iter()
            .map(|token| BatchToken { sequence: 0, token: *token, output: false })
            .collect();
        engine.extend(&silent).unwrap();
        assert!(engine.logits(0).is_empty());
        assert_eq!(engine.len(0), 14);
        engine.feed(&tokens[14..]).unwrap();
        assert!(distance(&[engine.logits(0).to_vec()], &all[14..]) < SAME, "{layers} layers");
        engine.extend(&[]).unwrap();
        assert_eq!(engine.len(0), 15);
        assert!(engine.logits(0).is_empty(), "there was no output");
    }
}

#[test]
fn a_truncated_sequence_can_continue_differently() {
    for recipe in recipes() {
        let tokens = recipe.tokens(30);
        let mut other = tokens[..11].to_vec();
        other.extend(tokens[11..].iter().rev());
        let wanted = logits_of(&mut engine(recipe.model(), f32_options()), &other);
        let mut engine = engine(recipe.model(), EngineOptions { sequences: 2, ..f32_options() });
        logits_of(&mut engine, &tokens);
        engine.truncate(0, 99);
        assert_eq!(engine.len(0), 30, "cutting does not lengthen");
        engine.truncate(0, 11);
        engine.truncate(7, 0);
        assert_eq!(engine.len(0), 11);
        let rows = logits_of(&mut engine, &other[11..]);
        assert!(distance(&rows, &wanted[11..]) < SAME);
        engine.truncate(0, 0);
        assert!(engine.is_empty());
        assert!(distance(&logits_of(&mut engine, &other), &wanted) < SAME, "from the start");
    }
}

#[test]
fn every_cache_type_gives_nearly_the_same_logits() {
    let recipe = Recipe { key_length: 32, rope_dims: 32, value_length: 32, ..Recipe::new("qwen2") };
    let tokens = recipe.tokens(40);
    let wanted = logits_of(&mut engine(recipe.model(), f32_options()), &tokens);
    for (cache, room) in
        [(DType::F16, 0.02), (DType::BF16, 0.1), (DType::Q8_0, 0.05), (DType::Q5_1, 0.5), (DType::Q4_0, 1.0)]
    {
        let mut engine = engine(
            recipe.model(),
            EngineOptions { cache_keys: cache, cache_values: cache, batch: 16, ..EngineOptions::default() },
        );
        let (_, found) = distances(&logits_of(&mut engine, &tokens), &wanted);
        println!("{cache}: {found:.2e}");
        assert!(found < room, "{cache}: off by {found:.2e}");
        assert!(found > 0.0, "{cache}: the cache is not of this type");
    }
}

#[test]
fn hidden_states_are_outputs_beside_the_logits() {
    let recipe = &recipes()[1];
    let tokens = recipe.tokens(9);
    let mut engine = engine(recipe.model(), EngineOptions { hidden: true, batch: 4, ..f32_options() });
    let rows = logits_of(&mut engine, &tokens);
    let hidden: Vec<Vec<f32>> = (0..9).map(|row| engine.hidden(row).to_vec()).collect();
    let (wanted, _) = crate::common::reference::Reference::new(recipe).run(&tokens);
    assert!(distance(&hidden, &wanted) < SAME);
    assert_eq!(rows.len(), 9);
    assert!(engine.hidden(9).is_empty());
}

#[test]
fn a_full_context_is_an_error_and_stays_unchanged() {
    let recipe = &recipes()[0];
    let tokens = recipe.tokens(20);
    let wanted = logits_of(&mut engine(recipe.model(), f32_options()), &tokens[..12]);
    let options = EngineOptions { context: 12, sequences: 2, batch: 5, ..f32_options() };
    let mut engine = engine(recipe.model(), options);
    let error = engine.extend(&all_outputs(0, &tokens[..13])).unwrap_err();
    assert!(matches!(error, Error::ContextFull { wanted: 13, used: 0, context: 12 }), "{error}");
    assert!(engine.is_empty());
    logits_of(&mut engine, &tokens[..10]);
    let error = engine.extend(&all_outputs(0, &tokens[10..13])).unwrap_err();
    assert!(matches!(error, Error::ContextFull { wanted: 3, used: 10, context: 12 }), "{error}");
    assert_eq!(engine.len(0), 10);
    // The other sequence's room is its own, and a batch that does not fit changes neither.
    let mut both = all_outputs(1, &tokens[..4]);
    both.extend(all_outputs(0, &tokens[10..13]));
    engine.extend(&both).unwrap_err();
    assert_eq!([engine.len(0), engine.len(1)], [10, 0]);
    let rest = logits_of(&mut engine, &tokens[10..12]);
    assert!(distance(&rest, &wanted[10..]) < SAME, "to the last slot");
    assert_eq!(engine.len(0), 12);
}

#[test]
fn tokens_and_sequences_that_do_not_exist_are_errors() {
    let recipe = &recipes()[0];
    let mut engine = engine(recipe.model(), EngineOptions { sequences: 2, ..f32_options() });
    engine.feed(&[1, 2, 3]).unwrap();
    let logits = engine.logits(0).to_vec();
    let error = engine.feed(&[4, 100]).unwrap_err();
    assert!(matches!(error, Error::Token { token: 100, count: 100 }), "{error}");
    let error = engine.extend(&all_outputs(2, &[4])).unwrap_err();
    assert!(matches!(error, Error::Sequence { sequence: 2, count: 2 }), "{error}");
    engine.extend(&all_outputs(usize::MAX, &[4])).unwrap_err();
    assert_eq!(engine.len(0), 3);
    assert_eq!(engine.len(usize::MAX), 0);
    assert_eq!(engine.logits(0), logits, "an error found before computing leaves the last results");
    engine.feed(&[4]).unwrap();
}

#[test]
fn options_out_of_range_are_errors() {
    let try_with = |options: EngineOptions| {
        Engine::new(Recipe::new("llama").model(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).err()
    };
    let defaults = EngineOptions::default;
    for (options, word) in [
        (EngineOptions { batch: 0, ..defaults() }, "batch"),
        (EngineOptions { sequences: 0, ..defaults() }, "sequences"),
        (EngineOptions { context: usize::MAX, ..defaults() }, "context"),
        (EngineOptions { context: 1 << 20, sequences: 1 << 20, ..defaults() }, "context"),
        (EngineOptions { cache_keys: DType::Q4_1, cache_values: DType::F16, ..defaults() }, "cache"),
        (EngineOptions { cache_keys: DType::I32, cache_values: DType::I32, ..defaults() }, "cache"),
    ] {
        let error = try_with(options.clone()).unwrap_or_else(|| panic!("{options:?} was taken"));
        assert!(matches!(error, Error::Option { .. }) && error.to_string().contains(word), "{error}");
    }
    // 12 elements per head and two heads make 24, which is no whole number of q8_0 blocks.
    let odd = Recipe { key_length: 12, rope_dims: 12, value_length: 12, ..Recipe::new("llama") };
    let options = EngineOptions { cache_keys: DType::Q8_0, cache_values: DType::Q8_0, ..defaults() };
    let error = Engine::new(odd.model(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).err().unwrap();
    assert!(error.to_string().contains("blocks of 32"), "{error}");
}

#[test]
fn the_default_context_is_the_models_own() {
    let model = |context| Recipe { context, ..Recipe::new("llama") }.model();
    let resolved = |model: &Model, context| {
        EngineOptions { context, ..EngineOptions::default() }.resolve(model).unwrap()
    };
    assert_eq!(resolved(&model(128), 0).context, 128);
    assert_eq!(resolved(&model(128), 0).batch, 128, "no batch is larger than the cache");
    assert_eq!(resolved(&model(1 << 20), 0).context, 4096);
    assert_eq!(resolved(&model(1 << 20), 10_000).context, 10_000);
    assert_eq!(resolved(&model(128), 300).context, 300, "who asks for more than the model knows gets it");
}

#[test]
fn a_forecast_has_the_bytes_and_loads_nothing() {
    let model = Recipe::new("llama").model();
    let plan = Engine::forecast(&model, &Scheduler::new([cpu(1)]), EngineOptions::default()).unwrap();
    let bytes = plan.bytes();
    assert_eq!(bytes.len(), 1);
    let weights: usize = model.file().tensors().map(|tensor| tensor.byte_len()).sum();
    assert!(bytes[0].total() as usize > weights, "{} of {weights}", bytes[0].total());
}

/// Random calls on several sequences: after each call, every sequence has the logits of the same tokens computed alone.
#[test]
fn random_calls_keep_every_sequence_right() {
    let recipe = &recipes()[0];
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let options = EngineOptions { context: 24, sequences: 3, batch: rng.range(1, 9), ..f32_options() };
        let mut engine = engine(recipe.model(), options);
        let mut alone = crate::common::engine(recipe.model(), f32_options());
        let mut texts: [Vec<u32>; 3] = Default::default();
        for call in 0..25 {
            let sequence = rng.below(3);
            if rng.chance(0.3) {
                let len = rng.below(25);
                engine.truncate(sequence, len);
                texts[sequence].truncate(len);
                continue;
            }
            let entries: Vec<BatchToken> = (0..rng.range(1, 10))
                .map(|_| BatchToken {
                    sequence: rng.below(3),
                    token: rng.below(recipe.vocabulary) as u32,
                    output: rng.chance(0.4),
                })
                .collect();
            let mut longer = texts.clone();
            entries.iter().for_each(|entry| longer[entry.sequence].push(entry.token));
            let fits = longer.iter().all(|text| text.len() <= 24);
            assert_eq!(engine.extend(&entries).is_ok(), fits, "seed {seed}, call {call}");
            if fits {
                let mut row = 0;
                let mut at = texts.clone().map(|text| text.len());
                for entry in &entries {
                    at[entry.sequence] += 1;
                    if entry.output {
                        alone.truncate(0, 0);
                        alone.feed(&longer[entry.sequence][..at[entry.sequence]]).unwrap();
                        let found = distance(&[engine.logits(row).to_vec()], &[alone.logits(0).to_vec()]);
                        assert!(found < SAME, "seed {seed}, call {call}: off by {found:.2e}");
                        row += 1;
                    }
                }
                texts = longer;
            }
            assert_eq!([0, 1, 2].map(|s| engine.len(s)), texts.clone().map(|text| text.len()));
        }
    }
}

#[test]
fn five_hundred_prompt_lengths_take_bounded_memory() {
    let recipe = Recipe { context: 600, layers: 1, width: 32, heads: 2, kv_heads: 1, ..Recipe::new("llama") };
    let mut engine = engine(recipe.model(), f32_options());
    let tokens = recipe.tokens(501);
    let feed = |engine: &mut Engine, length: usize| {
        engine.truncate(0, 0);
        engine.feed(&tokens[..length]).unwrap();
        engine.logits(0).to_vec()
    };
    let limits = quadriga_runtime::PlanLimits::default();
    let first = feed(&mut engine, 2);
    let mut most = 0;
    for length in (2..502).rev() {
        feed(&mut engine, length);
        let usage = engine.session().plan_usage();
        assert!(usage.plans <= limits.plans, "{length} tokens: {usage:?}");
        most = most.max(usage.bytes);
    }
    assert!(most / limits.plans < 100 << 10, "{most} bytes for {} plans of a small model", limits.plans);
    assert_eq!(feed(&mut engine, 2), first);
}

#[test]
fn a_likelihood_is_computed_with_the_logits_of_one_batch_at_a_time() {
    let text: String = (0..60).map(|i| char::from(b'a' + i % 7)).collect();
    let case = serde_json::json!({ "name": "n", "kind": "nll", "text": text, "ctx": 40 });
    let case: EvalCase = serde_json::from_value(case).unwrap();
    let parts = Recipe { text: true, ..Recipe::new("llama") }.parts();
    let likelihood = |batch: usize| {
        let options = EngineOptions { batch, ..f32_options() };
        let mut engine = engine(parts.model().unwrap(), options);
        let result = evaluate(&mut engine, &case).unwrap().result;
        let ResultFields::Nll { nll, count, .. } = result else { panic!("{result:?}") };
        assert_eq!(count, 39);
        let rows = (0..).take_while(|row| !engine.logits(*row).is_empty()).count();
        assert!(rows <= batch, "logits of {rows} tokens are kept, with batches of {batch}");
        nll
    };
    let whole = likelihood(64);
    for batch in [1, 3, 39] {
        assert!((likelihood(batch) - whole).abs() < 1e-4, "batches of {batch}");
    }
}
