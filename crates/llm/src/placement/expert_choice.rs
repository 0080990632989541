//! Whether accelerators hold the experts of whole layers, slots into which experts move, or some of both: by estimated time.

use serde::Serialize;

use super::estimate::usual_slots;
use super::expert_slots::{ExpertLayers, SlotSearch};
use super::rule::offloaded_index;
use super::search::fitting;
use super::{PlacedModel, Placement, SpeedEstimate};
use crate::Result;
use crate::engine::EngineOptions;
use crate::models::LayerSet;

/// The shares of the layers that could be resident, in quarters, that are compared.
const QUARTERS: usize = 4;

/// How much longer a request may take than with whole layers alone, if routing has no locality at all.
const MAX_LOSS: f64 = 0.02;

/// One way to use an accelerator's memory for experts, and the speed that is expected of it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct ExpertOption {
    /// Layers whose experts are all on accelerators.
    pub resident_layers: usize,
    /// Slots for experts of the other layers.
    pub slots: usize,
    /// Tokens per second of prefill.
    pub prefill: f64,
    /// Tokens per second of decoding, with the hits that are assumed.
    pub decode: f64,
    /// The same if all experts are used equally often.
    pub decode_without_locality: f64,
    /// Whether it was chosen.
    pub chosen: bool,
}

/// A plan, its options, and the seconds of a request: as assumed, and without locality.
struct Candidate {
    planned: (PlacedModel, EngineOptions),
    option: ExpertOption,
    seconds: [f64; 2],
}

impl SlotSearch<'_> {
    /// The best of a plan without slots, and of plans with slots in place of some or all of its resident layers: the one that
    /// is estimated to serve a request fastest, among those that lose little where routing has no locality.
    pub(super) fn choose(
        &self,
        placed: (PlacedModel, EngineOptions),
        plan: impl Fn(&Placement) -> Result<(PlacedModel, EngineOptions)>,
    ) -> Result<(PlacedModel, EngineOptions)> {
        let accelerators = self.devices.accelerators().len();
        let resident: Vec<usize> = ExpertLayers::of(&placed.0, accelerators).resident.iter().collect();
        let visible = usual_slots(&placed.1.clone().resolve(self.model)?);
        let mut candidates = vec![self.candidate(placed, resident.len(), visible)?];
        let mut tried = Vec::new();
        for quarter in (0..=QUARTERS).rev() {
            let kept = resident.len() * quarter / QUARTERS;
            if tried.contains(&kept) {
                continue;
            }
            tried.push(kept);
            let is_kept =
                |(index, _): &(usize, &usize)| offloaded_index(resident.len(), kept + 1, *index).is_some();
            let kept: LayerSet =
                resident.iter().enumerate().filter(is_kept).map(|(_, layer)| *layer).collect();
            for split in self.splits() {
                if let Some(planned) = self.with_resident((&kept, split), &plan)? {
                    candidates.push(self.candidate(planned, kept.len(), visible)?);
                }
            }
        }
        let most = candidates.first().map_or(f64::INFINITY, |first| first.seconds[1] * (1.0 + MAX_LOSS));
        let allowed = candidates.iter().enumerate().filter(|(_, candidate)| candidate.seconds[1] <= most);
        let best = allowed.min_by(|(_, a), (_, b)| a.seconds[0].total_cmp(&b.seconds[0]));
        let best = best.map_or(0, |(best, _)| best);
        let options: Vec<ExpertOption> = candidates
            .iter()
            .enumerate()
            .map(|(number, candidate)| ExpertOption { chosen: number == best, ..candidate.option })
            .collect();
        let (placed, with) = candidates.swap_remove(best).planned;
        Ok((PlacedModel { expert_options: options, ..placed }, with))
    }

    /// A plan with only these layers' experts resident, and slots for the others, on accelerators that divide the layers so; `None`
    /// if there is no room for enough.
    fn with_resident(
        &self,
        (kept, tensor_split): (&LayerSet, Vec<f32>),
        plan: impl Fn(&Placement) -> Result<(PlacedModel, EngineOptions)>,
    ) -> Result<Option<(PlacedModel, EngineOptions)>> {
        let layers = 0..self.model.hyperparameters().layers.len();
        let experts_on_cpu = layers.filter(|layer| !kept.contains(*layer)).collect();
        let placement = Placement { experts_on_cpu, tensor_split, ..self.placement.clone() };
        let Some((rest, with)) = fitting(plan(&placement))? else { return Ok(None) };
        let resident = ExpertLayers::of(&rest, self.devices.accelerators().len()).resident;
        let (bytes, least) = (self.left(&rest), self.least(&resident));
        self.fill(rest, &with, &bytes, least)
    }

    /// The estimate of a plan. All are compared with the same part of the KV cache in use.
    fn candidate(
        &self,
        planned: (PlacedModel, EngineOptions),
        resident_layers: usize,
        visible: usize,
    ) -> Result<Candidate> {
        let (placed, options) = &planned;
        let estimate = self.placement.estimate_at(self.model, self.devices, options, placed, visible)?;
        let speed = |estimate: &SpeedEstimate| {
            estimate.decode.as_ref().map_or(0.0, |decode| decode.tokens_per_second())
        };
        let without = estimate.without_locality();
        let option = ExpertOption {
            resident_layers,
            slots: placed.expert_slots,
            prefill: estimate.prefill.tokens_per_second(),
            decode: speed(&estimate),
            decode_without_locality: speed(&without),
            chosen: false,
        };
        let seconds = [estimate.request_seconds(), without.request_seconds()];
        Ok(Candidate { planned, option, seconds })
    }
}
