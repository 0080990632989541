//! What a planned rank does in a step: its nodes in the plan's order with their costs, and its collectives.

use std::ops::Range;

use quadriga_graph::{Collective, CollectiveKind, DType, Graph, NodeId, Op, layer_of};
use quadriga_runtime::{Cost, Plan, Rates, host_slowness};

use super::clocks::{Meeting, RankStep, TimeParts};
use super::routing::{ExpertCounts, RoutedStep};
use crate::placement::estimate::working_sets;
use crate::placement::neurons;
use crate::placement::parts::largest_leaf;
use crate::ranks::RankShare;

/// A step of a planned rank.
#[derive(Clone, Debug)]
enum PlannedStep {
    /// Takes the same time in every run, or meets others.
    Fixed(RankStep),
    /// A matmul with those of a layer's experts that tokens use.
    Experts(Box<ExpertNode>),
}

/// A matmul with some of a layer's experts.
#[derive(Clone, Debug)]
struct ExpertNode {
    layer: usize,
    experts: ExpertCounts,
    own: Range<usize>,
    /// Bytes of an expert, and of a token's activations.
    expert_bytes: f64,
    pair_bytes: f64,
    /// Operations for one token.
    pair_operations: f64,
    rates: Rates,
    dtype: DType,
    /// Whether a host computes it.
    on_host: bool,
}

/// The steps of a rank for one batch.
#[derive(Clone, Debug, Default)]
pub(super) struct RankProgram {
    steps: Vec<PlannedStep>,
    /// Messages to the first rank that its graph does not receive: results.
    pub(super) results: Vec<(usize, u16)>,
    /// Bytes that a run sends, as the plan has them.
    pub(super) sent: u64,
}

/// Where a plan belongs, and what is known of its batch.
pub(super) struct PlannedRank<'a> {
    pub(super) rank: usize,
    /// The ranks of its stage.
    pub(super) stage: Range<usize>,
    pub(super) ranks: usize,
    pub(super) share: Option<&'a RankShare>,
    pub(super) experts: Option<ExpertCounts>,
    /// Sequences of the batch, each with a KV cache of its own.
    pub(super) sequences: usize,
}

impl RankProgram {
    /// The steps of a plan. Backends of a rank compute in turn, and wait for copies of results; streamed weights are copied meanwhile.
    pub(super) fn new(plan: &Plan, rates: &[Rates], rank: &PlannedRank<'_>) -> RankProgram {
        let (graph, splits) = (plan.graph(), plan.splits());
        let sets = working_sets(plan, rates.len());
        let rates: Vec<Rates> =
            rates.iter().zip(sets).map(|(rates, bytes)| rates.for_working_set(bytes)).collect();
        let mut program = RankProgram::default();
        let (mut previous, mut streamed, mut compute) =
            (None, vec![0.0; rates.len()], vec![0.0; rates.len()]);
        for (number, split) in splits.splits.iter().enumerate() {
            let Some(own) = rates.get(split.backend) else { continue };
            let mut waits = 0.0;
            if let Some(before) = previous.filter(|before| *before != split.backend) {
                waits += rates.get(split.backend.min(before)).map_or(0.0, |rates| rates.rendezvous);
            }
            previous = Some(split.backend);
            for copy in split.inputs.iter().filter_map(|copy| splits.copies.get(*copy)) {
                let link = rates.get(copy.from.min(copy.to)).map_or(1.0, |rates| rates.link.max(1.0));
                let seconds = copy.bytes as f64 / link;
                match streamed.get_mut(copy.to).filter(|_| copy.source.is_none()) {
                    Some(streamed) => *streamed += seconds,
                    None => waits += seconds,
                }
            }
            program.compute(TimeParts { launches: waits, ..TimeParts::default() });
            let on_host = plan.backends().get(split.backend).is_some_and(|backend| backend.memory().host);
            for node in splits.nodes_of(number) {
                let seconds = program.node(graph, *node, (own, on_host), rank);
                compute.get_mut(split.backend).into_iter().for_each(|sum| *sum += seconds);
            }
        }
        let exposed: f64 = streamed.iter().zip(&compute).map(|(copies, own)| (copies - own).max(0.0)).sum();
        program.compute(TimeParts { memory: exposed, ..TimeParts::default() });
        program
    }

    /// Adds time to the last step, if that computes.
    fn compute(&mut self, parts: TimeParts) {
        if parts.seconds() <= 0.0 {
            return;
        }
        match self.steps.last_mut() {
            Some(PlannedStep::Fixed(RankStep::Compute(before))) => *before = *before + parts,
            _ => self.steps.push(PlannedStep::Fixed(RankStep::Compute(parts))),
        }
    }

