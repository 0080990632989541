//! The communication thread: starts and polls operations, sends and watches heartbeats.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::abi::Handle;
use super::beats::Beats;
use super::request::{Done, RawOperation};
use super::setup::{Facts, Started, constant};
use crate::communicator::{Limits, Wait};
use crate::error::ClusterError;
use crate::operation::Reduction;
use crate::shared_memory::{Outbox, Segment};
use crate::watch::{Failure, Watch, lock};

/// How often it is looked whether messages have been received that nobody waits for.
const BETWEEN_POLLS: Duration = Duration::from_micros(50);

/// What the communication thread is told to do. Each command but `Deliver` is answered.
pub(super) enum Command {
    Run(Asked, Arc<Done>),
    /// Messages that found no room in shared memory.
    Deliver(Mail),
    Split(Box<Division>, Arc<Done>),
    Fail(String, Arc<Done>),
    Finish(Arc<Done>),
    Abort(i32, Arc<Done>),
}

/// An operation of one of the communicators, and how long it may take.
pub(super) struct Asked {
    pub(super) operation: RawOperation,
    pub(super) communicator: usize,
    pub(super) wait: Wait,
}

/// The messages of a communicator that wait for room in shared memory.
pub(super) struct Mail {
    pub(super) segment: Arc<Segment>,
    pub(super) outbox: Arc<Mutex<Outbox>>,
}

/// A group that is to be made of a communicator's ranks.
pub(super) struct Division {
    pub(super) parent: Facts,
    pub(super) group: i32,
    pub(super) made: Arc<Mutex<Option<Facts>>>,
}

/// The connection between a communicator and its thread.
#[derive(Default)]
pub(super) struct Link {
    pub(super) failure: Failure,
    queue: Mutex<Queue>,
    wake: Condvar,
    /// The communication thread did not come back from a call of MPI that waits for other ranks.
    stuck: AtomicBool,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    ended: bool,
}

impl Link {
    pub(super) fn push(&self, command: Command) {
        let mut queue = lock(&self.queue);
        if queue.ended {
            drop(queue);
            command.refuse(&self.failure);
            return;
        }
        queue.commands.push_back(command);
        drop(queue);
        self.wake.notify_one();
    }

    /// The result of a command that lets the communication thread wait in MPI; an error after a limit, which then counts as the
    /// failure of all that follows.
    pub(super) fn wait(&self, done: &Done, call: &'static str, limit: Duration) -> Result<(), ClusterError> {
        done.wait_for(limit).unwrap_or_else(|| {
            self.stuck.store(true, Ordering::Relaxed);
            Err(self.failure.set(ClusterError::Deadline {
                operation: call,
                seconds: limit.as_secs(),
                missing: "a rank is stopped, or gone".to_owned(),
            }))
        })
    }

    /// Whether the communication thread no longer answers.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }

