//! The memory for the bodies of requests that are being read or answered, all of them together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory for all bodies.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    used: AtomicUsize,
    most: usize,
}

/// The part of it that one body takes, until it is dropped.
#[derive(Debug)]
pub(crate) struct BodyRoom {
    memory: Arc<BodyMemory>,
    bytes: usize,
}

impl BodyMemory {
    pub(crate) fn new(most: usize) -> BodyMemory {
        BodyMemory { used: AtomicUsize::new(0), most }
    }
}

impl BodyRoom {
    pub(crate) fn new(memory: &Arc<BodyMemory>) -> BodyRoom {
        BodyRoom { memory: Arc::clone(memory), bytes: 0 }
    }

    /// Takes room for more bytes. False if there is none.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        let BodyMemory { used, most } = &*self.memory;
        let fits = |now: usize| now.checked_add(bytes).filter(|sum| sum <= most);
        let fits = used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        self.bytes += if fits { bytes } else { 0 };
        fits
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_comes_back() {
        let memory = Arc::new(BodyMemory::new(10));
        let (mut first, mut second) = (BodyRoom::new(&memory), BodyRoom::new(&memory));
        assert!(first.grow(6) && second.grow(4) && !second.grow(1) && !first.grow(usize::MAX));
        drop(first);
        assert!(second.grow(6));
        drop(second);
        assert_eq!(memory.used.load(Ordering::Acquire), 0);
    }
}
