//! Batches small writes and copies into one kernel launch; bytes to be written travel in the launch's parameters.

use std::sync::Arc;

use quadriga_runtime::Buffer;

use crate::buffer::overlap;
use crate::launch::Argument;

/// The most copies of a launch.
const MAX_COPIES: usize = 8;
/// The most bytes of one copy.
pub(crate) const MAX_COPY_BYTES: usize = 128;
/// Bytes to be written that fit into a launch's parameters.
const DATA_BYTES: usize = 448;

/// The parameter of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SmallCopies {
    to: [u64; MAX_COPIES],
    /// Source addresses; 0 where the bytes are in `data`.
    from: [u64; MAX_COPIES],
    len: [u32; MAX_COPIES],
    at: [u32; MAX_COPIES],
    data: [u8; DATA_BYTES],
}

// SAFETY: `struct SmallCopies` of elementwise.cu has the same fields in the same order.
unsafe impl Argument for SmallCopies {}

/// Copies that wait to be launched together. A queue launches them before any later operation but waits.
pub(crate) struct SmallCopyBatch {
    copies: SmallCopies,
    count: usize,
    bytes: usize,
    /// Buffers of the batched copies, kept until the copies are launched; from then on the driver waits with freeing.
    buffers: Vec<Arc<dyn Buffer>>,
}

impl SmallCopyBatch {
    pub(crate) fn new() -> SmallCopyBatch {
        let copies = SmallCopies {
            to: [0; MAX_COPIES],
            from: [0; MAX_COPIES],
            len: [0; MAX_COPIES],
            at: [0; MAX_COPIES],
            data: [0; DATA_BYTES],
        };
        SmallCopyBatch { copies, count: 0, bytes: 0, buffers: Vec::new() }
    }

    /// Adds a write to an address; `false` if it is too large, the batch is full, or it conflicts with another copy.
    pub(crate) fn write(&mut self, to: u64, bytes: &[u8]) -> bool {
        let start = self.bytes;
        if !self.fits(to, None, bytes.len()) {
            return false;
        }
        let Some(room) = self.copies.data.get_mut(start..start + bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        self.bytes += bytes.len();
        self.push(to, 0, bytes.len(), start)
    }

    /// Adds a copy from one address to another; `false` as for a write.
    pub(crate) fn copy(&mut self, to: u64, from: u64, len: usize) -> bool {
        self.fits(to, Some(from), len) && self.push(to, from, len, 0)
    }

    /// Keeps the buffer of a copy that was added.
    pub(crate) fn keep(&mut self, buffer: &Arc<dyn Buffer>) {
        if !self.buffers.iter().any(|kept| Arc::ptr_eq(kept, buffer)) {
            self.buffers.push(Arc::clone(buffer));
        }
    }

    /// Releases the buffers once the copies are launched.
    pub(crate) fn release(&mut self) {
        self.buffers.clear();
    }

    /// Empties the batch, and returns the copies with their number. The buffers stay until [`SmallCopyBatch::release`].
    pub(crate) fn take(&mut self) -> Option<(&SmallCopies, u32)> {
        let count = std::mem::take(&mut self.count);
        self.bytes = 0;
        (count > 0).then_some((&self.copies, count as u32))
    }

    /// Whether a copy is small, and may run at the same time as the others: it touches no byte that another one writes,
    /// and writes none that another one reads.
    fn fits(&self, to: u64, from: Option<u64>, len: usize) -> bool {
        let SmallCopies { to: targets, from: sources, len: lens, .. } = &self.copies;
        let mut waiting = targets.iter().zip(sources).zip(lens).take(self.count);
        len <= MAX_COPY_BYTES
            && waiting.all(|((target, source), other)| {
                let other = *other as usize;
                !overlap(to, len, *target, other)
                    && !from.is_some_and(|from| overlap(from, len, *target, other))
                    && (*source == 0 || !overlap(to, len, *source, other))
            })
    }

    fn push(&mut self, to: u64, from: u64, len: usize, at: usize) -> bool {
        let (copies, index) = (&mut self.copies, self.count);
        let (Some(target), Some(source), Some(length), Some(start)) = (
            copies.to.get_mut(index),
            copies.from.get_mut(index),
            copies.len.get_mut(index),
            copies.at.get_mut(index),
        ) else {
            return false;
        };
        (*target, *source, *length, *start) = (to, from, len as u32, at as u32);
        self.count += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_batched_until_the_batch_is_full() {
        let mut small = SmallCopyBatch::new();
        for n in 0..3 {
            assert!(small.write(1000 + 100 * n, &[n as u8; 100]));
        }
        assert!(!small.write(5000, &[0; MAX_COPY_BYTES + 1]), "too large");
        assert!(small.write(5000, &[7; MAX_COPY_BYTES]));
        assert!(!small.write(6000, &[0; 100]), "no room for its bytes");
        assert!((0..4).all(|n| small.copy(7000 + 8 * n, 9000, 8)), "copies need no room for bytes");
        assert!(!small.copy(8000, 9000, 8), "a ninth");
        let (copies, count) = small.take().unwrap();
        assert_eq!((count, copies.to[2], copies.len[2], copies.at[2]), (8, 1200, 100, 200));
        assert_eq!((&copies.data[200..300], copies.from[2]), (&[2u8; 100][..], 0));
        assert_eq!((copies.to[5], copies.from[5], copies.len[5]), (7008, 9000, 8));
        assert!(small.take().is_none());
        assert!(small.write(6000, &[0; 100]), "there is room again");
    }

    #[test]
    fn copies_that_conflict_are_not_batched() {
        let mut small = SmallCopyBatch::new();
        assert!(small.write(1000, &[0; 8]));
        assert!(small.copy(2000, 3000, 8));
        assert!(!small.write(1004, &[0; 8]), "written twice");
        assert!(!small.copy(1007, 4000, 4), "written twice");
        assert!(!small.copy(4000, 1004, 8), "written, then read");
        assert!(!small.copy(4000, 2000, 1), "written, then read");
        assert!(!small.write(3007, &[0; 8]), "read, then written");
        assert!(small.copy(4000, 3000, 8), "read twice");
        assert!(small.write(1008, &[0; 8]), "adjacent");
    }
}
