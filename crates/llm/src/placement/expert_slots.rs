//! The size of an expert cache: memory of accelerators that experts of the CPU move into while the model runs.

use quadriga_graph::{TensorKind, layer_of};
use quadriga_runtime::{BackendBytes, DEFAULT_UPLOAD_BYTES, Plan};

use super::estimate::{BatchEstimate, usual_slots};
use super::search::fitting;
use super::{Devices, GpuLayers, PlacedModel, Placement, TensorClass, residence};
use crate::Result;
use crate::engine::{Engine, EngineOptions, MAX_OBSERVED_TOKENS, slot_bytes};
use crate::model::Model;
use crate::models::{GraphShape, LayerSet};

/// The memory of accelerators for experts whose tensors the CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ExpertCache {
    /// With [`GpuLayers::Auto`], whatever is [estimated](Placement::estimate) to be the fastest: slots for experts in all memory
    /// that the rest of the model leaves, the experts of whole layers in it, or some of both. Otherwise none.
    #[default]
    Auto,
    /// So many bytes on each accelerator.
    Bytes(u64),
}

/// The fewest tokens whose experts the cache must have room for in every layer, to be worth its rendezvous.
const MIN_TOKENS: usize = 2;

/// The share of a link's time that uploads may take, 1 of so many: they read memory that the CPU computes from.
const LINK_SHARE: f64 = 8.0;

/// The share of an accelerator's memory that experts on their way may take, 1 of so many.
const MEMORY_SHARE: u64 = 16;

/// The most bytes that are uploaded in a step, whatever the link.
const MAX_UPLOAD_BYTES: u64 = 64 << 20;

/// What alignment may add to the tensors of an expert in staging memory.
const STAGING_SLACK: u64 = 4 << 10;

impl Placement {
    /// Plans a model with `plan`, and gives it an expert cache where experts are on the CPU.
    pub(super) fn with_expert_cache(
        &self,
        model: &Model,
        devices: &Devices,
        plan: impl Fn(&Placement) -> Result<(PlacedModel, EngineOptions)>,
    ) -> Result<(PlacedModel, EngineOptions)> {
        let (placed, options) = plan(self)?;
        let (one, accelerators) = (expert_bytes(model)?, devices.accelerators().len());
        let is_auto = self.gpu_layers == GpuLayers::Auto;
        let may_have_slots = match self.expert_cache {
            ExpertCache::Auto => is_auto,
            ExpertCache::Bytes(bytes) => bytes > 0,
        };
        let one_slot = EngineOptions { expert_slots: 1, ..options.clone() };
        let supports = || -> Result<bool> { Ok(one_slot.resolve(model)?.expert_slots > 0) };
        if one == 0
            || accelerators == 0
            || !may_have_slots
            || ExpertLayers::of(&placed, accelerators).on_cpu.is_empty()
            || !supports()?
        {
            return Ok((placed, options));
        }
        let upload_bytes = self.upload_bytes(model, devices, (&placed, &options), one)?;
        let staging = upload_bytes.max(one + STAGING_SLACK);
        let slots = SlotSearch { placement: self, model, devices, one, upload_bytes, staging };
        match self.expert_cache {
            ExpertCache::Auto => slots.choose((placed, options), plan),
            ExpertCache::Bytes(bytes) => {
                let (rest, with) = if is_auto {
                    // What the cache is given is not for other parts.
                    let less = |budget: u64| budget.saturating_sub(bytes).saturating_sub(slots.staging);
                    let budgets = self.budgets(devices).into_iter();
                    let device_budgets = budgets.map(|budget| budget.map(less)).collect();
                    let less = Placement { device_budgets, ..self.clone() };
                    let Some(planned) = fitting(plan(&less))? else { return Ok((placed, options)) };
                    planned
                } else {
                    (placed.clone(), options.clone())
                };
                Ok(slots.fill(rest, &with, &vec![bytes; accelerators], 1)?.unwrap_or((placed, options)))
            }
        }
    }
}

impl Placement {
    /// The bytes of experts to upload in a step: what the slowest link carries in a part of the time of a step without a cache, but
    /// at least an expert.
    fn upload_bytes(
        &self,
        model: &Model,
        devices: &Devices,
        (placed, options): (&PlacedModel, &EngineOptions),
        one: u64,
    ) -> Result<u64> {
        let accelerators = devices.accelerators().len();
        let visible = usual_slots(&options.clone().resolve(model)?);
        let estimate = self.estimate_at(model, devices, options, placed, visible)?;
        let seconds = estimate.decode.as_ref().map(BatchEstimate::seconds);
        let link = self.rates_of(devices).iter().take(accelerators).map(|rates| rates.link).reduce(f64::min);
        let room = match self.expert_cache {
            ExpertCache::Auto => u64::MAX,
            ExpertCache::Bytes(bytes) => bytes,
        };
        let room = self.budgets(devices).into_iter().flatten().fold(room, u64::min) / MEMORY_SHARE;
        Ok(bytes_of_step(link, seconds).min(room).max(one))
    }
}

