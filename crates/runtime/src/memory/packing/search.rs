//! The search for packings with a lower peak than the fast strategies found.
//!
//! Each attempt looks for a packing within some capacity: by branch and bound, or by repairing greedy orders if there
//! are too many items for that, after a search [from the core](super::core_search). The capacity is the lower bound at first, as that is often reached, and then bisects
//! the range between the highest capacity that failed and the best peak, until the steps are spent.

use super::exact::Feasibility;
use super::greedy::{ORDERS, PlacementContext, sort};
use super::packer::Packer;
use super::problem::Strategy;

/// The fewest steps per item that an attempt gets.
const MIN_STEPS_PER_ITEM: u64 = 64;

impl Packer {
    /// Spends `steps` on lowering the peak.
    pub(super) fn search(&mut self, steps: u64, seed: u64) {
        let exact = self.exact.read(&self.timeline, &self.boundaries);
        let steps = self.best.steps.saturating_add(steps);
        if !exact {
            if !self.boundaries.any() {
                self.search_large(self.best.proved_bound, (steps - self.best.steps) / 4 * 3, seed);
            }
            if !self.conflicts.listed() {
                return;
            }
        }
        let unit = if exact { self.exact.unit() } else { 1 };
        let min_steps = MIN_STEPS_PER_ITEM.saturating_mul(self.timeline.items.len() as u64);
        let mut capacity = self.timeline.lower_bound.max(self.boundaries.bottom_bytes());
        // Attempts below this capacity have failed.
        let mut low = capacity;
        let mut share = 3;
        while self.best.peak > self.best.proved_bound {
            let slice = steps.saturating_sub(self.best.steps) / share;
            if slice < min_steps {
                return;
            }
            let tried = if exact {
                self.attempt(capacity, slice, seed)
            } else {
                self.attempt_greedily(capacity, slice, seed)
            };
            if !tried {
                low = capacity.saturating_add(unit);
            }
            // When the range is closed the bisection restarts from the proved bound, with more steps per attempt.
            share = 8;
            if low.saturating_add(self.best.peak / 1024) >= self.best.peak {
                low = self.best.proved_bound;
                share = 4;
            }
            capacity = low + (self.best.peak - unit).saturating_sub(low) / 2;
        }
    }

    /// Looks for a packing within `capacity` by branch and bound; false if none was found.
    pub(super) fn attempt(&mut self, capacity: u64, steps: u64, seed: u64) -> bool {
        let (found, spent) = self.exact.solve(capacity, steps, seed, &mut self.trial);
        self.best.steps += spent;
        match found {
            Feasibility::Feasible(peak) => {
                self.keep(peak, Strategy::BranchAndBound);
                true
            }
            Feasibility::Infeasible => {
                // With several chunks this proves nothing: another packing may leave the ends of chunks unused.
                if !self.boundaries.any() {
                    let unit = self.exact.unit();
                    self.best.proved_bound = self.best.proved_bound.max((capacity / unit + 1) * unit);
                }
                false
            }
            Feasibility::Unknown => false,
        }
    }

    /// Looks for a packing within `capacity` by repairing greedy orders; false if none was found.
    fn attempt_greedily(&mut self, capacity: u64, steps: u64, seed: u64) -> bool {
        self.greedy.steps = 0;
        let mut found = None;
        for attempt in 0..ORDERS.len() as u64 {
            let index = (attempt + seed % ORDERS.len() as u64) as usize % ORDERS.len();
            let Some(&strategy) = ORDERS.get(index) else { continue };
            sort(&self.timeline, strategy, &mut self.sorter, &mut self.order);
            let Packer { timeline, conflicts, boundaries, greedy, order, trial, .. } = self;
            found = greedy.repair(
                PlacementContext { timeline, conflicts, boundaries },
                order,
                capacity,
                steps / ORDERS.len() as u64,
                trial,
            );
            if found.is_some() {
                break;
            }
        }
        self.best.steps += self.greedy.steps.max(1);
        if let Some(peak) = found {
            self.keep(peak, Strategy::Repair);
        }
        found.is_some()
    }
}
