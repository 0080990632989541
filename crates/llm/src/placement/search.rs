//! The search for the best placement within budgets: fills each accelerator with parts of the model in the order of their
//! gain per byte. The forecast of the scheduler decides whether they fit, so that batch, KV cache and arena count to the byte.

use std::sync::Arc;

use quadriga_runtime::{Backend, BackendBytes, Plan, RuntimeError, Scheduler, WeightStreaming};

use super::order::{PlacementUnit, Tier, chosen, homes, tiers};
use super::overrides::Overrides;
use super::parts::{ModelPart, ModelParts};
use super::residence::Residence;
use super::rule::{offload_layers, with_expert_slots};
use super::{Devices, GpuLayers, PlacedModel, Placement};
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::models::LayerSet;
use crate::{Error, Result};

/// A model, its devices, and everything else that a placement depends on.
pub(super) struct Search<'a> {
    pub(super) placement: &'a Placement,
    pub(super) model: &'a Model,
    pub(super) devices: &'a Devices,
    pub(super) options: &'a EngineOptions,
    pub(super) overrides: Arc<Overrides>,
    /// When weights on the CPU are streamed; `None`: as the scheduler does by itself.
    pub(super) streaming: Option<WeightStreaming>,
}

/// The share of an arena within which a budget counts as full.
const SPARE_SHARE: u64 = 8;

/// How many units of each tier are on an accelerator.
type Counts = Vec<usize>;

