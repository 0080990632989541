//! Priorities and clients: whose prompts are started and computed first, and who is put back for want of pages.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::cpu;
use crate::common::serving::{batcher, options, recipe};
use quadriga_conformance::Rng;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request, RequestId};

/// A prompt of so many tokens that begins like no other one.
fn prompt(number: u32, length: usize) -> Vec<u32> {
    let mut tokens = recipe("llama").tokens(length);
    tokens[0] = number;
    tokens
}

fn request(client: u64, number: u32, length: usize) -> Request {
    Request { client, max_tokens: Some(4), past_end: true, ..Request::new(prompt(number, length)) }
}

/// The requests in the order of their first tokens.
fn first_tokens(batcher: &mut Batcher) -> Vec<RequestId> {
    let mut first = Vec::new();
    while batcher.is_busy() {
        for (id, event) in batcher.step() {
            if matches!(event, Event::Token { .. }) && !first.contains(&id) {
                first.push(id);
            }
        }
        batcher.check().unwrap();
    }
    first
}

#[test]
fn a_client_does_not_wait_for_all_prompts_of_another_one() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(9, 60));
    for number in 0..8 {
        batcher.submit(request(1, number, 300)).unwrap();
    }
    batcher.step();
    assert_eq!(batcher.state().running, 8);
    let other = batcher.submit(request(2, 8, 200)).unwrap();
    let first = first_tokens(&mut batcher);
    let before = first.iter().position(|id| *id == other).unwrap();
    assert!(before <= 2, "{before} prompts of the other client came first: {first:?}");
}

#[test]
fn a_prompt_that_takes_long_does_not_hold_up_other_clients() {
    let model = recipe("llama").model();
    let mut options = options(9, 60);
    options.engine.batch = 20;
    let mut batcher = batcher(&model, cpu(1), options);
    let long = batcher.submit(request(1, 0, 390)).unwrap();
    batcher.step();
    let short: Vec<RequestId> =
        (1..3).map(|number| batcher.submit(request(1 + u64::from(number), number, 60)).unwrap()).collect();
    assert_eq!(first_tokens(&mut batcher), [short[0], short[1], long]);
}

#[test]
fn an_urgent_prompt_is_computed_before_those_that_are_being_computed() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(9, 60));
    for number in 0..8 {
        batcher.submit(request(1, number, 300)).unwrap();
    }
    batcher.step();
    let urgent = batcher.submit(Request { priority: 1, ..request(1, 8, 200) }).unwrap();
    assert_eq!(first_tokens(&mut batcher)[0], urgent);
}

#[test]
fn a_client_that_got_less_is_started_first() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(1, 20));
    let ids: Vec<RequestId> = (0..5).map(|number| batcher.submit(request(1, number, 100)).unwrap()).collect();
    let other = batcher.submit(request(2, 8, 100)).unwrap();
    assert_eq!(first_tokens(&mut batcher)[..3], [ids[0], other, ids[1]]);
}

#[test]
fn pages_that_running_prompts_need_are_not_given_to_others() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(6, 10));
    for number in 0..6 {
        batcher.submit(Request { max_tokens: Some(1), ..request(1, number, 300) }).unwrap();
    }
    assert_eq!(first_tokens(&mut batcher).len(), 6);
    assert_eq!(batcher.state().preempted, 0);
}

/// Urgent requests keep the pool full: each that ends is followed by another one. A request of low priority is put back for them, and
/// its prompt waits for theirs.
#[test]
fn a_request_of_low_priority_is_answered_in_spite_of_urgent_ones_that_need_its_pages() {
    let model = recipe("llama").model();
    for seed in 0..4 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let full = BatcherOptions { patience: 60, ..options(5, 12) };
        let mut batcher = batcher(&model, cpu(1), full);
        let low: Vec<RequestId> =
            (0..2).map(|number| batcher.submit(request(1, number, 300)).unwrap()).collect();
        let (mut ended, mut number) = (Vec::new(), 2);
        for _ in 0..2000 {
            while batcher.state().waiting + batcher.state().running < 8 {
                let (length, max_tokens) = (rng.range(60, 130), Some(rng.range(60, 140)));
                let urgent = Request { priority: 1, max_tokens, ..request(2, number % 100, length) };
                batcher.submit(urgent).unwrap();
                number += 1;
            }
            for (id, event) in batcher.step() {
                if matches!(event, Event::Finished(_)) && low.contains(&id) {
                    ended.push(id);
                }
            }
            batcher.check().unwrap();
            if ended.len() == 2 {
                break;
            }
        }
        assert_eq!(ended, low, "seed {seed}: {:?}", batcher.state());
    }
}

#[test]
fn the_client_with_most_sequences_is_put_back_first() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(4, 8));
    let generate = |client, number| Request { max_tokens: Some(100), ..request(client, number, 65) };
    for number in 0..3 {
        batcher.submit(generate(1, number)).unwrap();
    }
    let other = batcher.submit(generate(2, 8)).unwrap();
    let (mut tokens, mut steps) = (0, 0);
    while tokens < 100 {
        let events = batcher.step();
        tokens +=
            events.iter().filter(|(id, event)| *id == other && matches!(event, Event::Token { .. })).count();
        steps += usize::from(tokens > 0);
        batcher.check().unwrap();
    }
    assert!(batcher.state().preempted > 0);
    assert_eq!(steps, 100, "it was put back");
}