    /// The next command; waits for one until a time.
    fn next(&self, until: Instant) -> Option<Command> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(command) = queue.commands.pop_front() {
                return Some(command);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            queue = self.wake.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Answers everything that is left, and everything that comes.
    fn end(&self) {
        let commands = {
            let mut queue = lock(&self.queue);
            queue.ended = true;
            std::mem::take(&mut queue.commands)
        };
        for command in commands {
            command.refuse(&self.failure);
        }
    }
}

impl Command {
    /// Answers that the communication has ended.
    fn refuse(&self, failure: &Failure) {
        let done = match self {
            Command::Run(_, done)
            | Command::Split(_, done)
            | Command::Fail(_, done)
            | Command::Finish(done)
            | Command::Abort(_, done) => done,
            // Whoever waits for these messages learns of the end itself.
            Command::Deliver(_) => return,
        };
        done.set(Err(failure.get().unwrap_or(ClusterError::Ended)));
    }
}

/// The state of the communication thread.
pub(super) struct Progress<H: Handle> {
    started: Started<H>,
    hosts: Vec<String>,
    rank: usize,
    link: Arc<Link>,
    beats: Beats<H>,
    watch: Watch,
    next_beat: Instant,
    /// The operations that MPI works on: with their request and start.
    active: Vec<Active<H>>,
    /// How many collectives of all ranks this one has begun.
    collectives: u64,
    /// Messages that wait for room in shared memory.
    mail: Vec<Mail>,
    /// An operation was given up while MPI worked on it. MPI must not be called again, except to end the process: any call
    /// could write to memory that is no longer borrowed.
    abandoned: bool,
}

struct Active<H> {
    /// Keeps the lengths that MPI reads.
    operation: RawOperation,
    request: H,
    since: Instant,
    wait: Wait,
    /// Which of the communicators it belongs to: the first is that of all ranks.
    communicator: usize,
    /// How many collectives of all ranks this one has begun with it.
    collectives: u64,
    done: Arc<Done>,
}

impl<H: Handle> Progress<H> {
    pub(super) fn new(
        started: Started<H>,
        facts: &Facts,
        link: Arc<Link>,
        limits: Limits,
    ) -> Result<Progress<H>, ClusterError> {
        let size = facts.hosts.len();
        let beats = match &facts.segment {
            Some(segment) => Beats::Shared(Arc::clone(segment)),
            None => Beats::messages(&started.api, started.beats, facts.rank, size)?,
        };
        let now = Instant::now();
        Ok(Progress {
            started,
            hosts: facts.hosts.clone(),
            rank: facts.rank,
            link,
            beats,
            watch: Watch::new(size, limits.silence, now),
            next_beat: now,
            active: Vec::new(),
            collectives: 0,
            mail: Vec::new(),
            abandoned: false,
        })
    }

    /// Serves commands until the end.
    pub(super) fn serve(&mut self) {
        // If this thread panics, nobody may wait for it.
        let _end = EndOnDrop(Arc::clone(&self.link));
        let mut polls = 0u32;
        loop {
            let is_awaited = self.active.iter().any(|active| !active.operation.is_send());
            let until = match self.active.is_empty() && self.mail.is_empty() {
                _ if is_awaited => Instant::now(),
                true => self.next_beat,
                // Receivers compute: polling would take time from them.
                false => Instant::now() + BETWEEN_POLLS,
            };
            match self.link.next(until) {
                Some(Command::Run(asked, done)) => self.begin(asked, done),
                Some(Command::Deliver(mail)) => self.add_mail(mail),
                Some(Command::Split(division, done)) => done.set(self.split(&division)),
                Some(Command::Fail(message, done)) => {
                    self.report(&message);
                    done.set(Ok(()));
                }
                Some(Command::Finish(done)) => {
                    let result = self.finish();
                    let ended = result.is_ok();
                    done.set(result);
                    if ended {
                        return;
                    }
                }
                Some(Command::Abort(code, done)) => {
                    // SAFETY: MPI has not been finalized, or this thread would have ended.
                    unsafe { (self.started.api.functions.abort)(self.started.api.constants.world, code) };
                    done.set(Ok(()));
                }
                None => {}
            }
            self.poll();
            self.mail.retain(|mail| !mail.segment.deliver(&mut lock(&mail.outbox)));
            if Instant::now() >= self.next_beat {
                self.look_around();
            }
            polls = polls.wrapping_add(1);
            if is_awaited && polls.is_multiple_of(64) {
                std::thread::yield_now();
            }
        }
    }

    /// Messages of a communicator wait for room, if none of it did already.
    fn add_mail(&mut self, mail: Mail) {
        if !self.mail.iter().any(|other| Arc::ptr_eq(&other.outbox, &mail.outbox)) {
            self.mail.push(mail);
        }
    }

    /// Starts an operation.
    fn begin(&mut self, asked: Asked, done: Arc<Done>) {
        let Asked { operation, communicator: index, wait } = asked;
        if let Some(failure) = self.link.failure.get() {
            return done.set(Err(failure));
        }
        let Some(communicator) = self.started.operations.get(index).copied() else {
            return done.set(Err(ClusterError::Ended));
        };
        let mut request = communicator;
        match self.call(&operation, communicator, &mut request) {
            Ok(()) => {
                self.collectives += u64::from(index == 0 && operation.is_collective());
                self.active.push(Active {
                    operation,
                    request,
                    since: Instant::now(),
                    wait,
                    communicator: index,
                    collectives: self.collectives,
                    done,
                });
            }
            Err(error) => done.set(Err(self.link.failure.set(error))),
        }
    }

