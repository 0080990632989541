//! The checker of packings. It shares no code with the packer, and is written to be verified by reading.

use super::problem::{Packing, PackingProblem};
use std::collections::BTreeMap;

/// A rule that a packing breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackingViolation {
    /// The number of placements is not the number of items.
    #[error("{placements} placements for {items} items")]
    Count {
        /// Items of the problem.
        items: usize,
        /// Placements of the packing.
        placements: usize,
    },
    /// An item's chunk does not exist.
    #[error("item {item} is in chunk {chunk}, but there are only {chunks}")]
    NoSuchChunk {
        /// The item.
        item: usize,
        /// Its chunk.
        chunk: u32,
        /// How many chunks there are.
        chunks: usize,
    },
    /// An item's offset is not a multiple of the alignment.
    #[error("item {item} is at offset {offset}, which is not a multiple of {alignment}")]
    Misaligned {
        /// The item.
        item: usize,
        /// Its offset.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// An item reaches past the end of its chunk.
    #[error("item {item} at offset {offset} reaches past the {size} bytes of its chunk")]
    OutOfBounds {
        /// The item.
        item: usize,
        /// Its offset.
        offset: u64,
        /// Bytes of the chunk.
        size: u64,
    },
    /// A chunk is larger than the limit, though no single item needs that.
    #[error("chunk {chunk} has {size} bytes, more than the limit {limit} and than any item in it")]
    ChunkTooLarge {
        /// The chunk.
        chunk: usize,
        /// Its bytes.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// Two items that are live at the same time overlap.
    #[error("items {first} and {second} overlap at time {time}")]
    Overlap {
        /// One of them.
        first: usize,
        /// The other.
        second: usize,
        /// The time.
        time: u32,
    },
    /// The peak is not the sum of the chunks.
    #[error("peak {peak}, but the chunks have {sum} bytes")]
    WrongPeak {
        /// The stated peak.
        peak: u64,
        /// Bytes of all chunks.
        sum: u128,
    },
}

/// Checks that `packing` is a valid packing of `problem`.
///
/// Sweeps over time with a map of the live items by address, and compares every item that starts with its neighbour.
pub fn check(problem: &PackingProblem, packing: &Packing) -> Result<(), PackingViolation> {
    let items = &problem.items;
    if items.len() != packing.placements.len() {
        return Err(PackingViolation::Count { items: items.len(), placements: packing.placements.len() });
    }
    let sum: u128 = packing.chunks.iter().map(|size| u128::from(*size)).sum();
    if sum != u128::from(packing.peak) {
        return Err(PackingViolation::WrongPeak { peak: packing.peak, sum });
    }

    let mut largest = vec![0; packing.chunks.len()];
    for (item, (what, place)) in items.iter().zip(&packing.placements).enumerate() {
        let (Some(size), Some(largest)) =
            (packing.chunks.get(place.chunk as usize), largest.get_mut(place.chunk as usize))
        else {
            return Err(PackingViolation::NoSuchChunk {
                item,
                chunk: place.chunk,
                chunks: packing.chunks.len(),
            });
        };
        if !place.offset.is_multiple_of(problem.alignment) {
            return Err(PackingViolation::Misaligned {
                item,
                offset: place.offset,
                alignment: problem.alignment,
            });
        }
        if place.offset.checked_add(what.size).is_none_or(|end| end > *size) {
            return Err(PackingViolation::OutOfBounds { item, offset: place.offset, size: *size });
        }
        *largest = what.size.next_multiple_of(problem.alignment).max(*largest);
    }
    if let Some(limit) = problem.max_chunk {
        for (chunk, (&size, &largest)) in packing.chunks.iter().zip(&largest).enumerate() {
            if size > limit && size > largest {
                return Err(PackingViolation::ChunkTooLarge { chunk, size, limit });
            }
        }
    }

    // Ends sort before starts: an item that ends at t is not live at t.
    let mut events = Vec::with_capacity(2 * items.len());
    for (item, what) in items.iter().enumerate().filter(|(_, what)| what.size > 0) {
        events.push((what.start, true, item));
        events.push((what.end, false, item));
    }
    events.sort_unstable();
    let mut live = BTreeMap::new();
    for (time, starts, item) in events {
        let (Some(what), Some(place)) = (items.get(item), packing.placements.get(item)) else { continue };
        let (from, to) = ((place.chunk, place.offset), (place.chunk, place.offset + what.size));
        if !starts {
            live.remove(&from);
            continue;
        }
        // Live items do not overlap, so of those that start below `to` the last one ends highest.
        if let Some((_, &(end, other))) = live.range(..to).next_back()
            && end > from
        {
            return Err(PackingViolation::Overlap { first: other, second: item, time });
        }
        live.insert(from, (to, item));
    }
    Ok(())
}
