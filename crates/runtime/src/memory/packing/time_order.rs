//! The baseline: the free list, one item after the other in order of time.
//!
//! This is what the original allocator does with a graph: it walks the nodes, allocates each result and releases what
//! is read for the last time. It is fast, linear but for the tree of free blocks, and on graphs whose storages are
//! alike it often reaches the lower bound.
#![expect(
    clippy::indexing_slicing,
    reason = "links and sections come from the timeline, for which all is sized"
)]

use super::timeline::Timeline;
use crate::memory::free_list::{FreeBlock, FreeList};

/// No further item in a chain.
const NONE: u32 = u32::MAX;

/// What the walk needs, kept for the next one.
#[derive(Clone, Debug, Default)]
pub(crate) struct TimeOrder {
    blocks: FreeList,
    /// For each section the head of the chain of items that end when it begins.
    ending: Vec<u32>,
    /// For each item the next one in its chain.
    next: Vec<u32>,
}

impl TimeOrder {
    /// Fills `offsets` for the timeline's items; returns the peak.
    pub(crate) fn place(&mut self, timeline: &Timeline, offsets: &mut Vec<u64>) -> u64 {
        self.blocks.reset(FreeBlock { offset: 0, size: u64::MAX });
        self.ending.clear();
        self.ending.resize(timeline.sections() + 1, NONE);
        self.next.clear();
        self.next.resize(timeline.items.len(), NONE);
        offsets.clear();
        let (mut peak, mut section) = (0, 0);
        for (index, item) in timeline.items.iter().enumerate() {
            while section <= item.start {
                let mut ended = self.ending[section as usize];
                while ended != NONE {
                    let size = timeline.items[ended as usize].size;
                    self.blocks.free(FreeBlock { offset: offsets[ended as usize], size });
                    ended = self.next[ended as usize];
                }
                section += 1;
            }
            // The last block has no end, and the sum of all sizes is below it: there is always room.
            let offset = self.blocks.allocate(item.size).unwrap_or(0);
            offsets.push(offset);
            peak = peak.max(offset + item.size);
            self.next[index] = std::mem::replace(&mut self.ending[item.end as usize], index as u32);
        }
        peak
    }
}
