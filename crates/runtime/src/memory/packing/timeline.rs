//! A packing problem in the form that the strategies use: items in order of their start, and time in sections.
//!
//! Whether two items are live together depends only on the order of their starts and ends, and the set of live items
//! grows only where an item starts. So time is divided at every start: a *section* runs from one start to the next, and
//! every item is live in a range of whole sections. Two items conflict if and only if they share a section, and the
//! lower bound is the largest sum of sizes over one section.
//!
//! Items that are live in all sections, as inputs are, can be stacked at the bottom of any packing. They are taken out
//! of the problem, which leaves fewer conflicts.
#![expect(
    clippy::indexing_slicing,
    reason = "sections are below `sections`, items below `items.len()`, and every array is sized for that by `build`"
)]

use super::problem::{PackingError, PackingItem, PackingProblem};

/// An item of the timeline; `start..end` are sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimelineItem {
    /// Bytes, rounded up to the alignment; not 0.
    pub(crate) size: u64,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl TimelineItem {
    /// In how many sections the item is live.
    pub(crate) fn duration(&self) -> u32 {
        self.end - self.start
    }
}

/// The treatment of items that are live in all sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AlwaysLive {
    /// They are items of the timeline like all others.
    Included,
    /// They are listed separately and are no items of the timeline.
    Separate,
}

/// All items that are not empty, in order of their start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    /// The items, in order of their start; of equal starts in the problem's order.
    pub(crate) items: Vec<TimelineItem>,
    /// For each of them its index in the problem.
    pub(crate) origin: Vec<u32>,
    /// For each section, and one past the last, the first item that starts there or later.
    pub(crate) first: Vec<u32>,
    /// For each section its live bytes.
    pub(crate) live: Vec<u64>,
    /// The maximum of live bytes over all sections.
    pub(crate) lower_bound: u64,
    /// Bytes of the largest item.
    pub(crate) largest: u64,
    /// The items that are listed separately: index in the problem, and bytes rounded up to the alignment.
    pub(crate) always_live: Vec<(u32, u64)>,
    /// The sum of their bytes.
    pub(crate) always_live_bytes: u64,
    /// Scratch: for each point in time its section, if these are few; else the sorted starts.
    ranks: Vec<u32>,
    /// Scratch: the items in the problem's order.
    scratch: Vec<(TimelineItem, u32)>,
}

impl Timeline {
    /// How many sections there are.
    pub(crate) fn sections(&self) -> usize {
        self.live.len()
    }

    /// The first section with the most live bytes.
    pub(crate) fn peak_section(&self) -> u32 {
        self.live.iter().position(|live| *live == self.lower_bound).unwrap_or(0) as u32
    }

    /// Reads a problem. Takes linear time if there are about as many points in time as items, as in a graph.
    pub(crate) fn build(
        &mut self,
        problem: &PackingProblem,
        always_live: AlwaysLive,
    ) -> Result<(), PackingError> {
        let last = validate(problem)?;
        let dense = last as usize <= 8 * problem.items.len() + 1024;
        if dense {
            self.rank_dense(problem, last)
        } else {
            self.rank_sparse(problem)
        };

        // A counting sort by start.
        let Timeline { items, origin, first, live, ranks, .. } = self;
        let sections = live.len();
        let rank = |time: u32| {
            if dense { ranks[time as usize] } else { ranks.partition_point(|&start| start < time) as u32 }
        };
        let span = |item: &PackingItem| TimelineItem {
            size: rounded(item.size, problem.alignment),
            start: rank(item.start),
            end: rank(item.end),
        };
        let apart = |span: &TimelineItem| {
            always_live == AlwaysLive::Separate && span.start == 0 && span.end as usize == sections
        };
        self.always_live.clear();
        self.always_live_bytes = 0;
        self.scratch.clear();
        first.clear();
        first.resize(sections + 2, 0);
        for (index, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
            let span = span(item);
            if apart(&span) {
                self.always_live.push((index as u32, span.size));
                self.always_live_bytes += span.size;
            } else {
                first[span.start as usize + 2] += 1;
                self.scratch.push((span, index as u32));
            }
        }
        for section in 2..first.len() {
            first[section] += first[section - 1];
        }
        // Old contents are overwritten.
        items.resize(self.scratch.len(), TimelineItem { size: 0, start: 0, end: 0 });
        origin.resize(self.scratch.len(), 0);
        self.largest = 0;
        for &(span, index) in &self.scratch {
            let place = &mut first[span.start as usize + 1];
            items[*place as usize] = span;
            origin[*place as usize] = index;
            *place += 1;
            self.largest = self.largest.max(span.size);
            // Differences, which may wrap; the prefix sum follows.
            live[span.start as usize] = live[span.start as usize].wrapping_add(span.size);
            if let Some(after) = live.get_mut(span.end as usize) {
                *after = after.wrapping_sub(span.size);
            }
        }
        first.truncate(sections + 1);
        let mut sum: u64 = 0;
        self.lower_bound = 0;
        for live in live {
            sum = sum.wrapping_add(*live);
            *live = sum;
            self.lower_bound = self.lower_bound.max(sum);
        }
        Ok(())
    }

    /// Numbers the starts by a pass over all points in time; leaves one zero for each section in `live`.
    fn rank_dense(&mut self, problem: &PackingProblem, last: u32) {
        self.ranks.clear();
        self.ranks.resize(last as usize + 1, 0);
        for item in problem.items.iter().filter(|item| item.size > 0) {
            self.ranks[item.start as usize] = 1;
        }
        let mut sections = 0;
        for rank in &mut self.ranks {
            sections += std::mem::replace(rank, sections);
        }
        self.live.clear();
        self.live.resize(sections as usize, 0);
    }

    /// Numbers the starts by sorting them; leaves one zero for each section in `live`.
    fn rank_sparse(&mut self, problem: &PackingProblem) {
        self.ranks.clear();
        self.ranks.extend(problem.items.iter().filter(|item| item.size > 0).map(|item| item.start));
        self.ranks.sort_unstable();
        self.ranks.dedup();
        self.live.clear();
        self.live.resize(self.ranks.len(), 0);
    }
}

/// Checks the problem; returns the last end.
fn validate(problem: &PackingProblem) -> Result<u32, PackingError> {
    if problem.alignment == 0 {
        return Err(PackingError::Alignment);
    }
    if problem.items.len() >= u32::MAX as usize {
        return Err(PackingError::TooMany { count: problem.items.len() });
    }
    let (mut last, mut sum) = (0, 0_u64);
    for (index, item) in problem.items.iter().enumerate() {
        if item.start >= item.end {
            return Err(PackingError::EmptyLifetime { item: index, start: item.start, end: item.end });
        }
        last = last.max(item.end);
        // Sizes up to the limit cannot overflow.
        let size = if item.size <= MAX_TOTAL { rounded(item.size, problem.alignment) } else { item.size };
        sum += size.min(MAX_TOTAL + 1);
        if sum > MAX_TOTAL {
            return Err(PackingError::TooLarge { item: index, size: item.size });
        }
    }
    Ok(last)
}

/// The largest sum of sizes.
const MAX_TOTAL: u64 = 1 << 61;

/// A size, rounded up to a multiple of the alignment.
fn rounded(size: u64, alignment: u64) -> u64 {
    if alignment.is_power_of_two() {
        // The usual case, which needs no division.
        size.wrapping_add(alignment - 1) & !(alignment - 1)
    } else {
        size.next_multiple_of(alignment)
    }
}
