//! Latches: dependencies between chunks of work of one step, without a barrier of all threads.

use super::sync::{AtomicBool, AtomicU32, Ordering};

/// One latch: counts arrivals, and is opened once.
#[derive(Debug)]
struct Latch {
    arrived: AtomicU32,
    open: AtomicBool,
}

/// A set of latches. Workers arrive at a latch; the last of them opens it with [`Worker::open`](super::Worker::open), and
/// others wait for that with [`Worker::wait_until`](super::Worker::wait_until).
///
/// Everything that a worker wrote before it arrived is visible to the last to arrive, and everything that the last wrote
/// before it opened the latch to whoever finds it open.
#[derive(Debug)]
pub struct Latches(Box<[Latch]>);

impl Latches {
    /// So many closed latches without arrivals.
    pub fn new(count: usize) -> Latches {
        let latch = |_| Latch { arrived: AtomicU32::new(0), open: AtomicBool::new(false) };
        Latches((0..count).map(latch).collect())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// Arrives at a latch that `expected` workers or chunks arrive at in all. True for the last.
    pub fn arrive(&self, index: usize, expected: usize) -> bool {
        let Some(latch) = self.0.get(index) else { return false };
        latch.arrived.fetch_add(1, Ordering::AcqRel) as usize + 1 == expected
    }

    /// Whether a latch is open.
    pub fn is_open(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(|latch| latch.open.load(Ordering::Acquire))
    }

    /// Opens a latch, without waking a worker that sleeps.
    pub(super) fn open(&self, index: usize) {
        if let Some(latch) = self.0.get(index) {
            latch.open.store(true, Ordering::Release);
        }
    }

    /// Closes all latches and forgets all arrivals, for the next use. A barrier or the end of the run must separate it from
    /// that use, and no worker may still arrive at a latch or look at one.
    pub fn reset(&self) {
        for latch in &self.0 {
            latch.arrived.store(0, Ordering::Relaxed);
            latch.open.store(false, Ordering::Relaxed);
        }
    }
}
