//! Estimates of a plan's time, from the rates of its devices.

use quadriga_graph::{DType, Graph, NodeId, Op, TensorId};
use quadriga_runtime::{Cost, Plan, Rates};
use serde::Serialize;

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
}

impl BatchEstimate {
    /// The time of the batch in seconds: backends compute one after another.
    pub fn seconds(&self) -> f64 {
        self.compute.iter().sum::<f64>() + self.copies + self.waiting + self.streaming
    }

    /// Tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds().max(1e-12)
    }

    /// The estimate for a plan of a batch of `tokens`, with the rates of its backends.
    pub fn of(plan: &Plan, tokens: usize, visible_slots: usize, rates: &[Rates]) -> BatchEstimate {
        let (graph, splits) = (plan.graph(), plan.splits());
        let mut estimate = BatchEstimate {
            tokens,
            visible_slots,
            compute: vec![0.0; rates.len()],
            copies: 0.0,
            crossings: 0,
            waiting: 0.0,
            streaming: 0.0,
        };
        let mut previous = None;
        for (number, split) in splits.splits.iter().enumerate() {
            let (Some(rates_here), Some(seconds)) =
                (rates.get(split.backend), estimate.compute.get_mut(split.backend))
            else {
                continue;
            };
            for node in splits.nodes_of(number) {
                let dtype = largest_leaf(graph, *node).map_or(DType::F32, |(_, dtype)| dtype);
                let share = expert_share(graph, *node) * neurons::active_share(graph, *node);
                *seconds += share * rates_here.seconds(Cost::of(graph, *node), dtype);
                if matches!(graph[*node].op(), Op::MulMat | Op::MulMatId | Op::Attention(_)) {
                    *seconds += rates_here.launch;
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
            let share =
                copy.selected_by.map_or(1.0, |_| share_of_weight(graph, TensorId::from_index(copy.tensor)));
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
        estimate
    }
}

/// The share of a matmul's experts that it computes, where slots and host divide them: as if all were used equally often.
/// An expert cache that follows the text serves more.
fn expert_share(graph: &Graph, node: NodeId) -> f64 {
    let (Op::MulMatId, Some(weight)) = (graph[node].op(), graph.inputs(node).first()) else { return 1.0 };
    share_of_weight(graph, *weight)
}

/// As [`expert_share`], of the experts' matrices.
fn share_of_weight(graph: &Graph, weight: TensorId) -> f64 {
    let name = graph.name(weight);
    let count = |name: &str| {
        let tensor = graph.leaf(name).and_then(|id| graph.get(id))?;
        tensor.shape().dims().first().map(|count| *count as f64)
    };
    let of = |slots: &str, all: &str| Some(count(slots)? / count(all)?.max(1.0));
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
    /// One token after some others; `None` for encoders.
    pub decode: Option<BatchEstimate>,
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

    /// Estimates the speed of a placed model from the rates of its devices: bytes that are read over memory bandwidth, or
    /// operations over the rate of matmuls, whichever takes longer, and a launch for each matmul; copies over the link; and
    /// a rendezvous for each crossing between devices. Measured speeds are lower where kernels do not reach the rates.
    pub fn estimate(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
    ) -> Result<SpeedEstimate> {
        let options = options.clone().resolve(model)?;
        let rates = self.rates_of(devices);
        let batch = |tokens: usize, slots: usize| -> Result<BatchEstimate> {
            let plan = Engine::plan_batch(model, &placed.scheduler, &options, tokens, slots)?;
            Ok(BatchEstimate::of(&plan, tokens, slots, &rates))
        };
        let prefill = batch(options.batch, options.batch)?;
        let encoder = model.hyperparameters().encoder;
        let decode = if encoder { None } else { Some(batch(1, usual_slots(&options))?) };
        Ok(SpeedEstimate { prefill, decode, rates })
    }
}
