//! Estimates of a plan's time, from the rates of its devices.

use std::collections::BTreeMap;

use quadriga_graph::{DType, Graph, NodeId, Op, TensorId, layer_of};
use quadriga_runtime::{Cost, ExpertRows, Plan, Rates};
use serde::Serialize;

use super::expert_ranks::DividedExperts;
use super::parts::largest_leaf;
use super::{PlacedModel, Placement, neurons};
use crate::engine::EngineOptions;
use crate::model::Model;
use crate::models::SLOTS_SUFFIX;
use crate::placement::Devices;
use crate::{Engine, Result};

/// The estimated time of one batch.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BatchEstimate {
    /// Tokens of the batch.
    pub tokens: usize,
    /// KV-cache slots that its attention covers.
    pub visible_slots: usize,
    /// Seconds of compute on each backend.
    pub compute: Vec<f64>,
    /// Seconds of copies of activations.
    pub copies: f64,
    /// How often one backend continues with a result of another.
    pub crossings: usize,
    /// Seconds of waiting for each other.
    pub waiting: f64,
    /// Seconds of streamed weights, as far as they take longer than the compute of the device that they are for.
    pub streaming: f64,
    /// Seconds in which a device computes experts of its slots while another computes the others.
    pub overlapped: f64,
}

impl BatchEstimate {
    /// The time of the batch in seconds: backends compute one after another, except where experts are in slots.
    pub fn seconds(&self) -> f64 {
        self.compute.iter().sum::<f64>() + self.copies + self.waiting + self.streaming - self.overlapped
    }

    /// Tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds().max(1e-12)
    }

    /// The estimate for a plan of a batch of `tokens`, with the rates of its backends.
    pub fn of(
        plan: &Plan,
        tokens: usize,
        visible_slots: usize,
        rates: &[Rates],
        hits: SlotHits,
    ) -> BatchEstimate {
        BatchEstimate::of_rank(plan, tokens, visible_slots, rates, hits, None)
    }

    /// The estimate for a rank that has a part of the experts.
    pub(super) fn of_rank(
        plan: &Plan,
        tokens: usize,
        visible_slots: usize,
        rates: &[Rates],
        hits: SlotHits,
        experts: Option<DividedExperts>,
    ) -> BatchEstimate {
        let (graph, splits) = (plan.graph(), plan.splits());
        let sets = working_sets(plan, rates.len());
        let rates: Vec<Rates> =
            rates.iter().zip(sets).map(|(rates, bytes)| rates.for_working_set(bytes)).collect();
        let mut estimate = BatchEstimate {
            tokens,
            visible_slots,
            compute: vec![0.0; rates.len()],
            copies: 0.0,
            crossings: 0,
            waiting: 0.0,
            streaming: 0.0,
            overlapped: 0.0,
        };
        // Of each layer with slots, the seconds of experts on each backend.
        let mut divided: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        let mut previous = None;
        for (number, split) in splits.splits.iter().enumerate() {
            let (Some(rates_here), Some(seconds)) =
                (rates.get(split.backend), estimate.compute.get_mut(split.backend))
            else {
                continue;
            };
            let is_host = plan.backends().get(split.backend).is_some_and(|backend| backend.memory().host);
            for node in splits.nodes_of(number) {
                let dtype = largest_leaf(graph, *node).map_or(DType::F32, |(_, dtype)| dtype);
                let share = expert_share(graph, *node, hits) * neurons::active_share(graph, *node);
                let cost = Cost::of(graph, *node);
                let cost = experts.map_or(cost, |experts| experts.cost(graph, *node, cost));
                let cost = if is_host { on_host(cost, graph, *node, experts) } else { cost };
                let mut own = share * rates_here.seconds(cost, dtype);
                if matches!(graph[*node].op(), Op::MulMat | Op::MulMatId | Op::Attention(_)) {
                    own += rates_here.launch;
                }
                *seconds += own;
                if let Some(layer) = divided_layer(graph, *node) {
                    let of_layer = divided.entry(layer).or_insert_with(|| vec![0.0; rates.len()]);
                    of_layer.get_mut(split.backend).into_iter().for_each(|seconds| *seconds += own);
                }
            }
            if let Some(before) = previous.filter(|before| *before != split.backend) {
                estimate.crossings += 1;
                // The one of both that is an accelerator has the longer wait.
                let of = |backend: usize| rates.get(backend).map_or(0.0, |rates| rates.rendezvous);
                estimate.waiting += of(split.backend.min(before));
            }
            previous = Some(split.backend);
        }
        let mut streamed = vec![0.0; rates.len()];
        for copy in &splits.copies {
            let Some(link) = rates.get(copy.from.min(copy.to)).map(|rates| rates.link.max(1.0)) else {
                continue;
            };
            let share = copy
                .selected_by
                .map_or(1.0, |_| share_of_weight(graph, TensorId::from_index(copy.tensor), hits));
            let seconds = share * copy.bytes as f64 / link;
            // Tensors that are there before the run are copied while the device computes.
            match streamed.get_mut(copy.to).filter(|_| copy.source.is_none()) {
                Some(streamed) => *streamed += seconds,
                None => estimate.copies += seconds,
            }
        }
        let exposed =
            streamed.iter().zip(&estimate.compute).map(|(copies, compute)| (copies - compute).max(0.0));
        estimate.streaming = exposed.sum();
        let overlapped =
            |of: &Vec<f64>| of.iter().sum::<f64>() - of.iter().copied().reduce(f64::max).unwrap_or(0.0);
        estimate.overlapped = divided.values().map(overlapped).sum();
        estimate
    }
}

