//! Greedy packing: take the items in some order, put each in the lowest place that is free during its life.
//!
//! All the wit is in the order. Large items first is good when a few large items decide the peak; long-lived first
//! keeps the floor flat; products of the two are a middle way. Best on large graphs is to begin at the moment of the
//! peak: what is alive then is piled up without any gap, longest-lived at the bottom, and all others find their places
//! around that pile.
//!
//! An order that misses the lower bound may be one step from the best: [`Greedy::repair`] moves the item that did not
//! fit to the front and tries again, a few times.
#![expect(clippy::indexing_slicing, reason = "orders are permutations of the timeline's items")]

use super::conflicts::Conflicts;
use super::problem::Strategy;
use super::timeline::{Span, Timeline};
use super::walls::Walls;

/// The offset of an item that has not been placed.
pub(crate) const UNPLACED: u64 = u64::MAX;

/// The orders that are tried, the most promising first.
pub(crate) const ORDERS: [Strategy; 5] = [
    Strategy::FromPeak,
    Strategy::BySize,
    Strategy::BySizeAndDuration,
    Strategy::ByArea,
    Strategy::ByDuration,
];

/// What an item is sorted by, the smallest first: two numbers that a strategy finds, and the item's index.
pub(crate) type Key = (u64, u32, u32);

/// Working memory of sorting.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sorting {
    keys: Vec<Key>,
    words: Vec<u64>,
    scratch: Vec<u64>,
}

/// Puts the items in the order that a strategy asks for; equal ones in order of time.
pub(crate) fn sort(timeline: &Timeline, strategy: Strategy, sorting: &mut Sorting, order: &mut Vec<u32>) {
    let peak = timeline.peak_section();
    sorting.keys.clear();
    sorting.keys.extend(timeline.items.iter().enumerate().map(|(index, item)| {
        let (first, second) = key(item, strategy, peak, timeline.largest);
        (!first, !second, index as u32)
    }));
    sort_keys(sorting, order);
}

/// Sorts keys whose indices ascend from 0 on. Where the bits in which they differ fit into one word, as those of a
/// model's few sizes and durations do, words are sorted instead.
fn sort_keys(Sorting { keys, words, scratch }: &mut Sorting, order: &mut Vec<u32>) {
    order.clear();
    let Some(&(first, second, _)) = keys.first() else { return };
    let varies = |(high, low): (u64, u32), key: &Key| (high | key.0 ^ first, low | key.1 ^ second);
    let (high, low) = keys.iter().fold((0, 0), varies);
    // The lowest bit that varies, and the bits from there up to the highest.
    let (from_high, from_low) = (high.trailing_zeros() % 64, low.trailing_zeros() % 32);
    let (mask_high, mask_low) = (ones(high >> from_high), ones(u64::from(low >> from_low)));
    let indices = ones(keys.len() as u64);
    let (shift_low, shift_high) = (indices.count_ones(), indices.count_ones() + mask_low.count_ones());
    if shift_high + mask_high.count_ones() > 64 {
        keys.sort_unstable();
        order.extend(keys.iter().map(|(_, _, index)| index));
        return;
    }
    words.clear();
    words.extend(keys.iter().map(|&(high, low, index)| {
        let (high, low) = ((high >> from_high) & mask_high, u64::from(low >> from_low) & mask_low);
        high.checked_shl(shift_high).unwrap_or(0) | low << shift_low | u64::from(index)
    }));
    sort_words(words, scratch, shift_low);
    order.extend(words.iter().map(|word| (word & indices) as u32));
}

/// The least number of ones, from the lowest bit on, that covers a number.
fn ones(number: u64) -> u64 {
    u64::MAX.checked_shr(number.leading_zeros()).unwrap_or(0)
}

/// Sorts words whose lowest `ascending` bits are in order already. Many are sorted byte by byte, the last byte first.
fn sort_words(words: &mut Vec<u64>, scratch: &mut Vec<u64>, ascending: u32) {
    const FEW: usize = 512;
    if words.len() < FEW {
        words.sort_unstable();
        return;
    }
    let used = 64 - words.iter().fold(0, |all, word| all | word).leading_zeros();
    scratch.clear();
    scratch.resize(words.len(), 0);
    for shift in (ascending..used).step_by(8) {
        let digit = |word: u64| (word >> shift & 0xff) as usize;
        let mut ends = [0_u32; 256];
        words.iter().for_each(|word| ends[digit(*word)] += 1);
        let mut sum = 0;
        ends.iter_mut().for_each(|place| sum += std::mem::replace(place, sum));
        for word in &*words {
            let place = &mut ends[digit(*word)];
            scratch[*place as usize] = *word;
            *place += 1;
        }
        std::mem::swap(words, scratch);
    }
}

