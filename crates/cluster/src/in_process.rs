//! Ranks that are threads of one process.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::communicator::{Communicator, Limits, Wait};
use crate::error::ClusterError;
use crate::operation::{Operation, Reduction};
use crate::overlap::during;
use crate::reduce::combine;
use crate::watch::lock;

/// The communicators of `size` ranks in this process, one for each thread. Sums are in the order of ranks.
pub fn in_process(size: usize, limits: Limits) -> Vec<InProcess> {
    let all = Group::new(None, (0..size).collect());
    let state = Mutex::new(State { failure: None, groups: vec![all] });
    let hub = Arc::new(Hub { limits, state, changed: Condvar::new() });
    (0..size)
        .map(|rank| InProcess { rank, world_rank: rank, size, group: 0, hub: Arc::clone(&hub) })
        .collect()
}

/// A rank of [`in_process`]. When it is dropped, operations of others that still need it fail.
pub struct InProcess {
    rank: usize,
    /// The number among all ranks, by which errors name it.
    world_rank: usize,
    size: usize,
    /// Which of [`State::groups`] it belongs to: the first is that of all.
    group: usize,
    hub: Arc<Hub>,
}

struct Hub {
    limits: Limits,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    failure: Option<ClusterError>,
    groups: Vec<Group>,
}

/// Ranks that have collectives and messages of their own.
struct Group {
    /// Which division made it: the group that was divided, how many divisions it had before, and the number that its ranks gave.
    made_by: Option<(usize, u64, u32)>,
    /// The number of each rank among all.
    members: Vec<usize>,
    /// How often each rank has divided it.
    splits: Vec<u64>,
    /// The number of the first round of `rounds`.
    first: u64,
    rounds: VecDeque<Round>,
    /// The number of the next round of each rank.
    next: Vec<u64>,
    gone: Vec<bool>,
    messages: Vec<Message>,
}

impl Group {
    fn new(made_by: Option<(usize, u64, u32)>, members: Vec<usize>) -> Group {
        let size = members.len();
        Group {
            made_by,
            members,
            splits: vec![0; size],
            first: 0,
            rounds: VecDeque::new(),
            next: vec![0; size],
            gone: vec![false; size],
            messages: Vec::new(),
        }
    }

    /// That a rank has ended.
    fn gone(&self, rank: usize) -> Option<ClusterError> {
        let rank = *self.members.get(rank).filter(|_| self.gone.get(rank) == Some(&true))?;
        let (host, message) = (THIS_MACHINE.to_owned(), "it has ended".to_owned());
        Some(ClusterError::RankFailed { rank, host, message })
    }
}

impl State {
    fn group(&mut self, index: usize) -> Result<&mut Group, ClusterError> {
        match &self.failure {
            Some(failure) => Err(failure.clone()),
            None => self.groups.get_mut(index).ok_or(ClusterError::Ended),
        }
    }
}

const THIS_MACHINE: &str = "this machine";

/// A collective: what each rank brings, then the results.
struct Round {
    brought: Vec<Option<Contribution>>,
    taken: usize,
}

#[derive(PartialEq)]
struct Contribution {
    kind: Kind,
    values: Values,
}

/// What must be the same on all ranks.
#[derive(Clone, PartialEq, Debug)]
enum Kind {
    AllReduce { len: usize, reduction: Reduction },
    AllGather { lengths: Vec<usize> },
    ReduceScatter { lengths: Vec<usize> },
    Broadcast { len: usize, root: usize },
}

#[derive(PartialEq)]
enum Values {
    Floats(Vec<f32>),
    Bytes(Vec<u8>),
}

struct Message {
    from: usize,
    to: usize,
    tag: u16,
    bytes: Vec<u8>,
}

impl Communicator for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn overlapped(&self, operation: Operation<'_>, work: &mut dyn FnMut()) -> Result<(), ClusterError> {
        let wait = Wait { what: operation.name(), limit: self.hub.limits.operation };
        self.execute(operation, work, wait)
    }

    fn run_within(&self, operation: Operation<'_>, wait: Wait) -> Result<(), ClusterError> {
        self.execute(operation, &mut || {}, wait)
    }

    fn fail(&self, message: &str) {
        let error = ClusterError::RankFailed {
            rank: self.world_rank,
            host: THIS_MACHINE.to_owned(),
            message: message.to_owned(),
        };
        lock(&self.hub.state).failure.get_or_insert(error);
        self.hub.changed.notify_all();
    }

    fn failure(&self) -> Option<ClusterError> {
        lock(&self.hub.state).failure.clone()
    }

    fn split(&self, group: u32) -> Result<Arc<dyn Communicator>, ClusterError> {
        let mut numbers = vec![0; 4 * self.size];
        let lengths = vec![4; self.size];
        self.run(Operation::AllGather {
            part: &group.to_le_bytes(),
            lengths: &lengths,
            whole: &mut numbers,
        })?;
        let (numbers, _) = numbers.as_chunks::<4>();
        let ours = || (0..self.size).zip(numbers).filter(|(_, number)| **number == group.to_le_bytes());
        let (rank, size) = (ours().take_while(|(rank, _)| *rank < self.rank).count(), ours().count());
        let mut state = lock(&self.hub.state);
        let parent = state.group(self.group)?;
        let Some(splits) = parent.splits.get_mut(self.rank) else { return Err(ClusterError::Ended) };
        *splits += 1;
        let made_by = Some((self.group, *splits, group));
        let members = ours().filter_map(|(rank, _)| parent.members.get(rank).copied()).collect();
        let found = state.groups.iter().position(|group| group.made_by == made_by);
        let index = found.unwrap_or_else(|| {
            state.groups.push(Group::new(made_by, members));
            state.groups.len() - 1
        });
        let hub = Arc::clone(&self.hub);
        Ok(Arc::new(InProcess { rank, world_rank: self.world_rank, size, group: index, hub }))
    }

    fn limits(&self) -> Limits {
        self.hub.limits
    }

    fn host(&self, _rank: usize) -> &str {
        THIS_MACHINE
    }
}

