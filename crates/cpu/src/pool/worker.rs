//! A job's handle on the pool: the worker's index, chunks of work with work stealing, and the barrier.

use std::cell::Cell;
use std::time::Duration;

use super::error::Stopped;
use super::latch::Latches;
use super::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, Signal};

/// A value in cache lines of its own, against false sharing.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// State of one run that its threads share.
#[derive(Debug)]
pub(super) struct Team {
    threads: u32,
    /// Longest poll at a barrier.
    longest: Duration,
    stopped: AtomicBool,
    /// One per thread's share of a step: the step number in the high 32 bits, the next chunk of the share in the low.
    tickets: Box<[CachePadded<AtomicU64>]>,
    arrived: CachePadded<AtomicU32>,
    passed: CachePadded<Signal>,
    /// Counts latches that were opened.
    opened: CachePadded<Signal>,
}

impl Team {
    pub(super) fn new(threads: usize, longest: Duration) -> Team {
        Team {
            threads: u32::try_from(threads).unwrap_or(u32::MAX),
            longest,
            stopped: AtomicBool::new(false),
            tickets: (0..threads).map(|_| CachePadded(AtomicU64::new(0))).collect(),
            arrived: CachePadded(AtomicU32::new(0)),
            passed: CachePadded(Signal::new(0)),
            opened: CachePadded(Signal::new(0)),
        }
    }

    /// Resets the state for the next run; only while no thread is inside a job.
    pub(super) fn reset(&self) {
        self.tickets.iter().for_each(|ticket| ticket.0.store(0, Ordering::Relaxed));
        self.arrived.0.store(0, Ordering::Relaxed);
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Ends the run early: `chunks` hands out nothing more, barriers open and nobody waits for a latch. True for the first
    /// caller.
    pub(super) fn stop(&self) -> bool {
        let first = !self.stopped.swap(true, Ordering::AcqRel);
        self.passed.0.add(1);
        self.opened.0.add(1);
        first
    }
}

/// One thread of a run, as its job sees it.
///
/// All workers of a run must make the same calls of [`chunks`](Worker::chunks) and [`barrier`](Worker::barrier), in
/// the same order.
#[derive(Debug)]
pub struct Worker<'team> {
    index: usize,
    team: &'team Team,
    step: Cell<u32>,
}

