//! Placement of a model: its devices, how many layers accelerators hold, and the memory that they may use.
//!
//! ```no_run
//! use quadriga_llm::placement::{GpuLayers, Placement};
//! use quadriga_llm::{Engine, EngineOptions, Model};
//!
//! let model = Model::open("model.gguf")?;
//! let placement = Placement { gpu_layers: GpuLayers::Count(12), budget: Some(6 << 30), ..Placement::default() };
//! let devices = placement.open_devices()?;
//! let placed = placement.plan(&model, &devices, &EngineOptions::default())?;
//! println!("{}", placed.forecast); // splits, copies and bytes of the largest batch
//! let engine = Engine::new(model, &placed.scheduler, EngineOptions::default(), &mut |_| {})?;
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

mod context;
mod devices;
mod overrides;
mod rule;
mod tensor_class;

use std::str::FromStr;
use std::sync::Arc;

use quadriga_runtime::{Backend, Plan, RuntimeError, Scheduler};

pub use self::devices::{DeviceList, DeviceName, Devices};
use self::overrides::Overrides;
pub use self::overrides::TensorOverride;
pub use self::rule::offload;
use self::rule::with_expert_slots;
pub use self::tensor_class::TensorClass;
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::{Error, Result};

/// The number of a model's layers that accelerators hold; the output matrix counts as one more.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum GpuLayers {
    /// As many as fit the memory.
    #[default]
    Auto,
    /// All of them.
    All,
    /// This many, the output matrix among them and the others evenly spread.
    Count(usize),
}

impl FromStr for GpuLayers {
    type Err = Error;

    /// Reads `auto`, `all` or a number.
    fn from_str(text: &str) -> Result<GpuLayers> {
        match text.to_ascii_lowercase().as_str() {
            "all" => Ok(GpuLayers::All),
            "auto" => Ok(GpuLayers::Auto),
            number => number.parse().map(GpuLayers::Count).map_err(|_| Error::Option {
                name: "the number of layers on accelerators",
                value: text.to_owned(),
                wanted: "a number, all or auto",
            }),
        }
    }
}

/// Where a model runs. The default uses the first GPU, if there is one, for as many layers as fit its free memory; the
/// CPU runs the rest.
#[derive(Clone, Default, Debug)]
pub struct Placement {
    /// The devices.
    pub devices: DeviceList,
    /// Threads of the CPU backend; one for each core if `None`.
    pub threads: Option<usize>,
    /// Layers on accelerators.
    pub gpu_layers: GpuLayers,
    /// Bytes that the model may use on each accelerator. Without a budget, [`GpuLayers::Auto`] uses 95 % of what is
    /// free.
    pub budget: Option<u64>,
    /// Weights that are placed by name, whatever the placement of their layers; of several that match, the first decides. States
    /// stay with their layers.
    pub overrides: Vec<TensorOverride>,
    /// The number of layers, from the first, whose experts are on the CPU.
    pub cpu_expert_layers: usize,
}

/// A model's placement on devices.
pub struct PlacedModel {
    /// The scheduler with placement rule and budgets, for [`Engine::new`] or `Generator::on`.
    pub scheduler: Scheduler,
    /// The plan of the largest batch over a full KV cache.
    pub forecast: Plan,
    /// The expressions among [`Placement::overrides`] that match no tensor of the model.
    pub unmatched: Vec<String>,
}

/// The share of a device's free memory that [`GpuLayers::Auto`] uses; the rest is left to the driver and other
/// programs.
const USABLE: f64 = 0.95;

impl Placement {
    /// Opens the devices.
    pub fn open_devices(&self) -> Result<Devices> {
        self.devices.open(self.threads)
    }

    /// Places a model on devices and plans it for an engine with these options. Nothing is loaded yet.
    pub fn plan(&self, model: &Model, devices: &Devices, options: &EngineOptions) -> Result<PlacedModel> {
        let all = model.hyperparameters().layers.len() + 1;
        let budgets = vec![self.budget; devices.accelerators().len()];
        let overrides = Arc::new(Overrides::resolve(self, model, devices)?);
        let plan = |count: usize, budgets: &[Option<u64>]| -> Result<PlacedModel> {
            let scheduler = scheduler(model, devices, count, &overrides, budgets);
            let forecast = Engine::forecast(model, &scheduler, options.clone())?;
            Ok(PlacedModel { scheduler, forecast, unmatched: overrides.unmatched.clone() })
        };
        match self.gpu_layers {
            _ if devices.accelerators().is_empty() => plan(0, &budgets),
            GpuLayers::Count(count) => plan(count.min(all), &budgets),
            GpuLayers::All => plan(all, &budgets),
            GpuLayers::Auto => {
                let free = |backend: &Arc<dyn Backend>| {
                    backend.device().free_bytes.map(|bytes| (bytes as f64 * USABLE) as u64)
                };
                let budgets: Vec<Option<u64>> =
                    devices.accelerators().iter().map(|b| self.budget.or_else(|| free(b))).collect();
                largest_that_fits(all, |count| plan(count, &budgets))
            }
        }
    }
}

/// The plan with the most layers on accelerators that is within its budgets, found by bisection.
fn largest_that_fits(all: usize, plan: impl Fn(usize) -> Result<PlacedModel>) -> Result<PlacedModel> {
    let attempt = |count: usize| match plan(count) {
        Ok(fits) => Ok(Some(fits)),
        Err(Error::Runtime(RuntimeError::OverBudget(_))) => Ok(None),
        Err(error) => Err(error),
    };
    if let Some(whole) = attempt(all)? {
        return Ok(whole);
    }
    // `low` layers fit, `high` do not.
    let (mut low, mut high) = (0, all);
    let mut best = plan(0)?;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match attempt(middle)? {
            Some(fits) => (low, best) = (middle, fits),
            None => high = middle,
        }
    }
    Ok(best)
}

/// A scheduler with `count` layers on accelerators, each of which may have a budget.
fn scheduler(
    model: &Model,
    devices: &Devices,
    count: usize,
    overrides: &Arc<Overrides>,
    budgets: &[Option<u64>],
) -> Scheduler {
    let accelerators = devices.accelerators().len();
    let mut scheduler = Scheduler::new(devices.backends());
    if accelerators > 0 {
        let layers = offload(model.hyperparameters(), count, accelerators);
        let overrides = Arc::clone(overrides);
        let rule = move |name: &str| overrides.get(name).or_else(|| layers(name));
        scheduler = scheduler.place(with_expert_slots(rule, accelerators));
    }
    for (accelerator, budget) in budgets.iter().enumerate() {
        if let Some(bytes) = budget {
            scheduler = scheduler.budget(accelerator, *bytes);
        }
    }
    scheduler
}
