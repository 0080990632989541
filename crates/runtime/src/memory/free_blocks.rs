//! Free ranges of one address space, and the rule by which one is chosen.
//!
//! The rule is that of the original allocator: the smallest block that is large enough, the highest of equal ones, over
//! all blocks *but the last*; the last block, which reaches to the open end, is the last resort. What is given back
//! merges with both neighbours. Every operation takes logarithmic time, and a warm structure allocates nothing.
//!
//! In one point the rule is mended: the last block stays the last when nothing is left of it. The original forgets it
//! then, treats whichever block is now the highest as the last resort, and so decides differently in a buffer of just
//! the measured size than it did while measuring.

use super::ordered_set::OrderedSet;

/// The free blocks of an address space that starts at 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeBlocks {
    /// The block that reaches to the end, even when nothing is left of it; it is in neither of the sets.
    last: Block,
    /// (offset, size) of the others.
    by_address: OrderedSet,
    /// (size, !offset) of the others: of equal sizes the highest address comes first.
    by_size: OrderedSet,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Block {
    pub(crate) fn end(self) -> u64 {
        self.offset + self.size
    }
}

impl FreeBlocks {
    /// Forgets everything and starts over with one block.
    pub(crate) fn reset(&mut self, block: Block) {
        self.by_address.clear();
        self.by_size.clear();
        self.last = block;
    }

    /// The block from which `size` bytes would be taken.
    pub(crate) fn choose(&self, size: u64) -> Option<Block> {
        match self.by_size.at_least((size, 0)) {
            Some((size, complement)) => Some(Block { offset: !complement, size }),
            None => Some(self.last).filter(|last| last.size >= size),
        }
    }

    /// Takes `size` bytes (not 0) from the start of the chosen block; returns their offset.
    pub(crate) fn take(&mut self, size: u64) -> Option<u64> {
        let block = self.choose(size)?;
        let rest = Block { offset: block.offset + size, size: block.size - size };
        if block == self.last {
            self.last = rest;
        } else {
            self.remove(block);
            if rest.size > 0 {
                self.insert(rest);
            }
        }
        Some(block.offset)
    }

    /// Gives back a range (not empty) that is not free; it merges with the free neighbours.
    pub(crate) fn give(&mut self, range: Block) {
        let mut merged = range;
        if let Some(before) = self.before(range.offset).filter(|before| before.end() == range.offset) {
            self.remove(before);
            merged = Block { offset: before.offset, size: before.size + merged.size };
        }
        if range.end() == self.last.offset {
            self.last = Block { offset: merged.offset, size: merged.size + self.last.size };
            return;
        }
        if let Some(after) = self.at(range.end()) {
            self.remove(after);
            merged.size += after.size;
        }
        self.insert(merged);
    }

    /// Calls `visit` with every free block that has bytes, in ascending order of addresses.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(Block)) {
        self.by_address.for_each(|(offset, size)| visit(Block { offset, size }));
        if self.last.size > 0 {
            visit(self.last);
        }
    }

    fn before(&self, offset: u64) -> Option<Block> {
        self.by_address.below((offset, 0)).map(|(offset, size)| Block { offset, size })
    }

    fn at(&self, offset: u64) -> Option<Block> {
        let (found, size) = self.by_address.at_least((offset, 0))?;
        (found == offset).then_some(Block { offset, size })
    }

    fn insert(&mut self, block: Block) {
        self.by_address.insert((block.offset, block.size));
        self.by_size.insert((block.size, !block.offset));
    }

    fn remove(&mut self, block: Block) {
        self.by_address.remove((block.offset, block.size));
        self.by_size.remove((block.size, !block.offset));
    }
}