impl Search<'_> {
    /// Plans the model with this many layers on accelerators.
    pub(super) fn layers(&self, count: usize, budgets: &[Option<u64>]) -> Result<PlacedModel> {
        let layers = self.model.hyperparameters().layers.len();
        self.plan(offload_layers(layers, count, self.shares(budgets)), budgets, Vec::new())
    }

    /// The accelerators' shares of the model within budgets, or else within what is free.
    fn shares(&self, budgets: &[Option<u64>]) -> Vec<f64> {
        let free = |(backend, budget): (&Arc<dyn Backend>, &Option<u64>)| {
            budget.or_else(|| self.placement.free_bytes(&**backend))
        };
        let room: Vec<Option<u64>> = self.devices.accelerators().iter().zip(budgets).map(free).collect();
        self.placement.shares_within(self.model, self.devices, &room)
    }

    /// Plans the model with as much of it on accelerators as saves the most time within the budgets.
    pub(super) fn best(&self, budgets: &[Option<u64>]) -> Result<PlacedModel> {
        let all = self.model.hyperparameters().layers.len() + 1;
        if !self.placement.neurons_on_cpu
            && let Some(whole) = fitting(self.layers(all, budgets))?
        {
            return Ok(whole);
        }
        let parts = self.parts()?;
        let rates = self.placement.rates_of(self.devices);
        let shares = self.shares(budgets);
        let mut tiers = tiers(&parts, &shares, &homes(&parts, &shares), &rates);
        if self.placement.neurons_on_cpu {
            // Beside gates, a layer's other rows are those of neurons.
            let is_rest = |part: ModelPart| matches!(part, ModelPart::FeedForward { .. });
            let keep = |tier: &Tier| !tier.units.iter().any(|unit| is_rest(unit.part));
            tiers.iter_mut().for_each(|tiers| tiers.retain(keep));
        }
        let Some(fullest) = self.fill(&parts, &tiers, budgets, false)? else {
            return self.units(&parts, &tiers, &none(&tiers), budgets);
        };
        if fullest.forecast.streams_weights() {
            return Ok(fullest);
        }
        // Without room for streamed weights, the CPU computes prompts with its own.
        let Some(streaming) = self.fill(&parts, &tiers, budgets, true)? else { return Ok(fullest) };
        let seconds = |placed: &PlacedModel| -> Result<f64> {
            let estimate = self.placement.estimate(self.model, self.devices, self.options, placed)?;
            Ok(estimate.request_seconds())
        };
        Ok(if seconds(&streaming)? < seconds(&fullest)? { streaming } else { fullest })
    }

    /// Fills one accelerator after the other. With `streams`, only plans that stream weights count. `None` if not even an
    /// empty accelerator is within its budget.
    fn fill(
        &self,
        parts: &ModelParts,
        tiers: &[Vec<Tier>],
        budgets: &[Option<u64>],
        streams: bool,
    ) -> Result<Option<PlacedModel>> {
        let attempt = |counts: &[Counts]| -> Result<Option<PlacedModel>> {
            let placed = fitting(self.units(parts, tiers, counts, budgets))?;
            Ok(placed.filter(|placed| !streams || placed.forecast.streams_weights()))
        };
        let mut counts = none(tiers);
        let Some(mut best) = attempt(&counts)? else { return Ok(None) };
        for (accelerator, tiers) in tiers.iter().enumerate() {
            let sizes: Vec<usize> = tiers.iter().map(|tier| tier.units.len()).collect();
            let with = |counts: &[Counts], own: Counts| {
                let mut counts = counts.to_vec();
                if let Some(slot) = counts.get_mut(accelerator) {
                    *slot = own;
                }
                counts
            };
            let (prefix, placed) =
                most(sizes.iter().sum(), |count| attempt(&with(&counts, first(&sizes, count))))?;
            let mut own = first(&sizes, prefix);
            best = placed.unwrap_or(best);
            // Of later tiers, whatever is small enough for the rest of the memory.
            let stopped =
                own.iter().zip(&sizes).position(|(taken, size)| taken < size).unwrap_or(sizes.len());
            for (number, tier) in tiers.iter().enumerate().skip(stopped + 1) {
                let used = best.forecast.bytes().get(accelerator).map_or(0, |bytes| bytes.total());
                let budget = budgets.get(accelerator).copied().flatten().unwrap_or(u64::MAX);
                let smallest = tier.units.iter().map(|unit| unit.bytes).min().unwrap_or(u64::MAX);
                if smallest > budget.saturating_sub(used) {
                    continue;
                }
                let more = |count: usize| {
                    let mut own = own.clone();
                    if let Some(taken) = own.get_mut(number) {
                        *taken = count;
                    }
                    own
                };
                let (count, placed) = most(tier.units.len(), |count| attempt(&with(&counts, more(count))))?;
                own = more(count);
                best = placed.unwrap_or(best);
            }
            counts = with(&counts, own);
        }
        Ok(Some(best))
    }

    /// Plans the model with some units of each tier on accelerators.
    fn units(
        &self,
        parts: &ModelParts,
        tiers: &[Vec<Tier>],
        counts: &[Counts],
        budgets: &[Option<u64>],
    ) -> Result<PlacedModel> {
        let units: Vec<PlacementUnit> =
            tiers.iter().zip(counts).flat_map(|(tiers, counts)| chosen(tiers, counts)).collect();
        let residence = Residence::new(parts, &units, self.devices.accelerators().len());
        self.plan(move |name| residence.backend_of(name), budgets, units)
    }

    /// Plans the model with a rule for its leaves, which overrides precede.
    fn plan(
        &self,
        rule: impl Fn(&str) -> Option<usize> + Send + Sync + 'static,
        budgets: &[Option<u64>],
        units: Vec<PlacementUnit>,
    ) -> Result<PlacedModel> {
        let mut scheduler = Scheduler::new(self.devices.backends());
        if let Some(streaming) = self.streaming {
            scheduler = scheduler.weight_streaming(Some(streaming));
        }
        if !self.devices.accelerators().is_empty() {
            let overrides = Arc::clone(&self.overrides);
            let rule = move |name: &str| overrides.get(name).or_else(|| rule(name));
            scheduler = scheduler.place(with_expert_slots(rule, self.devices.accelerators().len()));
        }
        for (accelerator, budget) in budgets.iter().enumerate() {
            if let Some(bytes) = budget {
                scheduler = scheduler.budget(accelerator, *bytes);
            }
        }
        let forecast = Engine::forecast(self.model, &scheduler, self.options.clone())?;
        if self.placement.gpu_layers == GpuLayers::Auto {
            self.check_other_batches(&scheduler, &forecast, budgets)?;
        }
        Ok(PlacedModel {
            scheduler,
            forecast,
            unmatched: self.overrides.unmatched.clone(),
            units,
            expert_slots: 0,
            expert_slot_bytes: Vec::new(),
            expert_staging_bytes: Vec::new(),
            resident_experts: LayerSet::EMPTY,
            upload_bytes: 0,
            expert_options: Vec::new(),
            neuron_slots: 0,
            neurons_not_divided: None,
        })
    }

    /// An error if a smaller batch exceeds a budget that the largest one nearly fills: memory may be packed worse there, and
    /// only small batches have slots for experts.
    fn check_other_batches(
        &self,
        scheduler: &Scheduler,
        largest: &Plan,
        budgets: &[Option<u64>],
    ) -> Result<()> {
        let is_full = |(bytes, budget): (BackendBytes, &Option<u64>)| {
            let spare = bytes.compute / SPARE_SHARE;
            budget.is_some_and(|budget| bytes.total() > 0 && bytes.total().saturating_add(spare) > budget)
        };
        if self.options.expert_slots == 0 && !largest.bytes().into_iter().zip(budgets).any(is_full) {
            return Ok(());
        }
        let options = self.options.clone().resolve(self.model)?;
        let all = options.context * options.sequences;
        for (tokens, slots) in [(options.batch, options.batch), (1, 1), (1, all)] {
            Engine::plan_batch(self.model, scheduler, &options, tokens, slots)?;
        }
        Ok(())
    }

    /// The model's parts, with their costs in decoding a token.
    fn parts(&self) -> Result<ModelParts> {
        let options = self.options.clone().resolve(self.model)?;
        let slots = super::estimate::usual_slots(&options);
        let graph = self.model.graph(options.shape(self.model, 1, 1, slots))?;
        let layers = &self.model.hyperparameters().layers;
        let experts: Vec<usize> =
            layers.iter().map(|layer| layer.experts.map_or(0, |experts| experts.count)).collect();
        let rates = self.placement.rates_of(self.devices);
        Ok(ModelParts::of(&graph, &experts, &rates, |name| self.overrides.get(name).is_some()))
    }
}

