//! A happens-before checker: every access to simulated memory must be ordered after the accesses it conflicts with.
//!
//! Simulated transfers are fast, so a missing wait would hardly ever show as a wrong result. The checker does not
//! depend on timing: each queue, and the host, has a vector clock, which grows with its commands, travels with recorded
//! events, and is joined where somebody waits. A read must know of the write whose bytes it reads; a write must know of
//! the previous write and of all reads since. Clocks are compared when a command is submitted, in program order, so a
//! violation is found in every run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The host: all threads of the process count as one, which is lenient but never wrong.
pub(crate) const HOST: u64 = 0;

/// How much an agent (a queue, or the host) knows of every other: the number of its commands that are done.
#[derive(Clone, Default, Debug)]
pub(crate) struct VectorClock(BTreeMap<u64, u64>);

impl VectorClock {
    fn knows(&self, agent: u64, time: u64) -> bool {
        self.0.get(&agent).is_some_and(|known| *known >= time)
    }

    /// The next moment of an agent.
    fn tick(&mut self, agent: u64) -> u64 {
        let time = self.0.entry(agent).or_default();
        *time += 1;
        *time
    }

    pub(crate) fn join(&mut self, other: &VectorClock) {
        for (agent, time) in &other.0 {
            let known = self.0.entry(*agent).or_default();
            *known = (*known).max(*time);
        }
    }
}

/// Numbers for queues and buffers; 0 is the host.
pub(crate) fn new_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What the host knows, and which queues exist.
#[derive(Default)]
struct Host {
    clock: VectorClock,
    /// Grows with every join, so that a queue can tell whether there is news.
    version: u64,
    /// Queues that are not dropped. A queue finishes its commands before it goes: everything of others is known to all.
    live: BTreeSet<u64>,
}

static HOST_STATE: Mutex<Host> =
    Mutex::new(Host { clock: VectorClock(BTreeMap::new()), version: 0, live: BTreeSet::new() });

fn host() -> MutexGuard<'static, Host> {
    HOST_STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The host has waited for something with this clock.
pub(crate) fn host_joins(clock: &VectorClock) {
    let mut host = host();
    let Host { clock: known, version, live } = &mut *host;
    // Queues that are gone are known anyway; keeping them would let clocks grow for ever.
    for (agent, time) in clock.0.iter().filter(|(agent, _)| **agent == HOST || live.contains(agent)) {
        let known = known.0.entry(*agent).or_default();
        *known = (*known).max(*time);
    }
    *version += 1;
}

/// The moment of one command of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    agent: u64,
    time: u64,
    clock: VectorClock,
}

/// A host access that happens now.
pub(crate) fn host_moment() -> Moment {
    let mut host = host();
    host.version += 1;
    let time = host.clock.tick(HOST);
    Moment { agent: HOST, time, clock: host.clock.clone() }
}

/// The clock of one queue.
#[derive(Debug)]
pub(crate) struct QueueClock {
    agent: u64,
    clock: VectorClock,
    /// The version of the host's clock that was joined last.
    host: u64,
}

impl QueueClock {
    pub(crate) fn new() -> QueueClock {
        let agent = new_id();
        host().live.insert(agent);
        QueueClock { agent, clock: VectorClock::default(), host: 0 }
    }

    /// A command is submitted: it comes after everything before it in the queue, and after what the host knows.
    pub(crate) fn submit(&mut self) -> Moment {
        let host = host();
        if host.version != self.host {
            self.clock.join(&host.clock);
            self.clock.0.retain(|agent, _| *agent == HOST || host.live.contains(agent));
            self.host = host.version;
        }
        drop(host);
        let time = self.clock.tick(self.agent);
        Moment { agent: self.agent, time, clock: self.clock.clone() }
    }

    /// The queue waits for something with this clock.
    pub(crate) fn join(&mut self, clock: &VectorClock) {
        self.clock.join(clock);
    }

    /// What is known once everything submitted so far is done.
    pub(crate) fn now(&self) -> &VectorClock {
        &self.clock
    }
}

impl Drop for QueueClock {
    fn drop(&mut self) {
        let mut host = host();
        host.live.remove(&self.agent);
        host.clock.0.remove(&self.agent);
    }
}

/// Accesses to one range of bytes.
#[derive(Clone, Default, Debug)]
struct Accesses {
    write: Option<(u64, u64)>,
    reads: Vec<(u64, u64)>,
}

/// Who accessed which bytes of a buffer last. Ranges start at the keys, and end at the next.
#[derive(Default, Debug)]
pub(crate) struct Shadow {
    ranges: Mutex<BTreeMap<usize, Accesses>>,
}

/// An access that is not ordered after a conflicting one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{access} bytes {start} to {end} without waiting for {conflict} by {by}")]
pub(crate) struct Unordered {
    access: &'static str,
    start: usize,
    end: usize,
    conflict: &'static str,
    by: String,
}

