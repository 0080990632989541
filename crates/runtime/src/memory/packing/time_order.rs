//! The baseline: best fit over a free list, one item after the other in order of time.
//!
//! This is what ggml's graph allocator does: it walks the nodes, allocates each result, and frees tensors after their
//! last reader. It takes linear time but for the tree of free blocks, and often reaches the lower bound on graphs whose
//! storages have few sizes.
#![expect(
    clippy::indexing_slicing,
    reason = "items and sections come from the timeline, which sizes all arrays"
)]

use super::timeline::Timeline;
use crate::memory::free_list::{FreeBlock, FreeList};

/// The end of a linked list.
const NONE: u32 = u32::MAX;

/// Best fit in time order, with its working memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct TimeOrder {
    free_list: FreeList,
    /// For each section the head of the linked list of items that end when it begins.
    ending: Vec<u32>,
    /// For each item the next one in its list.
    next: Vec<u32>,
}

impl TimeOrder {
    /// Fills `offsets` for the timeline's items; returns the peak.
    pub(crate) fn place(&mut self, timeline: &Timeline, offsets: &mut Vec<u64>) -> u64 {
        self.free_list.reset(FreeBlock { offset: 0, size: u64::MAX });
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
                    self.free_list.free(FreeBlock { offset: offsets[ended as usize], size });
                    ended = self.next[ended as usize];
                }
                section += 1;
            }
            // The last block is larger than the sum of all sizes: this never fails.
            let offset = self.free_list.allocate(item.size).unwrap_or(0);
            offsets.push(offset);
            peak = peak.max(offset + item.size);
            self.next[index] = std::mem::replace(&mut self.ending[item.end as usize], index as u32);
        }
        peak
    }
}
