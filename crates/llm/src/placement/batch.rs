//! The batch size of a model whose weights are streamed: each copy is used for as many tokens as memory allows.

use quadriga_runtime::Plan;

use super::{PlacedModel, Placement};
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::{Error, Result};

/// The share of an accelerator's free memory that a larger batch may leave in use.
const USABLE: f64 = 0.9;

impl Placement {
    /// A plan with a larger batch, if weights are streamed and memory suffices; else the plan and options as they are.
    pub(super) fn with_larger_batch(
        &self,
        model: &Model,
        (placed, options): (PlacedModel, EngineOptions),
    ) -> Result<(PlacedModel, EngineOptions)> {
        let mut batch = self.streaming_batch;
        while batch > options.batch && placed.forecast.streams_weights() {
            let larger = EngineOptions { batch, ..options.clone() }.resolve(model);
            let planned = larger
                .and_then(|larger| Ok((Engine::forecast(model, &placed.scheduler, larger.clone())?, larger)));
            match planned {
                Ok((forecast, larger))
                    if larger.batch > options.batch && self.suits(&forecast, &placed.forecast) =>
                {
                    return Ok((PlacedModel { forecast, ..placed }, larger));
                }
                Ok(_) | Err(Error::Runtime(_) | Error::Option { .. }) => batch /= 2,
                Err(other) => return Err(other),
            }
        }
        Ok((placed, options))
    }

    /// Whether a plan of a larger batch streams weights, holds the others where the first plan does, and fits the memory.
    fn suits(&self, plan: &Plan, first: &Plan) -> bool {
        let bytes = plan.bytes();
        let fits = plan.backends().iter().zip(&bytes).all(|(backend, bytes)| {
            let free = self.free_bytes(&**backend).map(|free| (free as f64 * USABLE) as u64);
            backend.memory().host || free.is_none_or(|free| bytes.total() <= free)
        });
        let same = first.bytes().iter().zip(&bytes).all(|(a, b)| a.weights == b.weights);
        plan.streams_weights() && fits && same
    }
}
