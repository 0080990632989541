//! Best fit in time order over several chunks: the baseline where one chunk cannot be large enough.
//!
//! Each item is placed where the existing chunks grow least: in the best-fitting free block, else at the end of a
//! chunk, and in a new chunk only if none has room. A chunk may grow up to the limit. One that was opened for an item
//! larger than the limit never grows, but other items may use its bytes while that item is not live. See
//! [`boundaries`](super::boundaries) for the better way.
#![expect(clippy::indexing_slicing, reason = "orders are permutations of the timeline's items")]

use super::problem::PackedOffset;
use super::timeline::Timeline;
use crate::memory::free_list::{FreeBlock, FreeList};

/// A chunk that is being filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OpenChunk {
    /// The size it may grow to.
    limit: u64,
    /// Its size so far.
    size: u64,
}

/// Best fit over several chunks, with its working memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChunkedTimeOrder {
    /// The placement of each of the timeline's items.
    pub(crate) placements: Vec<PackedOffset>,
    chunks: Vec<OpenChunk>,
    free: Vec<FreeList>,
    ending: Vec<Vec<u32>>,
}

impl ChunkedTimeOrder {
    /// Bytes of each chunk.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks.iter().map(|chunk| chunk.size)
    }

    /// Places all items in order of time. Returns the bytes of all chunks.
    pub(crate) fn place(&mut self, timeline: &Timeline, limit: u64) -> u64 {
        self.start(timeline);
        self.free.clear();
        self.ending.iter_mut().for_each(Vec::clear);
        self.ending.resize(timeline.sections() + 1, Vec::new());
        let mut section = 0;
        for (index, item) in timeline.items.iter().enumerate() {
            while section <= item.start {
                for &ended in &self.ending[section as usize] {
                    let PackedOffset { chunk, offset } = self.placements[ended as usize];
                    self.free[chunk as usize]
                        .free(FreeBlock { offset, size: timeline.items[ended as usize].size });
                }
                section += 1;
            }
            let choices =
                self.free.iter().zip(&self.chunks).enumerate().filter_map(|(chunk, (free, state))| {
                    let block = free.best_fit(item.size)?;
                    Some(((block.offset + item.size).saturating_sub(state.size), block.size, chunk))
                });
            let chunk = choices.min().map(|(_, _, chunk)| chunk).unwrap_or_else(|| {
                let chunk = self.open(limit, item.size);
                self.free.push(FreeList::default());
                self.free[chunk].reset(FreeBlock { offset: 0, size: self.chunks[chunk].limit });
                chunk
            });
            let offset = self.free[chunk].allocate(item.size).unwrap_or(0);
            self.put(index, chunk, offset, item.size);
            self.ending[item.end as usize].push(index as u32);
        }
        self.sizes().sum()
    }

    fn start(&mut self, timeline: &Timeline) {
        self.chunks.clear();
        self.placements.clear();
        self.placements.resize(timeline.items.len(), PackedOffset::default());
    }

    fn open(&mut self, limit: u64, size: u64) -> usize {
        self.chunks.push(OpenChunk { limit: limit.max(size), size: 0 });
        self.chunks.len() - 1
    }

    fn put(&mut self, item: usize, chunk: usize, offset: u64, size: u64) {
        self.placements[item] = PackedOffset { chunk: chunk as u32, offset };
        self.chunks[chunk].size = self.chunks[chunk].size.max(offset + size);
    }
}
