//! The context size of a model whose user leaves it open: what it was trained with, where that fits the memory.

use quadriga_runtime::Plan;

use super::{Devices, PlacedModel, Placement};
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::{Error, Result};

/// The share of a device's free memory that a context chosen here may use: the rest is for other programs, and for the
/// system's cache of the model file.
const USABLE: f64 = 0.5;

impl Placement {
    /// As [`Placement::plan`], and chooses the context if the options leave it open (0): the size that the model was
    /// trained with, halved until the plan takes no more than half of each device's free memory, with the placement for the
    /// default of at most 4096 tokens. Then the batch is made longer where weights are streamed
    /// ([`Placement::streaming_batch`]). Returns the options with context and batch.
    pub fn plan_with_context(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
    ) -> Result<(PlacedModel, EngineOptions)> {
        let plan = |placement: &Placement| {
            placement.with_larger_batch(model, placement.plan_context(model, devices, options)?)
        };
        let with_cache = |placement: &Placement| placement.with_expert_cache(model, devices, plan);
        self.with_neuron_slots(model, devices, with_cache)
    }

    fn plan_context(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
    ) -> Result<(PlacedModel, EngineOptions)> {
        let default = options.clone().resolve(model)?;
        if options.context != 0 || model.hyperparameters().context <= default.context {
            return Ok((self.plan_without_cache(model, devices, options)?, default));
        }
        let plain = self.plan_without_cache(model, devices, &default)?;
        let mut context = model.hyperparameters().context;
        while context > default.context {
            // The batch is limited by the context, so that it is resolved anew.
            let larger = EngineOptions { context, ..options.clone() };
            let planned = larger
                .resolve(model)
                .and_then(|larger| Ok((Engine::forecast(model, &plain.scheduler, larger.clone())?, larger)));
            match planned {
                Ok((forecast, larger)) if self.is_modest(&forecast, &plain.forecast) => {
                    return Ok((PlacedModel { forecast, ..plain }, larger));
                }
                Ok(_) | Err(Error::Runtime(_) | Error::Option { .. }) => context /= 2,
                Err(other) => return Err(other),
            }
        }
        Ok((plain, default))
    }

    /// Whether a plan leaves half of each device's memory free and keeps the weights where the default's are.
    fn is_modest(&self, plan: &Plan, default: &Plan) -> bool {
        let free = plan.backends().iter().map(|backend| self.free_bytes(&**backend));
        let fits = plan
            .bytes()
            .iter()
            .zip(free)
            .all(|(bytes, free)| free.is_none_or(|free| bytes.total() as f64 <= free as f64 * USABLE));
        let weights =
            |plan: &Plan| plan.bytes().iter().map(|bytes| bytes.weights + bytes.mapped).collect::<Vec<_>>();
        fits && weights(plan) == weights(default) && plan.streams_weights() == default.streams_weights()
    }
}