impl<'team> Worker<'team> {
    pub(super) fn new(index: usize, team: &'team Team) -> Worker<'team> {
        Worker { index, team, step: Cell::new(0) }
    }

    /// This thread's index in `0..threads()`; the caller of `run` is 0.
    pub const fn index(&self) -> usize {
        self.index
    }

    /// How many threads take part in this run.
    pub const fn threads(&self) -> usize {
        self.team.threads as usize
    }

    /// Calls `work(i)` for chunks of `0..count`: over all workers, each chunk exactly once.
    ///
    /// A worker first takes the chunks of its own contiguous share, in order, so that the hardware prefetcher sees
    /// sequential reads; then it steals from the other shares. Which worker takes a chunk must therefore not matter.
    ///
    /// Returns when no chunk is left; other workers may still be computing theirs (see
    /// [`barrier`](Worker::barrier)).
    pub fn chunks(&self, count: usize, mut work: impl FnMut(usize)) {
        // Steps are numbered from 1: a ticket that was just reset (step 0) belongs to none.
        let step = self.step.get().wrapping_add(1);
        self.step.set(step);
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let tickets = &self.team.tickets;
        let (before, from) = tickets.split_at(self.index.min(tickets.len()));
        let shares = (self.index..).zip(from).chain(before.iter().enumerate());
        for (share, ticket) in shares {
            let (first, end) = (self.begin(share, count), self.begin(share + 1, count));
            while first < end
                && let Some(chunk) = self.take(&ticket.0, step, end - first)
            {
                work((first + chunk) as usize);
            }
        }
    }

    /// The first chunk of a share of `count` chunks.
    fn begin(&self, share: usize, count: u32) -> u32 {
        let chunks = (u64::from(count) * share as u64).div_ceil(u64::from(self.team.threads));
        u32::try_from(chunks).unwrap_or(u32::MAX)
    }

    /// The chunk that [`chunks`](Worker::chunks) gives this worker first, unless another has stolen it.
    pub fn first_of(&self, count: usize) -> usize {
        self.begin(self.index, u32::try_from(count).unwrap_or(u32::MAX)) as usize
    }

    /// Like [`chunks`](Worker::chunks) for work that can fail; the first error ends this worker's share.
    ///
    /// # Errors
    /// The first error of `work`. Return it from the job, so that the other workers stop too.
    pub fn try_chunks<E>(&self, count: usize, mut work: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
        let mut result = Ok(());
        self.chunks(count, |chunk| {
            if result.is_ok() {
                result = work(chunk);
            }
        });
        result
    }

    /// Takes one of `count` chunks of a share. A worker leaves a step only when all chunks of all shares are taken: a
    /// ticket of a later step means that this step has no chunk left, and one of an earlier step that no worker has
    /// started this share.
    fn take(&self, ticket: &AtomicU64, step: u32, count: u32) -> Option<u32> {
        let mut seen = ticket.load(Ordering::Relaxed);
        loop {
            let (seen_step, next) = ((seen >> 32) as u32, seen as u32);
            let chunk = if seen_step == step {
                next
            } else if seen_step < step {
                0
            } else {
                return None;
            };
            if chunk >= count || self.team.stopped.load(Ordering::Relaxed) {
                return None;
            }
            let taken = u64::from(step) << 32 | u64::from(chunk + 1);
            match ticket.compare_exchange_weak(seen, taken, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(chunk),
                Err(now) => seen = now,
            }
        }
    }

    /// Waits until every worker of the run has arrived; all writes before it are visible to all workers after it.
    ///
    /// # Errors
    /// Another worker failed or panicked: the job should return at once.
    pub fn barrier(&self) -> Result<(), Stopped> {
        let team = self.team;
        if team.threads == 1 {
            return Ok(());
        }
        let passed = team.passed.0.get();
        if team.stopped.load(Ordering::Acquire) {
            return Err(Stopped::ByAnother);
        }
        if team.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == team.threads {
            team.arrived.0.store(0, Ordering::Relaxed);
            team.passed.0.add(1);
        } else {
            team.passed.0.wait(team.longest, |now| now != passed);
        }
        if team.stopped.load(Ordering::Acquire) {
            return Err(Stopped::ByAnother);
        }
        Ok(())
    }

    /// Opens a latch for all workers, and wakes those that wait in [`wait_until`](Worker::wait_until).
    pub fn open(&self, latches: &Latches, index: usize) {
        latches.open(index);
        if self.team.threads > 1 {
            self.team.opened.0.add(1);
        }
    }

    /// Waits until `ready()`: a condition on latches, which becomes true when a worker [opens](Worker::open) one. As at a
    /// barrier, the thread polls for a while and then sleeps.
    ///
    /// The work that opens the latch must be taken already, by a worker that does not wait for this one: work that was handed
    /// out by an earlier call of [`chunks`](Worker::chunks), say.
    ///
    /// # Errors
    /// Another worker failed or panicked: the job should return at once. A run of one thread never waits: then, too.
    pub fn wait_until(&self, ready: impl Fn() -> bool) -> Result<(), Stopped> {
        let team = self.team;
        if ready() {
            return Ok(());
        }
        if team.threads == 1 {
            return Err(Stopped::Panicked("a thread waited for its own work".into()));
        }
        let stopped = || team.stopped.load(Ordering::Acquire);
        team.opened.0.wait(team.longest, |_| ready() || stopped());
        if stopped() { Err(Stopped::ByAnother) } else { Ok(()) }
    }
}
