//! How long a model takes to open: `cargo run --release -p quadriga-llm --example open MODEL.gguf`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "an example")]

use std::time::Instant;

fn main() {
    let path = std::env::args().nth(1).expect("the path of a model");
    let mut times: Vec<_> = (0..15)
        .map(|_| {
            let started = Instant::now();
            let model = quadriga_llm::Model::open(&path).unwrap();
            let opened = started.elapsed();
            drop(model);
            opened
        })
        .collect();
    times.sort();
    println!("fastest {:?}, median {:?}", times[0], times[times.len() / 2]);
}
