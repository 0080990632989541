//! From a problem to a packing: which strategies are tried, in what order, and when that is enough.

use super::chunks::Chunks;
use super::conflicts::Conflicts;
use super::exact::Exact;
use super::greedy::Greedy;
use super::problem::{Effort, Packing, PackingError, PackingProblem, Placement, Strategy};
use super::sorting::Sorting;
use super::time_order::TimeOrder;
use super::timeline::{Steady, Timeline};
use super::walls::Walls;

/// Conflicts are listed one by one up to this many; beyond, orders are placed without lists.
pub(super) const CONFLICT_LIMIT: usize = 1 << 26;

/// How many steps even the least effort takes to fill chunks, which greedy orders are not good at.
const FAST_CHUNK_STEPS: u64 = 100_000;

/// Packs a problem.
pub fn pack(problem: &PackingProblem, effort: Effort) -> Result<Packing, PackingError> {
    let mut packer = Packer::default();
    packer.pack(problem, effort)?;
    Ok(packer.best)
}

/// Packs problems, and keeps its working memory for the next one: planning again what has been planned before allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct Packer {
    pub(super) timeline: Timeline,
    pub(super) conflicts: Conflicts,
    pub(super) time_order: TimeOrder,
    pub(super) greedy: Greedy,
    pub(super) sorting: Sorting,
    pub(super) order: Vec<u32>,
    pub(super) trial: Vec<u64>,
    pub(super) offsets: Vec<u64>,
    pub(super) exact: Exact,
    chunks: Chunks,
    pub(super) walls: Walls,
    best_walls: Walls,
    pub(super) best: Packing,
}

impl Packer {
    /// Packs a problem. After an error the packer is as good as new.
    pub fn pack(&mut self, problem: &PackingProblem, effort: Effort) -> Result<&Packing, PackingError> {
        self.timeline.build(problem, Steady::Apart)?;
        let lower_bound = self.timeline.steady_bytes + self.timeline.lower_bound;
        self.best.lower_bound = lower_bound;
        self.best.proved_bound = lower_bound;
        self.best.steps = 0;
        self.best.placements.clear();
        self.best.placements.resize(problem.items.len(), Placement::default());
        let mut done = self.begin_at_peak();
        if problem.max_chunk.is_none_or(|limit| lower_bound <= limit) && done {
            self.best.peak = lower_bound;
            self.write_offsets();
        } else {
            if !self.timeline.steady.is_empty() {
                self.timeline.build(problem, Steady::Among)?;
                done = self.begin_at_peak();
            }
            if !done {
                self.other_orders();
            }
            self.improve(problem, effort);
        }
        self.best.proved_optimal = self.best.peak <= self.best.proved_bound;
        #[cfg(debug_assertions)]
        if let Err(flaw) = super::check(problem, &self.best) {
            debug_assert!(false, "packing by {}: {flaw}", self.best.strategy);
        }
        Ok(&self.best)
    }

    /// Goes on from the first packing, with more effort, or into chunks where they have a limit.
    fn improve(&mut self, problem: &PackingProblem, effort: Effort) {
        match problem.max_chunk {
            Some(limit) if limit < self.timeline.lower_bound => self.pack_chunks(problem, limit, effort),
            limit => {
                self.pack_whole(effort);
                match limit {
                    Some(limit) if limit < self.best.peak => self.pack_chunks(problem, limit, effort),
                    _ => self.write_offsets(),
                }
            }
        }
    }

    /// Improves on the first packing into one chunk.
    fn pack_whole(&mut self, effort: Effort) {
        match effort {
            Effort::Fast => {}
            Effort::Search { seed, steps } => self.search(steps, seed),
            Effort::Exact { capacity: None, steps } => self.search(steps, 0),
            Effort::Exact { capacity: Some(capacity), steps } => {
                if self.best.peak > capacity && self.exact.read(&self.timeline, &self.walls) {
                    self.attempt(capacity, steps, 0);
                }
            }
        }
    }

