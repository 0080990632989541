//! Ranks that answer requests in simulated time: the scheduler plans each of them, and their plans are executed by clocks, over a link.
//!
//! The clocks of `quadriga-sim`'s devices belong to queues that execute commands in memory. A model of 671 billion weights on 64 ranks has no memory here, so
//! plans are simulated without any.

mod clocks;
mod programs;
mod routing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::str::FromStr;

use quadriga_runtime::Rates;
use serde::Serialize;

pub use self::clocks::TimeParts;
use self::clocks::{Meeting, RankClock, RankStep};
use self::programs::{PlannedRank, RankProgram};
use self::routing::{ExpertCounts, RoutedStep};
use super::estimate::usual_slots;
use super::rank_plan::RankParts;
use super::{Devices, PlacedModel, Placement};
use crate::engine::EngineOptions;
use crate::model::Model;
use crate::models::GraphShape;
use crate::ranks::{Grid, Link, MicroBatches};
use crate::sampling::random::Random;
use crate::{Error, Result};

/// A rank that computes slower than it should.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Straggler {
    /// By which factor.
    pub factor: f64,
    /// Which rank; `None` for another one in each step, at random.
    pub rank: Option<usize>,
}

impl FromStr for Straggler {
    type Err = String;

    /// A factor, and the rank or `random`: `1.2`, `1.2,3`, `2,random`.
    fn from_str(text: &str) -> std::result::Result<Straggler, String> {
        let (factor, rank) = text.split_once(',').unwrap_or((text, "0"));
        let factor = factor.parse::<f64>().ok().filter(|factor| factor.is_finite() && *factor >= 1.0);
        let rank = match rank {
            "random" => Some(None),
            number => number.parse::<usize>().ok().map(Some),
        };
        let wrong =
            || "must be a factor of at least 1 and perhaps a rank or random, such as 1.2,3".to_owned();
        Ok(Straggler { factor: factor.ok_or_else(wrong)?, rank: rank.ok_or_else(wrong)? })
    }
}

/// What simulated ranks reached.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SimulatedRun {
    /// Requests that are answered at once.
    pub requests: usize,
    /// Steps in which each of them gets a token; stages compute different ones at once.
    pub micro_batches: usize,
    /// Seconds in which each request gets a token, on average.
    pub round_seconds: f64,
    /// Tokens per second of all requests.
    pub tokens_per_second: f64,
    /// The critical path of a round.
    pub critical_path: TimeParts,
    /// What takes most of the critical path.
    pub bound: String,
    /// The share of the time in which ranks compute, on average.
    pub busy: f64,
    /// Bytes that the graphs of each rank send in a round.
    pub sent: Vec<u64>,
}

/// Ranks of a grid whose steps are planned.
#[derive(Debug)]
pub struct RankSimulation {
    grid: Grid,
    requests: usize,
    micro_batches: usize,
    /// Of each rank, the steps of a micro-batch, by its tokens.
    programs: Vec<BTreeMap<usize, RankProgram>>,
}

/// Rounds that are simulated, and those of them before the pipeline is full.
const ROUNDS: usize = 10;
const FILLING: usize = 2;

/// The tag of the messages that say what a step computes, and their bytes: those of a message and those for each token.
const COMMAND: u16 = u16::MAX;
const COMMAND_BYTES: f64 = 64.0;
const COMMAND_TOKEN_BYTES: f64 = 16.0;

/// The seed of routers and stragglers: every division sees the same ones.
const SEED: u64 = 24;

impl Placement {
    /// Plans the steps of every rank of a grid, with the rates of these devices for each, and so many requests at once. With
    /// several, greedy ones: the last stage then sends tokens, and no logits. If all ranks are on one machine (`share_caches`), stages share the caches.
    ///
    /// # Errors
    /// The model cannot be divided so, with the numbers, or not planned.
    pub fn simulate_ranks(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
        (grid, requests, share_caches): (Grid, usize, bool),
    ) -> Result<RankSimulation> {
        let mut rates = self.rates_of(devices);
        if share_caches {
            let in_turn = |rates: &mut Rates| rates.read_curve = rates.read_curve.in_turn(grid.pipeline);
            rates.iter_mut().for_each(in_turn);
        }
        let requests = requests.max(1);
        let parts = RankParts::new(model, options, (grid, requests), &rates)?;
        let micro_batches = MicroBatches::new(requests, grid.pipeline).count;
        let mut programs = Vec::new();
        for rank in 0..grid.ranks() {
            let part = parts.part(rank)?;
            let options = options.clone().resolve(&part)?;
            // Of the pages of all requests, each attends to its own.
            let own = EngineOptions { sequences: 1, pages: 0, ..options.clone() }.on(&placed.scheduler);
            let stage = rank / grid.tensor.max(1) * grid.tensor;
            let mut of_rank = BTreeMap::new();
            for (_, tokens) in sequences_of(requests, micro_batches) {
                if of_rank.contains_key(&tokens) {
                    continue;
                }
                let shape = own.shape(&part, tokens, tokens, usual_slots(&options));
                let shape = GraphShape { argmax: requests > 1, ..shape };
                let plan = placed.scheduler.plan(part.graph(shape)?)?;
                let experts = part.hyperparameters().layers.iter().find_map(|layer| layer.experts);
                let planned = PlannedRank {
                    rank,
                    stage: stage..stage + grid.tensor,
                    ranks: grid.ranks(),
                    share: part.ranks().map(|share| &**share),
                    experts: experts.map(|experts| ExpertCounts { all: experts.count, used: experts.used }),
                    sequences: tokens,
                };
                of_rank.insert(tokens, RankProgram::new(&plan, &rates, &planned));
            }
            programs.push(of_rank);
        }
        Ok(RankSimulation { grid, requests, micro_batches, programs })
    }
}

