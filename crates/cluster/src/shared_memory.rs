//! Collectives of ranks on one machine, through memory that all of them have mapped.
//!
//! A collective goes in rounds. In round `k` each rank copies its values to its slot `k mod 2`, publishes the round, waits until
//! all have published it, and reads the others' slots. A rank that publishes round `k + 1` has read those of round `k`; so when
//! all have, the slots of round `k` may be written again in round `k + 2`, and no second barrier is needed.

mod messages;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::MmapRaw;

pub(crate) use self::messages::Outbox;
use crate::communicator::Wait;
use crate::error::ClusterError;
use crate::operation::{Operation, Reduction};
use crate::reduce::combine;
use crate::watch::Failure;

/// The most ranks: there is a mailbox for each pair.
pub(crate) const MAX_RANKS: usize = 8;

/// Bytes that a rank brings to a round.
const SLOT: usize = 256 << 10;

/// Bytes of a part of a message, and how many parts a mailbox holds.
const LETTER: usize = 64 << 10;
const LETTERS: usize = 4;

/// Bytes of a rank's words and error text.
const HEADER: usize = 2048;
const BEAT: usize = 0;
const PUBLISHED: usize = 64;
const FAILED: usize = 128;
const TEXT: usize = 192;
const TEXT_BYTES: usize = HEADER - TEXT;

/// Bytes of a mailbox's words: parts that were written and read.
const MAILBOX: usize = 128;
/// Bytes before a part: tag and length of the whole message.
const ENVELOPE: usize = 64;

/// Memory that the ranks of a machine share.
pub(crate) struct Segment {
    base: *mut u8,
    /// Keeps the memory.
    _map: MmapRaw,
    ranks: usize,
    rank: usize,
    /// Held while this rank publishes an error.
    publishing: Mutex<()>,
}

// SAFETY: the memory is mapped as long as the segment lives. Words are atomic; everything else is written by one rank while no
// other reads it, as the module's protocol says, and by one thread of a rank at a time, since `Cursor` or `Outbox` is borrowed
// mutably, or the rank's text is, which a lock guards.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// How far this rank is: rounds of collectives, and parts of messages from each rank. Those to each rank are in the [`Outbox`].
#[derive(Debug)]
pub(crate) struct Cursor {
    rounds: u64,
    received: [u64; MAX_RANKS],
}

impl Cursor {
    pub(crate) fn new() -> Cursor {
        Cursor { rounds: 0, received: [0; MAX_RANKS] }
    }
}

/// What ends waiting for other ranks.
pub(crate) struct Patience<'a> {
    pub(crate) failure: &'a Failure,
    pub(crate) wait: Wait,
}

impl Segment {
    /// The bytes that `ranks` need.
    pub(crate) fn bytes(ranks: usize) -> usize {
        let pairs = ranks * ranks;
        ranks * (HEADER + 2 * SLOT) + pairs * (MAILBOX + LETTERS * (ENVELOPE + LETTER))
    }

