//! The packer: which strategies are tried, in what order, and when to stop.

use super::boundaries::ChunkBoundaries;
use super::chunked_time_order::ChunkedTimeOrder;
use super::conflicts::Conflicts;
use super::exact::Exact;
use super::greedy::Greedy;
use super::offset_order::OffsetOrder;
use super::problem::{Effort, PackedOffset, Packing, PackingError, PackingProblem, Strategy};
use super::radix_sort::RadixSorter;
use super::time_order::TimeOrder;
use super::timeline::{AlwaysLive, Timeline};

/// The most conflicts that are listed; beyond, only best fit in time order is tried.
pub(super) const CONFLICT_LIMIT: usize = 1 << 26;

/// Steps of search that even [`Effort::Fast`] spends on several chunks, where greedy orders do badly.
const FAST_CHUNK_STEPS: u64 = 100_000;

/// Packs a problem.
pub fn pack(problem: &PackingProblem, effort: Effort) -> Result<Packing, PackingError> {
    let mut packer = Packer::default();
    packer.pack(problem, effort)?;
    Ok(packer.best)
}

/// Packs problems. It keeps its working memory between problems: packing one of about the same size again allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct Packer {
    pub(super) timeline: Timeline,
    pub(super) conflicts: Conflicts,
    pub(super) time_order: TimeOrder,
    pub(super) greedy: Greedy,
    pub(super) offset_order: OffsetOrder,
    pub(super) sorter: RadixSorter,
    pub(super) order: Vec<u32>,
    pub(super) trial: Vec<u64>,
    pub(super) offsets: Vec<u64>,
    pub(super) exact: Exact,
    chunked: ChunkedTimeOrder,
    pub(super) boundaries: ChunkBoundaries,
    best_boundaries: ChunkBoundaries,
    pub(super) best: Packing,
}

impl Packer {
    /// Packs a problem. After an error the packer can be used again.
    pub fn pack(&mut self, problem: &PackingProblem, effort: Effort) -> Result<&Packing, PackingError> {
        self.timeline.build(problem, AlwaysLive::Separate)?;
        let lower_bound = self.timeline.always_live_bytes + self.timeline.lower_bound;
        self.best.lower_bound = lower_bound;
        self.best.proved_bound = lower_bound;
        self.best.steps = 0;
        self.best.placements.clear();
        self.best.placements.resize(problem.items.len(), PackedOffset::default());
        let mut done = self.try_from_peak();
        if problem.max_chunk.is_none_or(|limit| lower_bound <= limit) && done {
            self.best.peak = lower_bound;
            self.write_offsets();
        } else {
            if !self.timeline.always_live.is_empty() {
                self.timeline.build(problem, AlwaysLive::Included)?;
                done = self.try_from_peak();
            }
            if !done {
                self.try_other_strategies();
            }
            self.improve(problem, effort);
        }
        self.best.proved_optimal = self.best.peak <= self.best.proved_bound;
        #[cfg(debug_assertions)]
        if let Err(violation) = super::check(problem, &self.best) {
            debug_assert!(false, "packing by {}: {violation}", self.best.strategy);
        }
        Ok(&self.best)
    }

    /// Improves on the fast strategies as the effort allows, in several chunks if the limit requires it.
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

    /// Improves on the fast strategies in one chunk.
    fn pack_whole(&mut self, effort: Effort) {
        match effort {
            Effort::Fast => {}
            Effort::Search { seed, steps } => self.search(steps, seed),
            Effort::Exact { capacity: None, steps } => self.search(steps, 0),
            Effort::Exact { capacity: Some(capacity), steps } => {
                if self.best.peak <= capacity {
                    return;
                }
                if self.exact.read(&self.timeline, &self.boundaries) {
                    self.attempt(capacity, steps, 0);
                } else {
                    self.search_large(capacity.max(self.best.proved_bound), steps, 0);
                }
            }
        }
    }

    /// Packs into chunks of at most `limit` bytes.
    fn pack_chunks(&mut self, problem: &PackingProblem, limit: u64, effort: Effort) {
        self.best.proved_bound = self.timeline.lower_bound;
        if !self.conflicts.listed() {
            self.conflicts.build(&self.timeline, CONFLICT_LIMIT);
        }
        let baseline = self.chunked.place(&self.timeline, limit);
        self.best.peak = baseline;
        self.best.strategy = Strategy::TimeOrder;
        self.boundaries.even(&self.timeline, limit, problem.alignment);
        self.fill_chunks(effort);
        // Chunks may be smaller than the limit: try the limit, the largest item's size, and some sizes in between.
        let largest = self.timeline.largest.min(limit);
        for size in [limit, largest, largest.saturating_mul(2), largest.saturating_add(limit) / 2] {
            if self.best.peak > self.timeline.lower_bound && size <= limit {
                self.boundaries.fitted(&self.timeline, limit, problem.alignment, size);
                self.fill_chunks(effort);
            }
        }
        if self.best.peak < baseline {
            std::mem::swap(&mut self.boundaries, &mut self.best_boundaries);
            self.write_offsets();
        } else {
            self.best.chunks.clear();
            self.best.chunks.extend(self.chunked.sizes());
            for (&origin, placement) in self.timeline.origin.iter().zip(&self.chunked.placements) {
                if let Some(place) = self.best.placements.get_mut(origin as usize) {
                    *place = *placement;
                }
            }
        }
    }

    /// Packs within the current boundaries.
    fn fill_chunks(&mut self, effort: Effort) {
        self.try_orders(&[]);
        self.search(FAST_CHUNK_STEPS, 0);
        match effort {
            Effort::Fast => {}
            Effort::Search { seed, steps } => self.search(steps / 5, seed),
            Effort::Exact { steps, .. } => self.search(steps / 5, 0),
        }
    }

    /// Makes the offsets in `trial` the best if they are. `peak` is the highest end of an item.
    pub(super) fn keep(&mut self, peak: u64, strategy: Strategy) {
        let bytes = if self.boundaries.any() { self.bytes_in_chunks() } else { peak };
        if bytes < self.best.peak {
            self.best.peak = bytes;
            self.best.strategy = strategy;
            if self.boundaries.any() {
                self.best_boundaries.clone_from(&self.boundaries);
            }
            std::mem::swap(&mut self.offsets, &mut self.trial);
        }
    }

    /// Bytes of all chunks with the offsets in `trial`: a chunk ends with its highest item.
    fn bytes_in_chunks(&mut self) -> u64 {
        self.best.chunks.clear();
        for (item, &offset) in self.timeline.items.iter().zip(&self.trial) {
            grow(&mut self.best.chunks, self.boundaries.place(offset), item.size);
        }
        self.best.chunks.iter().sum()
    }

    /// Writes the best offsets in the problem's order, above the items that are always live.
    fn write_offsets(&mut self) {
        let Packer { timeline, boundaries, offsets, best, .. } = self;
        best.chunks.clear();
        if !boundaries.any() {
            best.chunks.push(best.peak);
            let mut bottom = 0;
            for &(origin, size) in &timeline.always_live {
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
            let place = boundaries.place(offset);
            grow(&mut best.chunks, place, item.size);
            if let Some(placement) = best.placements.get_mut(origin as usize) {
                *placement = place;
            }
        }
    }
}

/// Enlarges a chunk to hold an item.
fn grow(chunks: &mut Vec<u64>, place: PackedOffset, size: u64) {
    let chunk = place.chunk as usize;
    if chunk >= chunks.len() {
        chunks.resize(chunk + 1, 0);
    }
    if let Some(bytes) = chunks.get_mut(chunk) {
        *bytes = (place.offset + size).max(*bytes);
    }
}
