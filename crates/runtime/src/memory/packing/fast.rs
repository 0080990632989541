//! The quick strategies: greedy orders, each repaired a little, and the free list in time order; stops at the lower
//! bound.
//!
//! The order that begins at the peak comes first, because it reaches the lower bound on nearly every model's graph. What
//! is at the lower bound cannot be worse than the free list, so that is then not even asked.

use super::greedy::{Ground, ORDERS, sort};
use super::packer::{CONFLICT_LIMIT, Packer};
use super::problem::Strategy;

/// How many steps may go into repairing an order that misses the lower bound.
const REPAIR_STEPS: u64 = 30_000;

impl Packer {
    /// Finds the first packing into one chunk; true when it reaches the lower bound.
    pub(super) fn begin_at_peak(&mut self) -> bool {
        self.walls.none();
        self.best.peak = u64::MAX;
        self.conflicts.build(&self.timeline, CONFLICT_LIMIT) && self.try_order(Strategy::FromPeak)
    }

    /// Tries the quick strategies that come after that one.
    pub(super) fn other_orders(&mut self) {
        let peak = self.time_order.place(&self.timeline, &mut self.trial);
        self.keep(peak, Strategy::TimeOrder);
        if self.conflicts.listed() && self.best.peak > self.goal() && !self.repair_order() {
            self.try_orders(&[Strategy::FromPeak]);
        }
    }

    /// Tries the greedy orders and repairs them, until one reaches the lower bound; not those that have been tried.
    pub(super) fn try_orders(&mut self, tried: &[Strategy]) {
        if self.best.peak <= self.goal() || !self.conflicts.listed() {
            return;
        }
        for strategy in ORDERS.into_iter().filter(|strategy| !tried.contains(strategy)) {
            if self.try_order(strategy) || self.repair_order() {
                return;
            }
        }
    }

    /// The peak at which there is nothing left to gain.
    fn goal(&self) -> u64 {
        self.timeline.lower_bound.max(self.walls.bottom_bytes())
    }

    /// Places the items in one order; true when that reaches the lower bound.
    fn try_order(&mut self, strategy: Strategy) -> bool {
        let Packer { timeline, conflicts, walls, greedy, sorting, order, trial, best, .. } = self;
        sort(timeline, strategy, sorting, order);
        // With walls the bytes used can be less than the highest offset says: only the end tells.
        let limit = if walls.any() { u64::MAX } else { best.peak - 1 };
        if let Ok(peak) = greedy.place(Ground { timeline, conflicts, walls }, order, limit, trial) {
            self.keep(peak, strategy);
        }
        self.best.peak <= self.goal()
    }

    /// Repairs the order that was tried last; true when that reaches the lower bound.
    fn repair_order(&mut self) -> bool {
        let goal = self.goal();
        let Packer { timeline, conflicts, walls, greedy, order, trial, .. } = self;
        let ground = Ground { timeline, conflicts, walls };
        let repaired = greedy.repair(ground, order, goal, REPAIR_STEPS, trial);
        if let Some(peak) = repaired {
            self.keep(peak, Strategy::Repair);
        }
        repaired.is_some()
    }
}