/// The work of a node for a host, as the scheduler counts it to decide about [streaming](quadriga_runtime::WeightStreaming).
fn on_host(cost: Cost, graph: &Graph, node: NodeId, divided: Option<DividedExperts>) -> Cost {
    let Some(rows) = ExpertRows::of(graph, node) else { return cost };
    // A rank has some of the experts that its tokens choose from.
    let rows = divided.map_or(rows, |divided| divided.rows());
    Cost { operations: (cost.operations as f64 * rows.host_slowness()) as u64, ..cost }
}

/// Bytes that each backend reads in a run of a plan, with all experts: the next token uses others.
pub(super) fn working_sets(plan: &Plan, backends: usize) -> Vec<f64> {
    let (graph, splits) = (plan.graph(), plan.splits());
    let mut sets = vec![0.0; backends];
    for (number, split) in splits.splits.iter().enumerate() {
        let bytes = splits.nodes_of(number).iter().map(|node| {
            let experts = graph.inputs(*node).first().filter(|_| matches!(graph[*node].op(), Op::MulMatId));
            experts.map_or_else(|| Cost::of(graph, *node).traffic, |weight| graph[*weight].bytes() as u64)
        });
        let bytes = bytes.fold(0, u64::saturating_add);
        sets.get_mut(split.backend).into_iter().for_each(|set| *set += bytes as f64);
    }
    sets
}

/// How many look-ups of experts find theirs in a slot, of which there are some for the share `s` of a layer's experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotHits {
    /// `s`: all experts are used equally often, and what was used says nothing about what will be.
    WithoutLocality,
    /// `s · (2 − s)`: of the look-ups that would miss by chance, the share `s` hits because text stays on its topic and
    /// experts in use are moved into slots. Reports about texts vary from far less to far more: 67 % and 81 % with slots for an
    /// eighth and a quarter of 512 experts, where this is 23 % and 44 %; 90 % with 40 % of Qwen3-30B-A3B's, where this is 64 %.
    Assumed,
}

impl SlotHits {
    /// The share of look-ups that hit, of the share of experts that have slots.
    pub fn share(self, slots: f64) -> f64 {
        match self {
            SlotHits::WithoutLocality => slots,
            SlotHits::Assumed => slots * (2.0 - slots),
        }
    }
}

/// The share of a matmul's experts that it computes, where slots and host divide them.
fn expert_share(graph: &Graph, node: NodeId, hits: SlotHits) -> f64 {
    let (Op::MulMatId, Some(weight)) = (graph[node].op(), graph.inputs(node).first()) else { return 1.0 };
    share_of_weight(graph, *weight, hits)
}

/// The layer of a matmul with experts, where some of these are in slots.
fn divided_layer(graph: &Graph, node: NodeId) -> Option<usize> {
    let (Op::MulMatId, Some(weight)) = (graph[node].op(), graph.inputs(node).first()) else { return None };
    let name = graph.name(*weight);
    let is_divided = name.ends_with(SLOTS_SUFFIX) || graph.leaf(&format!("{name}{SLOTS_SUFFIX}")).is_some();
    layer_of(&name).filter(|_| is_divided)
}

