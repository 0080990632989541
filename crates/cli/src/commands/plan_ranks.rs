//! `quadriga plan --ranks`: how several machines would divide a model, without starting any.

use std::io::Write;

use quadriga_llm::placement::{GridPlan, Placement, RankPlan, SimulatedRun, Straggler};
use quadriga_llm::{Grid, Link, MOST_HELD, Parallelism, within_share};
use quadriga_runtime::Rates;
use quadriga_view::format::{count, plural, seconds};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::prepared_model::Prepared;
use crate::{size, terminal};

/// The rates of the backends of each of so many ranks of one machine that compute at once.
pub(crate) type RatesOfRanks<'a> = dyn Fn(usize) -> Vec<(String, Rates)> + 'a;

/// All divisions of a model among so many ranks.
#[derive(Serialize)]
pub(crate) struct RankReport {
    /// The division that is expected to answer the requests fastest.
    chosen: GridPlan,
    /// One rank alone, whether or not the model fits there.
    alone: GridPlan,
    /// Others that the model allows, the widest first.
    others: Vec<GridPlan>,
    /// The division that ranks take by themselves, which compare divisions before any is planned.
    ranks_choose: String,
    /// Those that it does not allow, and why.
    refused: Vec<(String, String)>,
    /// The chosen division and one rank alone in simulated time.
    #[serde(skip_serializing_if = "Option::is_none")]
    simulation: Option<SimulationReport>,
    #[serde(skip)]
    link: Link,
}

/// What ranks reach in simulated time.
#[derive(Serialize)]
struct SimulationReport {
    chosen: SimulatedRun,
    alone: SimulatedRun,
    /// The speed of the chosen division, as a share of that of so many ranks alone.
    efficiency: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    with_straggler: Option<SimulatedRun>,
}

