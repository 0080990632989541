//! The gated delta rule with the heads of Qwen3-Next: tokens in chunks, beside so few at a time that they go in steps.
//!
//! `cargo bench -p quadriga-cpu --bench recurrent -- [threads]`
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::time::Instant;

use quadriga_conformance::Rng;
use quadriga_cpu::Backend;
use quadriga_graph::{DType, DeltaRuleInputs, GatedDeltaRule, GraphBuilder};
use quadriga_runtime::{Scheduler, Session};

const KEY_HEADS: usize = 16;
const HEADS: usize = 32;
const LENGTH: usize = 128;

/// A session that computes so many tokens at a time.
fn session(tokens: usize, delta: bool, threads: usize) -> Session {
    let g = GraphBuilder::new();
    let input = |name: &str, dims: [usize; 3]| g.input(name, DType::F32, dims);
    let keys = input("keys", [tokens, KEY_HEADS, LENGTH]).l2_norm(1e-6);
    let values = input("values", [tokens, HEADS, LENGTH]);
    let [gates, betas] = ["gates", "betas"].map(|name| g.input(name, DType::F32, [tokens, HEADS]));
    let state = input("state", [HEADS, LENGTH, LENGTH]);
    let inputs = DeltaRuleInputs { keys, values, gates, betas, state };
    let (results, after) = keys.gated_delta_rule(inputs, GatedDeltaRule { scale: 0.1, tiled: false, delta });
    g.output("results", results.cont());
    g.output("after", after.cont());
    let backend = Backend::builder().threads(threads).build().unwrap();
    let mut session = Scheduler::new([backend]).plan(g.finish().unwrap()).unwrap().session().unwrap();
    let mut rng = Rng::new(1);
    let mut fill = |name: &str, len: usize, low: f64, high: f64| {
        let values: Vec<f32> = (0..len).map(|_| rng.uniform(low, high) as f32).collect();
        session.set(name, &values).unwrap();
    };
    fill("keys", tokens * KEY_HEADS * LENGTH, -1.0, 1.0);
    fill("values", tokens * HEADS * LENGTH, -1.0, 1.0);
    fill("gates", tokens * HEADS, -0.5, 0.0);
    fill("betas", tokens * HEADS, 0.0, 1.0);
    fill("state", HEADS * LENGTH * LENGTH, -1.0, 1.0);
    session
}

fn main() {
    let threads = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1);
    for delta in [true, false] {
        let mut sessions = [7, 16, 64, 512].map(|tokens| (tokens, session(tokens, delta, threads), f64::MAX));
        // In turns, so that all of them see the same machine.
        for _ in 0..15 {
            for (tokens, session, best) in &mut sessions {
                let start = Instant::now();
                session.run(&[]).unwrap();
                *best = best.min(start.elapsed().as_secs_f64() / *tokens as f64);
            }
        }
        for (tokens, _, best) in sessions {
            let rule = if delta { "delta rule" } else { "without correction" };
            println!("{rule}, {tokens} tokens at a time: {:.1} µs a token", best * 1e6);
        }
    }
}
