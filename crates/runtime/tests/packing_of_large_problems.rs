//! Problems with more items than branch and bound can take as a whole, whose optimum is known by construction.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_runtime::memory::packing::{Effort, PackingItem, PackingProblem, Strategy, check, pack};

const HEIGHT: u64 = 1 << 24;

/// Cuts rectangles, at random places, until there are `count`.
fn cut(rng: &mut Rng, rectangles: &mut Vec<PackingItem>, count: usize) {
    while rectangles.len() < count {
        let at = rng.below(rectangles.len());
        let whole = rectangles[at];
        if rng.chance(0.5) && whole.end - whole.start > 1 {
            let time = whole.start + rng.range(1, (whole.end - whole.start - 1) as usize) as u32;
            rectangles[at].end = time;
            rectangles.push(PackingItem { start: time, ..whole });
        } else if whole.size > 1 {
            let size = rng.range(1, whole.size as usize - 1) as u64;
            rectangles[at].size = size;
            rectangles.push(PackingItem { size: whole.size - size, ..whole });
        }
    }
}

/// A rectangle of [`HEIGHT`] bytes that is cut into `tight` items during a short time, and into small ones before and
/// after it, `count` in all; two of five small ones are left out. So the optimum is the height, and the packing is tight only there.
fn tight_for_a_short_time(seed: u64, count: usize, tight: usize) -> PackingProblem {
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let (last, from, to) = (100_000, 49_000, 51_000);
    let mut items = vec![PackingItem { size: HEIGHT, start: from, end: to }];
    cut(&mut rng, &mut items, tight);
    // Items at the edges of that time are prolonged; above and below them remain free rectangles.
    let mut free = Vec::new();
    for item in &mut items {
        if item.start == from {
            item.start = rng.range(1, from as usize) as u32;
            free.push(PackingItem { size: item.size, start: 0, end: item.start });
        }
        if item.end == to {
            item.end = rng.range(to as usize, last as usize - 1) as u32;
            free.push(PackingItem { size: item.size, start: item.end, end: last });
        }
    }
    let mut at = 0;
    while let Some(whole) = free.get(at).copied() {
        if whole.size > HEIGHT / 100 {
            free[at].size = whole.size / 2;
            free.push(PackingItem { size: whole.size - whole.size / 2, ..whole });
        } else {
            at += 1;
        }
    }
    cut(&mut rng, &mut free, count - tight);
    free.retain(|_| rng.chance(0.6));
    items.extend(free);
    for index in (1..items.len()).rev() {
        items.swap(index, rng.below(index + 1));
    }
    PackingProblem::new(items)
}

#[test]
fn problems_that_are_tight_for_a_short_time_are_packed_near_their_optimum() {
    for seed in 1..=2 {
        let problem = tight_for_a_short_time(seed, 25_000, 300);
        let fast = pack(&problem, Effort::Fast).unwrap();
        assert!(fast.ratio() > 1.05, "greedy orders do badly: {}", fast.ratio());
        let steps = 50_000_000;
        let packing = pack(&problem, Effort::Search { seed: 1, steps }).unwrap();
        check(&problem, &packing).unwrap();
        assert_eq!(packing.lower_bound, HEIGHT);
        assert!(packing.ratio() <= 1.001, "{}", packing.ratio());
        assert_eq!(packing.strategy, Strategy::Core);
        assert!(packing.steps <= steps, "{} steps", packing.steps);
    }
}

#[test]
fn more_steps_never_give_a_worse_packing_of_a_large_problem() {
    let problem = tight_for_a_short_time(4, 4000, 60);
    let mut peak = pack(&problem, Effort::Fast).unwrap().peak;
    for steps in [0, 1, 1000, 300_000, 3_000_000] {
        let effort = Effort::Search { seed: 7, steps };
        let packing = pack(&problem, effort).unwrap();
        check(&problem, &packing).unwrap();
        assert!(packing.peak <= peak, "{steps} steps: {} instead of {peak}", packing.peak);
        assert_eq!(packing, pack(&problem, effort).unwrap(), "the same answer again");
        peak = packing.peak;
    }
    assert_eq!(peak, HEIGHT);
}

#[test]
fn an_exact_search_of_a_large_problem_ends_within_the_capacity() {
    let problem = tight_for_a_short_time(4, 4000, 60);
    let capacity = HEIGHT + HEIGHT / 50;
    let exact = |capacity| pack(&problem, Effort::Exact { capacity, steps: 20_000_000 }).unwrap();
    let packing = exact(Some(capacity));
    check(&problem, &packing).unwrap();
    assert!(packing.peak <= capacity, "{} of {capacity}", packing.peak);
    let optimal = exact(None);
    assert_eq!((optimal.peak, optimal.proved_optimal), (HEIGHT, true));
    assert!(packing.steps <= optimal.steps);
}

/// Storages that live across the peak, as many as make more conflicts than are listed, and short-lived ones of other
/// sizes between their starts, which leave holes for best fit in time order.
#[test]
fn a_problem_with_too_many_conflicts_to_list_is_packed_from_its_peak() {
    let mut rng = Rng::new(5);
    let count = 11_700;
    let mut items = Vec::new();
    for index in 0..count {
        let start = 2 * index;
        items.push(PackingItem { size: rng.range(1, 1000) as u64, start, end: 6 * count - start });
        let short = PackingItem { size: rng.range(1, 2000) as u64, start, end: start + 3 };
        items.extend((index + 50 < count).then_some(short));
    }
    let problem = PackingProblem::new(items);
    let fast = pack(&problem, Effort::Fast).unwrap();
    assert_eq!(fast.strategy, Strategy::TimeOrder);
    assert!(fast.peak > fast.lower_bound);
    let packing = pack(&problem, Effort::Search { seed: 0, steps: 50_000_000 }).unwrap();
    check(&problem, &packing).unwrap();
    assert_eq!((packing.peak, packing.strategy), (packing.lower_bound, Strategy::FromPeak));
}
