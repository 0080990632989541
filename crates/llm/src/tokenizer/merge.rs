//! Merging of adjacent symbols, best pair first: the core of both kinds of BPE.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Marks the end of the list.
const NONE: usize = usize::MAX;

/// A part of the text that is one symbol.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// The byte offset of its start.
    pub(super) start: usize,
    /// The byte offset of its end.
    pub(super) end: usize,
    /// The symbol; `u32::MAX` if the vocabulary has none for it.
    pub(super) symbol: u32,
    previous: usize,
    next: usize,
}

/// A pair that could be merged. Ordered by `rank` (smallest first), then by position. It is stale unless its left
/// segment still ends at `middle` and the next one at `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    rank: u32,
    left: usize,
    middle: usize,
    end: usize,
    merged: u32,
}

/// Merges segments in O(n log n), with a heap of candidate pairs over a linked list of segments. Kept between words to
/// reuse the memory.
#[derive(Debug, Default)]
pub(super) struct Merger {
    segments: Vec<Segment>,
    heap: BinaryHeap<Reverse<MergeCandidate>>,
}

impl Merger {
    /// Starts over with no segments.
    pub(super) fn clear(&mut self) {
        self.segments.clear();
        self.heap.clear();
    }

    /// Appends a segment that follows the last one.
    pub(super) fn push(&mut self, start: usize, end: usize, symbol: u32) {
        let index = self.segments.len();
        let previous = index.checked_sub(1).unwrap_or(NONE);
        if let Some(last) = self.segments.last_mut() {
            last.next = index;
        }
        self.segments.push(Segment { start, end, symbol, previous, next: NONE });
    }

    /// Merges until no pair can be merged. `pair` gives the rank (smallest first) and the merged symbol of two adjacent
    /// segments.
    pub(super) fn merge(&mut self, pair: impl Fn(&Segment, &Segment) -> Option<(u32, u32)>) {
        // Building the heap from a vector takes linear time.
        let mut first = std::mem::take(&mut self.heap).into_vec();
        first.extend((0..self.segments.len()).filter_map(|left| self.candidate(left, &pair)));
        self.heap = BinaryHeap::from(first);
        while let Some(Reverse(candidate)) = self.heap.pop() {
            let Some((right_index, right)) = self.after(candidate.left) else { continue };
            let Some(left) = self.segments.get_mut(candidate.left) else { continue };
            let gone = left.start == left.end;
            if gone || left.end != candidate.middle || right.end != candidate.end {
                continue;
            }
            left.end = right.end;
            left.symbol = candidate.merged;
            left.next = right.next;
            let previous = left.previous;
            if let Some(gone) = self.segments.get_mut(right_index) {
                gone.end = gone.start;
            }
            if let Some(next) = self.segments.get_mut(right.next) {
                next.previous = candidate.left;
            }
            let before = self.candidate(previous, &pair);
            let after = self.candidate(candidate.left, &pair);
            self.heap.extend(before.into_iter().chain(after));
        }
    }

    /// The remaining segments, in order.
    pub(super) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|segment| segment.start != segment.end)
    }

    fn after(&self, index: usize) -> Option<(usize, Segment)> {
        let next = self.segments.get(index)?.next;
        self.segments.get(next).map(|segment| (next, *segment))
    }

    fn candidate(
        &self,
        left: usize,
        pair: &impl Fn(&Segment, &Segment) -> Option<(u32, u32)>,
    ) -> Option<Reverse<MergeCandidate>> {
        let (_, right) = self.after(left)?;
        let segment = self.segments.get(left)?;
        let (rank, merged) = pair(segment, &right)?;
        Some(Reverse(MergeCandidate { rank, left, middle: segment.end, end: right.end, merged }))
    }
}
