//! The free list of one address space: best fit, the last block last.
//!
//! The rule is that of ggml's tensor allocator: the smallest block that is large enough, of equal ones the one with the
//! highest address, over all blocks *but the last*; the last block reaches to the end of the address space and is taken
//! from only if no other fits. A freed range merges with both neighbours. Every operation takes logarithmic time, and
//! once its sets have grown to their working size a list allocates nothing.
//!
//! In one point the rule differs: the last block stays the last when it is empty. ggml drops it then and treats the
//! highest remaining block as the last, so that in a buffer of exactly the measured size it decides differently than it
//! did while measuring.

use super::ordered_set::OrderedSet;

/// The free blocks of an address space.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeList {
    /// The block that reaches to the end of the address space, even when it is empty; it is in neither of the sets.
    last: FreeBlock,
    /// (offset, size) of the others.
    by_address: OrderedSet,
    /// (size, !offset) of the others: of equal sizes the highest address comes first.
    by_size: OrderedSet,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreeBlock {
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl FreeBlock {
    pub(crate) fn end(self) -> u64 {
        self.offset + self.size
    }
}

impl FreeList {
    /// Makes `block` the only free block.
    pub(crate) fn reset(&mut self, block: FreeBlock) {
        self.by_address.clear();
        self.by_size.clear();
        self.last = block;
    }

    /// The best fit for `size` bytes.
    pub(crate) fn best_fit(&self, size: u64) -> Option<FreeBlock> {
        match self.by_size.at_least((size, 0)) {
            Some((size, complement)) => Some(FreeBlock { offset: !complement, size }),
            None => Some(self.last).filter(|last| last.size >= size),
        }
    }

    /// Takes `size` bytes (not 0) from the start of the best fit; returns their offset.
    pub(crate) fn allocate(&mut self, size: u64) -> Option<u64> {
        let block = self.best_fit(size)?;
        let rest = FreeBlock { offset: block.offset + size, size: block.size - size };
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

    /// Frees an allocated range (not empty); it merges with its free neighbours.
    pub(crate) fn free(&mut self, range: FreeBlock) {
        let mut merged = range;
        if let Some(before) = self.before(range.offset).filter(|before| before.end() == range.offset) {
            self.remove(before);
            merged = FreeBlock { offset: before.offset, size: before.size + merged.size };
        }
        if range.end() == self.last.offset {
            self.last = FreeBlock { offset: merged.offset, size: merged.size + self.last.size };
            return;
        }
        if let Some(after) = self.at(range.end()) {
            self.remove(after);
            merged.size += after.size;
        }
        self.insert(merged);
    }

    /// Calls `visit` with every free block that is not empty, in ascending order of addresses.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(FreeBlock)) {
        self.by_address.for_each(|(offset, size)| visit(FreeBlock { offset, size }));
        if self.last.size > 0 {
            visit(self.last);
        }
    }

    fn before(&self, offset: u64) -> Option<FreeBlock> {
        self.by_address.below((offset, 0)).map(|(offset, size)| FreeBlock { offset, size })
    }

    fn at(&self, offset: u64) -> Option<FreeBlock> {
        let (found, size) = self.by_address.at_least((offset, 0))?;
        (found == offset).then_some(FreeBlock { offset, size })
    }

    fn insert(&mut self, block: FreeBlock) {
        self.by_address.insert((block.offset, block.size));
        self.by_size.insert((block.size, !block.offset));
    }

    fn remove(&mut self, block: FreeBlock) {
        self.by_address.remove((block.offset, block.size));
        self.by_size.remove((block.size, !block.offset));
    }
}
