//! `quadriga plan --ranks`: how several machines would divide a model, without starting any.

use std::io::Write;

use quadriga_llm::placement::{GridPlan, Placement};
use quadriga_llm::{Grid, Link, Parallelism};
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
    /// Those that it does not allow, and why.
    refused: Vec<(String, String)>,
    #[serde(skip)]
    link: Link,
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
            // The ranks of a stage compute at once.
            let shared = link.is_memory && grid.tensor > 1;
            let shared = shared.then(|| Placement { rates: rates(grid.tensor), ..placement.clone() });
            let placement = shared.as_ref().unwrap_or(placement);
            placement.plan_ranks(model, devices, options, placed, (grid, &link, requests))
        };
        let (mut plans, mut refused) = (Vec::new(), Vec::new());
        for grid in parallelism.grids(ranks) {
            match plan(grid) {
                Ok(plan) => plans.push(plan),
                Err(error) => refused.push((grid.to_string(), error.to_string())),
            }
        }
        let fastest = (0..plans.len()).max_by(|a, b| {
            let speed = |index: &usize| plans.get(*index).map_or(0.0, |plan| plan.requests_tokens_per_second);
            let own_keys = |index: &usize| plans.get(*index).is_some_and(|plan| !plan.shares_keys);
            // Of equals, the first: the widest.
            own_keys(a).cmp(&own_keys(b)).then(speed(a).total_cmp(&speed(b))).then(b.cmp(a))
        });
        let Some(fastest) = fastest else {
            let reason = refused.into_iter().next().map(|(_, reason)| reason);
            let none = || format!("{parallelism} is not a division of {}", plural(ranks, "rank", "ranks"));
            return Err(Failure::Message(reason.unwrap_or_else(none)));
        };
        let chosen = plans.remove(fastest);
        let alone = plan(Grid { tensor: 1, pipeline: 1 })?;
        Ok(RankReport { chosen, alone, others: plans, refused, link })
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
        let most =
            |of: fn(&quadriga_llm::placement::RankPlan) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
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
        let faster = |other: &&GridPlan| {
            other.shares_keys && other.requests_tokens_per_second > self.chosen.requests_tokens_per_second
        };
        let why = match (self.others.is_empty(), *tensor > 1, self.chosen.requests > 1) {
            (false, ..) if self.others.iter().any(|other| faster(&other)) => {
                "With more ranks than KV heads, several would have the same part of the KV cache: only --parallelism tensor=N does that"
            }
            (true, ..) => "It is the only division that the model and the options allow",
            (false, true, _) => "Ranks that divide each layer read their parts at the same time",
            (false, false, false) => "Over this link, to divide each layer would cost more than it saves",
            (false, false, true) => {
                "Stages compute different requests at once, and exchange less than ranks that divide each layer"
            }
        };
        writeln!(out, "{why}.")?;
        for other in &self.others {
            writeln!(out, "  {}: {}", words(other), speeds(other))?;
        }
        for (grid, reason) in &self.refused {
            writeln!(out, "  {grid}: {reason}")?;
        }
        Ok(())
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
