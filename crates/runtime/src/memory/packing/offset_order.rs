//! Greedy packing without listed conflicts: placed items are kept in order of their offsets.
//!
//! [`Greedy`](super::greedy) visits an item's conflicts, of which large problems have too many to list. Here a search
//! for the lowest offset goes through the placed items from the bottom up and stops at the first gap that is large
//! enough. The items are kept in blocks, and a block of items that are all live at other times is skipped.
#![expect(clippy::indexing_slicing, reason = "orders hold the timeline's items, for which offsets are sized")]

use super::greedy::UNPLACED;
use super::timeline::{Timeline, TimelineItem};

/// The most items of a block.
const BLOCK: usize = 256;

/// How many items are visited in the time of a step of branch and bound.
const VISITS_PER_STEP: u64 = 32;

/// An item that has been placed.
#[derive(Clone, Copy, Debug)]
struct PlacedItem {
    offset: u64,
    end_offset: u64,
    start: u32,
    end: u32,
}

/// Placed items that follow each other in order of their offsets, and the sections in which any of them is live.
#[derive(Clone, Debug)]
struct Block {
    start: u32,
    end: u32,
    items: Vec<PlacedItem>,
}

/// Places items at the lowest offset, in the order given.
#[derive(Clone, Debug, Default)]
pub(crate) struct OffsetOrder {
    /// Blocks that are not empty, in order of their offsets.
    blocks: Vec<Block>,
    /// Items and blocks visited since this was last set to 0.
    visited: u64,
}

impl OffsetOrder {
    /// Places those items of `order` that have no offset yet, around those that have one. Returns the peak; or `None` if
    /// an item would exceed `limit`, or if the steps run out. Takes the steps spent from `steps`.
    pub(crate) fn place(
        &mut self,
        timeline: &Timeline,
        order: &[u32],
        limit: u64,
        offsets: &mut [u64],
        steps: &mut u64,
    ) -> Option<u64> {
        self.visited = 0;
        let peak = self.place_all(timeline, order, limit, offsets, *steps);
        *steps = steps.saturating_sub(self.visited / VISITS_PER_STEP + 1);
        peak
    }

    fn place_all(
        &mut self,
        timeline: &Timeline,
        order: &[u32],
        limit: u64,
        offsets: &mut [u64],
        steps: u64,
    ) -> Option<u64> {
        let mut peak = self.read(timeline, offsets);
        for &item in order {
            if offsets[item as usize] != UNPLACED {
                continue;
            }
            let span = timeline.items[item as usize];
            let offset = self.lowest(&span);
            let end_offset = offset + span.size;
            if end_offset > limit || self.visited / VISITS_PER_STEP >= steps {
                return None;
            }
            peak = peak.max(end_offset);
            offsets[item as usize] = offset;
            self.insert(PlacedItem { offset, end_offset, start: span.start, end: span.end });
        }
        Some(peak)
    }

    /// Begins with the items that have an offset; returns their peak.
    fn read(&mut self, timeline: &Timeline, offsets: &[u64]) -> u64 {
        let placed = timeline.items.iter().zip(offsets).filter(|(_, offset)| **offset != UNPLACED);
        let mut placed: Vec<PlacedItem> = placed
            .map(|(item, &offset)| PlacedItem {
                offset,
                end_offset: offset + item.size,
                start: item.start,
                end: item.end,
            })
            .collect();
        placed.sort_unstable_by_key(|item| (item.offset, item.start));
        self.blocks.clear();
        self.blocks.extend(placed.chunks(BLOCK / 2).map(block));
        placed.iter().map(|item| item.end_offset).max().unwrap_or(0)
    }