/// The bytes that a link may carry beside the work of a step of so many seconds. What is not known, or no number, is taken for
/// [`DEFAULT_UPLOAD_BYTES`].
fn bytes_of_step(link: Option<f64>, seconds: Option<f64>) -> u64 {
    let bytes = link.zip(seconds).map(|(link, seconds)| link * seconds / LINK_SHARE);
    match bytes.filter(|bytes| bytes.is_finite() && *bytes > 0.0) {
        Some(bytes) => (bytes as u64).min(MAX_UPLOAD_BYTES),
        None => DEFAULT_UPLOAD_BYTES,
    }
}

/// The layers of a plan by the place of their experts.
pub(super) struct ExpertLayers {
    /// Those of which the CPU has all experts' tensors.
    pub(super) on_cpu: LayerSet,
    /// Those of which accelerators have some or all.
    pub(super) resident: LayerSet,
}

impl ExpertLayers {
    /// The layers of a plan without slots.
    pub(super) fn of(placed: &PlacedModel, accelerators: usize) -> ExpertLayers {
        let parts = residence(&placed.forecast.explain());
        let experts = |of_cpu: bool| {
            let parts = parts.iter().filter(|part| part.class == TensorClass::Experts);
            let parts = parts.filter(move |part| (part.backend == accelerators) == of_cpu);
            parts.flat_map(|part| part.layers.iter().copied()).collect::<LayerSet>()
        };
        let resident = experts(false);
        let on_cpu = experts(true).iter().filter(|layer| !resident.contains(*layer)).collect();
        ExpertLayers { on_cpu, resident }
    }
}

/// The search for a number of slots.
pub(super) struct SlotSearch<'a> {
    pub(super) placement: &'a Placement,
    pub(super) model: &'a Model,
    pub(super) devices: &'a Devices,
    /// Bytes of an expert.
    pub(super) one: u64,
    /// Bytes of the experts that are uploaded in a step.
    pub(super) upload_bytes: u64,
    /// Memory for those that are on their way.
    pub(super) staging: u64,
}

