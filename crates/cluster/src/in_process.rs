//! Ranks that are threads of one process.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::communicator::{Communicator, Limits};
use crate::error::ClusterError;
use crate::operation::{Operation, Reduction};
use crate::reduce::combine;
use crate::watch::lock;

/// The communicators of `size` ranks in this process, one for each thread. Sums are in the order of ranks.
pub fn in_process(size: usize, limits: Limits) -> Vec<InProcess> {
    let state = State {
        failure: None,
        first: 0,
        rounds: VecDeque::new(),
        next: vec![0; size],
        gone: vec![false; size],
        messages: Vec::new(),
    };
    let hub = Arc::new(Hub { size, limits, state: Mutex::new(state), changed: Condvar::new() });
    (0..size).map(|rank| InProcess { rank, hub: Arc::clone(&hub) }).collect()
}

/// A rank of [`in_process`]. When it is dropped, operations of others that still need it fail.
pub struct InProcess {
    rank: usize,
    hub: Arc<Hub>,
}

struct Hub {
    size: usize,
    limits: Limits,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    failure: Option<ClusterError>,
    /// The number of the first round of `rounds`.
    first: u64,
    rounds: VecDeque<Round>,
    /// The number of the next round of each rank.
    next: Vec<u64>,
    gone: Vec<bool>,
    messages: Vec<Message>,
}

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
        self.hub.size
    }

    fn overlapped(&self, operation: Operation<'_>, work: &mut dyn FnMut()) -> Result<(), ClusterError> {
        operation.check(self.rank, self.hub.size)?;
        let started = Instant::now();
        let name = operation.name();
        let number = self.start(&operation)?;
        work();
        match operation {
            Operation::Send { .. } => Ok(()),
            Operation::Receive { bytes, from, tag } => self.receive(bytes, from, tag, started),
            collective => {
                let mut state = lock(&self.hub.state);
                while !self.complete(&mut state, number)? {
                    state = self.wait(state, started, name, number)?;
                }
                self.take(&mut state, number, collective)
            }
        }
    }

    fn fail(&self, message: &str) {
        let error = ClusterError::RankFailed {
            rank: self.rank,
            host: self.host(self.rank).to_owned(),
            message: message.to_owned(),
        };
        lock(&self.hub.state).failure.get_or_insert(error);
        self.hub.changed.notify_all();
    }

    fn failure(&self) -> Option<ClusterError> {
        lock(&self.hub.state).failure.clone()
    }

    fn host(&self, _rank: usize) -> &str {
        "this machine"
    }
}

impl InProcess {
    /// Brings this rank's values to the next round, or sends a message. Returns the number of the round.
    fn start(&self, operation: &Operation<'_>) -> Result<u64, ClusterError> {
        let mut state = lock(&self.hub.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
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
                state.messages.push(message);
                self.hub.changed.notify_all();
                return Ok(0);
            }
            Operation::Receive { .. } => return Ok(0),
        };
        let State { first, rounds, next, .. } = &mut *state;
        let Some(next) = next.get_mut(self.rank) else { return Err(ClusterError::Ended) };
        let number = *next;
        *next += 1;
        let index = (number - *first) as usize;
        if index == rounds.len() {
            rounds.push_back(Round { brought: (0..self.hub.size).map(|_| None).collect(), taken: 0 });
        }
        if let Some(place) = rounds.get_mut(index).and_then(|round| round.brought.get_mut(self.rank)) {
            *place = Some(contribution);
        }
        self.hub.changed.notify_all();
        Ok(number)
    }

    /// Whether every rank has brought its values to a round.
    fn complete(&self, state: &mut State, number: u64) -> Result<bool, ClusterError> {
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let index = (number - state.first) as usize;
        let Some(round) = state.rounds.get(index) else { return Err(ClusterError::Ended) };
        for (rank, brought) in round.brought.iter().enumerate() {
            if brought.is_none() && state.gone.get(rank) == Some(&true) {
                let error = ClusterError::RankFailed {
                    rank,
                    host: self.host(rank).to_owned(),
                    message: "it has ended".to_owned(),
                };
                return Err(state.failure.insert(error).clone());
            }
        }
        Ok(round.brought.iter().all(Option::is_some))
    }

    /// Reads this rank's result of a complete round.
    fn take(&self, state: &mut State, number: u64, operation: Operation<'_>) -> Result<(), ClusterError> {
        let index = (number - state.first) as usize;
        let Some(round) = state.rounds.get_mut(index) else { return Err(ClusterError::Ended) };
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
        while state.rounds.front().is_some_and(|round| round.taken == self.hub.size) {
            state.rounds.pop_front();
            state.first += 1;
        }
        Ok(())
    }

    fn receive(&self, into: &mut [u8], from: usize, tag: u16, started: Instant) -> Result<(), ClusterError> {
        let mut state = lock(&self.hub.state);
        loop {
            let found = |message: &Message| (message.from, message.to, message.tag) == (from, self.rank, tag);
            if let Some(index) = state.messages.iter().position(found) {
                let message = state.messages.remove(index);
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
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.gone.get(from) == Some(&true) {
                let (host, message) = (self.host(from).to_owned(), "it has ended".to_owned());
                return Err(state
                    .failure
                    .insert(ClusterError::RankFailed { rank: from, host, message })
                    .clone());
            }
            state = self.wait(state, started, "receive", u64::MAX)?;
        }
    }

    /// Waits for a change, until the limit of operations.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        started: Instant,
        operation: &'static str,
        number: u64,
    ) -> Result<MutexGuard<'a, State>, ClusterError> {
        let limit = self.hub.limits.operation.unwrap_or(Duration::MAX);
        let left = limit.saturating_sub(started.elapsed());
        if left.is_zero() {
            let index = number.checked_sub(state.first).map(|index| index as usize);
            let round = index.and_then(|index| state.rounds.get(index));
            let missing: Vec<String> = round
                .map(|round| round.brought.iter().enumerate().filter(|(_, brought)| brought.is_none()))
                .into_iter()
                .flatten()
                .map(|(rank, _)| format!("rank {rank}"))
                .collect();
            let missing = if missing.is_empty() {
                "the other rank did not take part".to_owned()
            } else {
                format!("{} did not take part", missing.join(", "))
            };
            let error = ClusterError::Deadline { operation, seconds: limit.as_secs(), missing };
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
        if let Some(gone) = lock(&self.hub.state).gone.get_mut(self.rank) {
            *gone = true;
        }
        self.hub.changed.notify_all();
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcess(rank {} of {})", self.rank, self.hub.size)
    }
}
