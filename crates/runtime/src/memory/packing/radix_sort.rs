//! Sorting items by a strategy's key: keys that differ in few bits are packed into one `u64` each and radix-sorted.
#![expect(clippy::indexing_slicing, reason = "digits are below 256, and positions below the number of words")]

/// An item's key, in ascending order: two numbers that the strategy computes, and the item's index.
pub(crate) type SortKey = (u64, u32, u32);

/// Sorts keys; keeps its working memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct RadixSorter {
    keys: Vec<SortKey>,
    words: Vec<u64>,
    scratch: Vec<u64>,
}

impl RadixSorter {
    /// Sorts keys whose indices ascend from 0 on, and writes the indices in sorted order. If the bits in which the keys
    /// differ fit into one 64-bit word, as with a model's few distinct sizes and durations, packed words are sorted.
    pub(crate) fn sort(&mut self, all: impl Iterator<Item = SortKey>, order: &mut Vec<u32>) {
        let RadixSorter { keys, words, scratch } = self;
        keys.clear();
        keys.extend(all);
        order.clear();
        let Some(&(first, second, _)) = keys.first() else { return };
        let varies = |(high, low): (u64, u32), key: &SortKey| (high | key.0 ^ first, low | key.1 ^ second);
        let (high, low) = keys.iter().fold((0, 0), varies);
        // The bits from the lowest to the highest that varies.
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
}

/// The shortest mask of low bits that covers a number.
fn ones(number: u64) -> u64 {
    u64::MAX.checked_shr(number.leading_zeros()).unwrap_or(0)
}

/// Sorts words whose lowest `ascending` bits are in order already: by comparison if they are few, else by a radix sort
/// from the least significant byte on.
fn sort_words(words: &mut Vec<u64>, scratch: &mut Vec<u64>, ascending: u32) {
    const MIN_RADIX: usize = 512;
    if words.len() < MIN_RADIX {
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

#[cfg(test)]
mod tests {
    use super::*;
    use quadriga_conformance::Rng;

    #[test]
    fn radix_sort_agrees_with_comparison_sort() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut rng = Rng::new(seed);
            // The numbers of one or both kinds may all be the same.
            let count = rng.below(2000);
            let [high, low] = [(); 2].map(|()| if rng.chance(0.2) { 64 } else { rng.below(64) as u32 });
            let number = |rng: &mut Rng, bits: u32| rng.next_u64().checked_shr(bits).unwrap_or(7);
            let keys: Vec<SortKey> = (0..count)
                .map(|index| (number(&mut rng, high), number(&mut rng, low) as u32, index as u32))
                .collect();
            let mut compared = keys.clone();
            compared.sort_unstable();
            let compared: Vec<u32> = compared.iter().map(|key| key.2).collect();
            let mut order = Vec::new();
            RadixSorter::default().sort(keys.into_iter(), &mut order);
            assert_eq!(order, compared, "seed {seed}");
        }
    }
}