    /// Adds a node; the seconds that it computes, as far as they do not depend on experts.
    fn node(
        &mut self,
        graph: &Graph,
        node: NodeId,
        (rates, on_host): (&Rates, bool),
        rank: &PlannedRank<'_>,
    ) -> f64 {
        let cost = Cost::of(graph, node);
        let op = graph[node].op();
        if let Op::Collective(collective) = op {
            self.sent += cost.sent;
            self.exchange(graph, node, collective, cost.sent, rank);
            return 0.0;
        }
        let dtype = largest_leaf(graph, node).map_or(DType::F32, |(_, dtype)| dtype);
        let mut seconds = 0.0;
        match expert_node(graph, node, cost, (rates, dtype), rank) {
            Some(experts) => {
                self.steps.push(PlannedStep::Experts(Box::new(ExpertNode { on_host, ..experts })));
            }
            None => {
                let mut traffic = cost.traffic as f64;
                if matches!(op, Op::Attention(_)) {
                    // Each sequence reads keys and values of its own.
                    let cache = graph.inputs(node).iter().skip(1).take(2);
                    let cache: usize =
                        cache.filter_map(|id| graph.get(*id)).map(|tensor| tensor.bytes()).sum();
                    traffic += rank.sequences.saturating_sub(1) as f64 * cache as f64;
                }
                let share = neurons::active_share(graph, node);
                let parts = roofline(rates, share * traffic, share * cost.operations as f64, dtype);
                seconds = parts.seconds();
                self.compute(parts);
            }
        }
        if matches!(op, Op::MulMat | Op::MulMatId | Op::Attention(_)) {
            self.compute(TimeParts { launches: rates.launch, ..TimeParts::default() });
            seconds += rates.launch;
        }
        seconds
    }

    fn exchange(
        &mut self,
        graph: &Graph,
        node: NodeId,
        collective: &Collective,
        sent: u64,
        rank: &PlannedRank<'_>,
    ) {
        let Collective { ranks, kind } = collective;
        let input = graph.inputs(node).first().and_then(|id| graph.get(*id)).map_or(0, |input| input.bytes());
        let output = graph[graph[node].output()].bytes();
        let all = 0..rank.ranks;
        // A group has all ranks, or those of the stage.
        let members = if ranks.count == rank.ranks { all } else { rank.stage.clone() };
        let meet = |meeting: Meeting, bytes: usize| RankStep::Meet {
            members: members.clone(),
            meeting,
            bytes: bytes as f64,
            sent,
        };
        self.steps.push(PlannedStep::Fixed(match kind {
            CollectiveKind::AllReduce => meet(Meeting::AllReduce, output),
            CollectiveKind::AllGather { .. } => meet(Meeting::AllGather, output),
            CollectiveKind::ReduceScatter { .. } => meet(Meeting::ReduceScatter, input),
            CollectiveKind::Broadcast { .. } => meet(Meeting::Broadcast, output),
            CollectiveKind::Send { to, tag } => {
                if *to == 0 {
                    self.results.push((rank.rank, *tag));
                }
                RankStep::Send { to: *to, tag: *tag, bytes: output as f64 }
            }
            CollectiveKind::Receive { from, tag, .. } => RankStep::Receive { from: *from, tag: *tag },
        }));
    }

    /// Appends the steps of one run, in which the rank computes slower by a factor.
    pub(super) fn append(&self, step: &RoutedStep, slower: f64, to: &mut Vec<RankStep>) {
        for planned in &self.steps {
            let next = match planned {
                PlannedStep::Fixed(RankStep::Compute(parts)) => RankStep::Compute(parts.scaled(slower)),
                PlannedStep::Fixed(other) => other.clone(),
                PlannedStep::Experts(node) => RankStep::Compute(node.parts(step).scaled(slower)),
            };
            match (to.last_mut(), &next) {
                (Some(RankStep::Compute(before)), RankStep::Compute(parts)) => *before = *before + *parts,
                _ => to.push(next),
            }
        }
    }
}

impl ExpertNode {
    fn parts(&self, step: &RoutedStep) -> TimeParts {
        let work = step.work(self.layer, self.experts, &self.own);
        let (distinct, pairs) = (work.distinct as f64, work.pairs as f64);
        let bytes = distinct * self.expert_bytes + pairs * self.pair_bytes;
        let slowness = if self.on_host { host_slowness(pairs / distinct.max(1.0)) } else { 1.0 };
        roofline(&self.rates, bytes, pairs * self.pair_operations * slowness, self.dtype)
    }
}

/// A matmul with experts, if the node is one.
fn expert_node(
    graph: &Graph,
    node: NodeId,
    cost: Cost,
    (rates, dtype): (&Rates, DType),
    rank: &PlannedRank<'_>,
) -> Option<ExpertNode> {
    let experts = rank.experts?;
    let weight = graph.inputs(node).first().filter(|_| matches!(graph[node].op(), Op::MulMatId))?;
    let ids = graph.inputs(node).get(2).and_then(|ids| graph.get(*ids))?;
    let (count, pairs) = (graph[*weight].dims4()[1].max(1), ids.elements().max(1) as f64);
    let layer = layer_of(&graph.name(*weight))?;
    let first = rank.share.map_or(0, |share| share.first_expert(layer));
    let expert_bytes = graph[*weight].bytes() as f64 / count as f64;
    let counted = pairs.min(count as f64);
    Some(ExpertNode {
        layer,
        experts,
        own: first..first + count,
        expert_bytes,
        pair_bytes: (cost.traffic as f64 - counted * expert_bytes).max(0.0) / pairs,
        pair_operations: cost.operations as f64 / pairs,
        rates: *rates,
        dtype,
        on_host: false,
    })
}

/// The longer of memory traffic and arithmetic.
fn roofline(rates: &Rates, traffic: f64, operations: f64, dtype: DType) -> TimeParts {
    let (memory, arithmetic) = (traffic / rates.read.max(1.0), operations / rates.operations(dtype).max(1.0));
    match memory >= arithmetic {
        true => TimeParts { memory, ..TimeParts::default() },
        false => TimeParts { arithmetic, ..TimeParts::default() },
    }
}