    /// The lowest offset at which an item overlaps no placed one.
    fn lowest(&mut self, span: &TimelineItem) -> u64 {
        let mut lowest = 0;
        let mut visited = 0;
        'search: for block in &self.blocks {
            visited += 1;
            if block.end <= span.start || span.end <= block.start {
                continue;
            }
            visited += block.items.len() as u64;
            for other in &block.items {
                if other.start < span.end && span.start < other.end {
                    if other.offset >= lowest + span.size {
                        break 'search;
                    }
                    lowest = lowest.max(other.end_offset);
                }
            }
        }
        self.visited += visited;
        lowest
    }

    fn insert(&mut self, item: PlacedItem) {
        let above = |block: &Block| block.items.first().is_some_and(|first| first.offset < item.offset);
        let at = self.blocks.partition_point(above).saturating_sub(1);
        let Some(into) = self.blocks.get_mut(at) else {
            self.blocks.push(block(&[item]));
            return;
        };
        let within = into.items.partition_point(|other| other.offset < item.offset);
        into.items.insert(within, item);
        into.start = into.start.min(item.start);
        into.end = into.end.max(item.end);
        if into.items.len() > BLOCK {
            let upper = block(&into.items[BLOCK / 2..]);
            *into = block(&into.items[..BLOCK / 2]);
            self.blocks.insert(at + 1, upper);
        }
    }
}

/// A block of these items.
fn block(items: &[PlacedItem]) -> Block {
    let mut copy = Vec::with_capacity(BLOCK + 1);
    copy.extend_from_slice(items);
    Block {
        start: items.iter().map(|item| item.start).min().unwrap_or(0),
        end: items.iter().map(|item| item.end).max().unwrap_or(0),
        items: copy,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::memory::packing::boundaries::ChunkBoundaries;
    use crate::memory::packing::conflicts::Conflicts;
    use crate::memory::packing::greedy::{Greedy, PlacementContext};
    use crate::memory::packing::timeline::AlwaysLive;
    use crate::memory::packing::{PackingItem, PackingProblem};

    fn timeline(seed: u64, count: u64) -> Timeline {
        let mut state = seed;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let items = (0..count).map(|_| {
            let start = random(100) as u32;
            PackingItem { size: 1 + random(50), start, end: start + 1 + random(30) as u32 }
        });
        let mut timeline = Timeline::default();
        timeline.build(&PackingProblem::new(items.collect()), AlwaysLive::Included).unwrap();
        timeline
    }

    /// Both place each item at the lowest offset that is free.
    #[test]
    fn offsets_are_those_of_the_greedy_that_lists_conflicts() {
        for seed in 0..8 {
            let timeline = timeline(seed, 900);
            let order: Vec<u32> = (0..900).map(|index| index * 7 % 900).collect();
            let (mut conflicts, boundaries) = (Conflicts::default(), ChunkBoundaries::default());
            assert!(conflicts.build(&timeline, usize::MAX));
            let context =
                PlacementContext { timeline: &timeline, conflicts: &conflicts, boundaries: &boundaries };
            let mut expected = Vec::new();
            let peak = Greedy::default().place(context, &order, u64::MAX, &mut expected).unwrap();
            let mut steps = u64::MAX;
            let mut offsets = vec![UNPLACED; 900];
            let mut by_offset = OffsetOrder::default();
            let found = by_offset.place(&timeline, &order, u64::MAX, &mut offsets, &mut steps);
            assert_eq!((found, &offsets), (Some(peak), &expected), "seed {seed}");
            // Again, with the first half placed already.
            for &item in order.iter().skip(450) {
                *offsets.get_mut(item as usize).unwrap() = UNPLACED;
            }
            let found = by_offset.place(&timeline, &order, peak, &mut offsets, &mut steps);
            assert_eq!((found, &offsets), (Some(peak), &expected), "seed {seed}");
            offsets.fill(UNPLACED);
            assert_eq!(by_offset.place(&timeline, &order, peak - 1, &mut offsets, &mut steps), None);
            let mut few = 10;
            offsets.fill(UNPLACED);
            let found = by_offset.place(&timeline, &order, u64::MAX, &mut offsets, &mut few);
            assert_eq!((found, few), (None, 0), "the steps are spent");
        }
    }
}
