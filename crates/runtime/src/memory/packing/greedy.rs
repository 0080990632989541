//! Greedy packing: take the items in some order, put each in the lowest place that is free during its life.
//!
//! All the wit is in the order. Large items first is good when a few large items decide the peak; long-lived first
//! keeps the floor flat; size × duration is a middle way; and items that live where memory is tightest should not find
//! that others came before them.
#![expect(clippy::indexing_slicing, reason = "orders are permutations of the timeline's items")]

use super::conflicts::Conflicts;
use super::problem::Strategy;
use super::timeline::Timeline;

/// The offset of an item that has not been placed.
pub(crate) const UNPLACED: u64 = u64::MAX;

/// The orders that are tried, the most promising first.
pub(crate) const ORDERS: [Strategy; 4] =
    [Strategy::BySize, Strategy::ByArea, Strategy::ByPressure, Strategy::ByDuration];

/// Puts the items in the order that a strategy asks for: largest key first, equal keys in order of time.
pub(crate) fn sort(
    timeline: &Timeline,
    strategy: Strategy,
    keys: &mut Vec<(u128, u32)>,
    order: &mut Vec<u32>,
) {
    keys.clear();
    keys.extend(timeline.items.iter().enumerate().map(|(index, item)| {
        let (size, duration) = (u128::from(item.size), u128::from(item.duration()));
        let key = match strategy {
            Strategy::ByArea => size * duration,
            Strategy::ByDuration => duration << 64 | size,
            Strategy::ByPressure => {
                let live = &timeline.live[item.start as usize..item.end as usize];
                u128::from(live.iter().copied().max().unwrap_or(0)) << 64 | size
            }
            _ => size << 32 | duration,
        };
        (!key, index as u32)
    }));
    keys.sort_unstable();
    order.clear();
    order.extend(keys.iter().map(|(_, index)| index));
}

/// Places items at the lowest offset, in the order given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Greedy {
    /// The placed items that conflict with the one at hand, as (offset, end).
    taken: Vec<(u64, u64)>,
}

impl Greedy {
    /// Fills `offsets`; returns the peak, or gives up as soon as it would be `bound` or more.
    pub(crate) fn place(
        &mut self,
        timeline: &Timeline,
        conflicts: &Conflicts,
        order: &[u32],
        bound: u64,
        offsets: &mut Vec<u64>,
    ) -> Option<u64> {
        offsets.clear();
        offsets.resize(timeline.items.len(), UNPLACED);
        let mut peak = 0;
        for &item in order {
            let item = item as usize;
            let size = timeline.items[item].size;
            let offset = self.lowest(timeline, conflicts, item, offsets);
            peak = peak.max(offset + size);
            if peak >= bound {
                return None;
            }
            offsets[item] = offset;
        }
        Some(peak)
    }

    /// The lowest offset at which `item` overlaps nothing that is placed.
    fn lowest(&mut self, timeline: &Timeline, conflicts: &Conflicts, item: usize, offsets: &[u64]) -> u64 {
        self.taken.clear();
        let earlier = conflicts.earlier(item).iter().map(|&other| other as usize);
        for other in earlier.chain(conflicts.later(item)) {
            let offset = offsets[other];
            if offset != UNPLACED {
                self.taken.push((offset, offset + timeline.items[other].size));
            }
        }
        self.taken.sort_unstable();
        let (size, mut floor) = (timeline.items[item].size, 0);
        for &(offset, end) in &self.taken {
            if offset >= floor + size {
                break;
            }
            floor = floor.max(end);
        }
        floor
    }
}
