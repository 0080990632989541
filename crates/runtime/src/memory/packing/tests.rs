//! Tests of single strategies. The packer stops at the first strategy that reaches the lower bound, so that most problems
//! never get to the others; here each strategy is called by itself.
//!
//! Results are compared with slow versions where there are any. Where a heuristic decides, the steps and offsets are
//! recorded: a change that still packs validly, but searches in another order, is noticed. Such a change is a decision;
//! record the new numbers if they are better.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

use super::boundaries::ChunkBoundaries;
use super::conflicts::Conflicts;
use super::exact::{Exact, Feasibility};
use super::greedy::{Greedy, ORDERS, PlacementContext, UNPLACED, sort};
use super::offset_order::OffsetOrder;
use super::radix_sort::RadixSorter;
use super::timeline::{AlwaysLive, Timeline, TimelineItem};
use super::{Effort, Packer, PackingItem, PackingProblem, Strategy};
use quadriga_conformance::Rng;

/// A hash of everything that a test has seen.
struct Record(u64);

impl Record {
    fn new() -> Self {
        Record(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, words: impl IntoIterator<Item = u64>) {
        for word in words {
            // FNV-1a over words.
            self.0 = (self.0 ^ word).wrapping_mul(0x100_0000_01b3);
        }
    }
}

fn timeline_of(items: Vec<PackingItem>) -> Timeline {
    let mut timeline = Timeline::default();
    timeline.build(&PackingProblem::new(items), AlwaysLive::Included).unwrap();
    timeline
}

fn random_items(rng: &mut Rng, count: usize, span: usize, largest: usize, unit: u64) -> Vec<PackingItem> {
    let item = |_| {
        let start = rng.below(span) as u32;
        let end = start + 1 + rng.below(span / 2 + 1) as u32;
        PackingItem { size: rng.range(1, largest) as u64 * unit, start, end }
    };
    (0..count).map(item).collect()
}

/// The same live bytes at all times: items that end are replaced by others of the same sum. Greedy orders rarely reach
/// that bound, and for some problems nothing does.
fn constant_load(rng: &mut Rng, load: u64, times: u32, unit: u64) -> Vec<PackingItem> {
    fn add(rng: &mut Rng, mut sum: u64, start: u32, end: u32, live: &mut Vec<PackingItem>) {
        while sum > 0 {
            let size = rng.range(1, sum.min(9) as usize) as u64;
            live.push(PackingItem { size, start, end });
            sum -= size;
        }
    }
    let (mut items, mut live) = (Vec::new(), Vec::new());
    add(rng, load, 0, times + 1, &mut live);
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
        add(rng, sum, time, times + 1, &mut live);
    }
    items.extend(live);
    items.iter_mut().for_each(|item| item.size *= unit);
    items
}

fn live_together(a: &TimelineItem, b: &TimelineItem) -> bool {
    a.start < b.end && b.start < a.end
}

/// Whether an item at an offset overlaps no placed item and crosses no boundary.
fn is_free(
    timeline: &Timeline,
    boundaries: &ChunkBoundaries,
    offsets: &[u64],
    item: usize,
    offset: u64,
) -> bool {
    let span = timeline.items[item];
    let apart = |(other, at): (&TimelineItem, &u64)| {
        *at == UNPLACED
            || !live_together(&span, other)
            || offset + span.size <= *at
            || at + other.size <= offset
    };
    let others = timeline.items.iter().zip(offsets).enumerate().filter(|(index, _)| *index != item);
    boundaries.next(offset) >= offset + span.size && others.map(|(_, other)| other).all(apart)
}

#[test]
fn items_are_sorted_by_what_a_strategy_says() {
    for seed in 0..40 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        // Sizes beyond 2^30 tell durations of equal length apart.
        let unit = [1, 64, 1 << 29][rng.below(3)];
        let count = [5, 80, 700][rng.below(3)];
        let timeline = timeline_of(random_items(&mut rng, count, 60, 9, unit));
        let peak = timeline.live.iter().position(|live| *live == timeline.lower_bound).unwrap() as u32;
        for strategy in ORDERS {
            let key = |item: &TimelineItem| {
                let (size, duration) = (item.size as f64, f64::from(item.end - item.start));
                match strategy {
                    Strategy::FromPeak if item.start <= peak && peak < item.end => {
                        (timeline.largest as f64 + duration, 0.0)
                    }
                    Strategy::BySizeAndDuration => (size * duration.sqrt(), duration),
                    Strategy::ByArea => (size * duration, duration),
                    Strategy::ByDuration => (duration, (size / f64::from(1 << 30)).floor()),
                    _ => (size, duration),
                }
            };
            let mut expected: Vec<u32> = (0..timeline.items.len() as u32).collect();
            // A stable sort: equal ones stay in order of time.
            expected.sort_by(|a, b| {
                let (a, b) = (key(&timeline.items[*a as usize]), key(&timeline.items[*b as usize]));
                b.partial_cmp(&a).unwrap()
            });
            let mut order = Vec::new();
            sort(&timeline, strategy, &mut RadixSorter::default(), &mut order);
            assert_eq!(order, expected, "{strategy}");
        }
    }
}

