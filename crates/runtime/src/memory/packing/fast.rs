//! The quick strategies: the free list in time order, then greedy orders, each repaired a little; stops at the lower
//! bound.

use super::greedy::{Ground, ORDERS, sort};
use super::packer::{CONFLICT_LIMIT, Packer};
use super::problem::Strategy;

/// How many steps may go into repairing an order that misses the lower bound.
const REPAIR_STEPS: u64 = 30_000;

impl Packer {
    /// Finds the first packing into one chunk.
    pub(super) fn fast(&mut self) {
        self.walls.none();
        self.conflicts.clear();
        let peak = self.time_order.place(&self.timeline, &mut self.trial);
        self.best.peak = u64::MAX;
        self.keep(peak, Strategy::TimeOrder);
        self.try_orders();
    }

    /// Tries the greedy orders, until one reaches the lower bound.
    pub(super) fn try_orders(&mut self) {
        let goal = self.timeline.lower_bound.max(self.walls.bottom_bytes());
        if self.best.peak <= goal {
            return;
        }
        if !self.conflicts.listed() && !self.conflicts.build(&self.timeline, CONFLICT_LIMIT) {
            return;
        }
        for strategy in ORDERS {
            sort(&self.timeline, strategy, &mut self.keys, &mut self.order);
            let Packer { timeline, conflicts, walls, greedy, order, trial, .. } = self;
            // With walls the bytes used can be less than the highest offset says: only the end tells.
            let limit = if walls.any() { u64::MAX } else { self.best.peak - 1 };
            if let Ok(peak) = greedy.place(Ground { timeline, conflicts, walls }, order, limit, trial) {
                self.keep(peak, strategy);
                if self.best.peak <= goal {
                    return;
                }
            }
            let Packer { timeline, conflicts, walls, greedy, order, trial, .. } = self;
            if let Some(peak) =
                greedy.repair(Ground { timeline, conflicts, walls }, order, goal, REPAIR_STEPS, trial)
            {
                self.keep(peak, Strategy::Repair);
                return;
            }
        }
    }
}
