//! Requests: options, hooks and callbacks of one answer, and the fast path of greedy decoding.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::common::{Recipe, cpu};
use quadriga_llm::sampling::{DryOptions, SamplingOptions};
use quadriga_llm::template::Message;
use quadriga_llm::{
    EngineOptions, Error, Finish, Generator, GeneratorOptions, Model, RequestOptions, TokenCounts,
};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

fn recipe() -> Recipe {
    Recipe { text: true, seed: 5, context: 200, ..Recipe::new("llama") }
}

fn greedy() -> SamplingOptions {
    SamplingOptions { temperature: 0.0, ..SamplingOptions::default() }
}

fn device() -> Arc<dyn Backend> {
    Sim::new("sim:0").alignment(256).build()
}

fn generator_on(backend: Arc<dyn Backend>, model: Model, sampling: SamplingOptions) -> Generator {
    let options = GeneratorOptions { sampling, max_tokens: Some(12), ..GeneratorOptions::default() };
    Generator::on(model, &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
}

fn request(sampling: SamplingOptions) -> RequestOptions {
    RequestOptions { sampling, reseed: true, max_tokens: Some(12), ..RequestOptions::default() }
}

#[test]
fn each_request_has_its_own_options() {
    let hot = SamplingOptions { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 3, ..greedy() };
    let mut plain = generator_on(cpu(1), recipe().model(), greedy());
    let first = plain.answer("the cat").unwrap().complete().unwrap();
    let said = first.tokens[0];
    let all = [
        greedy(),
        hot.clone(),
        SamplingOptions { logit_bias: BTreeMap::from([(said, f32::NEG_INFINITY)]), ..greedy() },
        SamplingOptions { repeat_penalty: 1.8, frequency_penalty: 1.0, ..greedy() },
        SamplingOptions {
            dry: DryOptions { multiplier: 5.0, allowed_length: 1, ..DryOptions::default() },
            ..hot.clone()
        },
        SamplingOptions { ignore_eos: true, ..hot },
        greedy(),
    ];
    for backend in [cpu as fn(usize) -> Arc<dyn Backend>, |_| device()] {
        let wanted: Vec<_> = all
            .iter()
            .map(|options| {
                let mut fresh = generator_on(backend(1), recipe().model(), options.clone());
                fresh.answer("the cat").unwrap().complete().unwrap().tokens
            })
            .collect();
        assert_eq!((&wanted[0], &wanted[6]), (&first.tokens, &first.tokens));
        assert!(wanted[1] != wanted[0] && wanted[2] != wanted[0] && wanted[3] != wanted[0]);
        assert!(!wanted[2].contains(&said), "a banned token never comes");
        let mut generator = generator_on(backend(1), recipe().model(), SamplingOptions::default());
        for (options, wanted) in all.iter().zip(&wanted) {
            let answer = generator.answer_with("the cat", request(options.clone())).unwrap();
            assert_eq!(answer.complete().unwrap().tokens, *wanted, "{options:?}");
        }
    }
}

#[test]
fn logits_stay_on_the_device_unless_somebody_needs_them() {
    let mut generator = generator_on(device(), recipe().model(), SamplingOptions::default());
    let wanted =
        generator_on(cpu(1), recipe().model(), greedy()).answer("the cat").unwrap().complete().unwrap();
    let ban = |token: u32| move |_: &[u32], logits: &mut [f32]| logits[token as usize] = f32::NEG_INFINITY;
    let changing = |sampling| (request(sampling), false);
    let with_hook = |token| RequestOptions { hook: Some(Box::new(ban(token))), ..request(greedy()) };
    for (request, on_device) in [
        (request(greedy()), true),
        changing(SamplingOptions { temperature: 0.5, ..greedy() }),
        changing(SamplingOptions { repeat_penalty: 1.1, ..greedy() }),
        changing(SamplingOptions { presence_penalty: 0.1, ..greedy() }),
        changing(SamplingOptions { logit_bias: BTreeMap::from([(9, -0.5)]), ..greedy() }),
        changing(SamplingOptions { ignore_eos: true, ..greedy() }),
        (with_hook(99), false),
        (request(greedy()), true),
    ] {
        let plain = request.sampling == greedy();
        let sampling = request.sampling.clone();
        let answer = generator.answer_with("the cat", request).unwrap().complete().unwrap();
        let engine = generator.engine();
        assert_eq!(engine.options().greedy, on_device, "{sampling:?}");
        assert_eq!(engine.logits(0).is_empty(), on_device, "{sampling:?}");
        assert!(!plain || answer.tokens == wanted.tokens, "the same tokens either way");
    }
    let banned = wanted.tokens[0];
    let answer = generator.answer_with("the cat", with_hook(banned)).unwrap().complete().unwrap();
    assert!(!answer.tokens.contains(&banned), "the hook decides");
    // Where the host has the logits there is nothing to gain.
    let mut host = generator_on(cpu(1), recipe().model(), SamplingOptions::default());
    host.answer_with("the cat", request(greedy())).unwrap().complete().unwrap();
    assert!(!host.engine().options().greedy);
}

#[test]
fn a_request_continues_the_random_numbers_or_starts_them_anew() {
    let hot = SamplingOptions { temperature: 2.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 11, ..greedy() };
    let mut generator = generator_on(cpu(1), recipe().model(), hot.clone());
    let mut ask = |reseed| {
        let request = RequestOptions { reseed, ..request(hot.clone()) };
        generator.answer_with("the cat", request).unwrap().complete().unwrap().tokens
    };
    let (first, second, third, again) = (ask(false), ask(false), ask(true), ask(false));
    assert_ne!(first, second, "the same prompt is answered anew");
    assert_eq!((&third, &again), (&first, &second), "the seed decides both");
}

#[test]
fn wrong_request_options_change_nothing() {
    let mut generator = generator_on(cpu(1), recipe().model(), greedy());
    let wanted = generator.answer("the cat").unwrap().complete().unwrap();
    let wrong = SamplingOptions { top_p: 2.0, ..greedy() };
    assert!(matches!(generator.answer_with("the dog", request(wrong)), Err(Error::SamplingOption { .. })));
    let answer = generator.answer("the cat").unwrap();
    assert_eq!(answer.counts().cached, answer.counts().prompt - 1, "the KV cache is still there");
    assert_eq!(answer.complete().unwrap().tokens, wanted.tokens);
}

#[test]
fn end_of_generation_tokens_can_be_ignored() {
    // All logits are 0, so greedy takes token 0, which ends the answer.
    let mut parts = recipe().parts();
    for (_, _, _, bytes) in parts.tensors.iter_mut().filter(|(name, ..)| name == "output.weight") {
        bytes.fill(0);
    }
    parts.set("tokenizer.ggml.eos_token_id", 0u32);
    let mut generator = generator_on(device(), parts.model().unwrap(), greedy());
    let ended = generator.answer("the").unwrap().complete().unwrap();
    assert_eq!((ended.tokens, ended.finish), (vec![0], Finish::End));
    let ignoring = SamplingOptions { ignore_eos: true, ..greedy() };
    let answer = generator.answer_with("the", request(ignoring)).unwrap().complete().unwrap();
    assert_eq!((answer.tokens, answer.finish), (vec![1; 12], Finish::Length));
}

#[test]
fn a_callback_sees_every_piece_and_can_stop() {
    let mut generator = generator_on(cpu(1), recipe().model(), greedy());
    let whole = generator.answer("the cat").unwrap().complete().unwrap();
    assert_eq!((whole.finish, whole.tokens.len()), (Finish::Length, 12));
    let prompt = whole.counts.prompt;
    assert_eq!(whole.counts, TokenCounts { prompt, answer: 12, ..TokenCounts::default() });
    let mut seen = String::new();
    let stopped = generator.answer("the cat").unwrap().stream(|piece| {
        seen.push_str(&piece.text);
        if seen.len() >= 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let stopped = stopped.unwrap();
    assert_eq!((stopped.finish, &stopped.text), (Finish::Cancelled, &seen));
    assert_eq!(stopped.tokens, whole.tokens[..stopped.tokens.len()]);
    assert!(stopped.tokens.len() < 12 && seen.len() >= 4);
    assert_eq!(
        stopped.counts,
        TokenCounts { prompt, cached: prompt - 1, answer: stopped.tokens.len(), reasoning: 0 }
    );
    let last = generator.answer("the cat").unwrap().stream(|_| ControlFlow::Continue(())).unwrap();
    assert_eq!(last.text, whole.text);
}

#[test]
fn the_first_token_is_no_decode_step() {
    let mut generator = generator_on(cpu(1), recipe().model(), greedy());
    for (most, steps) in [(0, 0), (1, 0), (2, 1), (9, 8)] {
        let request = RequestOptions { max_tokens: Some(most), ..request(greedy()) };
        let mut answer = generator.answer_with("the cat", request).unwrap();
        assert_eq!(answer.by_ref().count(), most);
        let (found, time) = answer.decode_speed();
        assert_eq!((found, time.is_zero()), (steps, steps == 0), "{most} tokens");
    }
}

fn conversation(turns: usize) -> Vec<Message> {
    let mut messages = vec![Message::new("system", "be brief")];
    for turn in 0..turns {
        messages.push(Message::new("user", format!("question {turn}")));
        messages.push(Message::new("assistant", format!("answer {turn}")));
    }
    messages.pop();
    messages
}

#[test]
fn the_oldest_turns_make_room_and_the_system_message_stays() {
    let options = GeneratorOptions {
        engine: EngineOptions { context: 150, ..EngineOptions::default() },
        sampling: greedy(),
        ..GeneratorOptions::default()
    };
    let mut generator =
        Generator::on(recipe().model(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).unwrap();
    for turns in 1..12 {
        let messages = conversation(turns);
        for room in [0, 1, 20, 60] {
            let fitted = generator.fit(&messages, room).unwrap();
            // Slow: one turn less at a time.
            let fits = |dropped: &usize| {
                let mut rest = messages.clone();
                rest.drain(1..1 + 2 * dropped);
                generator.tokenize(&rest).unwrap().len() + room.max(1) <= 150
            };
            let wanted = (0..turns).find(fits).unwrap();
            assert_eq!(
                (fitted.dropped_turns, fitted.dropped_messages),
                (wanted, 2 * wanted),
                "{turns} {room}"
            );
            let mut rest = messages.clone();
            rest.drain(1..1 + 2 * wanted);
            assert_eq!(fitted.messages, rest);
            assert_eq!(fitted.tokens, generator.tokenize(&rest).unwrap());
        }
    }
    let long = generator.fit(&conversation(11), 20).unwrap();
    assert!(long.dropped_turns > 3);
    assert!(generator.continue_tokens(&long.tokens).unwrap().complete().unwrap().tokens.len() >= 20);
    // The last turn stays even if it leaves less room than wanted, but not without any.
    let mut messages = conversation(3);
    messages[5].content = "x".repeat(80);
    let fitted = generator.fit(&messages, 140).unwrap();
    assert_eq!((fitted.dropped_turns, fitted.messages.len()), (2, 2));
    messages[5].content = "x".repeat(200);
    assert!(matches!(generator.fit(&messages, 1), Err(Error::ContextFull { context: 150, .. })));
    assert!(generator.fit(&[], 1).unwrap().messages.is_empty());
}

#[test]
fn a_system_message_of_the_conversation_replaces_the_generators_own() {
    let options = GeneratorOptions { system: Some("be the cat".into()), ..GeneratorOptions::default() };
    let generator = Generator::on(recipe().model(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).unwrap();
    let tokens = generator.tokenize(&[Message::new("system", "be the dog"), Message::new("user", "the end")]);
    let wanted = "<|start|>system be the dog<|end|><|start|>user the end<|end|><|start|>";
    assert_eq!(tokens.unwrap(), generator.model().tokenizer().unwrap().encode(wanted, true));
}

#[test]
fn the_prefill_of_a_long_prompt_is_observed_batch_by_batch() {
    let options = GeneratorOptions {
        sampling: greedy(),
        max_tokens: Some(1),
        engine: EngineOptions { batch: 8, ..EngineOptions::default() },
        ..GeneratorOptions::default()
    };
    let mut generator =
        Generator::on(recipe().model(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).unwrap();
    let seen: Arc<std::sync::Mutex<Vec<(usize, usize)>>> = Arc::default();
    let kept = Arc::clone(&seen);
    generator.observe_prefill(Some(Box::new(move |progress| {
        kept.lock().unwrap().push((progress.done, progress.total));
    })));
    let prompt: Vec<u32> = (0..20).map(|token| token % 7 + 1).collect();
    generator.continue_tokens(&prompt).unwrap();
    assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), [(8, 20), (16, 20), (20, 20)]);
    // One batch needs no progress; neither do tokens in the KV cache.
    generator.continue_tokens(&prompt).unwrap();
    generator.continue_tokens(&prompt[..5]).unwrap();
    assert_eq!(*seen.lock().unwrap(), []);
}
