//! The search for better packings than the quick one.
//!
//! A packing below some capacity is looked for, by branch and bound, or where the items are too many for that by
//! repairing greedy orders. The capacity is the lower bound at first, which is where the best packings often are; then
//! the middle between what may be possible and what is known to be, and so on until the steps are spent.

use super::exact::Verdict;
use super::greedy::{Ground, ORDERS, sort};
use super::packer::Packer;
use super::problem::Strategy;

/// The least steps for each item that an attempt is worth.
const LEAST: u64 = 64;

impl Packer {
    /// Spends `steps` on a lower peak.
    pub(super) fn search(&mut self, steps: u64, seed: u64) {
        let exact = self.exact.read(&self.timeline, &self.walls);
        if !exact && !self.conflicts.listed() {
            return;
        }
        let unit = if exact { self.exact.unit() } else { 1 };
        let least = LEAST.saturating_mul(self.timeline.items.len() as u64);
        let mut capacity = self.timeline.lower_bound.max(self.walls.bottom_bytes());
        // Capacities below this have been tried.
        let mut low = capacity;
        let mut share = 3;
        let steps = self.best.steps.saturating_add(steps);
        while self.best.peak > self.best.proved_bound {
            let slice = steps.saturating_sub(self.best.steps) / share;
            if slice < least {
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
            // When the last gap is closed, it begins again from the bottom: with other slices, and a lower peak to beat.
            share = 8;
            if low.saturating_add(self.best.peak / 1024) >= self.best.peak {
                low = self.best.proved_bound;
                share = 4;
            }
            capacity = low + (self.best.peak - unit).saturating_sub(low) / 2;
        }
    }

    /// Looks for a packing that fits into `capacity` by branch and bound; false when none was found.
    pub(super) fn attempt(&mut self, capacity: u64, steps: u64, seed: u64) -> bool {
        let (verdict, spent) = self.exact.solve(capacity, steps, seed, &mut self.trial);
        self.best.steps += spent;
        match verdict {
            Verdict::Fits(peak) => {
                self.keep(peak, Strategy::BranchAndBound);
                true
            }
            Verdict::Impossible => {
                // With walls, there may be a packing that leaves the ends of chunks unused, and is lower for that.
                if !self.walls.any() {
                    let unit = self.exact.unit();
                    self.best.proved_bound = self.best.proved_bound.max((capacity / unit + 1) * unit);
                }
                false
            }
            Verdict::Unknown => false,
        }
    }

    /// Looks for a packing that fits into `capacity` by repairing greedy orders; false when none was found.
    fn attempt_greedily(&mut self, capacity: u64, steps: u64, seed: u64) -> bool {
        self.greedy.steps = 0;
        let mut found = None;
        for turn in 0..ORDERS.len() as u64 {
            let index = (turn + seed % ORDERS.len() as u64) as usize % ORDERS.len();
            let Some(&strategy) = ORDERS.get(index) else { continue };
            sort(&self.timeline, strategy, &mut self.sorting, &mut self.order);
            let Packer { timeline, conflicts, walls, greedy, order, trial, .. } = self;
            found = greedy.repair(
                Ground { timeline, conflicts, walls },
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
