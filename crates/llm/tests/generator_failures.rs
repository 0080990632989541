//! Failures of a device in the middle of prompts and answers: the conversation goes on as if they had not happened.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, Scaling, cpu, engine};
use quadriga_llm::sampling::{Sampler, SamplingOptions};
use quadriga_llm::template::Message;
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};
use quadriga_llm::{EngineOptions, Generator, GeneratorOptions};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

fn recipe() -> Recipe {
    Recipe { text: true, seed: 5, context: 200, ..Recipe::new("llama") }
}

fn generator(backend: Arc<dyn Backend>, repeat_penalty: f32) -> Generator {
    let options = GeneratorOptions {
        sampling: SamplingOptions { temperature: 0.0, repeat_penalty, ..SamplingOptions::default() },
        engine: EngineOptions { batch: 3, ..EngineOptions::default() },
        max_tokens: Some(12),
        ..GeneratorOptions::default()
    };
    Generator::on(recipe().model(), &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
}

fn tokens_of(generator: &mut Generator, prompt: &[u32]) -> Vec<u32> {
    generator.continue_tokens(prompt).unwrap().map(|piece| piece.unwrap().token).collect()
}

#[test]
fn a_prompt_that_failed_is_answered_as_if_it_was_the_first() {
    let messages = [Message::new("user", "the cat sat on the dog")];
    let prompt = generator(cpu(1), 1.0).tokenize(&messages).unwrap();
    let wanted = tokens_of(&mut generator(Sim::new("sim:0").build(), 1.0), &prompt);
    let mut failures = 0;
    for point in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in 0..30 {
            let sim = Sim::new("sim:0").device();
            let mut generator = generator(Arc::clone(&sim) as _, 1.0);
            sim.fail(point, after);
            let failed = match generator.chat(&messages) {
                Ok(answer) => answer.into_iter().any(|piece| piece.is_err()),
                Err(_) => true,
            };
            failures += usize::from(failed);
            if failed {
                assert_eq!(tokens_of(&mut generator, &prompt), wanted, "{point:?} {after}");
            }
        }
    }
    assert!(failures > 30, "only {failures} faults were noticed");
}

#[test]
fn an_answer_that_failed_is_continued_as_on_another_device() {
    let mut failures = 0;
    for point in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in 0..40 {
            let sim = Sim::new("sim:0").device();
            let mut failing = generator(Arc::clone(&sim) as _, 1.0);
            let mut all = failing.tokenize(&[Message::new("user", "the cat sat on the dog")]).unwrap();
            sim.fail(point, after);
            let mut failed = false;
            match failing.continue_tokens(&all.clone()) {
                Ok(answer) => {
                    for piece in answer {
                        match piece {
                            Ok(piece) => all.push(piece.token),
                            Err(_) => failed = true,
                        }
                    }
                }
                Err(_) => failed = true,
            }
            failures += usize::from(failed);
            if failed {
                all.extend([3, 4]);
                let wanted = tokens_of(&mut generator(Sim::new("sim:0").build(), 1.0), &all);
                assert_eq!(tokens_of(&mut failing, &all), wanted, "{point:?} {after}");
            }
        }
    }
    assert!(failures > 40, "only {failures} faults were noticed");
}

#[test]
fn the_prompt_counts_as_recent_for_penalties() {
    for prompt in ["the cat", "the dog", "a cat sat", "the the", "on the cat", "cat cat"] {
        let tokens = generator(cpu(1), 1.0).model().tokenizer().unwrap().encode(prompt, false);
        let plain = tokens_of(&mut generator(cpu(1), 1.0), &tokens)[0];
        // The prompt has the token that would come next: with a penalty, another one comes.
        let longer: Vec<u32> = [plain].into_iter().chain(tokens).collect();
        let first = tokens_of(&mut generator(cpu(1), 1e6), &longer)[0];
        assert!(!longer.contains(&first), "{prompt}: {first} in {longer:?}");
    }
}

#[test]
fn an_answer_that_ends_within_a_character_shows_it() {
    // All logits are 0, so greedy takes token 0: the first byte of a character of two.
    let mut parts = recipe().parts();
    for (_, _, _, bytes) in parts.tensors.iter_mut().filter(|(name, ..)| name == "output.weight") {
        bytes.fill(0);
    }
    let mut tokens = recipe().model().tokenizer().unwrap().vocabulary().tokens.clone();
    tokens[0] = "Ã".to_owned();
    parts.set("tokenizer.ggml.tokens", tokens.iter().map(String::as_str).collect::<Vec<_>>());
    let options = GeneratorOptions {
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: Some(1),
        ..GeneratorOptions::default()
    };
    let scheduler = Scheduler::new([cpu(1)]);
    let mut generator = Generator::on(parts.model().unwrap(), &scheduler, options, &mut |_| {}).unwrap();
    assert_eq!(generator.answer("the").unwrap().text().unwrap(), "\u{fffd}");
}

#[test]
fn a_rope_factor_of_zero_means_none() {
    let logits = |scaling| {
        let recipe = Recipe { scaling, ..recipe() };
        let mut engine = engine(recipe.model(), EngineOptions::default());
        engine.feed(&recipe.tokens(20)).unwrap();
        engine.logits(0).to_vec()
    };
    let plain = logits(Scaling::No);
    assert!(plain.iter().all(|logit| logit.is_finite()));
    assert_eq!(logits(Scaling::Linear(0.0)), plain);
    assert_ne!(logits(Scaling::Linear(4.0)), plain);
}

#[test]
fn top_p_counts_all_candidates() {
    let options = SamplingOptions {
        temperature: 1.0,
        top_k: 0,
        top_p: 0.9,
        min_p: 0.0,
        seed: 3,
        ..SamplingOptions::default()
    };
    let mut sampler = Sampler::new(options).unwrap();
    let seen: std::collections::BTreeSet<u32> =
        (0..5000).map(|_| sampler.sample(&[0.0; 1000]).unwrap()).collect();
    assert!(seen.len() > 850 && seen.iter().all(|token| *token < 900), "{}", seen.len());
}

#[test]
fn a_token_outside_the_window_is_not_penalized() {
    let options = SamplingOptions {
        temperature: 0.0,
        repeat_penalty: 2.0,
        repeat_last_n: 2,
        ..SamplingOptions::default()
    };
    let mut sampler = Sampler::new(options).unwrap();
    [0, 7, 1].into_iter().for_each(|token| sampler.accept(token));
    assert_eq!(sampler.sample(&[4.0, 3.0, 2.5]).unwrap(), 0);
}

#[test]
fn text_after_a_special_token_begins_with_a_space() {
    let vocabulary = Vocabulary {
        model: "llama".into(),
        tokens: ["<unk>", "<s>", "a", "\u{2581}", "\u{2581}a"].map(String::from).to_vec(),
        types: vec![
            TokenType::Unknown,
            TokenType::Control,
            TokenType::Normal,
            TokenType::Normal,
            TokenType::Normal,
        ],
        scores: vec![0.0, 0.0, -3.0, -2.0, -1.0],
        unknown: Some(0),
        bos: Some(1),
        ..Vocabulary::default()
    };
    assert_eq!(Tokenizer::new(vocabulary).unwrap().encode("a<s>a", true), [4, 1, 4]);
}
