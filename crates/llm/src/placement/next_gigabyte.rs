//! What a model would gain from more memory on an accelerator.

use serde::Serialize;

use super::parts::ModelPart;
use super::{Devices, GpuLayers, PlacedModel, Placement};
use crate::Result;
use crate::engine::EngineOptions;
use crate::model::Model;

/// A gigabyte more of an accelerator's memory, and what it would change.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct NextGigabyte {
    /// The accelerator for which it helps most.
    pub device: String,
    /// The parts that would move to accelerators.
    pub moves: Vec<ModelPart>,
    /// Tokens per second of decoding, as estimated, without and with it.
    pub decode: [f64; 2],
}

/// Bytes of the gigabyte.
const GIGABYTE: u64 = 1 << 30;

impl Placement {
    /// What one more gigabyte of memory would change: on the accelerator for which it helps most. `None` if the model is on accelerators
    /// as a whole, or if the number of layers is given.
    pub fn next_gigabyte(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
    ) -> Result<Option<NextGigabyte>> {
        let speed = |placed: &PlacedModel| -> Result<f64> {
            let estimate = self.estimate(model, devices, options, placed)?;
            Ok(estimate.decode.as_ref().map_or(0.0, |decode| decode.tokens_per_second()))
        };
        if self.gpu_layers != GpuLayers::Auto || placed.units.is_empty() {
            return Ok(None);
        }
        let before = speed(placed)?;
        let search = self.search(model, devices, options)?;
        let budgets = self.budgets(devices);
        let mut best: Option<NextGigabyte> = None;
        for (number, backend) in devices.accelerators().iter().enumerate() {
            let more = |(index, budget): (usize, &Option<u64>)| {
                budget.map(|bytes| if index == number { bytes.saturating_add(GIGABYTE) } else { bytes })
            };
            let budgets: Vec<Option<u64>> = budgets.iter().enumerate().map(more).collect();
            let larger = search.best(&budgets)?;
            let after = speed(&larger)?;
            if best.as_ref().is_none_or(|best| after > best.decode[1]) {
                let is_new = |part: &ModelPart| {
                    let placed_there = |placed: &PlacedModel| {
                        placed.units.iter().any(|unit| unit.part == *part && unit.placed)
                    };
                    !placed_there(placed) && (larger.units.is_empty() || placed_there(&larger))
                };
                let moves = placed.units.iter().map(|unit| unit.part).filter(is_new).collect();
                let device = backend.name().to_owned();
                best = Some(NextGigabyte { device, moves, decode: [before, after] });
            }
        }
        Ok(best)
    }
}
