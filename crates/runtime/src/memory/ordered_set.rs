//! An ordered set of pairs of numbers in one flat array.
//!
//! A treap: a search tree by key that is also a heap by a pseudorandom priority, which gives an expected logarithmic
//! depth without rebalancing. Removed nodes are reused, so a set that has reached its working size allocates nothing.
//! That is why it is used in place of `BTreeSet`: planning the same graph again must not allocate.
#![expect(
    clippy::indexing_slicing,
    reason = "links are indices of nodes that this file pushed; nodes are never taken out of the array"
)]

/// An element of the set, in lexicographic order.
pub(crate) type SetKey = (u64, u64);

/// No child.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct TreeNode {
    key: SetKey,
    priority: u32,
    left: u32,
    right: u32,
}

/// An ordered set of [`SetKey`]s.
#[derive(Clone, Debug)]
pub(crate) struct OrderedSet {
    nodes: Vec<TreeNode>,
    unused: Vec<u32>,
    root: u32,
    random: u32,
}

impl Default for OrderedSet {
    fn default() -> Self {
        OrderedSet { nodes: Vec::new(), unused: Vec::new(), root: NONE, random: 0x9e37_79b9 }
    }
}

impl OrderedSet {
    /// Removes all keys but keeps the capacity.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.unused.clear();
        self.root = NONE;
    }

    /// Whether the set is empty.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.root == NONE
    }

    /// The smallest key that is not below `key`.
    pub(crate) fn at_least(&self, key: SetKey) -> Option<SetKey> {
        let (mut at, mut best) = (self.root, None);
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.key >= key {
                best = Some(node.key);
                at = node.left;
            } else {
                at = node.right;
            }
        }
        best
    }

    /// The largest key below `key`.
    pub(crate) fn below(&self, key: SetKey) -> Option<SetKey> {
        let (mut at, mut best) = (self.root, None);
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.key < key {
                best = Some(node.key);
                at = node.right;
            } else {
                at = node.left;
            }
        }
        best
    }

    /// Adds a key that is not in the set yet.
    pub(crate) fn insert(&mut self, key: SetKey) {
        // xorshift; priorities must only be independent of the keys.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let mut node = TreeNode { key, priority: self.random, left: NONE, right: NONE };
        let (mut parent, mut at) = (NONE, self.root);
        while at != NONE && self.nodes[at as usize].priority >= node.priority {
            parent = at;
            at = self.child(at, key);
        }
        (node.left, node.right) = self.split(at, key);
        let new = match self.unused.pop() {
            Some(index) => {
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        self.relink(parent, key, new);
    }

    /// Removes a key; false if it was not in the set.
    pub(crate) fn remove(&mut self, key: SetKey) -> bool {
        let (mut parent, mut at) = (NONE, self.root);
        while at != NONE && self.nodes[at as usize].key != key {
            parent = at;
            at = self.child(at, key);
        }
        if at == NONE {
            return false;
        }
        let TreeNode { left, right, .. } = self.nodes[at as usize];
        let joined = self.join(left, right);
        self.relink(parent, key, joined);
        self.unused.push(at);
        true
    }

    /// Calls `visit` with every key in ascending order.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(SetKey)) {
        let mut at = self.at_least((0, 0));
        while let Some(key) = at {
            visit(key);
            let next = match key.1.checked_add(1) {
                Some(low) => Some((key.0, low)),
                None => key.0.checked_add(1).map(|high| (high, 0)),
            };
            at = next.and_then(|next| self.at_least(next));
        }
    }

    /// The child of `at` on the side of `key`.
    fn child(&self, at: u32, key: SetKey) -> u32 {
        let node = &self.nodes[at as usize];
        if key < node.key { node.left } else { node.right }
    }

    /// Makes `to` the child of `parent` on the side of `key`, or the root if there is no parent.
    fn relink(&mut self, parent: u32, key: SetKey, to: u32) {
        if parent == NONE {
            self.root = to;
            return;
        }
        let node = &mut self.nodes[parent as usize];
        if key < node.key { node.left = to } else { node.right = to }
    }

    /// Splits a tree into the keys below `key` and the others.
    fn split(&mut self, tree: u32, key: SetKey) -> (u32, u32) {
        if tree == NONE {
            return (NONE, NONE);
        }
        let node = self.nodes[tree as usize];
        if node.key < key {
            let (low, high) = self.split(node.right, key);
            self.nodes[tree as usize].right = low;
            (tree, high)
        } else {
            let (low, high) = self.split(node.left, key);
            self.nodes[tree as usize].left = high;
            (low, tree)
        }
    }

    /// Joins two trees, all keys of the first being below all keys of the second.
    fn join(&mut self, low: u32, high: u32) -> u32 {
        if low == NONE {
            return high;
        }
        if high == NONE {
            return low;
        }
        let (below, above) = (self.nodes[low as usize], self.nodes[high as usize]);
        if below.priority >= above.priority {
            let joined = self.join(below.right, high);
            self.nodes[low as usize].right = joined;
            low
        } else {
            let joined = self.join(low, above.left);
            self.nodes[high as usize].left = joined;
            high
        }
    }
}

