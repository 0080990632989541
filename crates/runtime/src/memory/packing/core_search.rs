//! Search on problems with more items than branch and bound can take: the *core* first, then the others around it.
//!
//! In a large graph few sections are near the peak of live bytes. The items live there, the core, are packed by branch
//! and bound; all others are placed around them, each at the lowest offset that is free. Items that end above the limit
//! then join the core, and it is packed again. So the steps are spent where the packing is tight.
#![expect(
    clippy::indexing_slicing,
    reason = "cores and orders hold the timeline's items, for which all arrays are sized"
)]

use super::exact::{Feasibility, MAX_ITEMS};
use super::greedy::{ORDERS, UNPLACED, sort};
use super::packer::Packer;
use super::problem::{PackingItem, PackingProblem, Strategy};
use super::range_maximum::RangeMaximum;
use super::timeline::{AlwaysLive, Timeline, TimelineItem};

/// The search ends when the best peak is above a limit that failed by less than this fraction of it.
const LIMIT_FRACTION: u64 = 4096;

/// How many items are placed around each item of the core before the others.
const NEAR_PER_CORE_ITEM: usize = 4;

/// The fewest steps per item that a core gets.
const MIN_STEPS_PER_ITEM: u64 = 64;

/// The items, those live near the peak first.
struct ByLoad {
    /// The items, in descending order of the most live bytes of a section in their lifetime.
    order: Vec<u32>,
    /// These bytes, in the same order.
    loads: Vec<u64>,
    /// These bytes, for each item.
    of_item: Vec<u64>,
}

impl ByLoad {
    fn new(timeline: &Timeline) -> Self {
        let maxima = RangeMaximum::new(&timeline.live);
        let load = |item: &TimelineItem| maxima.of(item.start as usize, item.end as usize);
        let of_item: Vec<u64> = timeline.items.iter().map(load).collect();
        let mut order: Vec<u32> = (0..timeline.items.len() as u32).collect();
        order.sort_unstable_by_key(|&item| (u64::MAX - of_item[item as usize], item));
        let loads = order.iter().map(|&item| of_item[item as usize]).collect();
        ByLoad { order, loads, of_item }
    }

    /// The first `count` items, and all others with the load of the last of these.
    fn first(&self, count: usize) -> &[u32] {
        let last = self.loads.get(count.saturating_sub(1)).copied().unwrap_or(0);
        &self.order[..self.loads.partition_point(|load| *load >= last)]
    }
}

/// Items that are packed first.
#[derive(Default)]
struct Core {
    items: Vec<u32>,
    timeline: Timeline,
    /// The offsets in the order of the timeline.
    offsets: Vec<u64>,
}

impl Packer {
    /// Lowers the peak of a problem with too many items for branch and bound, until it is at most `goal` or the steps
    /// are spent.
    pub(super) fn search_large(&mut self, goal: u64, steps: u64, seed: u64) {
        let mut left = steps;
        if !self.conflicts.listed() {
            self.try_orders_unlisted(goal, &mut left);
        }
        if self.best.peak > goal {
            self.search_cores(goal, &mut left, seed);
        }
        self.best.steps += steps - left;
    }

    /// Tries the greedy orders, for which the fast strategies need listed conflicts.
    fn try_orders_unlisted(&mut self, goal: u64, left: &mut u64) {
        for strategy in ORDERS {
            if self.best.peak <= goal {
                return;
            }
            self.place_core(&Core::default(), strategy);
            let Packer { timeline, offset_order, order, trial, best, .. } = self;
            if let Some(peak) = offset_order.place(timeline, order, best.peak - 1, trial, left) {
                self.keep(peak, strategy);
            }
        }
    }

    /// Looks for packings within lower and lower limits.
    fn search_cores(&mut self, goal: u64, left: &mut u64, seed: u64) {
        let by_load = ByLoad::new(&self.timeline);
        let mut limit = goal;
        // No packing was found within this.
        let mut failed = goal;
        while self.search_within(limit, &by_load, left, seed) && self.best.peak > goal {
            if self.best.peak > limit {
                failed = limit;
            }
            if self.best.peak - failed <= failed / LIMIT_FRACTION {
                return;
            }
            limit = failed + (self.best.peak - failed) / 2;
        }
    }

