//! What several ranks would hold and how fast they would be, planned without any of them.

use std::sync::Arc;

use quadriga_cluster::Planned;
use quadriga_graph::{Collective, CollectiveKind, Op};
use quadriga_runtime::{BackendBytes, Cost, Plan, Rates};
use serde::Serialize;

use super::estimate::usual_slots;
use super::expert_ranks::DividedExperts;
use super::{BatchEstimate, Devices, PlacedModel, Placement, SlotHits};
use crate::engine::EngineOptions;
use crate::model::Model;
use crate::ranks::{Grid, Link, MOST_HELD, MicroBatches, Parallelism, RankResources, RequestLoad};
use crate::{Engine, Result};

/// What one of several ranks would hold and do.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RankPlan {
    /// Its number.
    pub rank: usize,
    /// Its part of the model in words.
    pub holds: String,
    /// Bytes of weights that it loads or reads in the file map.
    pub weights: u64,
    /// Bytes of KV cache.
    pub cache: u64,
    /// Bytes of results and of work memory.
    pub compute: u64,
    /// Bytes that it sends for each token of an answer.
    pub sent_per_token: u64,
    /// Seconds of compute for a token of an answer.
    pub compute_seconds: f64,
    /// Seconds in which the link exchanges data for it.
    pub link_seconds: f64,
    /// Those of them that are latency, whatever the bandwidth.
    pub link_latency_seconds: f64,
    /// Seconds of both for a batch of a prompt.
    pub prompt_seconds: f64,
    /// Seconds of both for a micro-batch: a token of each of a stage's share of the requests.
    pub step_seconds: f64,
}

/// A division among ranks, as planned.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GridPlan {
    /// The ranks that divide each layer.
    pub tensor: usize,
    /// The stages that have layers of their own.
    pub pipeline: usize,
    /// Whether several ranks have the same KV heads, because there are fewer than ranks: their cache is more than a share each.
    pub shares_keys: bool,
    /// The most weights and KV cache that a rank holds, as a multiple of its share: of what one rank alone would hold.
    pub largest_share: f64,
    /// Why that is more than a share and 5 %, where it is.
    pub uneven: Vec<String>,
    /// Each rank.
    pub ranks: Vec<RankPlan>,
    /// Collectives and messages of a rank for a token, the most of all.
    pub exchanges: usize,
    /// Tokens per second of one answer.
    pub decode_tokens_per_second: f64,
    /// Requests that are answered at once.
    pub requests: usize,
    /// Tokens per second of all of them, where each stage computes another micro-batch. Attention is estimated as if all had one KV cache.
    pub requests_tokens_per_second: f64,
    /// Tokens per second of a long prompt, whose batches follow each other through the stages.
    pub prompt_tokens_per_second: f64,
}

/// The parts of ranks that are not there, each with the same rates.
pub(super) struct RankParts<'a> {
    model: &'a Model,
    grid: Grid,
    parallelism: Parallelism,
    resources: Vec<RankResources>,
}

impl RankParts<'_> {
    /// Of a grid that answers so many requests at once; `rates` are those of a rank's devices.
    pub(super) fn new<'a>(
        model: &'a Model,
        options: &EngineOptions,
        (grid, requests): (Grid, usize),
        rates: &[Rates],
    ) -> Result<RankParts<'a>> {
        let parallelism = Parallelism {
            tensor: Some(grid.tensor),
            pipeline: Some(grid.pipeline),
            cache: Some(options.cache_rows(model)?),
            load: RequestLoad::constant(requests),
            link: None,
        };
        let resources = resources_of_ranks(grid.ranks(), rates);
        Ok(RankParts { model, grid, parallelism, resources })
    }

    /// The part of a rank.
    pub(super) fn part(&self, rank: usize) -> Result<Model> {
        let planned = Arc::new(Planned::new(rank, self.grid.ranks(), self.grid.tensor));
        self.model.clone().with_rank_resources(planned, self.parallelism, &self.resources)
    }
}

