//! Which part of a model goes to which device: `-ngl`, and the memory that there is.

use std::str::FromStr;
use std::sync::Arc;

use quadriga_llm::{Engine, EngineOptions, Hyperparameters, Model, offload, place_on_device};
use quadriga_runtime::{Backend, Plan, Scheduler};

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
    let attempt = |count: usize, budget: Option<u64>| -> Outcome<(Scheduler, Plan)> {
        let scheduler = scheduler(model.hyperparameters(), backends, count, budget);
        let plan = Engine::forecast(model, &scheduler, options.clone())?;
        Ok((scheduler, plan))
    };
    match layers {
        _ if backends.accelerators() == 0 => attempt(0, None),
        Layers::Count(count) => attempt(count.min(all), budget),
        Layers::All => attempt(all, budget),
        Layers::Auto => {
            let whole = attempt(all, None)?;
            if fits(&whole.1, backends, budget) {
                return Ok(whole);
            }
            // The most layers that fit, by halving: `low` fits, `high` does not.
            let (mut low, mut high) = (0, all);
            let mut best = attempt(0, None)?;
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                let tried = attempt(middle, None)?;
                if fits(&tried.1, backends, budget) {
                    (low, best) = (middle, tried);
                } else {
                    high = middle;
                }
            }
            Ok(best)
        }
    }
}

fn scheduler(hyper: &Hyperparameters, backends: &Backends, count: usize, budget: Option<u64>) -> Scheduler {
    let accelerators = backends.accelerators();
    let mut scheduler = Scheduler::new(backends.all.iter().cloned());
    if accelerators > 0 {
        scheduler = scheduler.place(rule(hyper, count, accelerators));
    }
    for accelerator in 0..accelerators {
        if let Some(bytes) = budget {
            scheduler = scheduler.budget(accelerator, bytes);
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

fn fits(plan: &Plan, backends: &Backends, budget: Option<u64>) -> bool {
    plan.bytes().iter().zip(&backends.all).take(backends.accelerators()).all(|(bytes, backend)| {
        let limit = budget.or_else(|| Some((backend.device().free_bytes? as f64 * USABLE) as u64));
        limit.is_none_or(|limit| bytes.total() <= limit)
    })
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