#[test]
fn keys_with_common_low_bits_are_sorted_like_others() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let count = [1, 2, 60, 511, 512, 513, 1500][rng.below(7)];
        let (high_bits, low_bits) = (rng.below(52), rng.below(20));
        let (high_shift, low_shift) = (rng.below(65 - high_bits) as u32, rng.below(33 - low_bits) as u32);
        let (high_base, low_base) = (rng.next_u64(), rng.next_u64() as u32);
        let mut bits = |bits: usize| rng.next_u64() & ((1 << bits) - 1);
        let keys: Vec<(u64, u32, u32)> = (0..count)
            .map(|index| {
                let high = bits(high_bits).checked_shl(high_shift).unwrap_or(0) ^ high_base;
                let low = (bits(low_bits) as u32).checked_shl(low_shift).unwrap_or(0) ^ low_base;
                (high, low, index)
            })
            .collect();
        let mut expected = keys.clone();
        expected.sort_unstable();
        let mut order = Vec::new();
        RadixSorter::default().sort(keys.into_iter(), &mut order);
        assert_eq!(order, expected.iter().map(|key| key.2).collect::<Vec<_>>());
    }
}

#[test]
fn greedy_places_every_item_at_the_lowest_offset_that_is_free() {
    let mut record = Record::new();
    for seed in 0..60 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let timeline = timeline_of(random_items(&mut rng, 30, 12, 40, 4));
        let mut boundaries = ChunkBoundaries::default();
        // Limits around the largest items' sizes: some items may need a chunk of their own.
        let limit = rng.range(100, 400) as u64;
        match seed % 3 {
            0 => {}
            1 => boundaries.even(&timeline, limit, 4),
            _ => boundaries.fitted(&timeline, limit, 4, rng.range(80, 400) as u64),
        }
        let mut conflicts = Conflicts::default();
        assert!(conflicts.build(&timeline, usize::MAX));
        let context =
            PlacementContext { timeline: &timeline, conflicts: &conflicts, boundaries: &boundaries };
        let (mut order, mut offsets) = (Vec::new(), Vec::new());
        sort(&timeline, ORDERS[rng.below(5)], &mut RadixSorter::default(), &mut order);
        let mut greedy = Greedy::default();
        let peak = greedy.place(context, &order, u64::MAX, &mut offsets).unwrap();
        let mut expected = vec![UNPLACED; 30];
        boundaries.large().for_each(|(item, offset)| expected[item] = offset);
        for &item in &order {
            let item = item as usize;
            if expected[item] == UNPLACED {
                let lowest =
                    (0..).step_by(4).find(|at| is_free(&timeline, &boundaries, &expected, item, *at));
                expected[item] = lowest.unwrap();
            }
        }
        assert_eq!(offsets, expected);
        let tops = timeline.items.iter().zip(&offsets).map(|(item, offset)| item.size + offset);
        assert_eq!(peak, tops.max().unwrap());
        // A limit of the peak is kept; the first item that exceeds a lower one is named.
        let steps = greedy.steps;
        assert_eq!(greedy.place(context, &order, peak, &mut offsets), Ok(peak));
        assert_eq!(greedy.steps, 2 * steps);
        let above = order
            .iter()
            .position(|item| expected[*item as usize] + timeline.items[*item as usize].size > peak - 1);
        let large = boundaries.large().map(|(item, offset)| offset + timeline.items[item].size).max();
        if large.is_none_or(|large| large < peak) {
            assert_eq!(greedy.place(context, &order, peak - 1, &mut offsets), Err(above.unwrap()));
        }
        greedy.steps = 0;
        let repaired = greedy.repair(context, &mut order, timeline.lower_bound, 500, &mut offsets);
        record.add([steps, greedy.steps, repaired.unwrap_or(0)].into_iter().chain(offsets));
    }
    assert_eq!(record.0, 0xcef9_7d41_ecab_10a8, "recorded");
}

