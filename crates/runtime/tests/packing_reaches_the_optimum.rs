//! How good packings are: at the optimum on all problems small enough to try everything, at the lower bound on the
//! graphs that matter.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_runtime::memory::packing::{
    Effort, Packer, PackingItem, PackingProblem, check, pack, parse_csv,
};
use std::path::PathBuf;

/// The best peak there is: every order of placing, each item at its lowest place. Some order is that of the offsets in
/// a best packing, and no item of it ends up higher than it is there.
fn optimum(items: &[PackingItem]) -> u64 {
    fn place(
        items: &[PackingItem],
        placed: &mut Vec<(PackingItem, u64)>,
        left: &mut Vec<usize>,
        peak: u64,
        least: u64,
        best: &mut u64,
    ) {
        if peak >= *best || *best == least {
            return;
        }
        if left.is_empty() {
            *best = peak;
            return;
        }
        for turn in 0..left.len() {
            let index = left.swap_remove(turn);
            let item = items[index];
            let meets = |other: &PackingItem| item.start < other.end && other.start < item.end;
            let tops =
                placed.iter().filter(|(other, _)| meets(other)).map(|(other, offset)| offset + other.size);
            let fits = |offset: u64| {
                placed.iter().all(|(other, at)| {
                    !meets(other) || offset + item.size <= *at || at + other.size <= offset
                })
            };
            let offset = tops.chain([0]).filter(|&offset| fits(offset)).min().unwrap();
            placed.push((item, offset));
            place(items, placed, left, peak.max(offset + item.size), least, best);
            placed.pop();
            left.push(index);
            let last = left.len() - 1;
            left.swap(turn, last);
        }
    }
    let alive = |time: u32| items.iter().filter(move |item| item.start <= time && time < item.end);
    let least = items.iter().map(|item| alive(item.start).map(|item| item.size).sum()).max().unwrap_or(0);
    let mut best = u64::MAX;
    place(items, &mut Vec::new(), &mut (0..items.len()).collect(), 0, least, &mut best);
    best
}

fn small_problem(rng: &mut Rng) -> PackingProblem {
    let (count, span, largest) = (rng.range(1, 8), rng.range(2, 8), rng.range(2, 9));
    let items = (0..count).map(|_| {
        let start = rng.below(span);
        PackingItem {
            size: rng.range(1, largest) as u64,
            start: start as u32,
            end: rng.range(start + 1, span) as u32,
        }
    });
    PackingProblem::new(items.collect())
}

/// The same number of bytes alive at all times: what ends is replaced by others of the same sum. Sometimes there is no
/// packing at the lower bound.
fn tight_problem(rng: &mut Rng) -> PackingProblem {
    fn add(rng: &mut Rng, mut sum: u64, start: u32, alive: &mut Vec<PackingItem>) {
        while sum > 0 {
            let size = rng.range(1, sum.min(4) as usize) as u64;
            alive.push(PackingItem { size, start, end: 9 });
            sum -= size;
        }
    }
    let (mut items, mut alive) = (Vec::new(), Vec::new());
    add(rng, 7, 0, &mut alive);
    for time in 1..=4 {
        let mut sum = 0;
        for _ in 0..2 {
            let index = rng.below(alive.len());
            if alive[index].start < time {
                let ended = alive.swap_remove(index);
                sum += ended.size;
                items.push(PackingItem { end: time, ..ended });
            }
        }
        add(rng, sum, time, &mut alive);
    }
    items.extend(alive);
    PackingProblem::new(items)
}

#[test]
fn small_problems_are_packed_as_well_as_trying_everything_does() {
    let mut packer = Packer::default();
    for seed in 0..1500 {
        println!("seed {seed}");
        let problem = small_problem(&mut Rng::new(seed));
        let best = optimum(&problem.items);
        let packing = packer.pack(&problem, Effort::Exact { capacity: None, steps: 20_000 }).unwrap();
        assert_eq!((packing.peak, packing.proved_optimal), (best, true));
        let packing = packer.pack(&problem, Effort::Search { seed, steps: 100_000 }).unwrap();
        assert_eq!(packing.peak, best);
    }
}

