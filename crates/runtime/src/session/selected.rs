//! The slices that copies of a traced run have selected: known to the devices, and read after the run.

use super::clock::TimedStep;
use super::prepared::PreparedPlan;
use super::session::Session;
use super::transfer::Route;
use crate::RuntimeError;
use crate::schedule::ScheduleStep;
use crate::trace::Stream;

/// For each copy of a plan the slices that it selected last, where that is known.
type Selected = Vec<Option<Vec<bool>>>;

/// What copies selected in the run before a traced one, which is prefetched, and in that one.
pub(super) struct SelectedSlices {
    pub(super) before: Selected,
    pub(super) after: Selected,
}

impl SelectedSlices {
    /// The bytes that a step copied of a weight that has `most`.
    pub(super) fn bytes(&self, step: ScheduleStep, steps: &[TimedStep], most: usize) -> Option<usize> {
        let of = |all: &Selected, copy: usize| all.get(copy).cloned().flatten();
        let slices = match step {
            ScheduleStep::Prefetch(copy) => of(&self.before, copy)?,
            ScheduleStep::Copy(copy) => {
                let mut slices = of(&self.after, copy)?;
                let prefetch = ScheduleStep::Prefetch(copy);
                if steps.iter().any(|timed| timed.step == prefetch) {
                    let there = of(&self.before, copy)?;
                    slices.iter_mut().zip(there).for_each(|(selected, there)| *selected &= !there);
                }
                slices
            }
            ScheduleStep::Split(_) => return None,
        };
        Some(most / slices.len().max(1) * slices.iter().filter(|selected| **selected).count())
    }
}

impl Session {
    /// The slices that the copies of a plan selected last. No run is in flight.
    pub(super) fn selected_slices(&mut self, current: usize) -> Result<Selected, RuntimeError> {
        let PreparedPlan { plan, compiled, .. } = self.plans.get(current)?;
        let Some(compiled) = compiled else { return Ok(Vec::new()) };
        let mut selected = Vec::with_capacity(compiled.copies.len());
        for (planned, regions) in plan.splits().copies.iter().zip(&compiled.copies) {
            let lane = self.lanes.get_mut(planned.to);
            selected.push(match (&regions.route, &regions.selection, lane) {
                (Route::Pull, Some(selection), Some(lane)) => {
                    let slices = lane.queue(Stream::Prefetch).selected_slices(selection);
                    slices.map_err(RuntimeError::device)?.filter(|slices| !slices.is_empty())
                }
                _ => None,
            });
        }
        Ok(selected)
    }
}