/// Two numbers that are larger for items that come earlier.
fn key(item: &Span, strategy: Strategy, peak: u32, largest: u64) -> (u64, u32) {
    // The bits of positive floating-point numbers are in the numbers' order.
    let product = |duration: f64| (item.size as f64 * duration).to_bits();
    let duration = item.duration();
    match strategy {
        Strategy::FromPeak if item.start <= peak && peak < item.end => (largest + u64::from(duration), 0),
        Strategy::BySizeAndDuration => (product(f64::from(duration).sqrt()), duration),
        Strategy::ByArea => (product(f64::from(duration)), duration),
        Strategy::ByDuration => (u64::from(duration), (item.size >> 30) as u32),
        _ => (item.size, duration),
    }
}

/// What items are placed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ground<'a> {
    pub(crate) timeline: &'a Timeline,
    /// Listed for this timeline.
    pub(crate) conflicts: &'a Conflicts,
    pub(crate) walls: &'a Walls,
}

/// Places items at the lowest offset, in the order given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Greedy {
    /// The placed items that conflict with the one at hand, as (offset, end).
    taken: Vec<(u64, u64)>,
    /// How many items have been looked at since this was last set to 0.
    pub(crate) steps: u64,
}

impl Greedy {
    /// Fills `offsets` and returns the peak; or, as soon as an item would reach beyond `limit`, its index in `order`.
    pub(crate) fn place(
        &mut self,
        ground: Ground<'_>,
        order: &[u32],
        limit: u64,
        offsets: &mut Vec<u64>,
    ) -> Result<u64, usize> {
        let Ground { timeline, walls, .. } = ground;
        offsets.clear();
        offsets.resize(timeline.items.len(), UNPLACED);
        let mut peak = 0;
        for (item, offset) in walls.large() {
            peak = peak.max(offset + timeline.items[item].size);
            offsets[item] = offset;
        }
        for (index, &item) in order.iter().enumerate() {
            let item = item as usize;
            if offsets[item] != UNPLACED {
                continue;
            }
            let size = timeline.items[item].size;
            let offset = self.lowest(ground, item, offsets);
            peak = peak.max(offset + size);
            if peak > limit {
                return Err(index);
            }
            offsets[item] = offset;
        }
        Ok(peak)
    }

    /// Tries to stay below `limit` by moving the item that did not fit to the front of the order, again and again, for
    /// `steps` steps; a step is a look at one item.
    pub(crate) fn repair(
        &mut self,
        ground: Ground<'_>,
        order: &mut [u32],
        limit: u64,
        steps: u64,
        offsets: &mut Vec<u64>,
    ) -> Option<u64> {
        let last = self.steps.saturating_add(steps);
        while self.steps < last {
            match self.place(ground, order, limit, offsets) {
                Ok(peak) => return Some(peak),
                // It was the first to be placed: it does not fit at all.
                Err(0) => return None,
                Err(index) => order[..=index].rotate_right(1),
            }
        }
        None
    }

    /// The lowest offset at which `item` overlaps nothing that is placed.
    fn lowest(&mut self, ground: Ground<'_>, item: usize, offsets: &[u64]) -> u64 {
        let Ground { timeline, conflicts, walls } = ground;
        let (earlier, later) = (conflicts.earlier(item), conflicts.later(item));
        // Every place is written before it is known whether it stays: guessing would cost more.
        self.taken.resize(self.taken.len().max(earlier.len() + later.len()), (0, 0));
        let mut count = 0;
        let mut look_at = |other: usize| {
            let offset = offsets[other];
            self.taken[count] = (offset, offset.wrapping_add(timeline.items[other].size));
            count += usize::from(offset != UNPLACED);
        };
        earlier.iter().for_each(|other| look_at(*other as usize));
        later.for_each(&mut look_at);
        let taken = &mut self.taken[..count];
        self.steps += count as u64 + 1;
        taken.sort_unstable();
        let size = timeline.items[item].size;
        let mut floor = walls.fit(0, size);
        for &(offset, end) in &*taken {
            if offset >= floor + size {
                break;
            }
            if end > floor {
                floor = walls.fit(end, size);
            }
        }
        floor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quadriga_conformance::Rng;

    #[test]
    fn keys_are_sorted_byte_by_byte_as_by_comparing() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut rng = Rng::new(seed);
            let (count, bits) = (rng.below(2000), rng.below(65) as u32);
            let number = |rng: &mut Rng| rng.next_u64().checked_shr(bits).unwrap_or(7);
            let keys: Vec<Key> =
                (0..count).map(|index| (number(&mut rng), number(&mut rng) as u32, index as u32)).collect();
            let mut compared = keys.clone();
            compared.sort_unstable();
            let compared: Vec<u32> = compared.iter().map(|key| key.2).collect();
            let (mut sorting, mut order) = (Sorting { keys, ..Sorting::default() }, Vec::new());
            sort_keys(&mut sorting, &mut order);
            assert_eq!(order, compared, "seed {seed}");
        }
    }
}
