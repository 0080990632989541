//! From a problem to a packing: which strategies are tried, in what order, and when that is enough.

use super::chunks::Chunks;
use super::conflicts::Conflicts;
use super::exact::{Exact, Verdict};
use super::greedy::{Greedy, ORDERS, sort};
use super::problem::{Effort, Packing, PackingError, Placement, Problem, Strategy};
use super::time_order::TimeOrder;
use super::timeline::Timeline;

/// Conflicts are listed one by one up to this many; beyond, orders are placed without lists.
const CONFLICT_LIMIT: usize = 1 << 26;

/// How many items are placed again, at most, to repair an order that misses the lower bound.
const REPAIR_STEPS: usize = 2_000;

/// Packs a problem.
pub fn pack(problem: &Problem, effort: Effort) -> Result<Packing, PackingError> {
    let mut packer = Packer::default();
    packer.pack(problem, effort)?;
    Ok(packer.best)
}

/// Packs problems, and keeps its working memory for the next one: planning again what has been planned before allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct Packer {
    timeline: Timeline,
    conflicts: Conflicts,
    time_order: TimeOrder,
    greedy: Greedy,
    keys: Vec<(u128, u32)>,
    order: Vec<u32>,
    trial: Vec<u64>,
    offsets: Vec<u64>,
    exact: Exact,
    chunks: Chunks,
    chunk_trial: Chunks,
    best: Packing,
}

impl Packer {
    /// Packs a problem. After an error the packer is as good as new.
    pub fn pack(&mut self, problem: &Problem, effort: Effort) -> Result<&Packing, PackingError> {
        self.timeline.build(problem)?;
        self.best.lower_bound = self.timeline.lower_bound;
        self.best.steps = 0;
        self.best.proved_optimal = false;
        self.fast();
        if let Effort::Exact { capacity, steps } = effort {
            let capacity = capacity.unwrap_or(self.timeline.lower_bound);
            let verdict = self.exact.solve(&self.timeline, capacity, steps, &mut self.trial);
            if verdict == Verdict::Fits {
                self.best.peak = capacity;
                self.best.strategy = Strategy::Exact;
                std::mem::swap(&mut self.offsets, &mut self.trial);
            }
            self.best.steps = self.exact.spent;
            eprintln!("{verdict:?} steps {} hits {}", self.exact.spent, self.exact.hits);
        }
        match problem.max_chunk {
            Some(limit) if limit < self.best.peak => self.fill_chunks(problem, limit),
            _ => self.write_down(problem),
        }
        self.best.proved_optimal |= self.at_lower_bound();
        #[cfg(debug_assertions)]
        if let Err(flaw) = super::check(problem, &self.best) {
            debug_assert!(false, "packing by {}: {flaw}", self.best.strategy);
        }
        Ok(&self.best)
    }

    /// The free list in time order, then greedy orders; stops at the lower bound.
    fn fast(&mut self) {
        let Packer { timeline, conflicts, greedy, order, trial, offsets, best, .. } = self;
        best.strategy = Strategy::TimeOrder;
        best.peak = self.time_order.place(timeline, offsets);
        if best.peak <= timeline.lower_bound || !conflicts.build(timeline, CONFLICT_LIMIT) {
            return;
        }
        for strategy in ORDERS {
            sort(timeline, strategy, &mut self.keys, order);
            if let Ok(peak) = greedy.place(timeline, conflicts, order, best.peak - 1, trial) {
                best.peak = peak;
                best.strategy = strategy;
                std::mem::swap(offsets, trial);
                if peak <= timeline.lower_bound {
                    return;
                }
            }
            let limit = timeline.lower_bound;
            if let Some(peak) = greedy.repair(timeline, conflicts, order, limit, REPAIR_STEPS, trial) {
                best.peak = peak;
                best.strategy = Strategy::Repair;
                std::mem::swap(offsets, trial);
                return;
            }
        }
    }

    fn at_lower_bound(&self) -> bool {
        self.best.peak <= self.timeline.lower_bound
    }

    /// Packs into chunks of at most `limit` bytes, when one chunk would not do.
    fn fill_chunks(&mut self, problem: &Problem, limit: u64) {
        let Packer { timeline, conflicts, chunks, chunk_trial: trial, best, .. } = self;
        best.strategy = Strategy::TimeOrder;
        best.peak = chunks.place_in_time_order(timeline, limit);
        if best.peak > timeline.lower_bound && conflicts.build(timeline, CONFLICT_LIMIT) {
            for strategy in ORDERS {
                sort(timeline, strategy, &mut self.keys, &mut self.order);
                if let Some(peak) = trial.place(timeline, conflicts, &self.order, limit, best.peak) {
                    best.peak = peak;
                    best.strategy = strategy;
                    std::mem::swap(chunks, trial);
                    if peak <= timeline.lower_bound {
                        break;
                    }
                }
            }
        }
        self.start_writing(problem);
        self.best.chunks.extend(self.chunks.sizes());
        for (&origin, placement) in self.timeline.origin.iter().zip(&self.chunks.placements) {
            if let Some(place) = self.best.placements.get_mut(origin as usize) {
                *place = *placement;
            }
        }
    }

    /// Writes down the best offsets in the problem's order.
    fn write_down(&mut self, problem: &Problem) {
        self.start_writing(problem);
        self.best.chunks.push(self.best.peak);
        for (&origin, &offset) in self.timeline.origin.iter().zip(&self.offsets) {
            if let Some(placement) = self.best.placements.get_mut(origin as usize) {
                placement.offset = offset;
            }
        }
    }

    fn start_writing(&mut self, problem: &Problem) {
        self.best.chunks.clear();
        self.best.placements.clear();
        self.best.placements.resize(problem.items.len(), Placement::default());
    }
}
