//! The free list against the original's rule, written down as plainly as possible.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_runtime::memory::{FreeList, FreeListError, Live, Region};

/// A sorted list of free blocks, searched from end to end (A1, A2, A3, A6). The last block reaches to the end of the
/// buffer, and stays in the list when nothing is left of it.
struct Plain {
    alignment: u64,
    free: Vec<(u64, u64)>,
    high_water: u64,
}

impl Plain {
    fn new(size: u64, alignment: u64) -> Self {
        Plain { alignment, free: vec![(0, size)], high_water: 0 }
    }

    fn allocate(&mut self, size: u64) -> Option<u64> {
        let size = size.next_multiple_of(self.alignment);
        let (last, others) = self.free.split_last()?;
        let mut best: Option<usize> = None;
        for (index, block) in others.iter().enumerate() {
            if block.1 >= size && best.is_none_or(|best| block.1 <= self.free[best].1) {
                best = Some(index);
            }
        }
        let best = best.or_else(|| (last.1 >= size).then_some(others.len()))?;
        let block = &mut self.free[best];
        let offset = block.0;
        *block = (block.0 + size, block.1 - size);
        if block.1 == 0 && best < self.free.len() - 1 {
            self.free.remove(best);
        }
        self.high_water = self.high_water.max(offset + size);
        Some(offset)
    }

    fn free(&mut self, offset: u64, size: u64) {
        self.free.push((offset, size));
        self.free.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for &(offset, size) in &self.free {
            match merged.last_mut() {
                Some(last) if last.0 + last.1 == offset => last.1 += size,
                _ => merged.push((offset, size)),
            }
        }
        self.free = merged;
    }
}

fn with_bytes(blocks: &[(u64, u64)]) -> Vec<(u64, u64)> {
    blocks.iter().copied().filter(|block| block.1 > 0).collect()
}

#[test]
fn takes_the_same_decisions_over_random_sequences() {
    for seed in 0..300 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let alignment = 1 << rng.below(6);
        let size = if rng.chance(0.5) { u64::MAX } else { rng.range(0, 4000) as u64 };
        let mut plain = Plain::new(size, alignment);
        let mut list = FreeList::new(0, size, alignment).unwrap().with_listing();
        let mut regions: Vec<Region> = Vec::new();
        for tag in 0..600 {
            if rng.chance(0.55) {
                let most = if rng.chance(0.5) { 20 } else { 300 };
                let wanted = rng.below(most) as u64;
                match (list.allocate(wanted, tag), plain.allocate(wanted)) {
                    (Ok(region), Some(offset)) => {
                        assert_eq!(region.offset, offset);
                        regions.push(region);
                    }
                    (Err(FreeListError::OutOfMemory { free, .. }), None) => {
                        assert_eq!(free, plain.free.iter().map(|block| block.1).sum::<u64>());
                    }
                    (ours, theirs) => panic!("{ours:?} but {theirs:?}"),
                }
            } else if !regions.is_empty() {
                let region = regions.swap_remove(rng.below(regions.len()));
                assert_eq!(list.free(region), Ok(true));
                if region.size > 0 {
                    plain.free(region.offset, region.size);
                }
            }
            assert_eq!(list.free_blocks(), with_bytes(&plain.free));
            assert_eq!(list.high_water(), plain.high_water);
            assert_eq!(list.used(), regions.iter().map(|region| region.size).sum::<u64>());
        }
        list.reset();
        assert_eq!(list.free_blocks(), with_bytes(&[(0, size)]));
        assert_eq!((list.high_water(), list.used()), (0, 0));
    }
}

#[test]
fn a1_the_last_block_is_the_last_resort() {
    let mut list = FreeList::measuring(1).unwrap();
    let regions: Vec<_> = (0..6).map(|tag| list.allocate(10, tag).unwrap()).collect();
    list.free(regions[1]).unwrap();
    list.free(regions[3]).unwrap();
    assert_eq!(list.allocate(10, 9).unwrap().offset, 30, "the highest of equal blocks");
    assert_eq!(list.allocate(11, 9).unwrap().offset, 60, "no hole is large enough");
    assert_eq!(list.allocate(4, 9).unwrap().offset, 10);
}

