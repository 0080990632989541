//! The maximum of any range of a list, in logarithmic time.
#![expect(clippy::indexing_slicing, reason = "nodes of the tree are below its length")]

/// A tree of maxima: the values are its leaves, and each node has the maximum of its two children.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangeMaximum {
    /// Node 1 is the root, the children of node `i` are `2i` and `2i + 1`.
    nodes: Vec<u64>,
}

impl RangeMaximum {
    pub(crate) fn new(values: &[u64]) -> Self {
        let count = values.len();
        let mut nodes = vec![0; count];
        nodes.extend_from_slice(values);
        for node in (1..count).rev() {
            nodes[node] = nodes[2 * node].max(nodes[2 * node + 1]);
        }
        RangeMaximum { nodes }
    }

    /// The maximum of the values `begin..end`; 0 if the range is empty.
    pub(crate) fn of(&self, begin: usize, end: usize) -> u64 {
        let leaves = self.nodes.len() / 2;
        let (mut low, mut high) = (begin + leaves, end + leaves);
        let mut maximum = 0;
        // The nodes that cover the range, level by level.
        while low < high {
            if low % 2 == 1 {
                maximum = self.nodes[low].max(maximum);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                maximum = self.nodes[high].max(maximum);
            }
            (low, high) = (low / 2, high / 2);
        }
        maximum
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, reason = "tests")]
    use super::*;

    #[test]
    fn the_maximum_of_a_range_is_that_of_its_values() {
        for count in 0..20_u64 {
            let values: Vec<u64> = (0..count).map(|index| (index * 7 + 3) % 11).collect();
            let maxima = RangeMaximum::new(&values);
            for begin in 0..=values.len() {
                for end in begin..=values.len() {
                    let expected = values[begin..end].iter().copied().max().unwrap_or(0);
                    assert_eq!(maxima.of(begin, end), expected, "{begin}..{end} of {values:?}");
                }
            }
        }
    }
}