impl RankReport {
    pub(crate) fn new(
        prepared: &Prepared,
        parallelism: Parallelism,
        (ranks, requests): (usize, usize),
        (link, rates): (Link, &RatesOfRanks<'_>),
    ) -> Outcome<RankReport> {
        let Prepared { model, devices, options, placement, placed, .. } = prepared;
        let plan = |grid: Grid| {
            let placement = placement_of(placement, grid, &link, rates);
            placement.plan_ranks(model, devices, options, placed, (grid, &link, requests))
        };
        let (mut plans, mut refused) = (Vec::new(), Vec::new());
        for grid in parallelism.grids(ranks) {
            match plan(grid) {
                Ok(plan) => plans.push(plan),
                Err(error) => refused.push((grid.to_string(), error.to_string())),
            }
        }
        // As ranks choose: those with KV heads of their own, if there are any, and of nearly equal speeds those within their share.
        let all_share = plans.iter().all(|plan| plan.shares_keys);
        let candidates: Vec<usize> = (0..plans.len())
            .filter(|index| all_share || plans.get(*index).is_some_and(|plan| !plan.shares_keys))
            .collect();
        let costs: Vec<(f64, f64)> = candidates
            .iter()
            .filter_map(|index| plans.get(*index))
            .map(|plan| (1.0 / plan.requests_tokens_per_second.max(f64::MIN_POSITIVE), plan.largest_share))
            .collect();
        let fastest = within_share(&costs).and_then(|place| candidates.get(place).copied());
        let Some(fastest) = fastest else {
            let reason = refused.into_iter().next().map(|(_, reason)| reason);
            let none = || format!("{parallelism} is not a division of {}", plural(ranks, "rank", "ranks"));
            return Err(Failure::Message(reason.unwrap_or_else(none)));
        };
        let chosen = plans.remove(fastest);
        let alone = plan(Grid { tensor: 1, pipeline: 1 })?;
        let own =
            placement.grid_of_ranks(model, devices, options, (ranks, parallelism), (&link, requests))?;
        let ranks_choose = own.to_string();
        Ok(RankReport { chosen, alone, others: plans, ranks_choose, refused, simulation: None, link })
    }

    /// Simulates the division that was chosen and one rank alone, with a straggler, too, if one is given.
    pub(crate) fn simulate(
        &mut self,
        prepared: &Prepared,
        rates: &RatesOfRanks<'_>,
        straggler: Option<Straggler>,
    ) -> Outcome {
        let Prepared { model, devices, options, placement, placed, .. } = prepared;
        let (link, requests) = (self.link, self.chosen.requests);
        let simulation = |grid: Grid| {
            let placement = placement_of(placement, grid, &link, rates);
            placement.simulate_ranks(model, devices, options, placed, (grid, requests, link.is_memory))
        };
        let grid = self.grid();
        let ranks = simulation(grid)?;
        let (chosen, alone) =
            (ranks.run(&link, None)?, simulation(Grid { tensor: 1, pipeline: 1 })?.run(&link, None)?);
        let efficiency = chosen.tokens_per_second / alone.tokens_per_second / grid.ranks() as f64;
        let with_straggler = straggler.map(|straggler| ranks.run(&link, Some(straggler))).transpose()?;
        self.simulation = Some(SimulationReport { chosen, alone, efficiency, with_straggler });
        Ok(())
    }

    /// The division that was chosen.
    pub(crate) fn grid(&self) -> Grid {
        Grid { tensor: self.chosen.tensor, pipeline: self.chosen.pipeline }
    }

    /// Whether another division was left because of the memory of its ranks.
    fn is_faster_and_uneven(&self, other: &GridPlan) -> bool {
        other.requests_tokens_per_second > self.chosen.requests_tokens_per_second
            && other.largest_share > self.chosen.largest_share
            && !other.shares_keys
    }

    /// A warning if the rank that needs most has not so much memory here.
    pub(crate) fn shortage(&self, free: Option<u64>) -> Option<String> {
        let total = |rank: &RankPlan| rank.weights + rank.cache + rank.compute;
        let largest = self.chosen.ranks.iter().max_by_key(|rank| total(rank))?;
        let free = free.filter(|free| total(largest) > *free)?;
        Some(format!(
            "rank {} needs {}, and this machine has {} free; more ranks or a smaller context (-c) need less",
            largest.rank,
            size::text(total(largest)),
            size::text(free)
        ))
    }

    pub(crate) fn json(&self) -> String {
        terminal::json(&serde_json::to_string(self).unwrap_or_default())
    }

    pub(crate) fn print(&self, out: &mut dyn Write) -> Outcome {
        let GridPlan { tensor, pipeline, ranks, .. } = &self.chosen;
        writeln!(
            out,
            "{} over {}: {}",
            plural(ranks.len(), "rank", "ranks"),
            self.link,
            words(&self.chosen)
        )?;
        writeln!(out)?;
        writeln!(
            out,
            "{:>4} {:>11} {:>11} {:>11} {:>11}  part",
            "rank", "weights", "KV cache", "compute", "total"
        )?;
        for rank in ranks {
            let total = rank.weights + rank.cache + rank.compute;
            let [weights, cache, compute, total] =
                [rank.weights, rank.cache, rank.compute, total].map(size::text);
            writeln!(
                out,
                "{:>4} {weights:>11} {cache:>11} {compute:>11} {total:>11}  {}",
                rank.rank, rank.holds
            )?;
        }
        writeln!(out)?;
        if self.chosen.largest_share > MOST_HELD {
            writeln!(
                out,
                "A rank holds up to {:.2} times its share of weights and KV cache: {}.",
                self.chosen.largest_share,
                self.chosen.uneven.join("; ")
            )?;
        }
        let most = |of: fn(&RankPlan) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
        writeln!(
            out,
            "A token takes {} of compute and {} on the link ({}, {}B sent by a rank){}.",
            seconds(most(|rank| rank.compute_seconds)),
            seconds(most(|rank| rank.link_seconds)),
            plural(self.chosen.exchanges, "exchange", "exchanges"),
            count(most(|rank| rank.sent_per_token as f64)),
            if *pipeline > 1 {
                format!(" in each of {pipeline} stages, one after the other")
            } else {
                String::new()
            },
        )?;
        writeln!(out, "Expected: {}; one rank alone {}.", speeds(&self.chosen), speeds(&self.alone))?;
        if let Some(simulated) = &self.simulation {
            let SimulationReport { chosen, alone, efficiency, with_straggler } = simulated;
            writeln!(
                out,
                "Simulated: {:.1} tok/s, bound by {}; one rank alone {:.1} tok/s, so {:.0} % of what the ranks could; ranks compute {:.0} % of the time.",
                chosen.tokens_per_second,
                chosen.bound,
                alone.tokens_per_second,
                100.0 * efficiency,
                100.0 * chosen.busy
            )?;
            if let Some(late) = with_straggler {
                writeln!(out, "With a straggler: {:.1} tok/s.", late.tokens_per_second)?;
            }
        }
        let faster = |other: &&GridPlan| {
            other.shares_keys && other.requests_tokens_per_second > self.chosen.requests_tokens_per_second
        };
        let why = match (self.others.is_empty(), *tensor > 1, self.chosen.requests > 1) {
            (false, ..) if self.others.iter().any(|other| faster(&other)) => {
                "With more ranks than KV heads, several would have the same part of the KV cache: only --parallelism tensor=N does that"
            }
            (true, ..) => "It is the only division that the model and the options allow",
            (false, ..) if self.others.iter().any(|other| self.is_faster_and_uneven(other)) => {
                "Another division is a little faster, but has ranks that hold more than their share of weights and KV cache"
            }
            (false, true, _) => "Ranks that divide each layer read their parts at the same time",
            (false, false, false) => "Over this link, to divide each layer would cost more than it saves",
            (false, false, true) => {
                "Stages compute different requests at once, and exchange less than ranks that divide each layer"
            }
        };
        writeln!(out, "{why}.")?;
        let own = words(&self.chosen);
        if self.ranks_choose != own {
            writeln!(
                out,
                "Ranks by themselves take {}, by a coarser estimate; --parallelism {own} gives this one.",
                self.ranks_choose
            )?;
        }
        for other in &self.others {
            writeln!(out, "  {}: {}", words(other), speeds(other))?;
        }
        for (grid, reason) in &self.refused {
            writeln!(out, "  {grid}: {reason}")?;
        }
        Ok(())
    }
}

/// The placement with the rates of one of a grid's ranks: where all are on this machine, the ranks of a stage compute at once.
fn placement_of(placement: &Placement, grid: Grid, link: &Link, rates: &RatesOfRanks<'_>) -> Placement {
    match link.is_memory && grid.tensor > 1 {
        true => Placement { rates: rates(grid.tensor), ..placement.clone() },
        false => placement.clone(),
    }
}

fn words(plan: &GridPlan) -> String {
    Grid { tensor: plan.tensor, pipeline: plan.pipeline }.to_string()
}

fn speeds(plan: &GridPlan) -> String {
    let GridPlan { decode_tokens_per_second: decode, prompt_tokens_per_second: prompt, .. } = plan;
    let requests = match plan.requests {
        1 => String::new(),
        requests => format!(", {requests} at once {:.1} tok/s", plan.requests_tokens_per_second),
    };
    format!("answers {decode:.1} tok/s{requests}, prompts {prompt:.0} tok/s")
}
