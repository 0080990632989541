//! Greedy packing: take the items in some order, put each in the lowest place that is free during its life.
//!
//! All the wit is in the order. Large items first is good when a few large items decide the peak; long-lived first
//! keeps the floor flat; products of the two are a middle way. Best on large graphs is to begin at the moment of the
//! peak: what is alive then is piled up without any gap, longest-lived at the bottom, and all others find their places
//! around that pile.
//!
//! An order that misses the lower bound may be one step from the best: [`Greedy::repair`] moves the item that did not
//! fit to the front and tries again, a few times.
#![expect(clippy::indexing_slicing, reason = "orders are permutations of the timeline's items")]

use super::conflicts::Conflicts;
use super::problem::Strategy;
use super::sorting::Sorting;
use super::timeline::{Span, Timeline};
use super::walls::Walls;

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

/// Puts the items in the order that a strategy asks for; equal ones in order of time.
pub(crate) fn sort(timeline: &Timeline, strategy: Strategy, sorting: &mut Sorting, order: &mut Vec<u32>) {
    let peak = timeline.peak_section();
    let keys = timeline.items.iter().enumerate().map(|(index, item)| {
        let (first, second) = key(item, strategy, peak, timeline.largest);
        (!first, !second, index as u32)
    });
    sorting.sort(keys, order);
}

/// Two numbers that are larger for items that come earlier.
fn key(item: &Span, strategy: Strategy, peak: u32, largest: u64) -> (u64, u32) {
    // The bits of positive floating-point numbers are in the numbers' order.
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

/// What items are placed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ground<'a> {
    pub(crate) timeline: &'a Timeline,
    /// Listed for this timeline.
    pub(crate) conflicts: &'a Conflicts,
    pub(crate) walls: &'a Walls,
}

/// Places items at the lowest offset, in the order given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Greedy {
    /// The placed items that conflict with the one at hand, as (offset, end).
    taken: Vec<(u64, u64)>,
    /// How many items have been looked at since this was last set to 0.
    pub(crate) steps: u64,
}

impl Greedy {
    /// Fills `offsets` and returns the peak; or, as soon as an item would reach beyond `limit`, its index in `order`.
    pub(crate) fn place(
        &mut self,
        ground: Ground<'_>,
        order: &[u32],
        limit: u64,
        offsets: &mut Vec<u64>,
    ) -> Result<u64, usize> {
        let Ground { timeline, walls, .. } = ground;
        offsets.clear();
        offsets.resize(timeline.items.len(), UNPLACED);
        let mut peak = 0;
        for (item, offset) in walls.large() {
            peak = peak.max(offset + timeline.items[item].size);
            offsets[item] = offset;
        }
        for (index, &item) in order.iter().enumerate() {
            let item = item as usize;
            if offsets[item] != UNPLACED {
                continue;
            }
            let size = timeline.items[item].size;
            let offset = self.lowest(ground, item, offsets);
            peak = peak.max(offset + size);
            if peak > limit {
                return Err(index);
            }
            offsets[item] = offset;
        }
        Ok(peak)
    }

    /// Tries to stay below `limit` by moving the item that did not fit to the front of the order, again and again, for
    /// `steps` steps; a step is a look at one item.
    pub(crate) fn repair(
        &mut self,
        ground: Ground<'_>,
        order: &mut [u32],
        limit: u64,
        steps: u64,
        offsets: &mut Vec<u64>,
    ) -> Option<u64> {
        let last = self.steps.saturating_add(steps);
        while self.steps < last {
            match self.place(ground, order, limit, offsets) {
                Ok(peak) => return Some(peak),
                // It was the first to be placed: it does not fit at all.
                Err(0) => return None,
                Err(index) => order[..=index].rotate_right(1),
            }
        }
        None
    }

    /// The lowest offset at which `item` overlaps nothing that is placed.
    fn lowest(&mut self, ground: Ground<'_>, item: usize, offsets: &[u64]) -> u64 {
        let Ground { timeline, conflicts, walls } = ground;
        let (earlier, later) = (conflicts.earlier(item), conflicts.later(item));
        // Every place is written before it is known whether it stays: guessing would cost more.
        self.taken.resize(self.taken.len().max(earlier.len() + later.len()), (0, 0));
        let mut count = 0;
        let mut look_at = |other: usize| {
            let offset = offsets[other];
            self.taken[count] = (offset, offset.wrapping_add(timeline.items[other].size));
            count += usize::from(offset != UNPLACED);
        };
        earlier.iter().for_each(|other| look_at(*other as usize));
        later.for_each(&mut look_at);
        let taken = &mut self.taken[..count];
        self.steps += count as u64 + 1;
        taken.sort_unstable();
        let size = timeline.items[item].size;
        let mut floor = walls.fit(0, size);
        for &(offset, end) in &*taken {
            if offset >= floor + size {
                break;
            }
            if end > floor {
                floor = walls.fit(end, size);
            }
        }
        floor
    }
}