/// No units on any accelerator.
fn none(tiers: &[Vec<Tier>]) -> Vec<Counts> {
    tiers.iter().map(|tiers| vec![0; tiers.len()]).collect()
}

/// The first `count` units of tiers of these sizes, as a number of each tier.
fn first(sizes: &[usize], count: usize) -> Counts {
    let mut left = count;
    let mut counts = Counts::new();
    for size in sizes {
        let taken = left.min(*size);
        left -= taken;
        counts.push(taken);
    }
    counts
}

/// A plan, or `None` if it exceeds a budget.
pub(super) fn fitting<T>(plan: Result<T>) -> Result<Option<T>> {
    match plan {
        Ok(plan) => Ok(Some(plan)),
        Err(Error::Runtime(RuntimeError::OverBudget(_))) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The largest number up to `all` that fits, found by bisection, and its plan; 0 always fits, without a plan.
fn most<T>(all: usize, attempt: impl Fn(usize) -> Result<Option<T>>) -> Result<(usize, Option<T>)> {
    // `low` fits, `high` does not.
    let (mut low, mut high) = (0, all + 1);
    let mut best = None;
    while high - low > 1 {
        // Everything first: later tiers often fit as a whole, or not at all.
        let middle = if high > all { all } else { low + (high - low) / 2 };
        match attempt(middle)? {
            Some(fits) => (low, best) = (middle, Some(fits)),
            None => high = middle,
        }
    }
    Ok((low, best))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn the_largest_number_that_fits_is_found_in_few_attempts() {
        for all in 0..40 {
            for limit in 0..=all {
                let attempts = Cell::new(0);
                let fits = |count: usize| {
                    assert!((1..=all).contains(&count), "{count} of {all}");
                    attempts.set(attempts.get() + 1);
                    Ok((count <= limit).then_some(count))
                };
                let found = most(all, fits);
                assert!(matches!(found, Ok((count, plan)) if count == limit && plan.unwrap_or(0) == limit));
                let bound = if limit == all { 1 } else { 1 + all.ilog2() + 1 };
                assert!(attempts.get() <= bound, "{} attempts for {limit} of {all}", attempts.get());
            }
        }
        let failing = most(3, |_| Err::<Option<()>, _>(Error::EmptyPrompt));
        assert!(matches!(failing, Err(Error::EmptyPrompt)));
    }

    #[test]
    fn the_first_units_fill_one_tier_after_another() {
        assert_eq!(first(&[2, 0, 3], 0), [0, 0, 0]);
        assert_eq!(first(&[2, 0, 3], 1), [1, 0, 0]);
        assert_eq!(first(&[2, 0, 3], 4), [2, 0, 2]);
        assert_eq!(first(&[2, 0, 3], 9), [2, 0, 3]);
    }
}