/// Ranks with the same devices: as ranks that are there, they count with the rates of the one that reads fastest.
fn resources_of_ranks(ranks: usize, rates: &[Rates]) -> Vec<RankResources> {
    let rates = rates.iter().copied().max_by(|a, b| a.read.total_cmp(&b.read));
    vec![RankResources { rates, ..RankResources::of_speed(1.0) }; ranks]
}

/// What a plan exchanges with other ranks.
#[derive(Default)]
struct Exchanges {
    count: usize,
    bytes: f64,
    seconds: f64,
    latency: f64,
}

impl Exchanges {
    fn of(plan: &Plan, link: &Link) -> Exchanges {
        let mut all = Exchanges::default();
        let graph = plan.graph();
        for node in graph.node_ids() {
            let Op::Collective(Collective { ranks, kind }) = graph[node].op() else { continue };
            let bytes = graph[graph[node].output()].bytes() as f64;
            let take = |bytes: f64| match kind {
                CollectiveKind::AllReduce => Some(link.all_reduce(ranks.count, bytes)),
                CollectiveKind::AllGather { .. } => Some(link.all_gather(ranks.count, bytes)),
                CollectiveKind::Send { .. } => Some(link.send(bytes)),
                // The sender counts a message. Models have no others.
                _ => None,
            };
            let (Some(seconds), Some(latency)) = (take(bytes), take(0.0)) else { continue };
            all.count += 1;
            all.bytes += Cost::of(graph, node).sent as f64;
            all.seconds += seconds;
            all.latency += latency;
        }
        all
    }
}

impl Placement {
    /// The grid that so many ranks with these devices choose by themselves over a link, for so many requests at once. They compare divisions
    /// before any is planned, by the bytes that ranks read.
    ///
    /// # Errors
    /// The model cannot be divided so, with the numbers.
    pub fn grid_of_ranks(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        (ranks, parallelism): (usize, Parallelism),
        (link, requests): (&Link, usize),
    ) -> Result<Grid> {
        let (cache, load) = (Some(options.cache_rows(model)?), RequestLoad::constant(requests));
        let parallelism = Parallelism { cache, load, ..parallelism };
        let resources = resources_of_ranks(ranks, &self.rates_of(devices));
        model.grid_of_ranks(parallelism, &resources, *link)
    }