impl SlotSearch<'_> {
    /// The fewest slots that an automatic cache has for the layers that are not `resident`.
    pub(super) fn least(&self, resident: &LayerSet) -> usize {
        let experts = self.with_slots(resident);
        experts.map(|experts| (MIN_TOKENS * experts.used).min(experts.count)).sum()
    }

    /// The experts of the layers that are not `resident`.
    fn with_slots(&self, resident: &LayerSet) -> impl Iterator<Item = crate::hyperparameters::Experts> {
        let layers = self.model.hyperparameters().layers.iter().enumerate();
        layers.filter(|(layer, _)| !resident.contains(*layer)).filter_map(|(_, layer)| layer.experts)
    }

    /// The bytes that a plan leaves on each accelerator, beside uploads.
    pub(super) fn left(&self, rest: &PlacedModel) -> Vec<u64> {
        let free = |(bytes, budget): (BackendBytes, Option<u64>)| {
            budget.unwrap_or(0).saturating_sub(bytes.total()).saturating_sub(self.staging)
        };
        let all = rest.forecast.bytes().into_iter().zip(self.placement.budgets(self.devices));
        all.map(free).collect()
    }

    /// The ways to divide layers among accelerators that are worth comparing. Slots are spread evenly over layers: where one
    /// accelerator has more memory than others, it has more slots if it has more layers.
    pub(super) fn splits(&self) -> Vec<Vec<f32>> {
        let budgets = self.placement.budgets(self.devices);
        let mut splits = vec![self.placement.tensor_split.clone()];
        let is_uneven = budgets.windows(2).any(|pair| pair.first() != pair.last());
        if self.placement.tensor_split.is_empty() && is_uneven {
            splits.push(budgets.iter().map(|budget| budget.unwrap_or(0) as f32).collect());
        }
        splits.retain(|split| split.is_empty() || split.iter().any(|share| *share > 0.0));
        splits
    }

    /// A plan with as many slots as there is room for in `bytes` of each accelerator, and within budgets; `None` if those
    /// are fewer than `least`.
    pub(super) fn fill(
        &self,
        mut rest: PlacedModel,
        with: &EngineOptions,
        bytes: &[u64],
        least: usize,
    ) -> Result<Option<(PlacedModel, EngineOptions)>> {
        let accelerators = self.devices.accelerators().len();
        let budgets = match self.placement.gpu_layers {
            GpuLayers::Auto => self.placement.budgets(self.devices),
            _ => self.placement.given_budgets(self.devices),
        };
        // Uploads need memory that no plan has.
        for (accelerator, budget) in budgets.iter().enumerate() {
            if let Some(budget) = budget {
                let planned = budget.saturating_sub(self.staging);
                rest.scheduler = rest.scheduler.budget(accelerator, planned);
            }
        }
        let resident = ExpertLayers::of(&rest, accelerators).resident;
        let all: usize = self.with_slots(&resident).map(|experts| experts.count).sum();
        // A backend may need a little more for a slot than the file: packed rows are aligned.
        let wanted = bytes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)) / self.one;
        let mut slots = usize::try_from(wanted).unwrap_or(usize::MAX).min(all);
        while slots >= least.max(1) {
            let upload_bytes = self.upload_bytes;
            let with = EngineOptions {
                expert_slots: slots,
                resident_experts: resident,
                upload_bytes,
                ..with.clone()
            };
            if let Some((forecast, expert_slot_bytes)) = self.check(&rest, &with, bytes)? {
                let staged = |own: &u64| if *own > 0 { self.staging } else { 0 };
                let placed = PlacedModel {
                    forecast,
                    expert_slots: slots,
                    resident_experts: resident,
                    upload_bytes,
                    expert_staging_bytes: expert_slot_bytes.iter().map(staged).collect(),
                    expert_slot_bytes,
                    ..rest
                };
                return Ok(Some((placed, with)));
            }
            slots -= (slots / 32).max(1);
        }
        Ok(None)
    }

    /// The plan of the largest batch beside slots, and their bytes on each backend; `None` if a batch exceeds a budget then, weights
    /// are no longer streamed, or the slots exceed `bytes` on an accelerator.
    fn check(
        &self,
        placed: &PlacedModel,
        options: &EngineOptions,
        bytes: &[u64],
    ) -> Result<Option<(Plan, Vec<u64>)>> {
        let resolved = options.clone().resolve(self.model)?;
        let all = resolved.context * resolved.sequences;
        let mut own = Vec::new();
        for tokens in [1, MAX_OBSERVED_TOKENS.min(resolved.batch)] {
            let plan = Engine::plan_batch(self.model, &placed.scheduler, &resolved, tokens, all);
            let Some(plan) = fitting(plan)? else { return Ok(None) };
            own = slot_bytes(&plan);
            // Some bytes of alignment do not count.
            if own.iter().zip(bytes).any(|(own, bytes)| *own > bytes.saturating_add(bytes / 64)) {
                return Ok(None);
            }
        }
        let forecast = fitting(Engine::forecast(self.model, &placed.scheduler, options.clone()))?;
        // Slots must leave the memory in which weights are streamed for prompts.
        let streams = placed.forecast.streams_weights();
        let forecast = forecast.filter(|forecast| forecast.streams_weights() || !streams);
        Ok(forecast.map(|forecast| (forecast, own)))
    }
}

/// The bytes of one expert of a layer, as the file has them; of the largest, if layers differ. 0 without experts.
pub fn expert_bytes(model: &Model) -> Result<u64> {
    let layers = &model.hyperparameters().layers;
    if layers.iter().all(|layer| layer.experts.is_none()) {
        return Ok(0);
    }
    let graph = model.graph(GraphShape::new(1, 1))?;
    let mut bytes = vec![0u64; layers.len()];
    for id in graph.of_kind(TensorKind::Weight) {
        let (name, tensor) = (graph.name(id), graph.get(id));
        let is_expert = TensorClass::of_weight(&name) == TensorClass::Experts;
        let layer = layer_of(&name).filter(|_| is_expert).and_then(|layer| bytes.get_mut(layer));
        if let (Some(layer), Some(tensor)) = (layer, tensor) {
            let experts = tensor.shape().dims().first().copied().unwrap_or(1).max(1);
            *layer += (tensor.bytes() / experts) as u64;
        }
    }
    Ok(bytes.into_iter().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_step_follow_from_the_link_and_the_time_of_the_step() {
        // An eighth of what 16 GB/s carry in 10 ms.
        assert_eq!(bytes_of_step(Some(16e9), Some(0.010)), 20_000_000);
        assert_eq!(bytes_of_step(Some(16e9), Some(0.001)), 2_000_000);
        assert_eq!(bytes_of_step(Some(4e9), Some(0.001)), 500_000);
        assert_eq!(bytes_of_step(Some(50e9), Some(1.0)), MAX_UPLOAD_BYTES);
        for (link, seconds) in
            [(None, Some(1.0)), (Some(16e9), None), (Some(f64::NAN), Some(1.0)), (Some(16e9), Some(0.0))]
        {
            assert_eq!(bytes_of_step(link, seconds), DEFAULT_UPLOAD_BYTES);
        }
    }
}
