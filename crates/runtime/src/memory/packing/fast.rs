//! The fast strategies: greedy orders with a few repairs, and best fit in time order, until one reaches the lower
//! bound.
//!
//! [`Strategy::FromPeak`] comes first, because it reaches the lower bound on nearly every model's graph. Best fit in
//! time order is then not needed: it cannot be better.

use super::greedy::{ORDERS, PlacementContext, sort};
use super::packer::{CONFLICT_LIMIT, Packer};
use super::problem::Strategy;

/// Steps spent on repairing an order that misses the lower bound.
const REPAIR_STEPS: u64 = 30_000;

impl Packer {
    /// Tries [`Strategy::FromPeak`] in one chunk; true if it reaches the lower bound.
    pub(super) fn try_from_peak(&mut self) -> bool {
        self.boundaries.none();
        self.best.peak = u64::MAX;
        self.conflicts.build(&self.timeline, CONFLICT_LIMIT) && self.try_order(Strategy::FromPeak)
    }

    /// Tries the other fast strategies.
    pub(super) fn try_other_strategies(&mut self) {
        let peak = self.time_order.place(&self.timeline, &mut self.trial);
        self.keep(peak, Strategy::TimeOrder);
        if self.conflicts.listed() && self.best.peak > self.goal() && !self.repair_order() {
            self.try_orders(&[Strategy::FromPeak]);
        }
    }

    /// Tries the greedy orders other than `tried`, with repairs, until one reaches the lower bound.
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

    /// The lowest peak that is possible with the current boundaries.
    fn goal(&self) -> u64 {
        self.timeline.lower_bound.max(self.boundaries.bottom_bytes())
    }

    /// Places the items in one order; true if that reaches the lower bound.
    fn try_order(&mut self, strategy: Strategy) -> bool {
        let Packer { timeline, conflicts, boundaries, greedy, sorter, order, trial, best, .. } = self;
        sort(timeline, strategy, sorter, order);
        // With several chunks the highest offset is no measure of the bytes used.
        let limit = if boundaries.any() { u64::MAX } else { best.peak - 1 };
        if let Ok(peak) =
            greedy.place(PlacementContext { timeline, conflicts, boundaries }, order, limit, trial)
        {
            self.keep(peak, strategy);
        }
        self.best.peak <= self.goal()
    }

    /// Repairs the order that was tried last; true if that reaches the lower bound.
    fn repair_order(&mut self) -> bool {
        let goal = self.goal();
        let Packer { timeline, conflicts, boundaries, greedy, order, trial, .. } = self;
        let context = PlacementContext { timeline, conflicts, boundaries };
        let repaired = greedy.repair(context, order, goal, REPAIR_STEPS, trial);
        if let Some(peak) = repaired {
            self.keep(peak, Strategy::Repair);
        }
        repaired.is_some()
    }
}
