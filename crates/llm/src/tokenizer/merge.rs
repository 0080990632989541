//! Merging of neighbours, best pair first: the heart of both kinds of byte-pair encoding.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Marks the end of the list.
const NONE: usize = usize::MAX;

/// A stretch of the text that is one symbol; after merging, one that stands for a token or for nothing known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Where it starts, in bytes.
    pub(super) start: usize,
    /// Where it ends.
    pub(super) end: usize,
    /// What it is called in the vocabulary; `u32::MAX` for what has no name.
    pub(super) symbol: u32,
    previous: usize,
    next: usize,
}

/// A pair that could be merged. Ordered by `rank` (smallest first), then by position. The pair is still there when its
/// left piece still ends at `middle` and the piece after that at `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: usize,
    middle: usize,
    end: usize,
    merged: u32,
}

/// Merges pieces in O(n log n): a heap of candidate pairs over a linked list of pieces. Kept between words for its
/// memory.
#[derive(Debug, Default)]
pub(super) struct Merger {
    pieces: Vec<Piece>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Starts over with no pieces.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
        self.heap.clear();
    }

    /// Appends a piece that follows the last one.
    pub(super) fn push(&mut self, start: usize, end: usize, symbol: u32) {
        let index = self.pieces.len();
        let previous = index.checked_sub(1).unwrap_or(NONE);
        if let Some(last) = self.pieces.last_mut() {
            last.next = index;
        }
        self.pieces.push(Piece { start, end, symbol, previous, next: NONE });
    }

    /// Merges until no pair has a rank. `pair` says what two neighbours become and how soon (smaller is sooner).
    pub(super) fn merge(&mut self, pair: impl Fn(&Piece, &Piece) -> Option<(u32, u32)>) {
        // Made into a heap all at once, which takes linear time.
        let mut first = std::mem::take(&mut self.heap).into_vec();
        first.extend((0..self.pieces.len()).filter_map(|left| self.candidate(left, &pair)));
        self.heap = BinaryHeap::from(first);
        while let Some(Reverse(candidate)) = self.heap.pop() {
            let Some((right_index, right)) = self.after(candidate.left) else { continue };
            let Some(left) = self.pieces.get_mut(candidate.left) else { continue };
            let gone = left.start == left.end;
            if gone || left.end != candidate.middle || right.end != candidate.end {
                continue;
            }
            left.end = right.end;
            left.symbol = candidate.merged;
            left.next = right.next;
            let previous = left.previous;
            if let Some(gone) = self.pieces.get_mut(right_index) {
                gone.end = gone.start;
            }
            if let Some(next) = self.pieces.get_mut(right.next) {
                next.previous = candidate.left;
            }
            let before = self.candidate(previous, &pair);
            let after = self.candidate(candidate.left, &pair);
            self.heap.extend(before.into_iter().chain(after));
        }
    }

    /// The pieces that are left, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(|piece| piece.start != piece.end)
    }

    fn after(&self, index: usize) -> Option<(usize, Piece)> {
        let next = self.pieces.get(index)?.next;
        self.pieces.get(next).map(|piece| (next, *piece))
    }

    fn candidate(
        &self,
        left: usize,
        pair: &impl Fn(&Piece, &Piece) -> Option<(u32, u32)>,
    ) -> Option<Reverse<Candidate>> {
        let (_, right) = self.after(left)?;
        let piece = self.pieces.get(left)?;
        let (rank, merged) = pair(piece, &right)?;
        Some(Reverse(Candidate { rank, left, middle: piece.end, end: right.end, merged }))
    }
}