    /// Plans every rank of a grid over a link, with the rates of these devices for each rank, and so many requests
    /// at once. Where the link is memory, all ranks are
    /// on one machine: the rates are those that the ranks of a stage reach together, and stages share the caches.
    ///
    /// # Errors
    /// The model cannot be divided so, with the numbers, or not planned.
    pub fn plan_ranks(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
        (grid, link, requests): (Grid, &Link, usize),
    ) -> Result<GridPlan> {
        let mut rates = self.rates_of(devices);
        if link.is_memory {
            let in_turn = |rates: &mut Rates| rates.read_curve = rates.read_curve.in_turn(grid.pipeline);
            rates.iter_mut().for_each(in_turn);
        }
        let parts = RankParts::new(model, options, (grid, requests), &rates)?;
        let micro_batches = MicroBatches::new(requests, grid.pipeline);
        let mut ranks = Vec::new();
        let (mut exchanges, mut batch, mut shares_keys) = (0, 1, false);
        let mut uneven = Vec::new();
        for rank in 0..grid.ranks() {
            let part = parts.part(rank)?;
            let options = options.clone().resolve(&part)?;
            // Of the pages of all requests, each attends to its own.
            let own = EngineOptions { sequences: 1, pages: 0, ..options.clone() };
            let estimate = |tokens: usize, outputs: usize, slots: usize| -> Result<(f64, Exchanges)> {
                // Ranks have no slots for experts.
                let hits = SlotHits::WithoutLocality;
                let plan = Engine::plan_outputs(&part, &placed.scheduler, &own, (tokens, outputs), slots)?;
                let experts = part.hyperparameters().layers.iter().find_map(|layer| layer.experts);
                let experts = experts.map(|experts| DividedExperts::new(experts, tokens));
                let estimate = BatchEstimate::of_rank(&plan, tokens, slots, &rates, hits, experts);
                let seconds = estimate.seconds();
                Ok((seconds, Exchanges::of(&plan, link)))
            };
            let (compute_seconds, exchanged) = estimate(1, 1, usual_slots(&options))?;
            let requests = micro_batches.requests;
            let (step_seconds, step_exchanged) = match requests {
                1 => (compute_seconds, exchanged.seconds),
                _ => {
                    let (seconds, exchanged) = estimate(requests, requests, usual_slots(&options))?;
                    (seconds, exchanged.seconds)
                }
            };
            let (prompt_seconds, prompt_exchanged) = estimate(options.batch, 1, options.batch)?;
            let forecast = Engine::forecast(&part, &placed.scheduler, options.clone())?;
            let sum = |of: fn(&BackendBytes) -> u64| forecast.bytes().iter().map(of).sum::<u64>();
            exchanges = exchanges.max(exchanged.count);
            if let Some(share) = part.ranks() {
                uneven.extend(
                    share
                        .why_uneven()
                        .into_iter()
                        .filter(|reason| !uneven.contains(reason))
                        .collect::<Vec<_>>(),
                );
            }
            shares_keys |= part.ranks().is_some_and(|share| share.shares_keys());
            batch = options.batch;
            ranks.push(RankPlan {
                rank,
                holds: part.ranks().map(|share| share.describe()).unwrap_or_default(),
                weights: sum(|bytes| bytes.weights + bytes.mapped),
                cache: sum(|bytes| bytes.state),
                compute: sum(|bytes| bytes.compute + bytes.work),
                sent_per_token: exchanged.bytes as u64,
                compute_seconds,
                link_seconds: exchanged.seconds,
                link_latency_seconds: exchanged.latency,
                prompt_seconds: prompt_seconds + prompt_exchanged.seconds,
                step_seconds: step_seconds + step_exchanged,
            });
        }
        let slowest = |stage: &[RankPlan], of: fn(&RankPlan) -> f64| stage.iter().map(of).fold(0.0, f64::max);
        let stages = || ranks.chunks(grid.tensor.max(1));
        let decode: f64 =
            stages().map(|stage| slowest(stage, |rank| rank.compute_seconds + rank.link_seconds)).sum();
        let prompt = stages().map(|stage| slowest(stage, |rank| rank.prompt_seconds)).fold(0.0, f64::max);
        let round = micro_batches.seconds(stages().map(|stage| slowest(stage, |rank| rank.step_seconds)));
        let Grid { tensor, pipeline } = grid;
        let whole = Engine::forecast(model, &placed.scheduler, options.clone().resolve(model)?)?;
        let whole: u64 = whole.bytes().iter().map(|bytes| bytes.weights + bytes.mapped + bytes.state).sum();
        let most = ranks.iter().map(|rank| rank.weights + rank.cache).max().unwrap_or(0);
        let largest_share = most as f64 * ranks.len() as f64 / whole.max(1) as f64;
        if largest_share <= MOST_HELD {
            uneven.clear();
        } else if uneven.is_empty() {
            uneven.push("layers, heads and experts are not divided more finely".to_owned());
        }
        Ok(GridPlan {
            tensor,
            pipeline,
            shares_keys,
            largest_share,
            uneven,
            exchanges,
            decode_tokens_per_second: 1.0 / decode.max(1e-12),
            requests,
            requests_tokens_per_second: requests as f64 / round.max(1e-12),
            prompt_tokens_per_second: batch as f64 / prompt.max(1e-12),
            ranks,
        })
    }
}
