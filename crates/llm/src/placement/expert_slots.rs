//! The size of an expert cache: memory of accelerators that experts of the CPU move into while the model runs.

use std::str::FromStr;

use quadriga_graph::{TensorKind, layer_of};
use quadriga_runtime::{BackendBytes, RuntimeError};

use super::{Devices, GpuLayers, PlacedModel, Placement, TensorClass, residence};
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::models::GraphShape;
use crate::{Error, Result};

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

impl FromStr for ExpertCache {
    type Err = Error;

    /// Reads `auto` or a number of bytes.
    fn from_str(text: &str) -> Result<ExpertCache> {
        if text.eq_ignore_ascii_case("auto") {
            return Ok(ExpertCache::Auto);
        }
        let (name, wanted) = ("the size of the expert cache", "a number of bytes, or auto");
        text.parse().map(ExpertCache::Bytes).map_err(|_| Error::Option {
            name,
            value: text.to_owned(),
            wanted,
        })
    }
}

/// The fewest tokens whose experts the cache must have room for in every layer, to be worth its rendezvous.
const MIN_TOKENS: usize = 2;

/// Uploads that may be under way, whose staging memory is not part of a plan.
const STAGED_EXPERTS: u64 = 16;

impl Placement {
    /// Gives a placement an expert cache, where it has experts on the CPU.
    pub(super) fn with_expert_cache(
        &self,
        placed: PlacedModel,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        budgets: &[Option<u64>],
    ) -> Result<PlacedModel> {
        let one = expert_bytes(model)?;
        if one == 0 || devices.accelerators().is_empty() || self.expert_cache == ExpertCache::Bytes(0) {
            return Ok(placed);
        }
        let experts_on_cpu = |placed: &PlacedModel| {
            let cpu = devices.accelerators().len();
            let parts = residence(&placed.forecast.explain());
            parts.iter().any(|part| part.class == TensorClass::Experts && part.backend == cpu)
        };
        if !experts_on_cpu(&placed) {
            return Ok(placed);
        }
        let accelerators = devices.accelerators().len() as u64;
        let (bytes, rest, worth) = match self.expert_cache {
            ExpertCache::Bytes(bytes) => (bytes.saturating_mul(accelerators), placed.clone(), 1),
            ExpertCache::Auto if self.gpu_layers != GpuLayers::Auto => return Ok(placed),
            ExpertCache::Auto => {
                // All experts are on the CPU then, and move.
                let rest = Placement { cpu_expert_layers: usize::MAX, ..self.clone() };
                let plan = rest.search(model, devices, options)?.best(budgets);
                let Some(rest) = fitting(plan)? else { return Ok(placed) };
                let free = |(bytes, budget): (BackendBytes, &Option<u64>)| {
                    let left = budget.unwrap_or(0).saturating_sub(bytes.total());
                    left.saturating_sub(STAGED_EXPERTS * one)
                };
                // Slots are spread evenly, so that the fullest accelerator decides.
                let least = rest.forecast.bytes().into_iter().zip(budgets).map(free).min();
                let experts = model.hyperparameters().layers.iter().filter_map(|layer| layer.experts);
                let worth = experts.map(|experts| (MIN_TOKENS * experts.used).min(experts.count)).sum();
                (least.unwrap_or(0).saturating_mul(accelerators), rest, worth)
            }
        };
        // A backend may need a little more for a slot than the file: packed rows are aligned.
        let mut slots = usize::try_from(bytes / one).unwrap_or(usize::MAX);
        while slots >= worth {
            let checked = self.check_slots(rest.clone(), model, options, slots);
            match fitting(checked)? {
                Some(cached) => return Ok(cached),
                None => slots -= (slots / 32).max(1),
            }
        }
        Ok(placed)
    }

    /// The placement with so many slots; an error if decoding exceeds a budget then.
    fn check_slots(
        &self,
        placed: PlacedModel,
        model: &Model,
        options: &EngineOptions,
        slots: usize,
    ) -> Result<PlacedModel> {
        let options = EngineOptions { expert_slots: slots, ..options.clone() }.resolve(model)?;
        let all = options.context * options.sequences;
        Engine::plan_batch(model, &placed.scheduler, &options, 1, all)?;
        Ok(PlacedModel { expert_slots: options.expert_slots, ..placed })
    }
}

/// A plan, or `None` if it exceeds a budget.
fn fitting(plan: Result<PlacedModel>) -> Result<Option<PlacedModel>> {
    match plan {
        Ok(placed) => Ok(Some(placed)),
        Err(Error::Runtime(RuntimeError::OverBudget(_))) => Ok(None),
        Err(error) => Err(error),
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