    /// The memory of a machine's ranks, all zero at first, that only they have mapped, each as another `rank`. It has
    /// [`Segment::bytes`], or more.
    pub(crate) fn new(map: MmapRaw, ranks: usize, rank: usize) -> Segment {
        debug_assert!(map.len() >= Segment::bytes(ranks));
        Segment { base: map.as_mut_ptr(), _map: map, ranks, rank, publishing: Mutex::default() }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= Segment::bytes(self.ranks) && offset.is_multiple_of(8));
        // SAFETY: offsets are inside the segment and multiples of eight, the base is aligned to a page, and these words are
        // only used as atomics.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    fn mailbox(&self, from: usize, to: usize) -> usize {
        self.ranks * HEADER + (from * self.ranks + to) * MAILBOX
    }

    fn slot(&self, rank: usize, round: u64) -> *mut u8 {
        let slots = self.ranks * HEADER + self.ranks * self.ranks * MAILBOX;
        let offset = slots + (rank * 2 + (round % 2) as usize) * SLOT;
        debug_assert!(offset + SLOT <= Segment::bytes(self.ranks));
        // SAFETY: the offset is inside the segment for every rank below `ranks`.
        unsafe { self.base.add(offset) }
    }

    fn letter(&self, from: usize, to: usize, number: u64) -> usize {
        let letters = self.ranks * (HEADER + 2 * SLOT) + self.ranks * self.ranks * MAILBOX;
        let mailbox = (from * self.ranks + to) * LETTERS + (number % LETTERS as u64) as usize;
        letters + mailbox * (ENVELOPE + LETTER)
    }

    /// Counts a heartbeat of this rank.
    pub(crate) fn beat(&self) {
        self.word(self.rank * HEADER + BEAT).fetch_add(1, Ordering::Release);
    }

    /// The heartbeats of all ranks.
    pub(crate) fn beats(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.ranks).map(|rank| self.word(rank * HEADER + BEAT).load(Ordering::Acquire))
    }

    /// Publishes an error of this rank, once.
    pub(crate) fn publish_failure(&self, message: &str) {
        let failed = self.word(self.rank * HEADER + FAILED);
        // The thread that fails and the one that communicates may both come here.
        let _one = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.load(Ordering::Acquire) != 0 {
            return;
        }
        let length = message.len().min(TEXT_BYTES);
        // SAFETY: the text of this rank, which others read only after the word below is not zero.
        unsafe {
            let text = self.base.add(self.rank * HEADER + TEXT);
            std::ptr::copy_nonoverlapping(message.as_ptr(), text, length);
        }
        failed.store(length as u64 + 1, Ordering::Release);
    }

    /// The first rank other than this one that published an error, with its text.
    pub(crate) fn published_failure(&self) -> Option<(usize, String)> {
        (0..self.ranks).filter(|rank| *rank != self.rank).find_map(|rank| {
            let length = self.word(rank * HEADER + FAILED).load(Ordering::Acquire).checked_sub(1)?;
            let length = (length as usize).min(TEXT_BYTES);
            // SAFETY: the text is complete and no longer written once the word is not zero.
            let text = unsafe { std::slice::from_raw_parts(self.base.add(rank * HEADER + TEXT), length) };
            Some((rank, String::from_utf8_lossy(text).into_owned()))
        })
    }

    /// Starts an operation: a collective's first values are published, so that others can go on while this rank works.
    pub(crate) fn start(&self, operation: &Operation<'_>, cursor: &mut Cursor) {
        let own = match operation {
            Operation::AllReduce { values, .. } => as_bytes(values),
            Operation::ReduceScatter { values, .. } => as_bytes(values),
            Operation::AllGather { part, .. } => part,
            Operation::Broadcast { bytes, root } if *root == self.rank => bytes,
            Operation::Broadcast { .. } => &[],
            Operation::Send { .. } | Operation::Receive { .. } => return,
        };
        self.publish(own, 0, cursor.rounds);
    }

    /// Waits for the others, and completes what was [started](Segment::start).
    pub(crate) fn finish(
        &self,
        operation: Operation<'_>,
        cursor: &mut Cursor,
        patience: &Patience<'_>,
    ) -> Result<(), ClusterError> {
        match operation {
            Operation::AllReduce { values, reduction } => {
                self.all_reduce(values, reduction, cursor, patience)
            }
            Operation::ReduceScatter { values, lengths, part } => {
                self.reduce_scatter(values, lengths, part, cursor, patience)
            }
            Operation::AllGather { part, lengths, whole } => {
                self.all_gather(part, lengths, whole, cursor, patience)
            }
            Operation::Broadcast { bytes, root } => self.broadcast(bytes, root, cursor, patience),
            // Nobody waits for a message to be received: `Segment::send` is all of it.
            Operation::Send { .. } => Ok(()),
            Operation::Receive { bytes, from, tag } => self.receive(bytes, from, tag, cursor, patience),
        }
    }

    fn all_reduce(
        &self,
        values: &mut [f32],
        reduction: Reduction,
        cursor: &mut Cursor,
        patience: &Patience<'_>,
    ) -> Result<(), ClusterError> {
        let rounds = rounds_of(size_of_val(values));
        for index in 0..rounds {
            self.meet(cursor.rounds, patience)?;
            let at = index * (SLOT / 4);
            let chunk = chunk_mut(values, at, SLOT / 4);
            if self.ranks == 2 {
                // Of two, either order is the same sum.
                combine(reduction, chunk, self.floats(1 - self.rank, cursor.rounds, chunk.len()));
            } else {
                chunk.copy_from_slice(self.floats(0, cursor.rounds, chunk.len()));
                for rank in 1..self.ranks {
                    combine(reduction, chunk, self.floats(rank, cursor.rounds, chunk.len()));
                }
            }
            cursor.rounds += 1;
            if index + 1 < rounds {
                self.publish(as_bytes(values), (index + 1) * SLOT, cursor.rounds);
            }
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        values: &[f32],
        lengths: &[usize],
        part: &mut [f32],
        cursor: &mut Cursor,
        patience: &Patience<'_>,
    ) -> Result<(), ClusterError> {
        let own_start: usize = lengths.iter().take(self.rank).sum();
        let own_end = own_start + part.len();
        let rounds = rounds_of(size_of_val(values));
        for index in 0..rounds {
            self.meet(cursor.rounds, patience)?;
            let at = index * (SLOT / 4);
            let here = values.len().saturating_sub(at).min(SLOT / 4);
            let (start, end) = (own_start.clamp(at, at + here), own_end.clamp(at, at + here));
            let chunk = chunk_mut(part, start.saturating_sub(own_start), end - start);
            for rank in 0..self.ranks {
                let from =
                    self.floats(rank, cursor.rounds, here).get(start - at..end - at).unwrap_or_default();
                match rank {
                    0 => chunk.copy_from_slice(from),
                    _ => combine(Reduction::Sum, chunk, from),
                }
            }
            cursor.rounds += 1;
            if index + 1 < rounds {
                self.publish(as_bytes(values), (index + 1) * SLOT, cursor.rounds);
            }
        }
        Ok(())
    }

    fn all_gather(
        &self,
        part: &[u8],
        lengths: &[usize],
        whole: &mut [u8],
        cursor: &mut Cursor,
        patience: &Patience<'_>,
    ) -> Result<(), ClusterError> {
        let rounds = rounds_of(lengths.iter().copied().max().unwrap_or(0));
        for index in 0..rounds {
            self.meet(cursor.rounds, patience)?;
            let mut first = 0;
            for (rank, length) in lengths.iter().enumerate() {
                let here = length.saturating_sub(index * SLOT).min(SLOT);
                let to = chunk_mut(whole, first + index * SLOT, here);
                to.copy_from_slice(self.slot_bytes(rank, cursor.rounds, to.len()));
                first += length;
            }
            cursor.rounds += 1;
            if index + 1 < rounds {
                self.publish(part, (index + 1) * SLOT, cursor.rounds);
            }
        }
        Ok(())
    }

    fn broadcast(
        &self,
        bytes: &mut [u8],
        root: usize,
        cursor: &mut Cursor,
        patience: &Patience<'_>,
    ) -> Result<(), ClusterError> {
        let rounds = rounds_of(bytes.len());
        for index in 0..rounds {
            self.meet(cursor.rounds, patience)?;
            if root != self.rank {
                let to = chunk_mut(bytes, index * SLOT, SLOT);
                to.copy_from_slice(self.slot_bytes(root, cursor.rounds, to.len()));
            }
            cursor.rounds += 1;
            if index + 1 < rounds {
                let own: &[u8] = if root == self.rank { bytes } else { &[] };
                self.publish(own, (index + 1) * SLOT, cursor.rounds);
            }
        }
        Ok(())
    }

    /// Copies values from `at` on to this rank's slot of a round, and publishes the round.
    fn publish(&self, values: &[u8], at: usize, round: u64) {
        let chunk = values.get(at..values.len().min(at.saturating_add(SLOT))).unwrap_or_default();
        // SAFETY: a slot has SLOT bytes, and all ranks have read what was in this one two rounds ago.
        unsafe {
            std::ptr::copy_nonoverlapping(chunk.as_ptr(), self.slot(self.rank, round), chunk.len());
        }
        self.word(self.rank * HEADER + PUBLISHED).store(round + 1, Ordering::Release);
    }

    fn slot_bytes(&self, rank: usize, round: u64, len: usize) -> &[u8] {
        // SAFETY: a slot has SLOT bytes, of which `len` at most are asked for; all ranks have published the round, and none
        // writes to its slot again before this rank publishes the next.
        unsafe { std::slice::from_raw_parts(self.slot(rank, round), len.min(SLOT)) }
    }

    fn floats(&self, rank: usize, round: u64, len: usize) -> &[f32] {
        // SAFETY: as above; slots are aligned to 64 bytes, and any bits are a float.
        unsafe { std::slice::from_raw_parts(self.slot(rank, round).cast(), len.min(SLOT / 4)) }
    }

    /// Waits until all ranks have published a round.
    fn meet(&self, round: u64, patience: &Patience<'_>) -> Result<(), ClusterError> {
        let has_published =
            |rank: usize| self.word(rank * HEADER + PUBLISHED).load(Ordering::Acquire) > round;
        for rank in (0..self.ranks).filter(|rank| *rank != self.rank) {
            let missing = || (0..self.ranks).filter(|other| !has_published(*other)).collect();
            self.wait(patience, missing, || has_published(rank))?;
        }
        Ok(())
    }

    /// Polls, then yields, then sleeps between looks, until a condition holds; an error names those that are missing then.
    fn wait(
        &self,
        patience: &Patience<'_>,
        missing: impl Fn() -> Vec<usize>,
        ready: impl Fn() -> bool,
    ) -> Result<(), ClusterError> {
        for _ in 0..2000 {
            if ready() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let started = Instant::now();
        loop {
            for _ in 0..16 {
                if ready() {
                    return Ok(());
                }
                std::thread::yield_now();
            }
            patience.failure.check()?;
            let waited = started.elapsed();
            if let Some(limit) = patience.wait.limit.filter(|limit| waited >= *limit) {
                return Err(ClusterError::Deadline {
                    operation: patience.wait.what,
                    seconds: limit.as_secs(),
                    missing: ClusterError::absent(&missing()),
                });
            }
            // Steps follow each other within milliseconds; a server without requests need not poll.
            if waited > Duration::from_millis(20) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

/// How many slots so many bytes fill; an empty operation is a round, too.
fn rounds_of(bytes: usize) -> usize {
    bytes.div_ceil(SLOT).max(1)
}

/// At most `len` elements from `at` on.
fn chunk_mut<T>(values: &mut [T], at: usize, len: usize) -> &mut [T] {
    let end = values.len().min(at.saturating_add(len));
    values.get_mut(at..end).unwrap_or_default()
}

fn as_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: floats have no padding, and bytes no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
