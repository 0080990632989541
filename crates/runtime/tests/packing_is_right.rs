//! The properties of every packing, at every effort: valid, at or above the lower bound, never above best fit's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/best_fit.rs"]
mod best_fit;

use quadriga_conformance::Rng;
use quadriga_runtime::memory::packing::{
    Effort, PackedOffset, Packer, Packing, PackingError, PackingItem, PackingProblem, PackingViolation,
    Strategy, check, pack,
};

fn random_problem(rng: &mut Rng, most: usize) -> PackingProblem {
    let count = rng.range(0, most);
    let span = [4, 30, 1000, 4_000_000_000][rng.below(4)];
    let largest = [4, 100, 1 << 40][rng.below(3)];
    let items = (0..count).map(|_| {
        let start = rng.below(span);
        let end =
            if rng.chance(0.8) { start + 1 + rng.below(span / 4 + 1) } else { rng.range(start + 1, span) };
        let size = if rng.chance(0.05) { 0 } else { rng.below(largest) as u64 };
        PackingItem { size, start: start as u32, end: end.min(u32::MAX as usize) as u32 }
    });
    let items: Vec<_> = items.collect();
    let alignment = [1, 8, 32, 48][rng.below(4)];
    let max_chunk = rng.chance(0.5).then(|| rng.range(1, 4 * largest) as u64);
    PackingProblem { items, alignment, max_chunk }
}

/// The high-water mark of ggml's allocator, which goes through time once.
fn free_list_peak(problem: &PackingProblem) -> u64 {
    let items: Vec<_> = problem.items.iter().map(|item| (item.size, item.start, item.end)).collect();
    best_fit::best_fit_peak(&items, problem.alignment)
}

#[test]
fn packings_of_random_problems_are_valid_and_never_worse_than_best_fit() {
    let mut packer = Packer::default();
    for seed in 0..300 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let most = if seed % 50 == 0 { 200 } else { 30 };
        let mut problem = random_problem(&mut rng, most);
        let mut peak = u64::MAX;
        for effort in [
            Effort::Fast,
            Effort::Search { seed, steps: 3000 },
            Effort::Exact { capacity: None, steps: 3000 },
        ] {
            let packing = packer.pack(&problem, effort).unwrap();
            assert_eq!(check(&problem, packing), Ok(()));
            assert!(packing.peak >= packing.lower_bound);
            assert!(packing.peak > packing.lower_bound || packing.proved_optimal);
            if effort == Effort::Fast {
                peak = packing.peak;
            }
            assert!(packing.peak <= peak, "more effort never gives a worse peak");
            assert_eq!(*packing, pack(&problem, effort).unwrap(), "the same answer from a new packer");
        }
        problem.max_chunk = None;
        let packing = packer.pack(&problem, Effort::Fast).unwrap();
        assert!(packing.peak <= free_list_peak(&problem));
    }
}

#[test]
fn items_that_are_always_live_add_exactly_their_bytes() {
    let mut reached = 0;
    for seed in 1000..1200 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut problem = PackingProblem { max_chunk: None, ..random_problem(&mut rng, 40) };
        let alone = pack(&problem, Effort::Fast).unwrap();
        let mut bytes = 0;
        for _ in 0..rng.range(1, 6) {
            let item = PackingItem { size: rng.below(1 << 20) as u64, start: 0, end: u32::MAX };
            bytes += item.size.next_multiple_of(problem.alignment);
            problem.items.insert(rng.below(problem.items.len() + 1), item);
        }
        let both = pack(&problem, Effort::Fast).unwrap();
        assert_eq!(check(&problem, &both), Ok(()));
        assert_eq!(both.lower_bound, alone.lower_bound + bytes);
        if alone.strategy == Strategy::FromPeak && alone.proved_optimal {
            assert_eq!(both.peak, alone.peak + bytes);
            reached += 1;
        }
        // With a chunk limit they may not fit into the first chunk.
        problem.max_chunk = Some(rng.range(1, 2 * both.peak as usize + 2) as u64);
        assert_eq!(check(&problem, &pack(&problem, Effort::Fast).unwrap()), Ok(()));
    }
    assert!(reached > 50, "{reached}");
}

#[test]
fn empty_problems_and_zero_sizes_can_be_packed() {
    let empty = pack(&PackingProblem::new(Vec::new()), Effort::Fast).unwrap();
    assert_eq!((empty.peak, empty.lower_bound, empty.chunks.len(), empty.proved_optimal), (0, 0, 1, true));
    let problem = PackingProblem {
        max_chunk: Some(0),
        ..PackingProblem::new(vec![PackingItem { size: 0, start: 0, end: 1 }; 3])
    };
    let packing = pack(&problem, Effort::Exact { capacity: None, steps: 10 }).unwrap();
    assert_eq!((packing.peak, packing.placements.len()), (0, 3));
    assert_eq!(check(&problem, &packing), Ok(()));
}

