//! Random graphs on the CPU, with planned memory, in-place results and fusion, against the oracle; and bit for bit against
//! one thread without fusion.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga_conformance::{RandomGraph, compare};
use quadriga_runtime::{Backend, Scheduler};

/// How many graphs a plain test run computes; the environment variable `QUADRIGA_GRAPHS` asks for more.
const GRAPHS: u64 = 1500;

#[test]
fn random_graphs_give_the_same_bits_with_any_threads_and_fusion_and_agree_with_the_oracle() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (first, count) = (number("QUADRIGA_SEED", 1u64), number("QUADRIGA_GRAPHS", GRAPHS));
    // On a busy machine, threads wait long for each other.
    let most = number("QUADRIGA_MAX_THREADS", 8) as usize;
    let scheduler = |fuse: bool, threads: usize| {
        let cpu = quadriga_cpu::Backend::builder().threads(threads).fuse(fuse).build().unwrap();
        Scheduler::new([Arc::new(cpu) as Arc<dyn Backend>])
    };
    let plain = scheduler(false, 1);
    let schedulers: Vec<(bool, usize, Scheduler)> =
        [(true, 1), (true, 2), (false, 2), (true, 3), (true, 4), (true, 5), (false, 6), (true, 7), (true, 8)]
            .into_iter()
            .filter(|(_, threads)| *threads <= most)
            .map(|(fuse, threads)| (fuse, threads, scheduler(fuse, threads)))
            .collect();
    println!("seeds {first} to {}", first + count - 1);
    for seed in first..first + count {
        let random = RandomGraph::new(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let expected = random.expected().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let reference = random.run(&plain).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        if let Err(difference) = compare(&expected, &reference) {
            panic!("seed {seed}, one thread without fusion: {difference}\n{}", random.graph);
        }
        // All settings for some graphs, one of them for each of the others.
        let all = seed % 8 == 0;
        for (index, (fuse, threads, scheduler)) in schedulers.iter().enumerate() {
            if !all && seed as usize / 8 % schedulers.len() != index {
                continue;
            }
            let what = || format!("seed {seed}, {threads} threads, fusion {fuse}");
            let found = random.run(scheduler).unwrap_or_else(|error| panic!("{}: {error}", what()));
            for ((name, found), reference) in random.outputs.iter().zip(&found).zip(&reference) {
                let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
                if let Some(index) = found.iter().zip(reference).position(differs) {
                    let (found, wanted) = (found[index], reference[index]);
                    let graph = &random.graph;
                    panic!("{}: {name}[{index}] is {found} instead of {wanted}\n{graph}", what());
                }
            }
        }
    }
}