#[test]
fn branch_and_bound_visits_what_is_recorded() {
    let (mut exact, mut offsets, mut record) = (Exact::default(), Vec::new(), Record::new());
    let (mut feasible, mut infeasible) = (0, 0);
    for seed in 0..48 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let unit = [1, 12][rng.below(2)];
        let items = match seed % 2 {
            0 => constant_load(&mut rng, 8 + seed % 16, 4 + seed as u32 % 5, unit),
            _ => random_items(&mut rng, 14, 8, 9, unit),
        };
        let timeline = timeline_of(items);
        let mut boundaries = ChunkBoundaries::default();
        let limit = timeline.lower_bound / 2 + 2 * unit;
        match seed / 2 % 3 {
            0 => {}
            1 => boundaries.even(&timeline, limit, unit),
            _ => boundaries.fitted(&timeline, limit, unit, limit),
        }
        if !exact.read(&timeline, &boundaries) {
            assert!(boundaries.has_large());
            continue;
        }
        assert!(exact.unit() >= unit && timeline.items.iter().all(|item| item.size % exact.unit() == 0));
        for capacity in [timeline.lower_bound, timeline.lower_bound + 2 * unit, timeline.lower_bound * 5 / 4]
        {
            let mut found = Vec::new();
            for rule in 0..12 {
                let (result, spent) = exact.solve(capacity, 1500, rule, &mut offsets);
                record.add([spent]);
                if let Feasibility::Feasible(peak) = result {
                    assert!(peak <= capacity);
                    record.add(offsets.iter().copied().chain([peak]));
                    for item in 0..timeline.items.len() {
                        assert!(
                            is_free(&timeline, &boundaries, &offsets, item, offsets[item]),
                            "item {item}"
                        );
                    }
                }
                found.push(result);
            }
            let yes = found.iter().filter(|result| matches!(result, Feasibility::Feasible(_))).count();
            let no = found.iter().filter(|result| **result == Feasibility::Infeasible).count();
            assert!(yes == 0 || no == 0, "rules contradict each other: {found:?}");
            (feasible, infeasible) = (feasible + yes, infeasible + no);
        }
    }
    assert_eq!((feasible, infeasible, record.0), (1299, 12, 0x9054_c91d_afbb_f123), "recorded");
}

/// A packer with the timeline of some items, whose best packing is that of best fit in time order.
fn packer(items: Vec<PackingItem>, max_chunk: Option<u64>) -> Packer {
    let mut packer = Packer::default();
    packer.timeline = timeline_of(items);
    assert!(packer.conflicts.build(&packer.timeline, usize::MAX));
    packer.best.peak = u64::MAX;
    packer.best.proved_bound = packer.timeline.lower_bound;
    if let Some(limit) = max_chunk {
        packer.boundaries.even(&packer.timeline, limit, 1);
    } else {
        let peak = packer.time_order.place(&packer.timeline, &mut packer.trial);
        packer.keep(peak, Strategy::TimeOrder);
    }
    packer
}

#[test]
fn the_search_bisects_between_what_failed_and_what_was_found() {
    let mut record = Record::new();
    for seed in 0..30 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let unit = [1, 8][rng.below(2)];
        let items = match seed % 3 {
            0 => constant_load(&mut rng, 10 + seed, 5 + seed as u32 % 7, unit),
            _ => random_items(&mut rng, 24, 16, 30, unit),
        };
        let bound = timeline_of(items.clone()).lower_bound;
        let chunk = (seed % 3 == 2).then_some(bound * 2 / 3);
        let mut packer = packer(items, chunk);
        if chunk.is_some() {
            packer.try_orders(&[Strategy::FromPeak]);
        }
        let before = packer.best.peak;
        packer.search(20_000, seed);
        assert!(packer.best.peak <= before && packer.best.peak >= packer.best.proved_bound);
        assert!(chunk.is_some() || packer.best.steps <= 20_000);
        let best = &packer.best;
        record.add([best.peak, best.proved_bound, best.steps, best.strategy as u64]);
        record.add(packer.offsets.iter().copied());
    }
    assert_eq!(record.0, 0x9af6_3c70_32dc_0275, "recorded");
}

/// Items that are tight for a short time only, and more than branch and bound takes as a whole.
fn large(seed: u64, count: usize, tight: usize) -> Vec<PackingItem> {
    let mut rng = Rng::new(seed);
    let mut items = constant_load(&mut rng, 200, tight as u32, 64);
    let end = items.iter().map(|item| item.end).max().unwrap();
    for item in &mut items {
        (item.start, item.end) = (item.start + 5000, item.end + 5000);
        if item.start == 5000 {
            item.start -= rng.below(3000) as u32;
        }
        if item.end == end + 5000 {
            item.end += rng.below(3000) as u32;
        }
    }
    while items.len() < count {
        let start = if rng.chance(0.5) { rng.below(4500) } else { 5500 + rng.below(4500) } as u32;
        let end = start + 1 + rng.below(400) as u32;
        items.push(PackingItem { size: 1 + rng.below(60) as u64, start, end });
    }
    items
}

