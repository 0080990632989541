//! The problem as the strategies see it: items in order of time, and time cut into sections.
//!
//! Whether two items are alive together depends only on the order of moments, not on the moments themselves, and the
//! set of living items only grows where something starts. So time is cut at every start: a *section* runs from one
//! start to the next, and every item is alive in a range of whole sections. Two items conflict exactly when they share
//! a section, and the lower bound is the largest sum of sizes over one section.
//!
//! What is alive in all sections, as inputs are, may lie at the bottom of any packing, one above the other, and the rest
//! above that: it can be kept apart and forgotten, which leaves fewer conflicts.
#![expect(
    clippy::indexing_slicing,
    reason = "sections are below `sections`, items below `items.len()`, and every array is sized for that by `build`"
)]

use super::problem::{PackingError, PackingItem, PackingProblem};

/// An item as the strategies see it. `start..end` are sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Bytes, rounded up to the alignment; not 0.
    pub(crate) size: u64,
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl Span {
    /// In how many sections the item is alive.
    pub(crate) fn duration(&self) -> u32 {
        self.end - self.start
    }
}

/// What becomes of the items that are alive in all sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Steady {
    /// They are items like all others.
    Among,
    /// They are listed apart, and count for nothing else.
    Apart,
}

/// All items that take room, in order of their start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    /// The items, in order of their start; equal starts in the problem's order.
    pub(crate) items: Vec<Span>,
    /// For each of them its index in the problem.
    pub(crate) origin: Vec<u32>,
    /// For each section, and once past the last, the first of the items that start there or later.
    pub(crate) first: Vec<u32>,
    /// For each section the bytes alive in it.
    pub(crate) live: Vec<u64>,
    /// The most bytes alive in any section.
    pub(crate) lower_bound: u64,
    /// The largest item.
    pub(crate) largest: u64,
    /// Items that are kept apart: their index in the problem and their bytes, rounded up to the alignment.
    pub(crate) steady: Vec<(u32, u64)>,
    /// The bytes of those.
    pub(crate) steady_bytes: u64,
    /// Scratch: for each moment its section, where moments are few; else the sorted starts.
    ranks: Vec<u32>,
    /// Scratch: the items in the problem's order.
    scratch: Vec<(Span, u32)>,
}

impl Timeline {
    /// How many sections there are.
    pub(crate) fn sections(&self) -> usize {
        self.live.len()
    }

    /// The first section in which most bytes are alive.
    pub(crate) fn peak_section(&self) -> u32 {
        self.live.iter().position(|live| *live == self.lower_bound).unwrap_or(0) as u32
    }

    /// Reads a problem. Takes linear time where moments are about as many as items, as they are in a graph.
    pub(crate) fn build(&mut self, problem: &PackingProblem, steady: Steady) -> Result<(), PackingError> {
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
        let rank = |moment: u32| {
            if dense { ranks[moment as usize] } else { ranks.partition_point(|&start| start < moment) as u32 }
        };
        let span = |item: &PackingItem| Span {
            size: rounded(item.size, problem.alignment),
            start: rank(item.start),
            end: rank(item.end),
        };
        let apart = |span: &Span| steady == Steady::Apart && span.start == 0 && span.end as usize == sections;
        self.steady.clear();
        self.steady_bytes = 0;
        self.scratch.clear();
        first.clear();
        first.resize(sections + 2, 0);
        for (index, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
            let span = span(item);
            if apart(&span) {
                self.steady.push((index as u32, span.size));
                self.steady_bytes += span.size;
            } else {
                first[span.start as usize + 2] += 1;
                self.scratch.push((span, index as u32));
            }
        }
        for section in 2..first.len() {
            first[section] += first[section - 1];
        }
        // All that these hold from before is overwritten.
        items.resize(self.scratch.len(), Span { size: 0, start: 0, end: 0 });
        origin.resize(self.scratch.len(), 0);
        self.largest = 0;
        for &(span, index) in &self.scratch {
            let place = &mut first[span.start as usize + 1];
            items[*place as usize] = span;
            origin[*place as usize] = index;
            *place += 1;
            self.largest = self.largest.max(span.size);
            // Differences first, wrapping below zero; summed up below.
            live[span.start as usize] = live[span.start as usize].wrapping_add(span.size);
            if let Some(after) = live.get_mut(span.end as usize) {
                *after = after.wrapping_sub(span.size);
            }
        }
        first.truncate(sections + 1);
        let mut alive: u64 = 0;
        self.lower_bound = 0;
        for live in live {
            alive = alive.wrapping_add(*live);
            *live = alive;
            self.lower_bound = self.lower_bound.max(alive);
        }
        Ok(())
    }

    /// Numbers the starts by going over all moments; leaves one zero for each section in `live`.
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

    /// Numbers the starts by sorting them.
    fn rank_sparse(&mut self, problem: &PackingProblem) {
        self.ranks.clear();
        self.ranks.extend(problem.items.iter().filter(|item| item.size > 0).map(|item| item.start));
        self.ranks.sort_unstable();
        self.ranks.dedup();
        self.live.clear();
        self.live.resize(self.ranks.len(), 0);
    }
}

/// Refuses what cannot be computed with; returns the last moment.
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
        // Up to the limit nothing overflows.
        let size = if item.size <= LIMIT { rounded(item.size, problem.alignment) } else { item.size };
        sum += size.min(LIMIT + 1);
        if sum > LIMIT {
            return Err(PackingError::TooLarge { item: index, size: item.size });
        }
    }
    Ok(last)
}

/// The most bytes of all items together.
const LIMIT: u64 = 1 << 61;

/// A size, rounded up to a multiple of the alignment.
fn rounded(size: u64, alignment: u64) -> u64 {
    if alignment.is_power_of_two() {
        // This is all there ever is in practice, and needs no division.
        size.wrapping_add(alignment - 1) & !(alignment - 1)
    } else {
        size.next_multiple_of(alignment)
    }
}
