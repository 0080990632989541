//! The tensor allocator: one address space, a list of free blocks, decisions made one request at a time.
//!
//! It deals in offsets alone; whoever has memory behind them pairs it with a buffer. That makes measuring the same thing
//! as allocating: a list over an unlimited space takes the same decisions, and its high-water mark is the size of the
//! buffer to ask for.
//!
//! ```
//! use quadriga_runtime::memory::FreeList;
//! let mut list = FreeList::measuring(32)?;
//! let a = list.allocate(100, 0)?;
//! let b = list.allocate(100, 1)?;
//! list.free(a)?;
//! let c = list.allocate(64, 2)?;
//! assert_eq!((a.offset, b.offset, c.offset), (0, 128, 0));
//! assert_eq!(list.high_water(), 256);
//! # Ok::<(), quadriga_runtime::memory::FreeListError>(())
//! ```

use super::free_blocks::{Block, FreeBlocks};
use std::collections::BTreeMap;

/// What an allocation got: a range of the address space of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The buffer whose list this came from (see [`FreeList::for_buffer`]).
    pub buffer: u32,
    /// Bytes from the start of the buffer; a multiple of the alignment away from its aligned base.
    pub offset: u64,
    /// Bytes, rounded up to the alignment.
    pub size: u64,
}

/// A region in use, as the listing of the high-water mark shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// The caller's number for what is in it.
    pub tag: u32,
    /// Bytes from the start of the buffer.
    pub offset: u64,
    /// Bytes, rounded up to the alignment.
    pub size: u64,
}

/// Why the free list refused. The list is as it was before the call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FreeListError {
    /// An alignment of 0, or not a power of two.
    #[error("alignment {0} is not a power of two")]
    Alignment(u64),
    /// No free block is large enough.
    #[error(
        "{tag} needs {wanted} bytes, but the largest free block has {largest} ({free} of {capacity} bytes are free): \
         enlarge the buffer"
    )]
    OutOfMemory {
        /// The caller's number for what was to be placed.
        tag: u32,
        /// Bytes asked for, rounded up to the alignment.
        wanted: u64,
        /// Bytes of the largest free block.
        largest: u64,
        /// Bytes free in all blocks together.
        free: u64,
        /// Bytes that the list manages.
        capacity: u64,
    },
    /// A size that cannot be rounded up to the alignment.
    #[error("{tag} has {size} bytes, which cannot be rounded up to a multiple of {alignment}")]
    TooLarge {
        /// The caller's number for what was to be placed.
        tag: u32,
        /// Bytes asked for.
        size: u64,
        /// The list's alignment.
        alignment: u64,
    },
    /// The region is not in use: freed twice, or never given out.
    #[error(
        "the region of {size} bytes at offset {offset} is not in use: freed twice, or never allocated here"
    )]
    NotInUse {
        /// Offset of the region.
        offset: u64,
        /// Bytes of the region.
        size: u64,
    },
}

/// An allocator of ranges: best fit over all free blocks but the last, which is the last resort.
///
/// Every operation takes logarithmic time in the number of blocks, of which there is no limit.
#[derive(Clone, Debug)]
pub struct FreeList {
    buffer: u32,
    alignment: u64,
    whole: Block,
    blocks: FreeBlocks,
    in_use: BTreeMap<u64, (u64, u32)>,
    used: u64,
    high_water: u64,
    listing: Option<Vec<Live>>,
}

impl FreeList {
    /// A list over `size` bytes of memory whose first byte has the address `base`.
    ///
    /// The first block starts at the first aligned address. A buffer that is smaller than the gap before it has no room.
    pub fn new(base: u64, size: u64, alignment: u64) -> Result<Self, FreeListError> {
        if !alignment.is_power_of_two() {
            return Err(FreeListError::Alignment(alignment));
        }
        let gap = base.wrapping_neg() & (alignment - 1);
        let whole = Block { offset: gap.min(size), size: size.saturating_sub(gap) };
        let mut list = FreeList {
            buffer: 0,
            alignment,
            whole,
            blocks: FreeBlocks::default(),
            in_use: BTreeMap::new(),
            used: 0,
            high_water: 0,
            listing: None,
        };
        list.reset();
        Ok(list)
    }

