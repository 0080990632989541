//! Packings are the recorded ones. The other tests judge a packing; these notice a change of the heuristics that still
//! packs validly, but in another order, with other steps or to a higher peak. Such a change is a decision: record the new
//! sums if they are better.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_runtime::memory::packing::{Effort, Packer, PackingItem, PackingProblem};

/// What is recorded of some packings: the sum of their peaks, of their steps, and a hash of all placements.
#[derive(Default, PartialEq, Eq, Debug)]
struct Recorded {
    peaks: u64,
    steps: u64,
    placements: u64,
}

impl Recorded {
    fn new(peaks: u64, steps: u64, placements: u64) -> Recorded {
        Recorded { peaks, steps, placements }
    }
}

/// Packs every problem with every effort.
fn pack_all(problems: impl Iterator<Item = PackingProblem>, efforts: &[Effort]) -> Recorded {
    let mut packer = Packer::default();
    let mut recorded = Recorded::new(0, 0, 0xcbf2_9ce4_8422_2325);
    for problem in problems {
        for effort in efforts {
            let packing = packer.pack(&problem, *effort).unwrap();
            recorded.peaks += packing.peak;
            recorded.steps += packing.steps;
            for placed in &packing.placements {
                for word in [u64::from(placed.chunk), placed.offset] {
                    // FNV-1a over words.
                    recorded.placements = (recorded.placements ^ word).wrapping_mul(0x100_0000_01b3);
                }
            }
        }
    }
    recorded
}

/// Items of random sizes and lifetimes.
fn random_problem(seed: u64, count: usize, chunked: bool) -> PackingProblem {
    let mut rng = Rng::new(seed);
    let span = [6, 40, 1000][rng.below(3)];
    let items = (0..count).map(|_| {
        let start = rng.below(span);
        let end = start + 1 + rng.below(span / 3 + 1);
        PackingItem { size: rng.range(1, 5000) as u64, start: start as u32, end: end as u32 }
    });
    let items: Vec<PackingItem> = items.collect();
    let max_chunk = chunked.then(|| rng.range(6000, 30_000) as u64);
    PackingProblem { items, alignment: [1, 32, 48][rng.below(3)], max_chunk }
}

/// A rectangle that is cut into `count` ones at random: it can be packed without a gap.
fn tiling(seed: u64, count: usize) -> PackingProblem {
    let mut rng = Rng::new(seed);
    let mut items = vec![PackingItem { size: 1 << 16, start: 0, end: 1000 }];
    while items.len() < count {
        let at = rng.below(items.len());
        let whole = items[at];
        if rng.chance(0.5) && whole.end - whole.start > 1 {
            let time = whole.start + rng.range(1, (whole.end - whole.start - 1) as usize) as u32;
            items[at].end = time;
            items.push(PackingItem { start: time, ..whole });
        } else if whole.size > 1 {
            let size = rng.range(1, whole.size as usize - 1) as u64;
            items[at].size = size;
            items.push(PackingItem { size: whole.size - size, ..whole });
        }
    }
    PackingProblem::new(items)
}

const FAST: Effort = Effort::Fast;

fn search(steps: u64) -> Effort {
    Effort::Search { seed: 3, steps }
}

fn exact(steps: u64) -> Effort {
    Effort::Exact { capacity: None, steps }
}

#[test]
fn random_problems() {
    let small = pack_all(
        (0..60).map(|seed| random_problem(seed, 5 + seed as usize % 25, false)),
        &[FAST, search(3000), exact(3000)],
    );
    assert_eq!(small, Recorded::new(2_831_325, 0, 0x4d6b_7fc2_ddc7_a365));
    let large = pack_all((60..66).map(|seed| random_problem(seed, 400, false)), &[FAST, search(20_000)]);
    assert_eq!(large, Recorded::new(3_912_032, 0, 0x32e3_9b55_e36b_e8e5));
}

#[test]
fn problems_in_several_chunks() {
    let small = pack_all(
        (0..40).map(|seed| random_problem(seed, 5 + seed as usize % 30, true)),
        &[FAST, search(3000), exact(3000)],
    );
    assert_eq!(small, Recorded::new(1_935_351, 1_873_410, 0xd56e_6ab4_b3c1_ff4f));
    let large = pack_all((60..64).map(|seed| random_problem(seed, 300, true)), &[FAST, search(20_000)]);
    assert_eq!(large, Recorded::new(2_007_100, 1_337_982, 0x25c1_694b_e069_368d));
}

#[test]
fn tilings() {
    let tilings = pack_all(
        (0..20).map(|seed| tiling(seed, 8 + 2 * seed as usize)),
        &[FAST, search(50_000), exact(50_000)],
    );
    assert_eq!(tilings, Recorded::new(3_932_256, 255, 0x6a3f_1fd5_9c7f_5798));
}

#[test]
fn problems_larger_than_a_core() {
    let large = pack_all((0..2).map(|seed| tiling(seed, 1500)), &[FAST, search(400_000), exact(400_000)]);
    assert_eq!(large, Recorded::new(450_954, 535_103, 0xb520_9e9f_1b0b_4696));
}
