//! Chunks as one address space with walls in it.
//!
//! Where a buffer may have at most so many bytes, packing into several of them is packing into one address space in
//! which no item may lie across a wall; the walls are where one chunk ends and the next begins. They can stand anywhere,
//! as long as no two are farther apart than the limit, and where they stand decides how much is lost at them. Two
//! layouts are worth trying: all chunks of one size, and chunks that are just filled by what is alive at the peak.
//!
//! An item that is larger than a chunk may be gets a chunk of its own size, at the bottom; others may lie there too
//! while it is not alive.

use super::problem::Placement;
use super::timeline::{Span, Timeline};

/// Where the walls are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Walls {
    /// The ends of the chunks at the bottom.
    ends: Vec<u64>,
    /// Bytes of all chunks above these; 0 when there are no walls.
    chunk: u64,
    /// The items beyond the limit, and the chunk of each.
    large: Vec<(u32, u32)>,
    /// Scratch: what is alive at the peak, and whether it has no room in the chunk of the largest item.
    pile: Vec<(u64, bool)>,
}

impl Walls {
    /// One space without walls.
    pub(crate) fn none(&mut self) {
        self.ends.clear();
        self.large.clear();
        self.chunk = 0;
    }

    /// Chunks of `limit` bytes, and one or more for the items that are larger. Such items share a chunk when they are
    /// never alive together.
    pub(crate) fn even(&mut self, timeline: &Timeline, limit: u64, alignment: u64) {
        self.none();
        self.chunk = (limit - limit % alignment).max(1);
        let items = &timeline.items;
        let large = items.iter().enumerate().filter(|(_, item)| item.size > self.chunk);
        self.large.extend(large.map(|(index, _)| (index as u32, 0)));
        let span = |index: u32| items.get(index as usize).copied();
        self.large.sort_unstable_by_key(|(index, _)| (span(*index).map(|item| u64::MAX - item.size), *index));
        for at in 0..self.large.len() {
            let (placed, rest) = self.large.split_at_mut(at);
            let Some((index, chunk)) = rest.first_mut() else { break };
            let Some(item) = span(*index) else { break };
            let taken = |chunk: u32| {
                placed.iter().any(|(other, at)| {
                    *at == chunk && span(*other).is_some_and(|other| alive_together(&item, &other))
                })
            };
            *chunk =
                (0..self.ends.len() as u32).find(|chunk| !taken(*chunk)).unwrap_or(self.ends.len() as u32);
            if *chunk as usize == self.ends.len() {
                self.ends.push(self.bottom_bytes() + item.size);
            }
        }
    }

    /// As [`Walls::even`], but the first chunks are those that what is alive at the peak fills without a gap: each as
    /// large as what it got, at most `size` bytes, and the first one large enough for the largest item. What is alive
    /// together with that item, and would not fit beside it, is not put there.
    pub(crate) fn fitted(&mut self, timeline: &Timeline, limit: u64, alignment: u64, size: u64) {
        self.even(timeline, limit, alignment);
        let (peak, chunk) = (timeline.peak_section(), self.chunk);
        let small = || timeline.items.iter().filter(|item| item.size <= chunk);
        let Some(largest) = small().max_by_key(|item| item.size) else { return };
        let size = size.min(self.chunk).max(largest.size);
        let shut_out =
            |item: &Span| alive_together(item, largest) && item.size + largest.size > size && item != largest;
        self.pile.clear();
        let alive = small().filter(|item| item.start <= peak && peak < item.end);
        self.pile.extend(alive.map(|item| (item.size, shut_out(item))));
        self.pile.sort_unstable_by(|a, b| b.cmp(a));
        // One chunk after the other, each time the largest of the rest that still fits.
        let mut first = true;
        while !self.pile.is_empty() {
            let mut filled = 0;
            self.pile.retain(|&(item, shut_out)| {
                let fits = filled + item <= size && !(first && shut_out);
                filled += if fits { item } else { 0 };
                !fits
            });
            if first {
                filled = filled.max(largest.size);
                first = false;
            }
            self.ends.push(self.bottom_bytes() + filled);
        }
    }

    /// The same walls measured in units, each where it is or a little lower.
    pub(crate) fn copy_in_units(&mut self, other: &Walls, unit: u64) {
        self.none();
        self.chunk = other.chunk / unit;
        self.ends.extend(other.ends.iter().map(|end| end / unit));
    }

    /// True when items larger than a chunk have chunks of their own.
    pub(crate) fn has_large(&self) -> bool {
        !self.large.is_empty()
    }

    /// True when there are walls.
    pub(crate) fn any(&self) -> bool {
        self.chunk > 0
    }

    /// Bytes of the chunks at the bottom.
    pub(crate) fn bottom_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The items beyond the limit and their offsets.
    pub(crate) fn large(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.large.iter().map(|&(item, chunk)| (item as usize, self.start_of(chunk as usize)))
    }

    /// The lowest offset, from `offset` on, at which `size` bytes do not lie across a wall. `size` is within the limit.
    pub(crate) fn fit(&self, offset: u64, size: u64) -> u64 {
        if self.chunk == 0 {
            return offset;
        }
        let mut offset = offset;
        let within = self.ends.partition_point(|end| *end <= offset);
        for &end in self.ends.get(within..).unwrap_or_default() {
            if offset + size <= end {
                return offset;
            }
            offset = end;
        }
        let inside = (offset - self.bottom_bytes()) % self.chunk;
        if inside + size <= self.chunk { offset } else { offset - inside + self.chunk }
    }

    /// The first wall above `offset`.
    pub(crate) fn next(&self, offset: u64) -> u64 {
        if self.chunk == 0 {
            return u64::MAX;
        }
        match self.ends.get(self.ends.partition_point(|end| *end <= offset)) {
            Some(&end) => end,
            None => offset - (offset - self.bottom_bytes()) % self.chunk + self.chunk,
        }
    }

    /// The chunk and the offset in it.
    pub(crate) fn place(&self, offset: u64) -> Placement {
        let below = self.ends.partition_point(|end| *end <= offset);
        if self.chunk == 0 || below < self.ends.len() {
            return Placement { chunk: below as u32, offset: offset - self.start_of(below) };
        }
        let above = offset - self.bottom_bytes();
        Placement { chunk: below as u32 + (above / self.chunk) as u32, offset: above % self.chunk }
    }

    fn start_of(&self, chunk: usize) -> u64 {
        chunk.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }
}

fn alive_together(a: &Span, b: &Span) -> bool {
    a.start < b.end && b.start < a.end
}