    /// A list without memory behind it and without an end: the same decisions, to learn how much memory they need.
    pub fn measuring(alignment: u64) -> Result<Self, FreeListError> {
        FreeList::new(0, u64::MAX, alignment)
    }

    /// Gives the buffer a number, so that regions of other buffers are told apart.
    pub fn for_buffer(mut self, buffer: u32) -> Self {
        self.buffer = buffer;
        self
    }

    /// Keeps, from now on, the list of what is in use at each new high-water mark.
    pub fn with_listing(mut self) -> Self {
        self.listing = Some(Vec::new());
        self
    }

    /// The alignment of all regions.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The most bytes that were ever in use from the buffer's start on: the size a buffer needs for these decisions.
    pub fn high_water(&self) -> u64 {
        self.high_water
    }

    /// What was in use at the high-water mark, by address; empty without [`FreeList::with_listing`].
    pub fn live_at_high_water(&self) -> &[Live] {
        self.listing.as_deref().unwrap_or_default()
    }

    /// Bytes in use now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The free blocks by address, as (offset, size).
    pub fn free_blocks(&self) -> Vec<(u64, u64)> {
        let mut blocks = Vec::new();
        self.blocks.for_each(|block| blocks.push((block.offset, block.size)));
        blocks
    }

    /// Forgets all regions and the high-water mark: one free block again.
    pub fn reset(&mut self) {
        self.blocks.reset(self.whole);
        self.in_use.clear();
        self.used = 0;
        self.high_water = 0;
        if let Some(listing) = &mut self.listing {
            listing.clear();
        }
    }

    /// Finds room for `size` bytes, rounded up to the alignment. `tag` is the caller's number for what goes there.
    ///
    /// Nothing takes no room: a size of 0 gets an offset inside the buffer (or at its end) and need not be freed.
    pub fn allocate(&mut self, size: u64, tag: u32) -> Result<Region, FreeListError> {
        let wanted = size.checked_next_multiple_of(self.alignment).ok_or(FreeListError::TooLarge {
            tag,
            size,
            alignment: self.alignment,
        })?;
        if wanted == 0 {
            let offset = self.blocks.choose(0).map_or(self.whole.offset, |block| block.offset);
            return Ok(Region { buffer: self.buffer, offset, size: 0 });
        }
        let Some(offset) = self.blocks.take(wanted) else {
            return Err(self.out_of_memory(wanted, tag));
        };
        self.in_use.insert(offset, (wanted, tag));
        self.used += wanted;
        if offset + wanted > self.high_water {
            self.high_water = offset + wanted;
            if let Some(listing) = &mut self.listing {
                listing.clear();
                listing.extend(self.in_use.iter().map(|(&offset, &(size, tag))| Live { tag, offset, size }));
            }
        }
        Ok(Region { buffer: self.buffer, offset, size: wanted })
    }

    /// Gives a region back. A region of another buffer is none of this list's business: nothing happens, and the answer
    /// is false.
    pub fn free(&mut self, region: Region) -> Result<bool, FreeListError> {
        if region.buffer != self.buffer {
            return Ok(false);
        }
        if region.size == 0 {
            return Ok(true);
        }
        match self.in_use.get(&region.offset) {
            Some((size, _)) if *size == region.size => {}
            _ => return Err(FreeListError::NotInUse { offset: region.offset, size: region.size }),
        }
        self.in_use.remove(&region.offset);
        self.used -= region.size;
        self.blocks.give(Block { offset: region.offset, size: region.size });
        Ok(true)
    }

    fn out_of_memory(&self, wanted: u64, tag: u32) -> FreeListError {
        let (mut largest, mut free) = (0, 0);
        self.blocks.for_each(|block| {
            largest = block.size.max(largest);
            free += block.size;
        });
        FreeListError::OutOfMemory { tag, wanted, largest, free, capacity: self.whole.size }
    }
}