/// How long an operation has been waited for, and may be.
#[derive(Clone, Copy)]
struct Patience {
    started: Instant,
    wait: Wait,
}

impl InProcess {
    fn execute(
        &self,
        operation: Operation<'_>,
        work: &mut dyn FnMut(),
        wait: Wait,
    ) -> Result<(), ClusterError> {
        operation.check(self.rank, self.size)?;
        let patience = Patience { started: Instant::now(), wait };
        let number = self.start(&operation)?;
        during(work, || match operation {
            Operation::Send { .. } => Ok(()),
            Operation::Receive { bytes, from, tag } => self.receive(bytes, from, tag, patience),
            collective => {
                let mut state = lock(&self.hub.state);
                while !self.complete(&mut state, number)? {
                    state = self.wait(state, patience, (None, number))?;
                }
                self.take(&mut state, number, collective)
            }
        })
    }

    /// Brings this rank's values to the next round, or sends a message. Returns the number of the round.
    fn start(&self, operation: &Operation<'_>) -> Result<u64, ClusterError> {
        let mut state = lock(&self.hub.state);
        let group = state.group(self.group)?;
        let contribution = match operation {
            Operation::AllReduce { values, reduction } => Contribution {
                kind: Kind::AllReduce { len: values.len(), reduction: *reduction },
                values: Values::Floats(values.to_vec()),
            },
            Operation::AllGather { part, lengths, .. } => Contribution {
                kind: Kind::AllGather { lengths: lengths.to_vec() },
                values: Values::Bytes(part.to_vec()),
            },
            Operation::ReduceScatter { values, lengths, .. } => Contribution {
                kind: Kind::ReduceScatter { lengths: lengths.to_vec() },
                values: Values::Floats(values.to_vec()),
            },
            Operation::Broadcast { bytes, root } => Contribution {
                kind: Kind::Broadcast { len: bytes.len(), root: *root },
                values: Values::Bytes(if *root == self.rank { bytes.to_vec() } else { Vec::new() }),
            },
            Operation::Send { bytes, to, tag } => {
                let message = Message { from: self.rank, to: *to, tag: *tag, bytes: bytes.to_vec() };
                group.messages.push(message);
                self.hub.changed.notify_all();
                return Ok(0);
            }
            Operation::Receive { .. } => return Ok(0),
        };
        let Group { first, rounds, next, .. } = group;
        let Some(next) = next.get_mut(self.rank) else { return Err(ClusterError::Ended) };
        let number = *next;
        *next += 1;
        let index = (number - *first) as usize;
        if index == rounds.len() {
            rounds.push_back(Round { brought: (0..self.size).map(|_| None).collect(), taken: 0 });
        }
        if let Some(place) = rounds.get_mut(index).and_then(|round| round.brought.get_mut(self.rank)) {
            *place = Some(contribution);
        }
        self.hub.changed.notify_all();
        Ok(number)
    }

    /// Whether every rank has brought its values to a round.
    fn complete(&self, state: &mut State, number: u64) -> Result<bool, ClusterError> {
        let group = state.group(self.group)?;
        let index = (number - group.first) as usize;
        let Some(round) = group.rounds.get(index) else { return Err(ClusterError::Ended) };
        let missing = |(rank, brought): (usize, &Option<Contribution>)| match brought {
            Some(_) => None,
            None => group.gone(rank),
        };
        match round.brought.iter().enumerate().find_map(missing) {
            Some(error) => Err(state.failure.insert(error).clone()),
            None => Ok(round.brought.iter().all(Option::is_some)),
        }
    }

