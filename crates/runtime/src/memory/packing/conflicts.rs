//! Who is alive together with whom.
//!
//! With items in order of their start, the partners of an item fall in two parts: those that started before it and are
//! still alive when it starts, which are listed here one after the other for all items; and those that start while it
//! is alive, which are simply the items that follow it, up to its end.
#![expect(
    clippy::indexing_slicing,
    reason = "items and sections come from the timeline, for which all is sized"
)]

use super::timeline::Timeline;
use std::ops::Range;

/// The conflicts of a timeline's items.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conflicts {
    /// For each item, and once past the last, where its list in `earlier` begins.
    begin: Vec<u32>,
    earlier: Vec<u32>,
    /// For each item the end of the range of later items that it conflicts with.
    later_end: Vec<u32>,
    /// Scratch: the items alive now.
    alive: Vec<u32>,
    listed: bool,
}

impl Conflicts {
    /// Lists all conflicts; false (and nothing listed) where they are more than `limit`.
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
        self.alive.clear();
        self.earlier.reserve(pairs);
        let mut section = u32::MAX;
        for (index, item) in items.iter().enumerate() {
            if item.start != section {
                section = item.start;
                self.alive.retain(|&other| items[other as usize].end > section);
            }
            self.begin.push(self.earlier.len() as u32);
            self.earlier.extend_from_slice(&self.alive);
            self.alive.push(index as u32);
        }
        self.begin.push(self.earlier.len() as u32);
        true
    }

    /// Whether the conflicts of the present timeline have been listed.
    pub(crate) fn listed(&self) -> bool {
        self.listed
    }

    /// The items that started before `item` (or with it, but are listed before) and are alive when it starts.
    pub(crate) fn earlier(&self, item: usize) -> &[u32] {
        &self.earlier[self.begin[item] as usize..self.begin[item + 1] as usize]
    }

    /// The items that start while `item` is alive.
    pub(crate) fn later(&self, item: usize) -> Range<usize> {
        item + 1..self.later_end[item] as usize
    }
}