/// As [`expert_share`], of the experts' matrices.
fn share_of_weight(graph: &Graph, weight: TensorId, hits: SlotHits) -> f64 {
    let name = graph.name(weight);
    let count = |name: &str| {
        let tensor = graph.leaf(name).and_then(|id| graph.get(id))?;
        tensor.shape().dims().first().map(|count| *count as f64)
    };
    let of = |slots: &str, all: &str| Some(hits.share(count(slots)? / count(all)?.max(1.0)));
    match name.strip_suffix(SLOTS_SUFFIX) {
        Some(all) => of(&name, all).unwrap_or(1.0),
        None => 1.0 - of(&format!("{name}{SLOTS_SUFFIX}"), &name).unwrap_or(0.0),
    }
}

/// The estimated speed of a placed model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SpeedEstimate {
    /// A batch of the largest size at the beginning of a context.
    pub prefill: BatchEstimate,
    /// One token after some others, with the [hits that are assumed](SlotHits::Assumed); `None` for encoders.
    pub decode: Option<BatchEstimate>,
    /// The same [without locality](SlotHits::WithoutLocality); `None` where no experts are in slots.
    pub decode_without_locality: Option<BatchEstimate>,
    /// The rates of each backend.
    pub rates: Vec<Rates>,
}

/// A prompt and an answer of usual length, by which placements are compared.
const PROMPT: f64 = 512.0;
const ANSWER: f64 = 128.0;

impl SpeedEstimate {
    /// Seconds for a prompt of 512 tokens and an answer of 128.
    pub fn request_seconds(&self) -> f64 {
        let decode = self.decode.as_ref().map_or(0.0, BatchEstimate::seconds);
        PROMPT / self.prefill.tokens_per_second() + ANSWER * decode
    }

    /// The speed if all experts are used equally often.
    pub fn without_locality(&self) -> SpeedEstimate {
        let decode = self.decode_without_locality.clone().or_else(|| self.decode.clone());
        SpeedEstimate { decode, ..self.clone() }
    }
}

/// The most KV-cache slots that an estimate of decoding covers.
const MAX_VISIBLE: usize = 4096;

/// The KV-cache slots that estimates of decoding cover: half of the context.
pub(super) fn usual_slots(options: &EngineOptions) -> usize {
    (options.context / 2).clamp(1, MAX_VISIBLE)
}

impl Placement {
    /// The rates of each backend: as given, else assumed for its kind. A simulated device stands for a GPU.
    pub fn rates_of(&self, devices: &Devices) -> Vec<Rates> {
        use quadriga_runtime::DeviceKind;
        let rates = |backend: &std::sync::Arc<dyn quadriga_runtime::Backend>| {
            let known = self.rates.iter().find(|(name, _)| name == backend.name());
            known.map_or_else(
                || match backend.device().kind {
                    DeviceKind::Simulated => Rates::assumed(DeviceKind::Gpu),
                    DeviceKind::Cpu | DeviceKind::Gpu => backend.nominal_rates(),
                },
                |(_, rates)| *rates,
            )
        };
        devices.backends().iter().map(rates).collect()
    }

    /// Estimates the speed of a placed model from the rates of its devices: bytes that are read over the bandwidth that was measured for as many, or
    /// operations over the rate of matmuls, whichever takes longer, and a launch for each matmul; copies over the link; and
    /// a rendezvous for each crossing between devices. Measured speeds are lower where kernels do not reach the rates.
    pub fn estimate(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
    ) -> Result<SpeedEstimate> {
        let visible = usual_slots(&options.clone().resolve(model)?);
        self.estimate_at(model, devices, options, placed, visible)
    }

    /// As [`Placement::estimate`], with so many slots of the KV cache in use when a token is decoded.
    pub(super) fn estimate_at(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
        visible: usize,
    ) -> Result<SpeedEstimate> {
        // Of one request, whatever there is room for.
        let options = EngineOptions { pages: 0, sequences: 1, ..options.clone().resolve(model)? };
        let rates = self.rates_of(devices);
        let plan = |tokens: usize, slots: usize| {
            Engine::plan_batch(model, &placed.scheduler, &options, tokens, slots)
        };
        let (prompt, without) = (options.batch, SlotHits::WithoutLocality);
        // A long batch uses nearly all experts.
        let prefill = BatchEstimate::of(&plan(prompt, prompt)?, prompt, prompt, &rates, without);
        if model.hyperparameters().encoder {
            return Ok(SpeedEstimate { prefill, decode: None, decode_without_locality: None, rates });
        }
        let step = plan(1, visible)?;
        let decode = |hits: SlotHits| BatchEstimate::of(&step, 1, visible, &rates, hits);
        Ok(SpeedEstimate {
            prefill,
            decode: Some(decode(SlotHits::Assumed)),
            decode_without_locality: (options.expert_slots > 0).then(|| decode(without)),
            rates,
        })
    }
}
