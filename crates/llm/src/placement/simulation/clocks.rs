//! Simulated time of ranks: each executes its steps by a clock of its own, and they meet in collectives and messages over a link.
//!
//! Nothing is computed and no memory is needed, so that ranks and models may be of any size. A step begins when the previous one of its
//! rank has ended and what it waits for has arrived; so the order in which ranks are simulated does not matter.

use std::collections::{HashMap, VecDeque};
use std::ops::{Add, Range, Sub};

use serde::Serialize;

use crate::ranks::Link;
use crate::{Error, Result};

/// Seconds, by what takes them. Those of a clock are a critical path: of steps that end at once with others, the latest counts.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct TimeParts {
    /// Reading weights, KV cache and activations.
    pub memory: f64,
    /// Arithmetic that takes longer than the reads beside it.
    pub arithmetic: f64,
    /// Launches, barriers, and devices of a rank that wait for each other.
    pub launches: f64,
    /// Latency of the link.
    pub latency: f64,
    /// Bytes over the link.
    pub bandwidth: f64,
}

impl TimeParts {
    /// The sum of all parts.
    pub fn seconds(&self) -> f64 {
        self.memory + self.arithmetic + self.launches + self.latency + self.bandwidth
    }

    /// The longest part in words.
    pub(super) fn longest(&self) -> &'static str {
        let parts = [
            (self.memory, "memory reads"),
            (self.arithmetic, "arithmetic"),
            (self.launches, "launches"),
            (self.latency, "link latency"),
            (self.bandwidth, "link bandwidth"),
        ];
        parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or("", |(_, name)| name)
    }

    pub(super) fn scaled(self, factor: f64) -> TimeParts {
        TimeParts {
            memory: factor * self.memory,
            arithmetic: factor * self.arithmetic,
            launches: factor * self.launches,
            latency: factor * self.latency,
            bandwidth: factor * self.bandwidth,
        }
    }

    fn later(self, other: TimeParts) -> TimeParts {
        if other.seconds() > self.seconds() { other } else { self }
    }

    /// Seconds of which some are latency.
    fn on_link(all: f64, latency: f64) -> TimeParts {
        TimeParts { latency, bandwidth: (all - latency).max(0.0), ..TimeParts::default() }
    }
}

impl Add for TimeParts {
    type Output = TimeParts;

    fn add(self, other: TimeParts) -> TimeParts {
        TimeParts {
            memory: self.memory + other.memory,
            arithmetic: self.arithmetic + other.arithmetic,
            launches: self.launches + other.launches,
            latency: self.latency + other.latency,
            bandwidth: self.bandwidth + other.bandwidth,
        }
    }
}

impl Sub for TimeParts {
    type Output = TimeParts;

    fn sub(self, other: TimeParts) -> TimeParts {
        self + other.scaled(-1.0)
    }
}

/// A collective of simulated ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meeting {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
}

impl Meeting {
    fn seconds(self, link: &Link, ranks: usize, bytes: f64) -> f64 {
        match self {
            Meeting::AllReduce => link.all_reduce(ranks, bytes),
            Meeting::AllGather | Meeting::ReduceScatter => link.all_gather(ranks, bytes),
            Meeting::Broadcast => link.broadcast(ranks, bytes),
        }
    }
}

/// What a rank does next.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum RankStep {
    /// Computes alone.
    Compute(TimeParts),
    /// Meets other ranks; all continue when the link has exchanged so many bytes. The rank sends some of them.
    Meet { members: Range<usize>, meeting: Meeting, bytes: f64, sent: u64 },
    /// Sends a message, and goes on: the link sends it when it has sent those before.
    Send { to: usize, tag: u16, bytes: f64 },
    /// Waits for the next message with a tag.
    Receive { from: usize, tag: u16 },
    /// Notes the time.
    Mark,
}

/// A rank in the simulation.
#[derive(Clone, Default, Debug)]
pub(super) struct RankClock {
    /// When it has ended its steps so far.
    pub(super) now: TimeParts,
    /// Seconds in which it computed.
    pub(super) busy: f64,
    /// Bytes that it sent.
    pub(super) sent: u64,
    /// The times that it noted.
    pub(super) marks: Vec<TimeParts>,
    /// The next step.
    next: usize,
    /// Whether it waits for others at a meeting.
    gathered: bool,
    /// When its link has sent all messages.
    link_free: TimeParts,
}