    /// Reads this rank's result of a complete round.
    fn take(&self, state: &mut State, number: u64, operation: Operation<'_>) -> Result<(), ClusterError> {
        let group = state.group(self.group)?;
        let index = (number - group.first) as usize;
        let Some(round) = group.rounds.get_mut(index) else { return Err(ClusterError::Ended) };
        let brought: Vec<&Contribution> = round.brought.iter().flatten().collect();
        let own = brought.get(self.rank).map(|own| &own.kind);
        if let Some((rank, other)) = brought.iter().enumerate().find(|(_, other)| Some(&other.kind) != own) {
            let text = format!("rank {} calls {own:?}, rank {rank} {:?}", self.rank, other.kind);
            return Err(state.failure.insert(ClusterError::Disagreement(text)).clone());
        }
        let floats = |values: &Values, into: &mut [f32], at: usize, reduction: Option<Reduction>| {
            if let Values::Floats(values) = values
                && let Some(values) = values.get(at..at + into.len())
            {
                match reduction {
                    Some(reduction) => combine(reduction, into, values),
                    None => into.copy_from_slice(values),
                }
            }
        };
        match operation {
            Operation::AllReduce { values, reduction } => {
                for (rank, from) in brought.iter().enumerate() {
                    floats(&from.values, values, 0, (rank > 0).then_some(reduction));
                }
            }
            Operation::ReduceScatter { lengths, part, .. } => {
                let start = lengths.iter().take(self.rank).sum();
                for (rank, from) in brought.iter().enumerate() {
                    floats(&from.values, part, start, (rank > 0).then_some(Reduction::Sum));
                }
            }
            Operation::AllGather { whole, .. } => {
                let mut rest = whole;
                for from in &brought {
                    if let Values::Bytes(bytes) = &from.values
                        && let Some((part, after)) =
                            std::mem::take(&mut rest).split_at_mut_checked(bytes.len())
                    {
                        part.copy_from_slice(bytes);
                        rest = after;
                    }
                }
            }
            Operation::Broadcast { bytes, root } => {
                if let Some(Values::Bytes(from)) = brought.get(root).map(|from| &from.values) {
                    bytes.copy_from_slice(from);
                }
            }
            Operation::Send { .. } | Operation::Receive { .. } => {}
        }
        round.taken += 1;
        while group.rounds.front().is_some_and(|round| round.taken == self.size) {
            group.rounds.pop_front();
            group.first += 1;
        }
        Ok(())
    }

    fn receive(
        &self,
        into: &mut [u8],
        from: usize,
        tag: u16,
        patience: Patience,
    ) -> Result<(), ClusterError> {
        let mut state = lock(&self.hub.state);
        loop {
            let found = |message: &Message| (message.from, message.to, message.tag) == (from, self.rank, tag);
            let group = state.groups.get_mut(self.group).ok_or(ClusterError::Ended)?;
            if let Some(index) = group.messages.iter().position(found) {
                let message = group.messages.remove(index);
                if message.bytes.len() != into.len() {
                    let text = format!(
                        "rank {from} sends {} bytes, rank {} receives {}",
                        message.bytes.len(),
                        self.rank,
                        into.len()
                    );
                    return Err(state.failure.insert(ClusterError::Disagreement(text)).clone());
                }
                into.copy_from_slice(&message.bytes);
                return Ok(());
            }
            if let Some(error) = state.group(self.group)?.gone(from) {
                return Err(state.failure.insert(error).clone());
            }
            state = self.wait(state, patience, (Some(from), 0))?;
        }
    }

    /// Waits for a change, until the limit: of a round, or of a message from a rank.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        Patience { started, wait: Wait { what, limit } }: Patience,
        (from, number): (Option<usize>, u64),
    ) -> Result<MutexGuard<'a, State>, ClusterError> {
        let limit = limit.unwrap_or(Duration::MAX);
        let left = limit.saturating_sub(started.elapsed());
        if left.is_zero() {
            let group = state.group(self.group)?;
            let index = number.checked_sub(group.first).map(|index| index as usize);
            let round = index.and_then(|index| group.rounds.get(index));
            let missing: Vec<usize> = round
                .map(|round| round.brought.iter().enumerate().filter(|(_, brought)| brought.is_none()))
                .into_iter()
                .flatten()
                .map(|(rank, _)| rank)
                .collect();
            let missing = from.map_or(missing, |from| vec![from]);
            let of_all = missing.iter().filter_map(|rank| group.members.get(*rank).copied());
            let missing = ClusterError::absent(&of_all.collect::<Vec<usize>>());
            let error = ClusterError::Deadline { operation: what, seconds: limit.as_secs(), missing };
            let error = state.failure.insert(error).clone();
            self.hub.changed.notify_all();
            return Err(error);
        }
        let wait = left.min(Duration::from_secs(3600));
        Ok(self.hub.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0)
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let mut state = lock(&self.hub.state);
        if let Some(gone) = state.groups.get_mut(self.group).and_then(|group| group.gone.get_mut(self.rank)) {
            *gone = true;
        }
        drop(state);
        self.hub.changed.notify_all();
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcess(rank {} of {})", self.rank, self.size)
    }
}