#[test]
fn where_the_lower_bound_cannot_be_reached_that_is_proved() {
    let mut packer = Packer::default();
    let mut hard = 0;
    for seed in 0..20_000 {
        let problem = tight_problem(&mut Rng::new(seed));
        let packing = packer.pack(&problem, Effort::Exact { capacity: None, steps: 20_000 }).unwrap();
        assert!(packing.proved_optimal, "seed {seed}");
        if packing.peak > packing.lower_bound && problem.items.len() <= 10 {
            println!("seed {seed}");
            let peak = packing.peak;
            assert_eq!(peak, optimum(&problem.items));
            let below = Effort::Exact { capacity: Some(peak - 1), steps: 20_000 };
            let packing = packer.pack(&problem, below).unwrap();
            assert_eq!(
                (packing.peak >= peak, packing.proved_bound),
                (true, peak),
                "nothing below is possible"
            );
            hard += 1;
        }
    }
    assert!(hard >= 1, "some of the problems are hard: {hard}");
}

/// Tilings: rectangles cut into rectangles. The lower bound is the optimum, and hard to find by greed.
#[test]
fn random_tilings_are_packed_without_a_gap() {
    let mut packer = Packer::default();
    for seed in 0..60 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut pieces = vec![(0_u32, 1000_u32, 5000_u64)];
        for _ in 0..rng.range(5, 60) {
            let at = rng.below(pieces.len());
            let (start, end, size) = pieces[at];
            if rng.chance(0.5) && end - start > 1 {
                let cut = start + rng.range(1, (end - start - 1) as usize) as u32;
                pieces[at] = (start, cut, size);
                pieces.push((cut, end, size));
            } else if size > 1 {
                let cut = rng.range(1, size as usize - 1) as u64;
                pieces[at] = (start, end, cut);
                pieces.push((start, end, size - cut));
            }
        }
        let items = pieces.iter().map(|&(start, end, size)| PackingItem { size, start, end }).collect();
        let packing =
            packer.pack(&PackingProblem::new(items), Effort::Search { seed, steps: 20_000_000 }).unwrap();
        assert_eq!(packing.peak, 5000);
    }
}

fn instances() -> Vec<(String, PackingProblem)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/packing");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        PackingProblem::new(parse_csv(&text).unwrap())
    };
    paths.iter().map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), read(path))).collect()
}

#[test]
fn model_graphs_are_packed_at_the_lower_bound_without_search() {
    let instances = instances();
    assert_eq!(instances.len(), 22);
    for (name, problem) in instances.iter().filter(|(name, _)| !name.starts_with("tiling")) {
        let packing = pack(problem, Effort::Fast).unwrap();
        check(problem, &packing).unwrap();
        assert_eq!(packing.peak, packing.lower_bound, "{name}");
        let aligned = PackingProblem { alignment: 256, ..problem.clone() };
        let packing = pack(&aligned, Effort::Fast).unwrap();
        assert_eq!(packing.peak, packing.lower_bound, "{name}, aligned");
    }
}

#[test]
fn large_tilings_are_packed_without_a_gap() {
    for (name, problem) in instances().iter().filter(|(name, _)| name.starts_with("tiling")) {
        let packing = pack(problem, Effort::Search { seed: 0, steps: 50_000_000 }).unwrap();
        check(problem, &packing).unwrap();
        assert_eq!((packing.peak, packing.proved_optimal), (1_048_576, true), "{name}");
    }
}

/// Where a chunk can take the largest tensor and a little more, the limit costs next to nothing. At exactly the largest
/// tensor it can cost more, whatever one does. In `llama7b.decode.c4k.fa` the logits are the largest: one chunk has their
/// 128,000 bytes. The 16,384 bytes of an input that is alive with them must be in another chunk, for all of the run. Of
/// what else is alive at the peak of a layer, 112,768 bytes at most fit into the first chunk together, which leaves
/// 44,032 + 16,384 for others: 188,416 bytes are the least, 1.088 of what is alive at the peak. The same holds for
/// `llama7b.pp512.c4k.fa.out512`.
#[test]
fn model_graphs_in_chunks_need_hardly_more() {
    for (name, problem) in instances().iter().filter(|(name, _)| !name.starts_with("tiling")) {
        let largest = problem.items.iter().map(|item| item.size).max().unwrap();
        let tight = ["llama7b.decode.c4k.fa", "llama7b.pp512.c4k.fa.out512"].contains(&name.as_str());
        for (limit, ratio) in [
            (largest, if tight { 1.089 } else { 1.0 }),
            (largest + largest / 3, 1.02),
            (2 * largest, 1.02),
            (3 * largest, 1.02),
        ] {
            let problem = PackingProblem { max_chunk: Some(limit), ..problem.clone() };
            let packing = pack(&problem, Effort::Fast).unwrap();
            check(&problem, &packing).unwrap();
            assert!(packing.ratio() <= ratio, "{name} in chunks of {limit}: {}", packing.ratio());
        }
    }
}
