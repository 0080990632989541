//! Which ranks are alive: heartbeats as they were seen, and the first failure.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::ClusterError;

/// The first error of a communicator, which every later operation returns.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    failed: AtomicBool,
    error: Mutex<Option<ClusterError>>,
}

impl Failure {
    /// Keeps an error, unless there is one already, and returns the one that counts.
    pub(crate) fn set(&self, error: ClusterError) -> ClusterError {
        let first = lock(&self.error).get_or_insert(error).clone();
        self.failed.store(true, Ordering::Release);
        first
    }

    pub(crate) fn get(&self) -> Option<ClusterError> {
        self.failed.load(Ordering::Acquire).then(|| lock(&self.error).clone()).flatten()
    }

    pub(crate) fn check(&self) -> Result<(), ClusterError> {
        self.get().map_or(Ok(()), Err)
    }
}

/// The heartbeats of the other ranks, as this one sees them.
#[derive(Debug)]
pub(crate) struct Watch {
    silence: Duration,
    looked: Instant,
    seen: Vec<(u64, Instant)>,
}

impl Watch {
    pub(crate) fn new(ranks: usize, silence: Duration, now: Instant) -> Watch {
        Watch { silence, looked: now, seen: vec![(0, now); ranks] }
    }

    /// How often heartbeats are due.
    pub(crate) fn interval(&self) -> Duration {
        self.silence / 8
    }

    /// Notes the latest heartbeat of each rank. Returns the first rank that has been silent for too long, and for how long.
    ///
    /// If this rank itself has not looked for half of that time, because it was stopped or its machine was suspended, the
    /// others get a new chance: their heartbeats may be waiting to be read.
    pub(crate) fn look(
        &mut self,
        beats: impl Iterator<Item = u64>,
        rank: usize,
        now: Instant,
    ) -> Option<(usize, Duration)> {
        let asleep = now.duration_since(self.looked) > self.silence / 2;
        self.looked = now;
        let mut lost = None;
        for (other, (beat, seen)) in beats.zip(&mut self.seen).enumerate() {
            if beat != seen.0 || asleep {
                *seen = (beat, now);
            } else if other != rank && lost.is_none() && now.duration_since(seen.1) >= self.silence {
                lost = Some((other, now.duration_since(seen.1)));
            }
        }
        lost
    }
}

/// A lock that a panic of another thread does not spoil: what it guards is valid between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_silent_rank_is_lost_after_the_limit() {
        let start = Instant::now();
        let mut watch = Watch::new(3, 4 * SECOND, start);
        assert_eq!(watch.look([1, 1, 1].into_iter(), 0, start + SECOND), None);
        assert_eq!(watch.look([2, 1, 2].into_iter(), 0, start + 2 * SECOND), None);
        assert_eq!(watch.look([2, 1, 3].into_iter(), 0, start + 4 * SECOND), None);
        assert_eq!(watch.look([2, 1, 4].into_iter(), 0, start + 5 * SECOND), Some((1, 4 * SECOND)));
    }

    #[test]
    fn a_rank_that_was_stopped_itself_blames_nobody() {
        let start = Instant::now();
        let mut watch = Watch::new(2, 4 * SECOND, start);
        assert_eq!(watch.look([1, 1].into_iter(), 0, start + SECOND), None);
        assert_eq!(watch.look([1, 1].into_iter(), 0, start + 60 * SECOND), None);
        assert_eq!(watch.look([1, 1].into_iter(), 0, start + 62 * SECOND), None);
        assert_eq!(watch.look([1, 1].into_iter(), 0, start + 64 * SECOND), Some((1, 4 * SECOND)));
    }

    #[test]
    fn the_first_failure_counts() {
        let failure = Failure::default();
        assert_eq!(failure.check(), Ok(()));
        assert_eq!(failure.set(ClusterError::Ended), ClusterError::Ended);
        assert_eq!(failure.set(ClusterError::AlreadyInitialized), ClusterError::Ended);
        assert_eq!(failure.check(), Err(ClusterError::Ended));
    }
}
