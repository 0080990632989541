//! Memory of which all requests together may take so much: that of bodies, and that of answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory that there is.
#[derive(Debug)]
pub(crate) struct MemoryPool {
    used: AtomicUsize,
    most: usize,
}

/// The memory of answers. Streams have a part of their own: answers that are collected would otherwise end them in their middle.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerMemory {
    /// Of those that are collected until they are complete.
    pub(crate) collected: Arc<MemoryPool>,
    /// Of those that wait for their clients to read them.
    pub(crate) streamed: Arc<MemoryPool>,
}

impl AnswerMemory {
    pub(crate) fn new(most: usize) -> AnswerMemory {
        let streamed = most / 4;
        let pool = |most| Arc::new(MemoryPool::new(most));
        AnswerMemory { collected: pool(most - streamed), streamed: pool(streamed) }
    }
}

/// The part of it that one request takes, until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryRoom {
    pool: Arc<MemoryPool>,
    bytes: AtomicUsize,
}

impl Default for MemoryPool {
    /// Without a limit.
    fn default() -> MemoryPool {
        MemoryPool::new(usize::MAX)
    }
}

impl MemoryPool {
    pub(crate) fn new(most: usize) -> MemoryPool {
        MemoryPool { used: AtomicUsize::new(0), most }
    }

    /// The bytes that there are.
    pub(crate) fn most(&self) -> usize {
        self.most
    }
}

impl MemoryRoom {
    pub(crate) fn new(pool: &Arc<MemoryPool>) -> MemoryRoom {
        MemoryRoom { pool: Arc::clone(pool), bytes: AtomicUsize::new(0) }
    }

    /// The memory that it is a part of.
    pub(crate) fn pool(&self) -> &MemoryPool {
        &self.pool
    }

    /// The bytes that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    /// Takes room for more bytes. False if there is none.
    pub(crate) fn grow(&self, bytes: usize) -> bool {
        let MemoryPool { used, most } = &*self.pool;
        let fits = |now: usize| now.checked_add(bytes).filter(|sum| sum <= most);
        let fits = used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        if fits {
            self.bytes.fetch_add(bytes, Ordering::AcqRel);
        }
        fits
    }

    /// Gives bytes back, of those that it takes.
    pub(crate) fn shrink(&self, bytes: usize) {
        let before = self
            .bytes
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| Some(now.saturating_sub(bytes)));
        let given = before.unwrap_or_else(|now| now).min(bytes);
        self.pool.used.fetch_sub(given, Ordering::AcqRel);
    }
}

impl Drop for MemoryRoom {
    fn drop(&mut self) {
        self.pool.used.fetch_sub(*self.bytes.get_mut(), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_comes_back() {
        let pool = Arc::new(MemoryPool::new(10));
        let (first, second) = (MemoryRoom::new(&pool), MemoryRoom::new(&pool));
        assert!(first.grow(6) && second.grow(4) && !second.grow(1) && !first.grow(usize::MAX));
        drop(first);
        assert!(second.grow(6));
        second.shrink(3);
        assert_eq!((second.bytes(), pool.used.load(Ordering::Acquire)), (7, 7));
        // No more than it took.
        second.shrink(100);
        assert_eq!((second.bytes(), pool.used.load(Ordering::Acquire)), (0, 0));
        assert!(second.grow(10));
        drop(second);
        assert_eq!(pool.used.load(Ordering::Acquire), 0);
    }
}
