//! Which part of a model goes to which device: `-ngl`, and the memory that there is.

use std::str::FromStr;
use std::sync::Arc;

use quadriga_llm::{Engine, EngineOptions, Hyperparameters, Model, offload, place_on_device};
use quadriga_runtime::{Backend, Plan, RuntimeError, Scheduler};

use crate::backends::Backends;
use crate::failure::Outcome;

/// How many of a model's layers go to accelerators; the output counts as one more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layers {
    /// So many, the output among them and the others evenly spread.
    Count(usize),
    /// All of them.
    All,
    /// As many as fit.
    Auto,
}

impl FromStr for Layers {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Layers, &'static str> {
        match text.to_ascii_lowercase().as_str() {
            "all" => Ok(Layers::All),
            "auto" => Ok(Layers::Auto),
            number => number.parse().map(Layers::Count).map_err(|_| "a number of layers, all or auto"),
        }
    }
}

/// What of a device's free memory a plan may take when nobody says how much: the rest is for the driver and others.
const USABLE: f64 = 0.95;

/// A scheduler with the model's layers placed, and what the largest batch will take.
pub(crate) fn place(
    model: &Model,
    backends: &Backends,
    options: &EngineOptions,
    layers: Layers,
    budget: Option<u64>,
) -> Outcome<(Scheduler, Plan)> {
    let all = model.hyperparameters().layers + 1;
    let plan = |count: usize, limits: &[Option<u64>]| -> quadriga_llm::Result<(Scheduler, Plan)> {
        let scheduler = scheduler(model.hyperparameters(), backends, count, limits);
        let plan = Engine::forecast(model, &scheduler, options.clone())?;
        Ok((scheduler, plan))
    };
    let accelerators = backends.all.iter().take(backends.accelerators());
    match layers {
        _ if backends.accelerators() == 0 => Ok(plan(0, &[])?),
        Layers::Count(count) => Ok(plan(count.min(all), &vec![budget; backends.accelerators()])?),
        Layers::All => Ok(plan(all, &vec![budget; backends.accelerators()])?),
        Layers::Auto => {
            let usable = |b: &Arc<dyn Backend>| Some((b.device().free_bytes? as f64 * USABLE) as u64);
            let limits: Vec<Option<u64>> = accelerators.map(|b| budget.or_else(|| usable(b))).collect();
            // What does not fit is no failure; weights on loan are left out where they are too much.
            let attempt = |count: usize| match plan(count, &limits) {
                Ok(fits) => Ok(Some(fits)),
                Err(quadriga_llm::Error::Runtime(RuntimeError::OverBudget(_))) => Ok(None),
                Err(error) => Err(error),
            };
            if let Some(whole) = attempt(all)? {
                return Ok(whole);
            }
            // The most layers that fit, by halving: `low` fits, `high` does not.
            let (mut low, mut high) = (0, all);
            let mut best = plan(0, &limits)?;
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                match attempt(middle)? {
                    Some(fits) => (low, best) = (middle, fits),
                    None => high = middle,
                }
            }
            Ok(best)
        }
    }
}

/// A scheduler with layers placed; each accelerator may have a limit.
fn scheduler(
    hyper: &Hyperparameters,
    backends: &Backends,
    count: usize,
    limits: &[Option<u64>],
) -> Scheduler {
    let accelerators = backends.accelerators();
    let mut scheduler = Scheduler::new(backends.all.iter().cloned());
    if accelerators > 0 {
        scheduler = scheduler.place(rule(hyper, count, accelerators));
    }
    for (accelerator, limit) in limits.iter().enumerate() {
        if let Some(bytes) = limit {
            scheduler = scheduler.budget(accelerator, *bytes);
        }
    }
    scheduler
}

/// The rule for one accelerator, extended to several: each has an equal run of the layers that are not the CPU's.
fn rule(
    hyper: &Hyperparameters,
    count: usize,
    accelerators: usize,
) -> impl Fn(&str) -> Option<usize> + Send + Sync + 'static {
    let on_device = offload(hyper, count);
    let layers = hyper.layers;
    move |name| match on_device(name)? {
        0 => {
            let block =
                name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            Some(match block {
                Some(block) => {
                    let number = place_on_device(layers, count, block).unwrap_or(block);
                    (number * accelerators / count.max(1)).min(accelerators - 1)
                }
                None if name.starts_with("output") => accelerators - 1,
                None => 0,
            })
        }
        _ => Some(accelerators),
    }
}

/// Says so where a plan takes more of a device than is free.
pub(crate) fn warn(plan: &Plan, backends: &[Arc<dyn Backend>]) {
    for (bytes, backend) in plan.bytes().iter().zip(backends) {
        if let Some(free) = backend.device().free_bytes.filter(|free| bytes.total() > *free) {
            note!(
                "quadriga: {} will need {}, but only {} are free; a smaller context (-c) or batch (-b) takes less",
                backend.name(),
                crate::size::text(bytes.total()),
                crate::size::text(free)
            );
        }
    }
}