    /// Looks for a packing within `limit`, with larger and larger cores. False if there are too few steps for the first
    /// one, or all items are live near the peak.
    fn search_within(&mut self, limit: u64, by_load: &ByLoad, left: &mut u64, seed: u64) -> bool {
        let mut core = Core::default();
        let mut items = by_load.first(1);
        let mut tried = false;
        while self.best.peak > limit && items.len() < by_load.order.len() {
            core.items.clear();
            core.items.extend_from_slice(items);
            if items.len() > MAX_ITEMS {
                if tried {
                    break;
                }
                // Small items find a gap more easily than large ones.
                let size = |item: &u32| self.timeline.items[*item as usize].size;
                core.items.sort_unstable_by_key(|item| (u64::MAX - size(item), *item));
                core.items.truncate(MAX_ITEMS / 2);
            }
            let mut slice = *left / 4;
            if slice < MIN_STEPS_PER_ITEM * core.items.len() as u64 {
                break;
            }
            tried = true;
            *left -= slice;
            self.grow_core(&mut core, limit, by_load, &mut slice, seed);
            *left += slice;
            items = by_load.first(items.len() + items.len() / 4 + 1);
        }
        tried
    }

    /// Packs a core and the other items around it, those with a high load first; adds to the core those above the limit,
    /// and tries again.
    fn grow_core(&mut self, core: &mut Core, limit: u64, by_load: &ByLoad, left: &mut u64, seed: u64) {
        let mut orders = ORDERS;
        while core.items.len() <= MAX_ITEMS && self.pack_core(core, limit, left, seed) {
            let near = by_load.first(NEAR_PER_CORE_ITEM * core.items.len()).len();
            let load = by_load.loads.get(near).copied().unwrap_or(0);
            let mut lowest = u64::MAX;
            let mut above = Vec::new();
            // The best order comes first the next time, as the others are given up where they are worse.
            for index in 0..orders.len() {
                let strategy = orders[index];
                self.place_core(core, strategy);
                let is_near = |item: &u32| by_load.of_item[*item as usize] > load;
                let (near, far): (Vec<u32>, Vec<u32>) = self.order.iter().partition(|item| is_near(item));
                let Some(mut peak) = self.place_around(&near, lowest - 1, left) else { continue };
                // The others are placed if those near the peak fit; and once, to have a packing.
                if peak <= limit || index == 0 && self.best.strategy != Strategy::Core {
                    match self.place_around(&far, u64::MAX, left) {
                        Some(whole) => peak = whole,
                        None => return,
                    }
                    let found = self.items_above(limit);
                    if peak < lowest {
                        (lowest, above) = (peak, found);
                        orders[..=index].rotate_right(1);
                    }
                    self.keep(peak, Strategy::Core);
                    if self.best.peak <= limit {
                        return;
                    }
                } else {
                    (lowest, above) = (peak, self.items_above(limit));
                    orders[..=index].rotate_right(1);
                }
            }
            if above.is_empty() {
                return;
            }
            core.items.append(&mut above);
        }
    }

    /// The items that are placed above a limit.
    fn items_above(&self, limit: u64) -> Vec<u32> {
        let items = (0..).zip(self.timeline.items.iter().zip(&self.trial));
        let above = items.filter(|(_, (item, offset))| **offset != UNPLACED && *offset + item.size > limit);
        above.map(|(index, _)| index).collect()
    }

    /// Packs a core by branch and bound; false if no packing within the limit was found.
    fn pack_core(&mut self, core: &mut Core, limit: u64, left: &mut u64, seed: u64) -> bool {
        core.items.sort_unstable();
        core.items.dedup();
        let items = core.items.iter().map(|&item| {
            let item = self.timeline.items[item as usize];
            PackingItem { size: item.size, start: item.start, end: item.end }
        });
        let problem = PackingProblem::new(items.collect());
        if core.timeline.build(&problem, AlwaysLive::Included).is_err()
            || !self.exact.read(&core.timeline, &self.boundaries)
        {
            return false;
        }
        let (found, spent) = self.exact.solve(limit, *left, seed, &mut core.offsets);
        *left = left.saturating_sub(spent);
        matches!(found, Feasibility::Feasible(_))
    }

    /// Begins with the core's items at their offsets, and sorts all as a strategy requires.
    fn place_core(&mut self, core: &Core, strategy: Strategy) {
        let Packer { timeline, sorter, order, trial, .. } = self;
        sort(timeline, strategy, sorter, order);
        trial.clear();
        trial.resize(timeline.items.len(), UNPLACED);
        for (&index, &offset) in core.timeline.origin.iter().zip(&core.offsets) {
            trial[core.items[index as usize] as usize] = offset;
        }
    }

    /// Places more items, each at its lowest offset; returns the peak, unless it exceeds `limit` or the steps run out.
    fn place_around(&mut self, order: &[u32], limit: u64, left: &mut u64) -> Option<u64> {
        self.offset_order.place(&self.timeline, order, limit, &mut self.trial, left)
    }
}
