//! What a model would gain from more memory on an accelerator.

use serde::Serialize;

use super::expert_slots::ExpertLayers;
use super::parts::ModelPart;
use super::{Devices, GpuLayers, PlacedModel, Placement, PlacementUnit};
use crate::Result;
use crate::engine::EngineOptions;
use crate::model::Model;
use crate::models::LayerSet;

/// A gigabyte more of an accelerator's memory, and what it would change.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct NextGigabyte {
    /// The accelerator for which it helps most.
    pub device: String,
    /// With an expert cache: how many more experts would be on accelerators, in slots or for good.
    pub expert_slots: usize,
    /// The parts that would move to accelerators. Like parts of other layers may trade places with them, to spread evenly.
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
        if self.gpu_layers != GpuLayers::Auto {
            return Ok(None);
        }
        // Where experts can be in slots, too, more memory may change what is chosen.
        if placed.expert_slots > 0 || !placed.expert_options.is_empty() {
            return self.next_experts(model, devices, options, placed);
        }
        if placed.units.is_empty() {
            return Ok(None);
        }
        let before = speed(placed)?;
        let search = self.search(model, devices, options)?;
        let budgets = self.budgets(devices);
        let mut best: Option<NextGigabyte> = None;
        for (number, backend) in devices.accelerators().iter().enumerate() {
            let larger = search.best(&with_a_gigabyte(&budgets, number))?;
            let after = speed(&larger)?;
            if best.as_ref().is_none_or(|best| after > best.decode[1]) {
                let moves = moves(&placed.units, &larger.units);
                let device = backend.name().to_owned();
                best = Some(NextGigabyte { device, expert_slots: 0, moves, decode: [before, after] });
            }
        }
        Ok(best)
    }

    /// As [`Placement::next_gigabyte`], for a model whose experts may move.
    fn next_experts(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
        placed: &PlacedModel,
    ) -> Result<Option<NextGigabyte>> {
        let none = EngineOptions { expert_slots: 0, resident_experts: LayerSet::EMPTY, ..options.clone() };
        let speed = |placed: &PlacedModel| -> Result<f64> {
            let (expert_slots, resident_experts) = (placed.expert_slots, placed.resident_experts);
            let options = EngineOptions { expert_slots, resident_experts, ..options.clone() };
            let estimate = self.estimate(model, devices, &options, placed)?;
            Ok(estimate.decode.as_ref().map_or(0.0, |decode| decode.tokens_per_second()))
        };
        let experts = |placed: &PlacedModel| -> usize {
            let resident = match placed.expert_slots {
                0 => ExpertLayers::of(placed, devices.accelerators().len()).resident,
                _ => placed.resident_experts,
            };
            let layers =
                resident.iter().filter_map(|layer| model.hyperparameters().layers.get(layer)?.experts);
            placed.expert_slots + layers.map(|experts| experts.count).sum::<usize>()
        };
        let (before, budgets) = (speed(placed)?, self.budgets(devices));
        let mut best: Option<NextGigabyte> = None;
        for (number, backend) in devices.accelerators().iter().enumerate() {
            let device_budgets = with_a_gigabyte(&budgets, number);
            let larger = Placement { device_budgets, ..self.clone() };
            let larger = larger.plan(model, devices, &none)?;
            let after = speed(&larger)?;
            if best.as_ref().is_none_or(|best| after > best.decode[1]) {
                best = Some(NextGigabyte {
                    device: backend.name().to_owned(),
                    expert_slots: experts(&larger).saturating_sub(experts(placed)),
                    moves: Vec::new(),
                    decode: [before, after],
                });
            }
        }
        Ok(best)
    }
}

/// Budgets of accelerators, of which one has a gigabyte more.
fn with_a_gigabyte(budgets: &[Option<u64>], number: usize) -> Vec<Option<u64>> {
    let more = |(index, budget): (usize, &Option<u64>)| {
        budget.map(|bytes| if index == number { bytes.saturating_add(GIGABYTE) } else { bytes })
    };
    budgets.iter().enumerate().map(more).collect()
}

/// The parts on accelerators among `after` that are not there among `before`, as many of a kind as there are more; all that are left
/// if `after` is empty, because the model fits as a whole.
fn moves(before: &[PlacementUnit], after: &[PlacementUnit]) -> Vec<ModelPart> {
    let is_placed = |units: &[PlacementUnit], part| units.iter().any(|unit| unit.part == part && unit.placed);
    let count = |units: &[PlacementUnit], part: ModelPart| {
        units.iter().filter(|unit| unit.placed && unit.part.is_alike(part)).count()
    };
    let mut moves: Vec<ModelPart> = Vec::new();
    for part in before.iter().map(|unit| unit.part).filter(|part| !is_placed(before, *part)) {
        let listed = moves.iter().filter(|other| other.is_alike(part)).count();
        let is_more = is_placed(after, part) && count(before, part) + listed < count(after, part);
        if after.is_empty() || is_more {
            moves.push(part);
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_trade_places_are_no_moves() {
        let units = |placed: &[usize]| -> Vec<PlacementUnit> {
            let unit = |layer| PlacementUnit {
                part: ModelPart::Experts { layer, count: 8 },
                bytes: 1,
                gain: 1.0,
                accelerator: 0,
                placed: placed.contains(&layer),
            };
            (0..6).map(unit).collect()
        };
        let layers = |parts: Vec<ModelPart>| parts.iter().filter_map(|part| part.layer()).collect::<Vec<_>>();
        assert_eq!(layers(moves(&units(&[2, 5]), &units(&[1, 3, 5]))), [1]);
        assert_eq!(layers(moves(&units(&[2, 5]), &[])), [0, 1, 3, 4]);
        assert!(moves(&units(&[2, 5]), &units(&[2, 5])).is_empty());
    }
}
