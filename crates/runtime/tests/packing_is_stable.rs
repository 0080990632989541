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

/// The same live bytes at all times: items that end are replaced by others of the same total size. Greedy orders rarely
/// reach that bound, and for some problems nothing does.
fn constant_load(seed: u64, load: u64, times: u32) -> PackingProblem {
    fn add(rng: &mut Rng, mut sum: u64, start: u32, end: u32, live: &mut Vec<PackingItem>) {
        while sum > 0 {
            let size = rng.range(1, sum.min(9) as usize) as u64;
            live.push(PackingItem { size, start, end });
            sum -= size;
        }
    }
    let mut rng = Rng::new(seed);
    let (mut items, mut live) = (Vec::new(), Vec::new());
    add(&mut rng, load, 0, times + 1, &mut live);
    for time in 1..=times {
        let mut sum = 0;
        for _ in 0..3 {
            let index = rng.below(live.len());
            if live.len() > 1 && live[index].start < time {
                let ended = live.swap_remove(index);
                sum += ended.size;
                items.push(PackingItem { end: time, ..ended });
            }
        }
        add(&mut rng, sum, time, times + 1, &mut live);
    }
    items.extend(live);
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
    let problems = (0..30).map(|seed| random_problem(seed, 5 + seed as usize % 25, false));
    assert_eq!(
        pack_all(problems, &[FAST, search(1000), exact(1000)]),
        Recorded::new(1_362_108, 0, 0x41f0_bd35_f409_8815)
    );
    let large = (60..63).map(|seed| random_problem(seed, 400, false));
    assert_eq!(pack_all(large, &[FAST, search(10_000)]), Recorded::new(2_165_184, 0, 0x1826_27b7_2e3a_e565));
}

#[test]
fn problems_in_several_chunks() {
    let problems = (0..16).map(|seed| random_problem(seed, 5 + seed as usize % 30, true));
    assert_eq!(
        pack_all(problems, &[FAST, search(500), exact(500)]),
        Recorded::new(711_108, 283_254, 0xad10_1af8_29dc_eec3)
    );
    let large = (60..62).map(|seed| random_problem(seed, 200, true));
    assert_eq!(
        pack_all(large, &[FAST, search(3000)]),
        Recorded::new(736_576, 434_170, 0x38d8_24d2_5853_da95)
    );
}

#[test]
fn tilings() {
    let problems = (0..20).map(|seed| tiling(seed, 8 + 2 * seed as usize));
    assert_eq!(
        pack_all(problems, &[FAST, search(20_000), exact(20_000)]),
        Recorded::new(3_932_256, 255, 0x6a3f_1fd5_9c7f_5798)
    );
}

#[test]
fn constant_loads() {
    let problems = (0..40).map(|seed| constant_load(seed, 8 + seed, 4 + seed as u32 / 4));
    assert_eq!(
        pack_all(problems, &[FAST, search(2000), exact(5000)]),
        Recorded::new(3_615, 0, 0xecfb_b20e_0ec6_6d0a)
    );
}

#[test]
fn problems_larger_than_a_core() {
    let problems = (0..2).map(|seed| tiling(seed, 1500));
    assert_eq!(
        pack_all(problems, &[FAST, search(100_000), exact(100_000)]),
        Recorded::new(450_954, 0, 0xb520_9e9f_1b0b_4696)
    );
}