#[test]
fn a_large_problem_is_searched_from_its_core_as_recorded() {
    let mut record = Record::new();
    for (seed, steps) in [(0, 20_000), (1, 100_000), (2, 400_000), (3, 400_000)] {
        println!("seed {seed}");
        let mut packer = packer(large(seed, 2400, 12), None);
        let goal = packer.timeline.lower_bound;
        packer.search_large(goal, steps, seed);
        assert!(packer.best.steps <= steps);
        let best = &packer.best;
        record.add([best.peak, best.proved_bound, best.steps, best.strategy as u64]);
        record.add(packer.offsets.iter().copied());
        // Without listed conflicts the greedy orders are tried first.
        let mut unlisted = self::packer(large(seed, 2400, 12), None);
        assert!(!unlisted.conflicts.build(&unlisted.timeline, 10));
        unlisted.search(steps, seed);
        let best = &unlisted.best;
        record.add([best.peak, best.steps, best.strategy as u64]);
        record.add(unlisted.offsets.iter().copied());
    }
    // Repairs of greedy orders follow where conflicts are listed.
    let mut packer = packer(large(7, 2200, 10), None);
    packer.search(60_000, 7);
    record.add([packer.best.peak, packer.best.steps, packer.best.strategy as u64]);
    assert_eq!(record.0, 0xb4cc_ace6_61bb_c911, "recorded");
}

#[test]
fn blocks_of_placed_items_are_visited_as_recorded() {
    let mut record = Record::new();
    let (mut offset_order, mut sorter, mut order) =
        (OffsetOrder::default(), RadixSorter::default(), Vec::new());
    for seed in 0..4 {
        println!("seed {seed}");
        let timeline = timeline_of(random_items(&mut Rng::new(seed), 1200, 90, 50, 1));
        for strategy in ORDERS {
            sort(&timeline, strategy, &mut sorter, &mut order);
            let mut offsets = vec![UNPLACED; 1200];
            let mut steps = 100_000;
            let peak = offset_order.place(&timeline, &order, u64::MAX, &mut offsets, &mut steps);
            record.add([steps, peak.unwrap()]);
            let mut enough = 100_000 - steps;
            offsets.fill(UNPLACED);
            assert_eq!(offset_order.place(&timeline, &order, u64::MAX, &mut offsets, &mut enough), peak);
            assert_eq!(enough, 0);
        }
    }
    assert_eq!(record.0, 0x9d45_f337_85b5_2a11, "recorded");
}

#[test]
fn chunks_are_packed_with_a_fifth_of_the_steps_for_each_layout() {
    let mut record = Record::new();
    let mut packer = Packer::default();
    let mut hard = 0;
    for seed in 0..8 {
        println!("seed {seed}");
        let items = random_items(&mut Rng::new(seed), 16, 12, 40, 1);
        let bound = timeline_of(items.clone()).lower_bound;
        // One chunk would do, is just too small, or far too small.
        for limit in [bound + 100, bound, bound - 1, bound / 2, bound / 3] {
            let problem = PackingProblem { items: items.clone(), alignment: 1, max_chunk: Some(limit) };
            let steps = 20_003;
            let efforts =
                [Effort::Fast, Effort::Search { seed, steps }, Effort::Exact { capacity: None, steps }];
            for effort in efforts {
                let packing = packer.pack(&problem, effort).unwrap();
                record.add([packing.peak, packing.steps, packing.proved_bound, packing.strategy as u64]);
                record.add(packing.placements.iter().flat_map(|p| [u64::from(p.chunk), p.offset]));
                record.add(packing.chunks.iter().copied());
                assert!(packing.ratio() >= 1.0 && packing.ratio() < 2.0);
                hard += usize::from(packing.peak > bound);
            }
            // Problems in which chunks waste bytes take all steps: a few of them are enough.
            if hard > 6 {
                break;
            }
        }
    }
    assert!(hard > 0);
    assert_eq!(packer.pack(&PackingProblem::new(Vec::new()), Effort::Fast).unwrap().ratio(), 1.0);
    assert_eq!(record.0, 0xa155_d86c_bca6_3821, "recorded");
}
