//! The interference graph: which items are live together.
//!
//! With items in order of their start, the conflicts of an item are of two kinds: earlier items that are still live
//! when it starts, which are listed here; and items that start while it is live, which are a range of the items after
//! it.
#![expect(
    clippy::indexing_slicing,
    reason = "items and sections come from the timeline, for which all is sized"
)]

use super::timeline::Timeline;
use std::ops::Range;

/// The conflicts of a timeline's items.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conflicts {
    /// For each item, and one past the last, the begin of its list in `earlier`.
    begin: Vec<u32>,
    earlier: Vec<u32>,
    /// For each item the end of the range of later items that it conflicts with.
    later_end: Vec<u32>,
    /// Scratch: the live items.
    live: Vec<u32>,
    listed: bool,
}

impl Conflicts {
    /// Lists all conflicts; false, with nothing listed, if there are more than `limit`.
    pub(crate) fn build(&mut self, timeline: &Timeline, limit: usize) -> bool {
        let items = &timeline.items;
        self.begin.clear();
        self.later_end.clear();
        self.earlier.clear();
        let mut pairs = 0;
        for (index, item) in items.iter().enumerate() {
            let end = timeline.first[item.end as usize];
            self.later_end.push(end);
            pairs += end as usize - index - 1;
        }
        self.listed = pairs <= limit.min(u32::MAX as usize);
        if !self.listed {
            return false;
        }
        self.live.clear();
        self.earlier.reserve(pairs);
        let mut section = u32::MAX;
        for (index, item) in items.iter().enumerate() {
            if item.start != section {
                section = item.start;
                self.live.retain(|&other| items[other as usize].end > section);
            }
            self.begin.push(self.earlier.len() as u32);
            self.earlier.extend_from_slice(&self.live);
            self.live.push(index as u32);
        }
        self.begin.push(self.earlier.len() as u32);
        true
    }

    /// Whether the conflicts of the current timeline are listed.
    pub(crate) fn listed(&self) -> bool {
        self.listed
    }

    /// The items before `item` in the timeline that are live when it starts.
    pub(crate) fn earlier(&self, item: usize) -> &[u32] {
        &self.earlier[self.begin[item] as usize..self.begin[item + 1] as usize]
    }

    /// The items after `item` in the timeline that start while it is live.
    pub(crate) fn later(&self, item: usize) -> Range<usize> {
        item + 1..self.later_end[item] as usize
    }
}