/// Ranks that have come to a meeting.
#[derive(Default)]
struct Gathering {
    arrived: usize,
    latest: TimeParts,
}

/// The sender, the receiver and the tag of messages.
type MessageKey = (usize, usize, u16);

/// Simulated ranks.
struct Simulation<'a> {
    programs: &'a [Vec<RankStep>],
    link: &'a Link,
    clocks: Vec<RankClock>,
    /// The messages that have been sent and not received, with the times at which they arrive.
    messages: HashMap<MessageKey, VecDeque<TimeParts>>,
    /// The next gathering of each range of ranks. All of them meet before the next one begins.
    gatherings: HashMap<Range<usize>, Gathering>,
    /// Ranks that are not known to wait.
    runnable: VecDeque<usize>,
}

/// Executes the steps of each rank.
///
/// # Errors
/// A rank waits for what never comes.
pub(super) fn run(programs: &[Vec<RankStep>], link: &Link) -> Result<Vec<RankClock>> {
    let mut simulation = Simulation {
        programs,
        link,
        clocks: vec![RankClock::default(); programs.len()],
        messages: HashMap::new(),
        gatherings: HashMap::new(),
        runnable: (0..programs.len()).collect(),
    };
    while let Some(rank) = simulation.runnable.pop_front() {
        while simulation.advance(rank) {}
    }
    let waiting = |(rank, (clock, steps)): (usize, (&RankClock, &Vec<RankStep>))| {
        let step = steps.get(clock.next)?;
        Some(format!("simulated rank {rank} waits for ever: {step:?}"))
    };
    match simulation.clocks.iter().zip(programs).enumerate().find_map(waiting) {
        Some(reason) => Err(Error::Ranks { reason }),
        None => Ok(simulation.clocks),
    }
}

impl Simulation<'_> {
    /// Executes the next step of a rank; `false` if it waits or has none.
    fn advance(&mut self, rank: usize) -> bool {
        let programs = self.programs;
        // Messages arrive at a rank that waits for others, too.
        let Some(clock) = self.clocks.get_mut(rank).filter(|clock| !clock.gathered) else { return false };
        let Some(step) = programs.get(rank).and_then(|steps| steps.get(clock.next)) else { return false };
        match step {
            RankStep::Compute(parts) => {
                clock.now = clock.now + *parts;
                clock.busy += parts.seconds();
            }
            RankStep::Mark => clock.marks.push(clock.now),
            RankStep::Send { to, tag, bytes } => {
                let begins = clock.now.later(clock.link_free);
                let latency = self.link.send(0.0);
                clock.link_free = begins + TimeParts::on_link(self.link.send(*bytes) - latency, 0.0);
                clock.sent += *bytes as u64;
                let arrives = begins + TimeParts::on_link(self.link.send(*bytes), latency);
                self.messages.entry((rank, *to, *tag)).or_default().push_back(arrives);
                self.runnable.push_back(*to);
            }
            RankStep::Receive { from, tag } => {
                let arrived = self.messages.get_mut(&(*from, rank, *tag)).and_then(VecDeque::pop_front);
                let Some(arrived) = arrived else { return false };
                clock.now = clock.now.later(arrived);
            }
            RankStep::Meet { members, meeting, bytes, sent } => {
                let (meeting, bytes, count) = (*meeting, *bytes, members.len());
                let gathering = self.gatherings.entry(members.clone()).or_default();
                gathering.arrived += 1;
                gathering.latest = gathering.latest.later(clock.now);
                clock.sent += *sent;
                if gathering.arrived < count {
                    clock.gathered = true;
                    return false;
                }
                let latency = meeting.seconds(self.link, count, 0.0);
                let all = meeting.seconds(self.link, count, bytes);
                let ends = gathering.latest + TimeParts::on_link(all, latency);
                self.gatherings.remove(members);
                for member in self.clocks.get_mut(members.clone()).into_iter().flatten() {
                    member.now = ends;
                    member.next += 1;
                    member.gathered = false;
                }
                self.runnable.extend(members.clone().filter(|member| *member != rank));
                return true;
            }
        }
        clock.next += 1;
        true
    }
}
