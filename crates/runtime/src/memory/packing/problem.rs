//! The packing problem and its answer, as plain data.

use std::fmt;

/// One storage: so many bytes, needed during `start..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PackingItem {
    /// Bytes; 0 is allowed and takes no room.
    pub size: u64,
    /// The first moment at which the storage is needed.
    pub start: u32,
    /// The first moment at which it is needed no more; after `start`.
    pub end: u32,
}

/// What is to be packed, and into what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackingProblem {
    /// The storages.
    pub items: Vec<PackingItem>,
    /// Offsets are multiples of this, and sizes are rounded up to it. At least 1.
    pub alignment: u64,
    /// The largest buffer to be had. What does not fit goes into further buffers ("chunks"); an item that is larger on
    /// its own gets a chunk of its size. `None`: one chunk of any size.
    pub max_chunk: Option<u64>,
}

impl PackingProblem {
    /// A problem without alignment and without a limit on the size of a chunk.
    pub fn new(items: Vec<PackingItem>) -> Self {
        PackingProblem { items, alignment: 1, max_chunk: None }
    }
}

/// Where an item is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement {
    /// Index into [`Packing::chunks`].
    pub chunk: u32,
    /// Bytes from the start of the chunk.
    pub offset: u64,
}

/// An answer to a [`PackingProblem`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// One placement for each item, in the items' order.
    pub placements: Vec<Placement>,
    /// Bytes of each chunk; at least one chunk, which may be empty.
    pub chunks: Vec<u64>,
    /// Bytes of all chunks together.
    pub peak: u64,
    /// No packing can have a lower peak: the most bytes that are alive at one time.
    pub lower_bound: u64,
    /// No packing can have a lower peak, as far as is known: the lower bound, or more after an exhaustive search.
    pub proved_bound: u64,
    /// What found it.
    pub strategy: Strategy,
    /// True when the peak is the proved bound: there is no better packing.
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

/// The way in which a packing was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// The free list, one item after the other in order of time: the baseline.
    #[default]
    TimeOrder,
    /// Lowest place first, items in order of their size.
    BySize,
    /// Lowest place first; what is alive at the peak comes first, longest-lived first, then the others by size.
    FromPeak,
    /// Lowest place first, items in order of size × √duration.
    BySizeAndDuration,
    /// Lowest place first, items in order of size × duration.
    ByArea,
    /// Lowest place first, items in order of their duration.
    ByDuration,
    /// A greedy order in which items that did not fit were moved to the front.
    Repair,
    /// Branch and bound.
    BranchAndBound,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strategy::TimeOrder => "free list in time order",
            Strategy::BySize => "greedy by size",
            Strategy::FromPeak => "greedy from the peak",
            Strategy::BySizeAndDuration => "greedy by size and duration",
            Strategy::ByArea => "greedy by area",
            Strategy::ByDuration => "greedy by duration",
            Strategy::Repair => "greedy with repairs",
            Strategy::BranchAndBound => "branch and bound",
        })
    }
}

/// How hard to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// The free list in time order and a few greedy orders; the best wins. Stops at the lower bound.
    Fast,
    /// As `Fast`, then branch and bound at capacities between the lower bound and the best peak, for a limited time.
    /// The same seed and number of steps always find the same.
    Search {
        /// Decides what is tried first.
        seed: u64,
        /// The most steps to take; a step is a look at one item, some 50 ns.
        steps: u64,
    },
    /// As `Search`, but until the answer is proved optimal, or the steps run out.
    Exact {
        /// Stop as soon as the peak is at most this; `None`: find the lowest peak there is.
        capacity: Option<u64>,
        /// The most steps to take; a step is a look at one item, some 50 ns.
        steps: u64,
    },
}

/// Why a problem cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackingError {
    /// An alignment of 0.
    #[error("alignment is 0: use 1 where there is none")]
    Alignment,
    /// An item that ends before or when it starts.
    #[error("item {item} lives during {start}..{end}, which is empty")]
    EmptyLifetime {
        /// Index of the item.
        item: usize,
        /// Its start.
        start: u32,
        /// Its end.
        end: u32,
    },
    /// All sizes together, rounded up to the alignment, are beyond 2^61 bytes.
    #[error("item {item} of {size} bytes brings the sum of all sizes beyond 2^61")]
    TooLarge {
        /// Index of the item.
        item: usize,
        /// Its bytes.
        size: u64,
    },
    /// More items than can be numbered.
    #[error("{count} items are more than 2^32 - 2")]
    TooMany {
        /// How many.
        count: usize,
    },
}