impl Shadow {
    /// An error if a read or a write of a range is not ordered after those it conflicts with. Records nothing.
    pub(crate) fn check(
        &self,
        start: usize,
        bytes: usize,
        write: bool,
        moment: &Moment,
    ) -> Result<(), Unordered> {
        let end = start + bytes;
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |agent: u64| agent != HOST && !host().live.contains(&agent);
        let stranger = |(agent, time): &(u64, u64)| {
            *agent != moment.agent && !moment.clock.knows(*agent, *time) && !gone(*agent)
        };
        // The range that the first byte is in may start before it.
        let first = ranges.range(..=start).next_back().map_or(start, |(from, _)| *from);
        for (from, accesses) in ranges.range(first..end).filter(|_| bytes > 0) {
            let conflict = match accesses.write.filter(|write| stranger(write)) {
                Some((agent, _)) => Some(("a write", agent)),
                None if write => {
                    accesses.reads.iter().find(|read| stranger(read)).map(|read| ("a read", read.0))
                }
                None => None,
            };
            if let Some((conflict, agent)) = conflict {
                let by = if agent == HOST { "the host".to_owned() } else { format!("queue {agent}") };
                let access = if write { "writes" } else { "reads" };
                return Err(Unordered { access, start: start.max(*from), end, conflict, by });
            }
        }
        Ok(())
    }

    /// Records a read or a write of a range.
    pub(crate) fn record(&self, start: usize, bytes: usize, write: bool, moment: &Moment) {
        if bytes == 0 {
            return;
        }
        let end = start + bytes;
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        // Cut ranges at both ends, so that the access covers whole ones.
        for cut in [start, end] {
            if !ranges.contains_key(&cut) {
                let covering = ranges.range(..cut).next_back().map(|(_, accesses)| accesses.clone());
                ranges.insert(cut, covering.unwrap_or_default());
            }
        }
        let now = (moment.agent, moment.time);
        for (_, accesses) in ranges.range_mut(start..end) {
            if write {
                *accesses = Accesses { write: Some(now), reads: Vec::new() };
            } else {
                match accesses.reads.iter_mut().find(|read| read.0 == moment.agent) {
                    Some(read) => read.1 = moment.time,
                    None => accesses.reads.push(now),
                }
            }
        }
        if write {
            // The whole range has one writer now: one entry is enough.
            let inner: Vec<usize> = ranges.range(start + 1..end).map(|(from, _)| *from).collect();
            for from in inner {
                ranges.remove(&from);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    impl Shadow {
        /// Records an access, unless it is refused.
        fn access(&self, start: usize, bytes: usize, write: bool, at: &Moment) -> Result<(), Unordered> {
            self.check(start, bytes, write, at)?;
            self.record(start, bytes, write, at);
            Ok(())
        }
    }

    #[test]
    fn a_queue_is_ordered_with_itself() {
        let (shadow, mut queue) = (Shadow::default(), QueueClock::new());
        shadow.access(0, 8, true, &queue.submit()).unwrap();
        shadow.access(4, 8, false, &queue.submit()).unwrap();
        shadow.access(0, 16, true, &queue.submit()).unwrap();
    }

    #[test]
    fn a_refused_access_is_none() {
        let (shadow, mut one, mut two) = (Shadow::default(), QueueClock::new(), QueueClock::new());
        shadow.access(0, 8, true, &one.submit()).unwrap();
        assert!(shadow.access(0, 16, true, &two.submit()).is_err());
        // Neither the bytes that were in conflict nor the others were written.
        shadow.access(0, 16, true, &one.submit()).unwrap();
    }

    #[test]
    fn another_queue_must_wait_for_a_write_and_for_reads() {
        let (shadow, mut one, mut two) = (Shadow::default(), QueueClock::new(), QueueClock::new());
        shadow.access(0, 8, true, &one.submit()).unwrap();
        let error = shadow.access(7, 1, false, &two.submit()).unwrap_err();
        assert!(
            error.to_string().contains("reads bytes 7 to 8 without waiting for a write by queue"),
            "{error}"
        );
        shadow.access(8, 8, false, &two.submit()).unwrap();

        let shadow = Shadow::default();
        shadow.access(0, 8, true, &one.submit()).unwrap();
        let written = one.now().clone();
        two.join(&written);
        shadow.access(0, 8, false, &two.submit()).unwrap();
        assert!(shadow.access(2, 2, true, &one.submit()).is_err(), "two still reads");
        let shadow = Shadow::default();
        shadow.access(0, 8, false, &two.submit()).unwrap();
        one.join(&two.now().clone());
        shadow.access(2, 2, true, &one.submit()).unwrap();
    }

    #[test]
    fn the_host_knows_what_it_waited_for_and_queues_know_what_the_host_did() {
        let (shadow, mut queue) = (Shadow::default(), QueueClock::new());
        shadow.access(0, 8, true, &host_moment()).unwrap();
        shadow.access(0, 8, true, &queue.submit()).unwrap();
        assert!(shadow.access(0, 8, false, &host_moment()).is_err());
        let shadow = Shadow::default();
        shadow.access(0, 8, true, &queue.submit()).unwrap();
        host_joins(queue.now());
        shadow.access(0, 8, false, &host_moment()).unwrap();
    }
}