    /// Packs into chunks of at most `limit` bytes, when one chunk would not do.
    fn pack_chunks(&mut self, problem: &PackingProblem, limit: u64, effort: Effort) {
        self.best.proved_bound = self.timeline.lower_bound;
        if !self.conflicts.listed() {
            self.conflicts.build(&self.timeline, CONFLICT_LIMIT);
        }
        let baseline = self.chunks.place_in_time_order(&self.timeline, limit);
        self.best.peak = baseline;
        self.best.strategy = Strategy::TimeOrder;
        self.walls.even(&self.timeline, limit, problem.alignment);
        self.fill_chunks(effort);
        // Chunks of any size are as good: large ones, ones of the largest item's size, and some between.
        let largest = self.timeline.largest.min(limit);
        for size in [limit, largest, largest.saturating_mul(2), largest.saturating_add(limit) / 2] {
            if self.best.peak > self.timeline.lower_bound && size <= limit {
                self.walls.fitted(&self.timeline, limit, problem.alignment, size);
                self.fill_chunks(effort);
            }
        }
        if self.best.peak < baseline {
            std::mem::swap(&mut self.walls, &mut self.best_walls);
            self.write_offsets();
        } else {
            self.best.chunks.clear();
            self.best.chunks.extend(self.chunks.sizes());
            for (&origin, placement) in self.timeline.origin.iter().zip(&self.chunks.placements) {
                if let Some(place) = self.best.placements.get_mut(origin as usize) {
                    *place = *placement;
                }
            }
        }
    }

    /// Fills the chunks between the present walls.
    fn fill_chunks(&mut self, effort: Effort) {
        self.try_orders(&[]);
        self.search(FAST_CHUNK_STEPS, 0);
        match effort {
            Effort::Fast => {}
            Effort::Search { seed, steps } => self.search(steps / 5, seed),
            Effort::Exact { steps, .. } => self.search(steps / 5, 0),
        }
    }

    /// Makes the offsets just tried the best, if they are. `peak` is the highest byte they use.
    pub(super) fn keep(&mut self, peak: u64, strategy: Strategy) {
        let bytes = if self.walls.any() { self.bytes_in_chunks() } else { peak };
        if bytes < self.best.peak {
            self.best.peak = bytes;
            self.best.strategy = strategy;
            if self.walls.any() {
                self.best_walls.clone_from(&self.walls);
            }
            std::mem::swap(&mut self.offsets, &mut self.trial);
        }
    }

    /// Bytes of all chunks, by the offsets just tried: a chunk ends where its highest item does.
    fn bytes_in_chunks(&mut self) -> u64 {
        self.best.chunks.clear();
        for (item, &offset) in self.timeline.items.iter().zip(&self.trial) {
            grow(&mut self.best.chunks, self.walls.place(offset), item.size);
        }
        self.best.chunks.iter().sum()
    }

    /// Writes down the best offsets in the problem's order, above what is kept apart.
    fn write_offsets(&mut self) {
        let Packer { timeline, walls, offsets, best, .. } = self;
        best.chunks.clear();
        if !walls.any() {
            best.chunks.push(best.peak);
            let mut bottom = 0;
            for &(origin, size) in &timeline.steady {
                if let Some(placement) = best.placements.get_mut(origin as usize) {
                    placement.offset = bottom;
                }
                bottom += size;
            }
            for (&origin, &offset) in timeline.origin.iter().zip(&*offsets) {
                if let Some(placement) = best.placements.get_mut(origin as usize) {
                    placement.offset = bottom + offset;
                }
            }
            return;
        }
        best.chunks.push(0);
        for ((&origin, item), &offset) in timeline.origin.iter().zip(&timeline.items).zip(&*offsets) {
            let place = walls.place(offset);
            grow(&mut best.chunks, place, item.size);
            if let Some(placement) = best.placements.get_mut(origin as usize) {
                *placement = place;
            }
        }
    }
}

/// Makes a chunk large enough for an item.
fn grow(chunks: &mut Vec<u64>, place: Placement, size: u64) {
    let chunk = place.chunk as usize;
    if chunk >= chunks.len() {
        chunks.resize(chunk + 1, 0);
    }
    if let Some(bytes) = chunks.get_mut(chunk) {
        *bytes = (place.offset + size).max(*bytes);
    }
}
