//! Several chunks as one address space with boundaries that no item may cross.
//!
//! The size of a chunk is limited, so the distance of two boundaries is; within that limit they can be anywhere, and
//! their positions decide how many bytes are lost at the ends of chunks. Two layouts are tried: chunks of equal size,
//! and chunks that the items live at the peak fill without a gap.
//!
//! An item larger than the limit gets a chunk of its own size at the bottom; other items may use that chunk while the
//! large one is not live.

use super::problem::PackedOffset;
use super::timeline::{Timeline, TimelineItem};

/// The boundaries of chunks in one address space.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChunkBoundaries {
    /// The ends of the chunks at the bottom, which differ in size.
    ends: Vec<u64>,
    /// Bytes of each chunk above these; 0 if there are no boundaries.
    chunk: u64,
    /// The items larger than the limit, and the chunk of each.
    large: Vec<(u32, u32)>,
    /// Scratch: the sizes of the items live at the peak, and whether each is excluded from the chunk of the largest
    /// item.
    at_peak: Vec<(u64, bool)>,
}

impl ChunkBoundaries {
    /// One address space without boundaries.
    pub(crate) fn none(&mut self) {
        self.ends.clear();
        self.large.clear();
        self.chunk = 0;
    }

    /// Chunks of `limit` bytes, and one or more for the items that are larger. Large items share a chunk if they are
    /// never live together.
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
                    *at == chunk && span(*other).is_some_and(|other| live_together(&item, &other))
                })
            };
            *chunk =
                (0..self.ends.len() as u32).find(|chunk| !taken(*chunk)).unwrap_or(self.ends.len() as u32);
            if *chunk as usize == self.ends.len() {
                self.ends.push(self.bottom_bytes() + item.size);
            }
        }
    }

    /// As [`ChunkBoundaries::even`], but the first chunks are sized so that the items live at the peak fill them
    /// without a gap: each at most `size` bytes, the first one large enough for the largest item. An item that is live
    /// together with the largest one and does not fit beside it is not assigned to its chunk.
    pub(crate) fn fitted(&mut self, timeline: &Timeline, limit: u64, alignment: u64, size: u64) {
        self.even(timeline, limit, alignment);
        let (peak, chunk) = (timeline.peak_section(), self.chunk);
        let small = || timeline.items.iter().filter(|item| item.size <= chunk);
        let Some(largest) = small().max_by_key(|item| item.size) else { return };
        let size = size.min(self.chunk).max(largest.size);
        let excluded = |item: &TimelineItem| {
            live_together(item, largest) && item.size + largest.size > size && item != largest
        };
        self.at_peak.clear();
        let live = small().filter(|item| item.start <= peak && peak < item.end);
        self.at_peak.extend(live.map(|item| (item.size, excluded(item))));
        self.at_peak.sort_unstable_by(|a, b| b.cmp(a));
        // First fit decreasing, one chunk after the other.
        let mut first = true;
        while !self.at_peak.is_empty() {
            let mut filled = 0;
            self.at_peak.retain(|&(item, excluded)| {
                let fits = filled + item <= size && !(first && excluded);
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

    /// The same boundaries in units, rounded down.
    pub(crate) fn copy_in_units(&mut self, other: &ChunkBoundaries, unit: u64) {
        self.none();
        self.chunk = other.chunk / unit;
        self.ends.extend(other.ends.iter().map(|end| end / unit));
    }

    /// Whether there are items larger than the limit.
    pub(crate) fn has_large(&self) -> bool {
        !self.large.is_empty()
    }

    /// Whether there are boundaries.
    pub(crate) fn any(&self) -> bool {
        self.chunk > 0
    }

    /// Bytes of the chunks at the bottom.
    pub(crate) fn bottom_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The items larger than the limit and their offsets.
    pub(crate) fn large(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.large.iter().map(|&(item, chunk)| (item as usize, self.start_of(chunk as usize)))
    }

    /// The lowest offset, from `offset` on, at which `size` bytes cross no boundary. `size` is within the limit.
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

    /// The first boundary above `offset`.
    pub(crate) fn next(&self, offset: u64) -> u64 {
        if self.chunk == 0 {
            return u64::MAX;
        }
        match self.ends.get(self.ends.partition_point(|end| *end <= offset)) {
            Some(&end) => end,
            None => offset - (offset - self.bottom_bytes()) % self.chunk + self.chunk,
        }
    }

    /// The chunk of an offset, and the offset inside it.
    pub(crate) fn place(&self, offset: u64) -> PackedOffset {
        let below = self.ends.partition_point(|end| *end <= offset);
        if self.chunk == 0 || below < self.ends.len() {
            return PackedOffset { chunk: below as u32, offset: offset - self.start_of(below) };
        }
        let above = offset - self.bottom_bytes();
        PackedOffset { chunk: below as u32 + (above / self.chunk) as u32, offset: above % self.chunk }
    }

    fn start_of(&self, chunk: usize) -> u64 {
        chunk.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }
}

fn live_together(a: &TimelineItem, b: &TimelineItem) -> bool {
    a.start < b.end && b.start < a.end
}
