//! The rows of neurons that accelerators hold beside attention and gates: as many as their memory has room for.

use quadriga_graph::{Op, TensorKind};

use super::search::fitting;
use super::{Devices, GpuLayers, PlacedModel, Placement};
use crate::engine::{Engine, EngineOptions, STAGED_ROWS};
use crate::model::Model;
use crate::models::{GraphShape, NEURON_SLOTS, NeuronMode};
use crate::{Result, models::Neurons};

/// Why there are no slots, though the model could have some.
const NO_ROOM: &str = "the GPU has no room for rows of neurons beside attention and gates";

/// The least share of all neurons that slots must have room for, to be worth their kernels: in 1 of so many.
const WORTH: usize = 64;

impl Placement {
    /// Plans a model with `plan`, and gives accelerators the rows of some neurons where the CPU has those of all.
    pub(super) fn with_neuron_slots(
        &self,
        model: &Model,
        devices: &Devices,
        plan: impl Fn(&Placement) -> Result<(PlacedModel, EngineOptions)>,
    ) -> Result<(PlacedModel, EngineOptions)> {
        let (placed, options) = plan(self)?;
        if !self.hot_neurons {
            return Ok((placed, options));
        }
        let undivided = |placed, reason| PlacedModel { neurons_not_divided: Some(reason), ..placed };
        if let Some(reason) = self.not_divided(model, devices, &options, &placed)? {
            return Ok((undivided(placed, reason), options));
        }
        let [bytes, neurons] = row_bytes(model, options.neurons)?;
        let accelerators = devices.accelerators().len();
        let apart = Placement { neurons_on_cpu: true, ..self.clone() };
        let Some((rest, with)) = fitting(plan(&apart))? else {
            return Ok((undivided(placed, NO_ROOM), options));
        };
        let free = rest.forecast.bytes().into_iter().zip(self.budgets(devices)).map(|(used, budget)| {
            let left = budget.unwrap_or(0).saturating_sub(used.total());
            left.saturating_sub(STAGED_ROWS * bytes)
        });
        // Slots are spread evenly, so that the fullest accelerator decides.
        let wanted = free.min().unwrap_or(0).saturating_mul(accelerators as u64) / bytes;
        let mut slots = usize::try_from(wanted).unwrap_or(usize::MAX).min(neurons as usize);
        while slots * WORTH >= neurons as usize && slots > 0 {
            let with = EngineOptions { neurons: Neurons { slots, ..with.neurons }, ..with.clone() };
            let resolved = with.clone().resolve(model)?;
            let all = resolved.context * resolved.sequences;
            let fits = |tokens: usize| -> Result<bool> {
                Ok(fitting(Engine::plan_batch(model, &rest.scheduler, &resolved, tokens, all))?.is_some())
            };
            if fits(1)?
                && let Some(forecast) = fitting(Engine::forecast(model, &rest.scheduler, with.clone()))?
            {
                return Ok((PlacedModel { forecast, neuron_slots: slots, ..rest }, with));
            }
            slots -= (slots / 16).max(1);
        }
        Ok((undivided(placed, NO_ROOM), options))
    }

    /// Why accelerators get no rows of neurons; `None` if they may.
    fn not_divided(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
    ) -> Result<Option<&'static str>> {
        // One slot for each layer shows whether the model's graphs and options have any.
        let slots = model.hyperparameters().layers.len();
        let with = EngineOptions { neurons: Neurons { slots, ..options.neurons }, ..options.clone() };
        let divides = || -> Result<bool> {
            let neurons = with.clone().resolve(model)?.neurons;
            let graph = model.graph(GraphShape { neurons, ..GraphShape::new(1, 1) })?;
            Ok(graph.leaf(NEURON_SLOTS).is_some() && row_bytes(model, options.neurons)?[0] > 0)
        };
        Ok(Some(match () {
            () if devices.accelerators().is_empty() => "no GPU is used (see `quadriga devices`)",
            () if options.neurons.mode != NeuronMode::Exact => "neurons are divided in exact mode only",
            () if options.pages > 0 => "neurons are not divided where requests share a KV cache in pages",
            () if self.gpu_layers != GpuLayers::Auto => "the number of layers on the GPU is given",
            () if !divides()? => {
                "only networks with rectified gates, ffn_down_t, and neither bias nor adapter of ffn_up are divided"
            }
            () if placed.units.is_empty() => "the whole model fits the GPU",
            () if options.neurons.slots > 0 => "the number of slots is given",
            () => return Ok(None),
        }))
    }
}

/// The bytes of a neuron's rows that are read only if it is active, and the number of all neurons; 0 where no row is skipped.
fn row_bytes(model: &Model, neurons: Neurons) -> Result<[u64; 2]> {
    let graph = model.graph(GraphShape { neurons, ..GraphShape::new(1, 1) })?;
    let (mut bytes, mut rows, mut matrices) = (0u64, 0u64, 0u64);
    for node in graph.node_ids() {
        let weight = graph.inputs(node).first().and_then(|id| graph.get(*id));
        let Some(weight) = weight.filter(|weight| weight.kind() == TensorKind::Weight) else { continue };
        match graph[node].op() {
            Op::MulMatSparse { .. } => matrices += 1,
            Op::AxpySparse => rows += weight.shape().rows() as u64,
            _ => continue,
        }
        bytes += weight.bytes() as u64;
    }
    // Only networks of which both matrices have a row for each neuron are divided.
    Ok(if rows == 0 || matrices == 0 { [0; 2] } else { [bytes.div_ceil(rows), rows] })
}