    /// Makes a group, which waits for all ranks of the communicator: they have just met.
    fn split(&mut self, division: &Division) -> Result<(), ClusterError> {
        self.link.failure.check()?;
        let Division { parent, group, made } = division;
        let facts = self.started.split(parent, *group);
        let facts = facts.map_err(|error| self.link.failure.set(error))?;
        *lock(made) = Some(facts);
        Ok(())
    }

    fn call(&self, operation: &RawOperation, comm: H, request: &mut H) -> Result<(), ClusterError> {
        let api = &self.started.api;
        let (f, c) = (&api.functions, &api.constants);
        let reduction = |reduction: Reduction| match reduction {
            Reduction::Sum => c.sum,
            Reduction::Max => c.max,
        };
        // SAFETY: the memory is borrowed until the operation is done, and the lists of lengths are kept with the request.
        // Lengths and ranks have been checked.
        unsafe {
            match operation {
                RawOperation::AllReduce { values, count, reduction: of } => {
                    let in_place = constant::<c_void>(c.in_place).cast_const();
                    let code = (f.iallreduce)(
                        in_place,
                        values.cast(),
                        *count,
                        c.float,
                        reduction(*of),
                        comm,
                        request,
                    );
                    api.check("MPI_Iallreduce", code)
                }
                RawOperation::AllGather { part, count, lengths, starts, whole } => {
                    let (to, starts, lengths) = (whole.cast(), starts.as_ptr(), lengths.as_ptr());
                    let code = (f.iallgatherv)(
                        part.cast(),
                        *count,
                        c.byte,
                        to,
                        lengths,
                        starts,
                        c.byte,
                        comm,
                        request,
                    );
                    api.check("MPI_Iallgatherv", code)
                }
                RawOperation::ReduceScatter { values, lengths, part } => {
                    let (from, to) = (values.cast(), part.cast());
                    let code = (f.ireduce_scatter)(from, to, lengths.as_ptr(), c.float, c.sum, comm, request);
                    api.check("MPI_Ireduce_scatter", code)
                }
                RawOperation::Broadcast { bytes, count, root } => {
                    api.check("MPI_Ibcast", (f.ibcast)(bytes.cast(), *count, c.byte, *root, comm, request))
                }
                RawOperation::Send { bytes, count, to, tag } => {
                    let bytes = bytes.as_ptr().cast();
                    api.check("MPI_Isend", (f.isend)(bytes, *count, c.byte, *to, *tag, comm, request))
                }
                RawOperation::Receive { bytes, count, from, tag } => api
                    .check("MPI_Irecv", (f.irecv)(bytes.cast(), *count, c.byte, *from, *tag, comm, request)),
            }
        }
    }

    /// Completes the operations that MPI has completed, or gives them up.
    fn poll(&mut self) {
        if self.abandoned || self.active.is_empty() {
            return;
        }
        let mut failed = self.link.failure.get();
        let api = &self.started.api;
        let mut left = Vec::new();
        for mut active in std::mem::take(&mut self.active) {
            let mut complete = 0;
            // SAFETY: an active request whose memory is borrowed.
            let code = unsafe {
                (api.functions.test)(
                    &mut active.request,
                    &mut complete,
                    constant(api.constants.status_ignore),
                )
            };
            let late = active.wait.limit.filter(|limit| active.since.elapsed() >= *limit);
            match api.check("MPI_Test", code) {
                Ok(()) if complete != 0 => active.done.set(Ok(())),
                Ok(()) => {
                    if let Some(limit) = late {
                        failed.get_or_insert(ClusterError::Deadline {
                            operation: active.wait.what,
                            seconds: limit.as_secs(),
                            missing: ClusterError::absent(&self.absent(&active)),
                        });
                    }
                    left.push(active);
                }
                Err(error) => {
                    failed.get_or_insert(error);
                    left.push(active);
                }
            }
        }
        self.active = left;
        if let Some(failed) = failed {
            self.give_up(failed);
        }
    }

    /// The ranks that an operation waits for, as far as their heartbeats say.
    fn absent(&self, active: &Active<H>) -> Vec<usize> {
        match &active.operation {
            // Groups number their ranks themselves.
            _ if active.communicator != 0 => Vec::new(),
            RawOperation::Receive { from, .. } => usize::try_from(*from).into_iter().collect(),
            _ => self.beats.behind(active.collectives),
        }
    }

