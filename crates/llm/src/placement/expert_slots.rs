//! The size of an expert cache: memory of accelerators that experts of the CPU move into while the model runs.

use quadriga_graph::{TensorKind, layer_of};
use quadriga_runtime::{BackendBytes, MAX_UPLOADS, Plan};

use super::search::fitting;
use super::{ClassResidence, Devices, GpuLayers, PlacedModel, Placement, TensorClass, residence};
use crate::Result;
use crate::engine::{Engine, EngineOptions, MAX_OBSERVED_TOKENS, slot_bytes};
use crate::model::Model;
use crate::models::GraphShape;

/// The memory of accelerators for experts whose tensors the CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ExpertCache {
    /// With [`GpuLayers::Auto`], all memory that the rest of the model leaves, if that is enough for the experts of some
    /// tokens; otherwise none.
    #[default]
    Auto,
    /// So many bytes on each accelerator.
    Bytes(u64),
}

/// The fewest tokens whose experts the cache must have room for in every layer, to be worth its rendezvous.
const MIN_TOKENS: usize = 2;

/// Uploads that may be in flight, whose staging memory is not part of a plan.
const STAGED_EXPERTS: u64 = MAX_UPLOADS as u64;

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
        let on_cpu =
            |part: &ClassResidence| part.class == TensorClass::Experts && part.backend == accelerators;
        let has_experts = residence(&placed.forecast.explain()).iter().any(on_cpu);
        if one == 0 || accelerators == 0 || !has_experts || self.expert_cache == ExpertCache::Bytes(0) {
            return Ok((placed, options));
        }
        let is_auto = self.gpu_layers == GpuLayers::Auto;
        // All experts are on the CPU then, and move.
        let rest = Placement { cpu_expert_layers: usize::MAX, ..self.clone() };
        let budgets = self.budgets(devices);
        let (rest, with, bytes) = match self.expert_cache {
            ExpertCache::Auto if !is_auto => return Ok((placed, options)),
            ExpertCache::Auto => {
                let Some((rest, with)) = fitting(plan(&rest))? else { return Ok((placed, options)) };
                let free = |(bytes, budget): (BackendBytes, &Option<u64>)| {
                    let left = budget.unwrap_or(0).saturating_sub(bytes.total());
                    left.saturating_sub(STAGED_EXPERTS * one)
                };
                // Slots are spread evenly, so that the fullest accelerator decides.
                let least = rest.forecast.bytes().into_iter().zip(&budgets).map(free).min();
                (rest, with, least.unwrap_or(0))
            }
            ExpertCache::Bytes(bytes) if is_auto => {
                // What the cache is given is not for other parts.
                let least = budgets.iter().flatten().min().map(|budget| budget.saturating_sub(bytes));
                let less = Placement { budget: least.or(self.budget), ..rest };
                let Some((mut rest, with)) = fitting(plan(&less))? else { return Ok((placed, options)) };
                for (accelerator, budget) in budgets.iter().enumerate() {
                    if let Some(bytes) = budget {
                        rest.scheduler = rest.scheduler.budget(accelerator, *bytes);
                    }
                }
                (rest, with, bytes)
            }
            ExpertCache::Bytes(bytes) => (placed.clone(), options.clone(), bytes),
        };
        let on_accelerator =
            |part: &ClassResidence| part.class == TensorClass::Experts && part.backend < accelerators;
        if residence(&rest.forecast.explain()).iter().any(on_accelerator) {
            return Ok((placed, options));
        }
        let experts = || model.hyperparameters().layers.iter().filter_map(|layer| layer.experts);
        let all: usize = experts().map(|experts| experts.count).sum();
        let worth = match self.expert_cache {
            ExpertCache::Auto => experts().map(|e| (MIN_TOKENS * e.used).min(e.count)).sum(),
            ExpertCache::Bytes(_) => 1,
        };
        // A backend may need a little more for a slot than the file: packed rows are aligned.
        let wanted = bytes.saturating_mul(accelerators as u64) / one;
        let mut slots = usize::try_from(wanted).unwrap_or(usize::MAX).min(all);
        while slots >= worth {
            let with = EngineOptions { expert_slots: slots, ..with.clone() };
            match self.check_slots(&rest, model, &with, bytes)? {
                Some((forecast, expert_slot_bytes)) => {
                    let placed = PlacedModel { forecast, expert_slots: slots, expert_slot_bytes, ..rest };
                    return Ok((placed, with));
                }
                None => slots -= (slots / 32).max(1),
            }
        }
        Ok((placed, options))
    }

    /// The plan of the largest batch beside slots, and their bytes on each backend; `None` if a batch exceeds a budget then, or the slots `bytes` on an
    /// accelerator.
    fn check_slots(
        &self,
        placed: &PlacedModel,
        model: &Model,
        options: &EngineOptions,
        bytes: u64,
    ) -> Result<Option<(Plan, Vec<u64>)>> {
        let resolved = options.clone().resolve(model)?;
        let all = resolved.context * resolved.sequences;
        let mut own = Vec::new();
        for tokens in [1, MAX_OBSERVED_TOKENS.min(resolved.batch)] {
            let plan = Engine::plan_batch(model, &placed.scheduler, &resolved, tokens, all);
            let Some(plan) = fitting(plan)? else { return Ok(None) };
            own = slot_bytes(&plan);
            // Some bytes of alignment do not count.
            if own.iter().any(|own| *own > bytes.saturating_add(bytes / 64)) {
                return Ok(None);
            }
        }
        let forecast = fitting(Engine::forecast(model, &placed.scheduler, options.clone()))?;
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
