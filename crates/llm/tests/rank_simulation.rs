//! Simulated ranks: clocks that execute the plans of all of them over a link.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::Recipe;
use crate::common::experts::ExpertRecipe;
use quadriga_llm::placement::{Devices, Placement, RankSimulation, SimulatedRun, Straggler};
use quadriga_llm::{EngineOptions, Grid, Link, Model};
use quadriga_runtime::{DeviceKind, Rates};

/// A link that takes no time.
const NOTHING: Link = Link { bytes_per_second: f64::INFINITY, latency: 0.0, is_memory: false };

fn simulation(model: &Model, (tensor, pipeline): (usize, usize), requests: usize) -> RankSimulation {
    let cpu = quadriga_cpu::Backend::builder().threads(1).build().unwrap();
    let devices = Devices::new([], Arc::new(cpu)).unwrap();
    // Nothing but memory reads takes time.
    let rates = Rates {
        read: 1e6,
        int8: 1e30,
        bf16: 1e30,
        f32: 1e30,
        launch: 0.0,
        ..Rates::assumed(DeviceKind::Cpu)
    };
    let placement = Placement { rates: vec![("cpu".to_owned(), rates)], ..Placement::default() };
    let options = EngineOptions { context: 64, ..EngineOptions::default() };
    let placed = placement.plan(model, &devices, &options).unwrap();
    let grid = Grid { tensor, pipeline };
    placement.simulate_ranks(model, &devices, &options, &placed, (grid, requests, false)).unwrap()
}

fn run(model: &Model, grid: (usize, usize), requests: usize) -> SimulatedRun {
    simulation(model, grid, requests).run(&NOTHING, None).unwrap()
}

fn even() -> Recipe {
    Recipe { layers: 4, heads: 4, kv_heads: 4, vocabulary: 256, feed_forward: 128, ..Recipe::new("llama") }
}

fn near(found: f64, expected: f64, tolerance: f64) {
    assert!((found / expected - 1.0).abs() < tolerance, "{found} instead of {expected}");
}

#[test]
fn without_a_link_ranks_are_bound_by_the_balanced_work() {
    let model = even().model();
    let alone = run(&model, (1, 1), 1);
    assert_eq!(
        (alone.bound.as_str(), alone.sent.as_slice(), alone.micro_batches),
        ("memory reads", &[0][..], 1)
    );
    near(alone.busy, 1.0, 1e-9);
    // Norms and activations are computed by every rank; all else is divided evenly.
    let two = run(&model, (2, 1), 1);
    assert!(two.round_seconds > 0.5 * alone.round_seconds && two.round_seconds < 0.65 * alone.round_seconds);
    near(two.busy, 1.0, 1e-9);
    // For one answer stages take turns.
    let stages = run(&model, (1, 2), 1);
    near(stages.round_seconds, alone.round_seconds, 0.02);
    near(stages.busy, 0.5, 0.1);
    assert_eq!(stages.bound, "memory reads, stages in turn");
}

#[test]
fn every_message_has_its_latency_and_its_bytes() {
    let model = even().model();
    let latency = |seconds| Link { latency: seconds, ..NOTHING };
    let seconds = |grid, link| simulation(&model, grid, 1).run(&link, None).unwrap().round_seconds;
    // A message for the step; two sums a layer and one of the embedding, there and back; and the logits.
    near(seconds((2, 1), latency(100.0)) - seconds((2, 1), NOTHING), 100.0 * (1.0 + 2.0 * 9.0 + 1.0), 1e-6);
    // Activations one way, and logits the other; the second stage has its message before.
    near(seconds((1, 2), latency(100.0)) - seconds((1, 2), NOTHING), 100.0 * 2.0, 1e-6);
    let found = simulation(&model, (1, 2), 1).run(&NOTHING, None).unwrap();
    let Recipe { width, vocabulary, .. } = even();
    assert_eq!(found.sent, [4 * width as u64, 4 * vocabulary as u64]);
    // Of a sum each of two ranks sends all, of the logits its half.
    let found = simulation(&model, (2, 1), 1).run(&NOTHING, None).unwrap();
    assert_eq!(found.sent, [(9 * 4 * width + 4 * vocabulary / 2) as u64; 2]);
    let slow = Link { bytes_per_second: 1.0, ..NOTHING };
    let slow = simulation(&model, (1, 2), 1).run(&slow, None).unwrap();
    assert!(slow.bound.starts_with("link bandwidth"), "{}", slow.bound);
}

#[test]
fn stages_compute_different_requests_at_once() {
    let model = even().model();
    let (one, many) = (run(&model, (1, 2), 1), run(&model, (1, 2), 2));
    assert_eq!((one.micro_batches, many.micro_batches), (1, 2));
    // Two steps take as long as twice the slower stage: more than one step through both, and less than two.
    assert!(many.round_seconds < 1.5 * one.round_seconds, "{} {}", many.round_seconds, one.round_seconds);
    assert!(many.busy > 0.7 && one.busy < 0.6, "{} {}", many.busy, one.busy);
    assert!(many.sent[1] < one.sent[1], "greedy requests need no logits: {:?}", many.sent);
}

#[test]
fn a_straggler_delays_all_that_wait_for_it() {
    let model = even().model();
    let simulation = simulation(&model, (2, 1), 1);
    let seconds = |straggler| simulation.run(&NOTHING, straggler).unwrap().round_seconds;
    let on_time = seconds(None);
    for rank in [Some(0), Some(1)] {
        near(seconds(Some(Straggler { factor: 1.5, rank })), 1.5 * on_time, 0.02);
    }
    // Of two ranks one is slow in every step, and it is as slow as the other would be.
    near(seconds(Some(Straggler { factor: 1.5, rank: None })), 1.5 * on_time, 0.02);
    let error = simulation.run(&NOTHING, Some(Straggler { factor: 2.0, rank: Some(2) })).unwrap_err();
    assert!(error.to_string().contains("ranks 0 to 1"), "{error}");
}

#[test]
fn a_straggler_at_random_steps_delays_less_than_one_in_all() {
    let model = even().model();
    let simulation = simulation(&model, (1, 2), 1);
    let seconds =
        |rank| simulation.run(&NOTHING, Some(Straggler { factor: 3.0, rank })).unwrap().round_seconds;
    let on_time = simulation.run(&NOTHING, None).unwrap().round_seconds;
    // Stages take turns: each adds its own delay, one of them in each step.
    let [first, last, random] = [Some(0), Some(1), None].map(seconds);
    near(first + last - on_time, 3.0 * on_time, 1e-6);
    assert!(random > first.min(last) && random < first.max(last), "{random} of {first} and {last}");
}

#[test]
fn no_division_of_experts_is_faster_than_its_ranks() {
    let recipe = Recipe { experts: Some(ExpertRecipe::new(8, 2)), feed_forward: 96, ..even() };
    let model = recipe.model();
    for requests in [1, 2, 5, 32] {
        let alone = run(&model, (1, 1), requests);
        for grid in [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4)] {
            let found = run(&model, grid, requests);
            let ranks = (grid.0 * grid.1) as f64;
            let efficiency = found.tokens_per_second / alone.tokens_per_second / ranks;
            assert!(efficiency <= 1.0 + 1e-9 && efficiency > 0.1, "{grid:?}, {requests}: {efficiency}");
        }
    }
}