#[cfg(test)]
mod tests {
    use super::OrderedSet;
    use quadriga_conformance::Rng;
    use std::collections::BTreeSet;

    /// The most nodes from a node down.
    fn depth(set: &OrderedSet, at: u32) -> usize {
        let Some(node) = set.nodes.get(at as usize) else { return 0 };
        1 + depth(set, node.left).max(depth(set, node.right))
    }

    #[test]
    fn the_tree_stays_shallow() {
        let mut set = OrderedSet::default();
        let (count, shallow) = (4096, 48);
        (0..count).for_each(|key| set.insert((key, 0)));
        assert!(depth(&set, set.root) < shallow, "ascending keys: {}", depth(&set, set.root));
        // Every second node is removed, then added again.
        for round in 0..8 {
            (0..count).step_by(2).for_each(|key| assert!(set.remove((key, 0))));
            assert!(depth(&set, set.root) < shallow, "removed, {round}: {}", depth(&set, set.root));
            (0..count).rev().step_by(2).for_each(|key| set.insert((key - 1, 0)));
            assert!(depth(&set, set.root) < shallow, "added, {round}: {}", depth(&set, set.root));
        }
        let mut listed = 0;
        set.for_each(|key| {
            assert_eq!(key, (listed, 0));
            listed += 1;
        });
        assert_eq!(listed, count);
    }

    #[test]
    fn the_largest_numbers_are_keys_like_others() {
        let keys = [(0, u64::MAX), (1, 0), (u64::MAX, u64::MAX)];
        let (mut set, mut listed) = (OrderedSet::default(), Vec::new());
        keys.into_iter().for_each(|key| set.insert(key));
        set.for_each(|key| listed.push(key));
        assert_eq!(listed, keys);
    }

    #[test]
    fn behaves_like_the_standard_ordered_set() {
        for seed in 0..40 {
            println!("seed {seed}");
            let mut rng = Rng::new(seed);
            let (mut ours, mut standard) = (OrderedSet::default(), BTreeSet::new());
            let span = [4, 40, 1000][rng.below(3)];
            for _ in 0..2000 {
                let key = (rng.below(span) as u64, rng.below(3) as u64);
                if rng.chance(0.5) && !standard.contains(&key) {
                    standard.insert(key);
                    ours.insert(key);
                } else {
                    assert_eq!(ours.remove(key), standard.remove(&key));
                }
                let key = (rng.below(span) as u64, rng.below(3) as u64);
                assert_eq!(ours.at_least(key), standard.range(key..).next().copied());
                assert_eq!(ours.below(key), standard.range(..key).next_back().copied());
                assert_eq!(ours.is_empty(), standard.is_empty());
            }
            let mut listed = Vec::new();
            ours.for_each(|key| listed.push(key));
            assert!(listed.iter().eq(standard.iter()));
            assert!(ours.nodes.len() <= 3 * span, "removed nodes are used again");
        }
    }
}
