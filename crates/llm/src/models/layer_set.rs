//! A set of layers.

use std::fmt;

/// A set of a model's layers: of the first 256.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LayerSet {
    words: [u64; 4],
}

impl LayerSet {
    /// No layers.
    pub const EMPTY: LayerSet = LayerSet { words: [0; 4] };

    /// Adds a layer; those from the 257th on stay outside.
    pub fn insert(&mut self, layer: usize) {
        if let Some(word) = self.words.get_mut(layer / 64) {
            *word |= 1 << (layer % 64);
        }
    }

    /// Whether a layer is in the set.
    pub fn contains(&self, layer: usize) -> bool {
        self.words.get(layer / 64).is_some_and(|word| word >> (layer % 64) & 1 == 1)
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The layers, first to last.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..64 * self.words.len()).filter(|layer| self.contains(*layer))
    }
}

impl FromIterator<usize> for LayerSet {
    fn from_iter<I: IntoIterator<Item = usize>>(layers: I) -> LayerSet {
        let mut set = LayerSet::EMPTY;
        layers.into_iter().for_each(|layer| set.insert(layer));
        set
    }
}

impl fmt::Debug for LayerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_once_and_in_order() {
        let set: LayerSet = [200, 3, 64, 63, 3, 256, usize::MAX].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 63, 64, 200]);
        assert_eq!((set.len(), set.is_empty(), LayerSet::EMPTY.is_empty()), (4, false, true));
        assert!(!set.contains(256) && !set.contains(4));
    }
}