#[test]
fn invalid_problems_are_errors_that_name_the_item() {
    let refuse = |problem: PackingProblem| pack(&problem, Effort::Fast).unwrap_err();
    let good = PackingItem { size: 8, start: 0, end: 1 };
    let huge = PackingItem { size: u64::MAX, start: 0, end: 1 };
    assert_eq!(
        refuse(PackingProblem { alignment: 0, ..PackingProblem::new(vec![]) }),
        PackingError::Alignment
    );
    assert_eq!(
        refuse(PackingProblem::new(vec![good, PackingItem { size: 1, start: 7, end: 7 }])),
        PackingError::EmptyLifetime { item: 1, start: 7, end: 7 }
    );
    for alignment in [1, 32] {
        assert_eq!(
            refuse(PackingProblem { alignment, ..PackingProblem::new(vec![good, huge]) }),
            PackingError::TooLarge { item: 1, size: u64::MAX }
        );
    }
    let half = PackingItem { size: 1 << 60, start: 0, end: 1 };
    assert!(pack(&PackingProblem::new(vec![half, half]), Effort::Fast).is_ok());
    assert_eq!(
        refuse(PackingProblem::new(vec![half, half, good])),
        PackingError::TooLarge { item: 2, size: 8 },
        "even if the items are not live together"
    );
}

#[test]
fn chunks_stay_within_the_limit_and_larger_items_get_their_own() {
    let items = vec![
        PackingItem { size: 16, start: 0, end: 2 },
        PackingItem { size: 8, start: 0, end: 2 },
        PackingItem { size: 24, start: 1, end: 3 },
    ];
    let problem = PackingProblem { items, alignment: 8, max_chunk: Some(32) };
    let packing = pack(&problem, Effort::Fast).unwrap();
    assert_eq!((packing.peak, packing.chunks.len(), packing.proved_optimal), (48, 2, true));

    let items = vec![PackingItem { size: 24, start: 0, end: 2 }, PackingItem { size: 16, start: 1, end: 3 }];
    let packing = pack(&PackingProblem { items, alignment: 8, max_chunk: Some(16) }, Effort::Fast).unwrap();
    assert_eq!((packing.peak, packing.chunks), (40, vec![24, 16]));
}

/// One corrupted packing for each kind of violation.
#[test]
fn corrupted_packings_are_rejected() {
    let items = vec![
        PackingItem { size: 8, start: 0, end: 4 },
        PackingItem { size: 16, start: 1, end: 3 },
        PackingItem { size: 8, start: 3, end: 6 },
        PackingItem { size: 0, start: 0, end: 9 },
    ];
    let problem = PackingProblem { items, alignment: 8, max_chunk: Some(16) };
    let place = |chunk, offset| PackedOffset { chunk, offset };
    let valid = Packing {
        placements: vec![place(0, 0), place(1, 0), place(1, 8), place(0, 0)],
        chunks: vec![8, 16],
        peak: 24,
        ..Packing::default()
    };
    assert_eq!(check(&problem, &valid), Ok(()));
    let corrupt = |change: &dyn Fn(&mut Packing)| {
        let mut packing = valid.clone();
        change(&mut packing);
        check(&problem, &packing).unwrap_err()
    };
    assert_eq!(corrupt(&|p| p.placements.truncate(3)), PackingViolation::Count { items: 4, placements: 3 });
    assert_eq!(corrupt(&|p| p.peak = 16), PackingViolation::WrongPeak { peak: 16, sum: 24 });
    assert_eq!(
        corrupt(&|p| p.placements[2] = place(2, 0)),
        PackingViolation::NoSuchChunk { item: 2, chunk: 2, chunks: 2 }
    );
    assert_eq!(
        corrupt(&|p| p.placements[2] = place(1, 4)),
        PackingViolation::Misaligned { item: 2, offset: 4, alignment: 8 }
    );
    assert_eq!(
        corrupt(&|p| p.placements[2] = place(1, 16)),
        PackingViolation::OutOfBounds { item: 2, offset: 16, size: 16 }
    );
    assert_eq!(
        corrupt(&|p| p.placements[2] = place(1, u64::MAX - 7)),
        PackingViolation::OutOfBounds { item: 2, offset: u64::MAX - 7, size: 16 }
    );
    assert_eq!(
        corrupt(&|p| p.placements[2] = place(0, 0)),
        PackingViolation::Overlap { first: 0, second: 2, time: 3 }
    );
    assert_eq!(
        corrupt(&|p| {
            p.placements[0] = place(1, 16);
            p.chunks[1] = 24;
            p.peak = 32;
        }),
        PackingViolation::ChunkTooLarge { chunk: 1, size: 24, limit: 16 }
    );
}

/// After moving one item of a packing, the checker finds a violation if and only if two items overlap.
#[test]
fn the_checker_agrees_with_a_comparison_of_all_pairs() {
    for seed in 0..2000 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut problem = random_problem(&mut rng, 12);
        problem.alignment = 1;
        problem.max_chunk = None;
        let mut packing = pack(&problem, Effort::Fast).unwrap();
        if problem.items.is_empty() {
            continue;
        }
        let moved = rng.below(problem.items.len());
        packing.placements[moved].offset =
            rng.below((packing.peak - problem.items[moved].size + 1) as usize) as u64;
        let apart = |a: usize, b: usize| {
            let (first, second) = (problem.items[a], problem.items[b]);
            let (low, high) = (packing.placements[a].offset, packing.placements[b].offset);
            let empty = first.size == 0 || second.size == 0;
            let in_time = first.end <= second.start || second.end <= first.start;
            empty || in_time || low + first.size <= high || high + second.size <= low
        };
        let valid = (0..problem.items.len()).all(|a| (0..a).all(|b| apart(a, b)));
        assert_eq!(check(&problem, &packing).is_ok(), valid);
    }
}
