//! Greedy packing: take the items in some order, place each at the lowest offset that is free during its lifetime.
//!
//! The order decides the quality. Largest first is good if a few large items decide the peak; longest-lived first
//! avoids fragmentation at the bottom; products of size and duration are in between. Best on large graphs is to start
//! at the peak: the items live there are stacked without a gap, longest-lived at the bottom, and all others are placed
//! around them.
//!
//! An order that misses the lower bound may be close to one that does not: [`Greedy::repair`] moves the item that did
//! not fit to the front and tries again.
#![expect(clippy::indexing_slicing, reason = "orders are permutations of the timeline's items")]

use super::boundaries::ChunkBoundaries;
use super::conflicts::Conflicts;
use super::problem::Strategy;
use super::radix_sort::RadixSorter;
use super::timeline::{Timeline, TimelineItem};

/// The offset of an item that has not been placed.
pub(crate) const UNPLACED: u64 = u64::MAX;

/// The orders that are tried, the most promising first.
pub(crate) const ORDERS: [Strategy; 5] = [
    Strategy::FromPeak,
    Strategy::BySize,
    Strategy::BySizeAndDuration,
    Strategy::ByArea,
    Strategy::ByDuration,
];

/// Sorts the items as a strategy requires; equal ones in order of time.
pub(crate) fn sort(timeline: &Timeline, strategy: Strategy, sorter: &mut RadixSorter, order: &mut Vec<u32>) {
    let peak = timeline.peak_section();
    let keys = timeline.items.iter().enumerate().map(|(index, item)| {
        let (first, second) = key(item, strategy, peak, timeline.largest);
        (!first, !second, index as u32)
    });
    sorter.sort(keys, order);
}

/// Two numbers that are larger for items that are placed earlier.
fn key(item: &TimelineItem, strategy: Strategy, peak: u32, largest: u64) -> (u64, u32) {
    // The bit patterns of positive floats are ordered as the floats are.
    let product = |duration: f64| (item.size as f64 * duration).to_bits();
    let duration = item.duration();
    match strategy {
        Strategy::FromPeak if item.start <= peak && peak < item.end => (largest + u64::from(duration), 0),
        Strategy::BySizeAndDuration => (product(f64::from(duration).sqrt()), duration),
        Strategy::ByArea => (product(f64::from(duration)), duration),
        Strategy::ByDuration => (u64::from(duration), (item.size >> 30) as u32),
        _ => (item.size, duration),
    }
}

/// The problem that items are placed in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacementContext<'a> {
    pub(crate) timeline: &'a Timeline,
    /// The conflicts of this timeline, listed.
    pub(crate) conflicts: &'a Conflicts,
    pub(crate) boundaries: &'a ChunkBoundaries,
}

/// Places items at the lowest offset, in the order given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Greedy {
    /// The placed items that conflict with the current one, as (offset, end).
    taken: Vec<(u64, u64)>,
    /// Items visited since this was last set to 0.
    pub(crate) steps: u64,
}

impl Greedy {
    /// Fills `offsets` and returns the peak; or the index in `order` of the first item that would exceed `limit`.
    pub(crate) fn place(
        &mut self,
        context: PlacementContext<'_>,
        order: &[u32],
        limit: u64,
        offsets: &mut Vec<u64>,
    ) -> Result<u64, usize> {
        let PlacementContext { timeline, boundaries, .. } = context;
        offsets.clear();
        offsets.resize(timeline.items.len(), UNPLACED);
        let mut peak = 0;
        for (item, offset) in boundaries.large() {
            peak = peak.max(offset + timeline.items[item].size);
            offsets[item] = offset;
        }
        for (index, &item) in order.iter().enumerate() {
            let item = item as usize;
            if offsets[item] != UNPLACED {
                continue;
            }
            let size = timeline.items[item].size;
            let offset = self.lowest(context, item, offsets);
            peak = peak.max(offset + size);
            if peak > limit {
                return Err(index);
            }
            offsets[item] = offset;
        }
        Ok(peak)
    }

    /// Tries to stay within `limit` by moving the item that did not fit to the front of the order, repeatedly, for
    /// `steps` steps (items visited).
    pub(crate) fn repair(
        &mut self,
        context: PlacementContext<'_>,
        order: &mut [u32],
        limit: u64,
        steps: u64,
        offsets: &mut Vec<u64>,
    ) -> Option<u64> {
        let last = self.steps.saturating_add(steps);
        while self.steps < last {
            match self.place(context, order, limit, offsets) {
                Ok(peak) => return Some(peak),
                // The first item alone exceeds the limit.
                Err(0) => return None,
                Err(index) => order[..=index].rotate_right(1),
            }
        }
        None
    }

    /// The lowest offset at which `item` overlaps no placed item.
    fn lowest(&mut self, context: PlacementContext<'_>, item: usize, offsets: &[u64]) -> u64 {
        let PlacementContext { timeline, conflicts, boundaries } = context;
        let (earlier, later) = (conflicts.earlier(item), conflicts.later(item));
        // Unplaced items are written too and overwritten by the next, which avoids mispredicted branches.
        self.taken.resize(self.taken.len().max(earlier.len() + later.len()), (0, 0));
        let mut count = 0;
        let mut visit = |other: usize| {
            let offset = offsets[other];
            self.taken[count] = (offset, offset.wrapping_add(timeline.items[other].size));
            count += usize::from(offset != UNPLACED);
        };
        earlier.iter().for_each(|other| visit(*other as usize));
        later.for_each(&mut visit);
        let taken = &mut self.taken[..count];
        self.steps += count as u64 + 1;
        taken.sort_unstable();
        let size = timeline.items[item].size;
        let mut lowest = boundaries.fit(0, size);
        for &(offset, end) in &*taken {
            if offset >= lowest + size {
                break;
            }
            if end > lowest {
                lowest = boundaries.fit(end, size);
            }
        }
        lowest
    }
}