/// The first request of each micro-batch, and how many it has.
fn sequences_of(requests: usize, micro_batches: usize) -> impl Iterator<Item = (usize, usize)> {
    let bound = move |index: usize| index * requests / micro_batches.max(1);
    (0..micro_batches).map(move |index| (bound(index), bound(index + 1) - bound(index)))
}

impl RankSimulation {
    /// Answers the requests for some rounds over a link. The first rank begins a step when it has the tokens of the previous one of the same requests, tells the
    /// others, and goes on with the next step.
    ///
    /// # Errors
    /// There is no such straggler; plans of ranks do not fit together.
    pub fn run(&self, link: &Link, straggler: Option<Straggler>) -> Result<SimulatedRun> {
        let ranks = self.grid.ranks();
        if let Some(rank) = straggler.and_then(|straggler| straggler.rank).filter(|rank| *rank >= ranks) {
            let reason = format!("rank {rank} is to be slow, and there are ranks 0 to {}", ranks - 1);
            return Err(Error::Ranks { reason });
        }
        let programs = self.programs(straggler);
        let clocks = clocks::run(&programs, link)?;
        Ok(self.report(&clocks))
    }

    /// The steps of all rounds.
    fn programs(&self, straggler: Option<Straggler>) -> Vec<Vec<RankStep>> {
        let ranks = self.grid.ranks();
        let mut programs = vec![Vec::new(); ranks];
        let mut random = Random { state: SEED };
        // What the first rank waits for before it has a micro-batch's tokens.
        let mut results: Vec<Vec<(usize, u16)>> = vec![Vec::new(); self.micro_batches];
        for round in 0..=ROUNDS {
            for (index, (first, tokens)) in sequences_of(self.requests, self.micro_batches).enumerate() {
                let pending = results.get_mut(index).map(std::mem::take).unwrap_or_default();
                if let Some(steps) = programs.first_mut() {
                    steps.extend(pending.into_iter().map(|(from, tag)| RankStep::Receive { from, tag }));
                    if index + 1 == self.micro_batches {
                        steps.push(RankStep::Mark);
                    }
                }
                if round == ROUNDS {
                    continue;
                }
                self.command(tokens, &mut programs);
                let step = RoutedStep { seed: SEED, round, first, tokens };
                let slow = straggler.map(|straggler| {
                    let drawn = (random.unit() * ranks as f64) as usize;
                    (straggler.rank.unwrap_or(drawn), straggler.factor)
                });
                for (rank, (of_rank, steps)) in self.programs.iter().zip(&mut programs).enumerate() {
                    let Some(program) = of_rank.get(&tokens) else { continue };
                    let slower = slow.filter(|(slow, _)| *slow == rank).map_or(1.0, |(_, factor)| factor);
                    program.append(&step, slower, steps);
                    results.get_mut(index).into_iter().for_each(|all| all.extend(&program.results));
                }
            }
        }
        programs
    }

    /// The first rank tells all others what to compute: together, or each stage when it comes to it.
    fn command(&self, tokens: usize, programs: &mut [Vec<RankStep>]) {
        let (ranks, bytes) = (self.grid.ranks(), COMMAND_BYTES + COMMAND_TOKEN_BYTES * tokens as f64);
        if ranks == 1 {
            return;
        }
        if self.grid.pipeline == 1 {
            let meet = RankStep::Meet { members: 0..ranks, meeting: Meeting::Broadcast, bytes, sent: 0 };
            programs.iter_mut().for_each(|steps| steps.push(meet.clone()));
            return;
        }
        let Some((leader, others)) = programs.split_first_mut() else { return };
        for (place, steps) in others.iter_mut().enumerate() {
            leader.push(RankStep::Send { to: place + 1, tag: COMMAND, bytes });
            steps.push(RankStep::Receive { from: 0, tag: COMMAND });
        }
    }

    fn report(&self, clocks: &[RankClock]) -> SimulatedRun {
        let marks = clocks.first().map(|clock| clock.marks.as_slice()).unwrap_or_default();
        let [begin, end] = [FILLING, ROUNDS].map(|round| marks.get(round).copied().unwrap_or_default());
        let critical_path = (end - begin).scaled(1.0 / (ROUNDS - FILLING) as f64);
        let round_seconds = critical_path.seconds();
        let busy: f64 = clocks.iter().map(|clock| clock.busy / clock.now.seconds().max(1e-12)).sum();
        let busy = busy / clocks.len().max(1) as f64;
        let takes_turns = self.micro_batches < self.grid.pipeline;
        let sent = |programs: &BTreeMap<usize, RankProgram>| {
            let batches = sequences_of(self.requests, self.micro_batches);
            batches.filter_map(|(_, tokens)| Some(programs.get(&tokens)?.sent)).sum()
        };
        SimulatedRun {
            requests: self.requests,
            micro_batches: self.micro_batches,
            round_seconds,
            tokens_per_second: self.requests as f64 / round_seconds.max(1e-12),
            bound: format!(
                "{}{}",
                critical_path.longest(),
                if takes_turns { ", stages in turn" } else { "" }
            ),
            critical_path,
            busy,
            sent: self.programs.iter().map(sent).collect(),
        }
    }
}
