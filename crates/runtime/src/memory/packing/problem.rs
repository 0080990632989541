//! The packing problem and its solution, as plain data.

use std::fmt;

/// One storage: its bytes, and its lifetime `start..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PackingItem {
    /// Bytes; may be 0.
    pub size: u64,
    /// The first point in time at which the storage is live.
    pub start: u32,
    /// The first point in time at which it is no longer live; after `start`.
    pub end: u32,
}

/// An instance of offline dynamic storage allocation: items to pack, and the constraints of their buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackingProblem {
    /// The storages.
    pub items: Vec<PackingItem>,
    /// Offsets are multiples of this, and sizes are rounded up to it. At least 1.
    pub alignment: u64,
    /// The size limit of a buffer (*chunk*): items are packed into as many chunks as needed, and an item larger than
    /// the limit gets a chunk of its size. `None`: one chunk of any size.
    pub max_chunk: Option<u64>,
}

impl PackingProblem {
    /// A problem without alignment and with one chunk of any size.
    pub fn new(items: Vec<PackingItem>) -> Self {
        PackingProblem { items, alignment: 1, max_chunk: None }
    }
}

/// The position of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PackedOffset {
    /// Index into [`Packing::chunks`].
    pub chunk: u32,
    /// Bytes from the start of the chunk.
    pub offset: u64,
}

/// A solution of a [`PackingProblem`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// One placement for each item, in the items' order.
    pub placements: Vec<PackedOffset>,
    /// Bytes of each chunk; at least one chunk, which may be empty.
    pub chunks: Vec<u64>,
    /// Bytes of all chunks together.
    pub peak: u64,
    /// The maximum of live bytes over time: no packing can have a lower peak.
    pub lower_bound: u64,
    /// The best bound that is proved: the lower bound, or more after an exhaustive search.
    pub proved_bound: u64,
    /// The strategy that found it.
    pub strategy: Strategy,
    /// Whether the peak equals the proved bound.
    pub proved_optimal: bool,
    /// Steps of search spent.
    pub steps: u64,
}

impl Packing {
    /// Peak divided by the lower bound; 1 is perfect.
    pub fn ratio(&self) -> f64 {
        if self.lower_bound == 0 { 1.0 } else { self.peak as f64 / self.lower_bound as f64 }
    }
}

/// The strategy by which a packing was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Best fit over a free list, items in order of time: the baseline.
    #[default]
    TimeOrder,
    /// Greedy at the lowest offset, largest first.
    BySize,
    /// Greedy at the lowest offset: the items live at the peak, longest-lived first, then the others, largest first.
    FromPeak,
    /// Greedy at the lowest offset, in descending order of size × √duration.
    BySizeAndDuration,
    /// Greedy at the lowest offset, in descending order of size × duration.
    ByArea,
    /// Greedy at the lowest offset, longest-lived first.
    ByDuration,
    /// A greedy order, repaired by moving items that did not fit to the front.
    Repair,
    /// Branch and bound.
    BranchAndBound,
    /// Branch and bound for the items live near the peak, greedy orders for the others.
    Core,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strategy::TimeOrder => "best fit in time order",
            Strategy::BySize => "greedy by size",
            Strategy::FromPeak => "greedy from the peak",
            Strategy::BySizeAndDuration => "greedy by size and duration",
            Strategy::ByArea => "greedy by area",
            Strategy::ByDuration => "greedy by duration",
            Strategy::Repair => "greedy with repairs",
            Strategy::BranchAndBound => "branch and bound",
            Strategy::Core => "branch and bound near the peak",
        })
    }
}

/// How much search to spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// The best of several greedy orders and best fit in time order. Stops at the lower bound.
    Fast,
    /// As `Fast`, then branch and bound at capacities between the lower bound and the best peak, for a limited number
    /// of steps. Deterministic for a seed and a number of steps.
    Search {
        /// Decides which branching rule comes first.
        seed: u64,
        /// The most steps; a step visits one item and takes about 50 ns.
        steps: u64,
    },
    /// As `Search`, until the packing is proved optimal or the steps run out.
    Exact {
        /// Stop as soon as the peak is at most this; `None`: minimize the peak.
        capacity: Option<u64>,
        /// The most steps; a step visits one item and takes about 50 ns.
        steps: u64,
    },
}

/// Why a problem cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackingError {
    /// An alignment of 0.
    #[error("alignment is 0: use 1 where there is none")]
    Alignment,
    /// An item with an empty lifetime.
    #[error("item {item} lives during {start}..{end}, which is empty")]
    EmptyLifetime {
        /// Index of the item.
        item: usize,
        /// Its start.
        start: u32,
        /// Its end.
        end: u32,
    },
    /// The sum of all sizes, rounded up to the alignment, exceeds 2^61 bytes.
    #[error("item {item} of {size} bytes brings the sum of all sizes beyond 2^61")]
    TooLarge {
        /// Index of the item.
        item: usize,
        /// Its bytes.
        size: u64,
    },
    /// Too many items.
    #[error("{count} items are more than 2^32 - 2")]
    TooMany {
        /// How many.
        count: usize,
    },
}