#[test]
fn a2_the_first_block_starts_at_the_aligned_base() {
    let mut list = FreeList::new(1000, 100, 32).unwrap();
    let region = list.allocate(5, 0).unwrap();
    assert_eq!((region.offset, region.size), (24, 32));
    assert_eq!(FreeList::new(0, 100, 0).unwrap_err(), FreeListError::Alignment(0));
    assert_eq!(FreeList::new(0, 100, 24).unwrap_err(), FreeListError::Alignment(24));
}

#[test]
fn a4_a_region_of_another_buffer_is_left_alone() {
    let mut first = FreeList::new(0, 64, 8).unwrap().for_buffer(1);
    let mut second = FreeList::new(0, 64, 8).unwrap().for_buffer(2);
    let region = first.allocate(8, 0).unwrap();
    second.allocate(8, 0).unwrap();
    assert_eq!(second.free(region), Ok(false));
    assert_eq!(second.used(), 8);
    assert_eq!(first.free(region), Ok(true));
    assert_eq!(first.free(region), Err(FreeListError::NotInUse { offset: 0, size: 8 }), "freed twice");
}

#[test]
fn a5_measuring_finds_the_size_with_which_the_same_requests_succeed() {
    for seed in 0..100 {
        println!("seed {seed}");
        let run = |list: &mut FreeList| {
            let mut rng = Rng::new(seed);
            let (mut regions, mut offsets) = (Vec::new(), Vec::new());
            for tag in 0..200 {
                if rng.chance(0.6) {
                    regions.push(list.allocate(rng.below(100) as u64, tag)?);
                    offsets.push(regions.last().map(|region| region.offset));
                } else if !regions.is_empty() {
                    list.free(regions.swap_remove(rng.below(regions.len())))?;
                }
            }
            Ok::<_, FreeListError>(offsets)
        };
        let mut measuring = FreeList::measuring(16).unwrap();
        let offsets = run(&mut measuring).unwrap();
        let mut exact = FreeList::new(0, measuring.high_water(), 16).unwrap();
        assert_eq!(run(&mut exact).unwrap(), offsets);
        let mut small = FreeList::new(0, measuring.high_water() - 16, 16).unwrap();
        assert!(run(&mut small).is_err());
    }
}

#[test]
fn a8_what_is_alive_at_the_high_water_mark_is_listed() {
    let mut list = FreeList::measuring(8).unwrap().with_listing();
    let first = list.allocate(8, 10).unwrap();
    list.allocate(8, 11).unwrap();
    list.free(first).unwrap();
    list.allocate(16, 12).unwrap();
    list.allocate(8, 13).unwrap();
    let live = |tag, offset, size| Live { tag, offset, size };
    assert_eq!(list.live_at_high_water(), [live(11, 8, 8), live(12, 16, 16)], "13 went into the hole");
}

#[test]
fn x6_a_buffer_filled_to_the_last_byte_still_answers() {
    let mut list = FreeList::new(0, 64, 32).unwrap();
    let first = list.allocate(32, 0).unwrap();
    list.allocate(32, 1).unwrap();
    let nothing = list.allocate(0, 2).unwrap();
    assert!(nothing.offset <= 64);
    assert_eq!(
        list.allocate(1, 3),
        Err(FreeListError::OutOfMemory { tag: 3, wanted: 32, largest: 0, free: 0, capacity: 64 })
    );
    assert_eq!(list.free(nothing), Ok(true));
    assert_eq!(list.free(first), Ok(true));
    assert_eq!(list.allocate(1, 4).unwrap().offset, 0);
}

#[test]
fn x7_a_buffer_smaller_than_its_alignment_gap_has_no_room() {
    let mut list = FreeList::new(8, 16, 32).unwrap();
    assert!(matches!(
        list.allocate(4 << 20, 0),
        Err(FreeListError::OutOfMemory { capacity: 0, free: 0, wanted: 4194304, .. })
    ));
    assert_eq!(list.allocate(0, 0).unwrap().offset, 16);
    assert!(matches!(list.allocate(u64::MAX, 0), Err(FreeListError::TooLarge { .. })));
}