    /// Ends all operations with an error.
    fn give_up(&mut self, error: ClusterError) {
        let error = self.link.failure.set(error);
        self.abandoned |= !self.active.is_empty();
        for active in self.active.drain(..) {
            active.done.set(Err(error.clone()));
            // MPI may still read a message's copy.
            std::mem::forget(active.operation);
        }
    }

    /// Sends a heartbeat, and looks for those of others.
    fn look_around(&mut self) {
        let now = Instant::now();
        self.next_beat = now + self.watch.interval();
        if self.abandoned {
            return;
        }
        if let Err(error) = self.heartbeat(now) {
            self.give_up(error);
        }
    }

    fn heartbeat(&mut self, now: Instant) -> Result<(), ClusterError> {
        let api = &self.started.api;
        let own = match self.link.failure.get() {
            Some(ClusterError::RankFailed { rank, message, .. }) if rank == self.rank => Some(message),
            // Others notice for themselves.
            Some(_) => return Ok(()),
            None => None,
        };
        self.beats.send(api, own.as_deref(), self.collectives)?;
        let host = |rank: usize| self.hosts.get(rank).cloned().unwrap_or_default();
        if let Some((rank, message)) = self.beats.receive(api)? {
            return Err(ClusterError::RankFailed { rank, host: host(rank), message });
        }
        let numbers = self.beats.numbers(self.hosts.len());
        if let Some((rank, silent)) = self.watch.look(numbers.into_iter(), self.rank, now) {
            return Err(ClusterError::RankLost { rank, host: host(rank), seconds: silent.as_secs() });
        }
        Ok(())
    }

    /// Tells the others of an error of this rank.
    fn report(&mut self, message: &str) {
        if self.abandoned {
            return;
        }
        if self.beats.send(&self.started.api, Some(message), self.collectives).is_ok() {
            self.beats.drain(&self.started.api, Instant::now() + Duration::from_secs(1));
        }
    }

    /// Ends MPI, together with all others.
    fn finish(&mut self) -> Result<(), ClusterError> {
        self.link.failure.check()?;
        // All ranks have met, so that every message has been received, or never will be.
        let until = Instant::now() + Duration::from_secs(1);
        while !self.active.is_empty() && Instant::now() < until {
            std::thread::sleep(BETWEEN_POLLS);
            self.poll();
        }
        if !self.active.is_empty() {
            let reason = format!("{} messages were never received", self.active.len());
            return Err(ClusterError::Invalid { operation: "send", reason });
        }
        let Started { api, operations, .. } = &self.started;
        self.beats.drain(api, Instant::now() + Duration::from_secs(1));
        if let Some(all) = operations.first().copied() {
            self.meet(all)?;
        }
        let api = &self.started.api;
        if !self.beats.free(api) {
            return Err(ClusterError::Ended);
        }
        // SAFETY: no operation is active. Whoever asked for this waits only so long for the others in it.
        api.check("MPI_Finalize", unsafe { (api.functions.finalize)() })
    }

    /// Waits until all ranks have come here. Heartbeats go on if that takes longer than between two of them.
    fn meet(&mut self, all: H) -> Result<(), ClusterError> {
        let mut request = all;
        let api = &self.started.api;
        // SAFETY: the request is a local variable, which is tested until it is complete, or never again.
        api.check("MPI_Ibarrier", unsafe { (api.functions.ibarrier)(all, &mut request) })?;
        self.next_beat = Instant::now() + self.watch.interval();
        loop {
            let (api, mut complete) = (&self.started.api, 0);
            let ignored = constant(api.constants.status_ignore);
            // SAFETY: an active request of this thread.
            let code = unsafe { (api.functions.test)(&mut request, &mut complete, ignored) };
            api.check("MPI_Test", code)?;
            if complete != 0 {
                return Ok(());
            }
            std::thread::yield_now();
            if Instant::now() >= self.next_beat {
                self.look_around();
                self.link.failure.check()?;
            }
        }
    }
}

struct EndOnDrop(Arc<Link>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failure.set(ClusterError::Ended);
        }
        self.0.end();
    }
}
