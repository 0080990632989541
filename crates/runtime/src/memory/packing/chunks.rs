//! Packing into several buffers, where one cannot be large enough.
//!
//! Each item goes where the chunks that are already there grow least: into a hole if there is one, on top of the chunk
//! that has most room below its top if there is none, and into a new chunk only when no other can take it. A chunk may
//! grow up to the limit; one that was opened for an item beyond the limit never grows, but others may use its bytes
//! while that item is not alive.
#![expect(clippy::indexing_slicing, reason = "orders are permutations of the timeline's items")]

use super::conflicts::Conflicts;
use super::greedy::UNPLACED;
use super::problem::Placement;
use super::timeline::Timeline;
use crate::memory::free_blocks::{Block, FreeBlocks};

/// A chunk while it is filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Chunk {
    /// The most bytes it may have.
    limit: u64,
    /// Bytes it has.
    size: u64,
}

/// Packs into chunks; keeps its working memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chunks {
    /// Where each of the timeline's items is.
    pub(crate) placements: Vec<Placement>,
    chunks: Vec<Chunk>,
    free: Vec<FreeBlocks>,
    taken: Vec<(u32, u64, u64)>,
    ending: Vec<Vec<u32>>,
}

impl Chunks {
    /// Bytes of each chunk.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks.iter().map(|chunk| chunk.size)
    }

    /// The free lists of all chunks, one item after the other in order of time. Returns the bytes of all chunks.
    pub(crate) fn place_in_time_order(&mut self, timeline: &Timeline, limit: u64) -> u64 {
        self.start(timeline);
        self.free.clear();
        self.ending.iter_mut().for_each(Vec::clear);
        self.ending.resize(timeline.sections() + 1, Vec::new());
        let mut section = 0;
        for (index, item) in timeline.items.iter().enumerate() {
            while section <= item.start {
                for &ended in &self.ending[section as usize] {
                    let Placement { chunk, offset } = self.placements[ended as usize];
                    self.free[chunk as usize]
                        .give(Block { offset, size: timeline.items[ended as usize].size });
                }
                section += 1;
            }
            let choices =
                self.free.iter().zip(&self.chunks).enumerate().filter_map(|(chunk, (free, state))| {
                    let block = free.choose(item.size)?;
                    Some(((block.offset + item.size).saturating_sub(state.size), block.size, chunk))
                });
            let chunk = choices.min().map(|(_, _, chunk)| chunk).unwrap_or_else(|| {
                let chunk = self.open(limit, item.size);
                self.free.push(FreeBlocks::default());
                self.free[chunk].reset(Block { offset: 0, size: self.chunks[chunk].limit });
                chunk
            });
            let offset = self.free[chunk].take(item.size).unwrap_or(0);
            self.put(index, chunk, offset, item.size);
            self.ending[item.end as usize].push(index as u32);
        }
        self.sizes().sum()
    }

    /// The items in the order given, each in its lowest place. Returns the bytes of all chunks, or nothing when they
    /// would be `bound` or more.
    pub(crate) fn place(
        &mut self,
        timeline: &Timeline,
        conflicts: &Conflicts,
        order: &[u32],
        limit: u64,
        bound: u64,
    ) -> Option<u64> {
        self.start(timeline);
        let mut total = 0;
        for &item in order {
            let item = item as usize;
            let size = timeline.items[item].size;
            let (growth, chunk, offset) = match self.best(timeline, conflicts, item) {
                Some(choice) => choice,
                None => (size, self.open(limit, size), 0),
            };
            total += growth;
            if total >= bound {
                return None;
            }
            self.put(item, chunk, offset, size);
        }
        Some(total)
    }

    /// The place in the existing chunks where `item` makes them grow least, as (growth, chunk, offset).
    fn best(&mut self, timeline: &Timeline, conflicts: &Conflicts, item: usize) -> Option<(u64, usize, u64)> {
        self.taken.clear();
        let earlier = conflicts.earlier(item).iter().map(|&other| other as usize);
        for other in earlier.chain(conflicts.later(item)) {
            let Placement { chunk, offset } = self.placements[other];
            if offset != UNPLACED {
                self.taken.push((chunk, offset, offset + timeline.items[other].size));
            }
        }
        self.taken.sort_unstable();
        let size = timeline.items[item].size;
        let mut taken = self.taken.iter().peekable();
        let mut best: Option<(u64, usize, u64)> = None;
        for (index, chunk) in self.chunks.iter().enumerate() {
            let mut floor = 0;
            while let Some(&(_, offset, end)) = taken.next_if(|next| next.0 as usize == index) {
                if offset >= floor + size {
                    break;
                }
                floor = floor.max(end);
            }
            while taken.next_if(|next| next.0 as usize == index).is_some() {}
            let growth = (floor + size).saturating_sub(chunk.size);
            if floor + size <= chunk.limit && best.is_none_or(|(least, ..)| growth < least) {
                best = Some((growth, index, floor));
            }
        }
        best
    }

    fn start(&mut self, timeline: &Timeline) {
        self.chunks.clear();
        self.placements.clear();
        self.placements.resize(timeline.items.len(), Placement { chunk: 0, offset: UNPLACED });
    }

    fn open(&mut self, limit: u64, size: u64) -> usize {
        self.chunks.push(Chunk { limit: limit.max(size), size: 0 });
        self.chunks.len() - 1
    }

    fn put(&mut self, item: usize, chunk: usize, offset: u64, size: u64) {
        self.placements[item] = Placement { chunk: chunk as u32, offset };
        self.chunks[chunk].size = self.chunks[chunk].size.max(offset + size);
    }
}
