//! The rows of neurons that accelerators hold beside attention and gates: as many as their memory has room for.

use quadriga_graph::{Op, TensorKind};

use super::search::fitting;
use super::{Devices, GpuLayers, PlacedModel, Placement};
use crate::engine::{Engine, EngineOptions, STAGED_ROWS};
use crate::model::Model;
use crate::models::{GraphShape, NeuronMode};
use crate::{Result, models::Neurons};

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
        let [bytes, neurons] = row_bytes(model, options.neurons)?;
        let (accelerators, is_auto) = (devices.accelerators().len(), self.gpu_layers == GpuLayers::Auto);
        let is_divisible = options.neurons.mode == NeuronMode::Exact && options.neurons.slots == 0;
        if bytes == 0 || accelerators == 0 || !is_auto || !is_divisible || placed.units.is_empty() {
            return Ok((placed, options));
        }
        let apart = Placement { neurons_on_cpu: true, ..self.clone() };
        let Some((rest, with)) = fitting(plan(&apart))? else { return Ok((placed, options)) };
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
        Ok((placed, options))
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
