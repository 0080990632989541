//! Placement of a model: its devices, how many layers accelerators hold, and the memory that they may use.
//!
//! ```no_run
//! use quadriga_llm::placement::{GpuLayers, Placement};
//! use quadriga_llm::{Engine, EngineOptions, Model};
//!
//! let model = Model::open("model.gguf")?;
//! let placement = Placement { gpu_layers: GpuLayers::Count(12), budget: Some(6 << 30), ..Placement::default() };
//! let devices = placement.open_devices()?;
//! let options = EngineOptions::default();
//! let placed = placement.plan(&model, &devices, &options)?;
//! println!("{}", placed.forecast); // splits, copies and bytes of the largest batch
//! let engine = Engine::new(model, &placed.scheduler, placed.engine_options(&options), &mut |_| {})?;
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

mod batch;
mod context;
mod devices;
mod estimate;
mod expert_choice;
mod expert_ranks;
mod expert_slots;
mod neuron_slots;
mod neurons;
mod next_gigabyte;
mod order;
mod overrides;
mod parts;
mod rank_plan;
mod report;
mod residence;
mod rule;
mod search;
mod shares;
mod simulation;
mod tensor_class;

use std::str::FromStr;
use std::sync::Arc;

pub use quadriga_cpu::numa::NumaMode;
use quadriga_graph::DType;
use quadriga_runtime::{Backend, Plan, Rates, Scheduler, WeightStreaming};

pub use self::devices::{CpuOptions, DeviceList, DeviceName, Devices};
pub use self::estimate::{BatchEstimate, SlotHits, SpeedEstimate};
pub use self::expert_choice::ExpertOption;
pub use self::expert_slots::{ExpertCache, expert_bytes};
pub use self::next_gigabyte::NextGigabyte;
pub use self::order::PlacementUnit;
use self::overrides::Overrides;
pub use self::overrides::TensorOverride;
pub use self::parts::ModelPart;
pub use self::rank_plan::{GridPlan, RankPlan};
pub use self::report::{ClassResidence, residence};
pub use self::rule::offload;
use self::search::Search;
use self::shares::shares;
pub use self::simulation::{RankSimulation, SimulatedRun, Straggler, TimeParts};
pub use self::tensor_class::TensorClass;
use crate::engine::EngineOptions;
use crate::model::Model;
use crate::models::{LayerSet, Neurons};
use crate::{Error, Result};

/// The number of a model's layers that accelerators hold; the output matrix counts as one more.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum GpuLayers {
    /// As much as fits the memory, not only whole layers: the parts that save the most time per byte.
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

/// Where a model runs. The default uses the first GPU, if there is one, for as much of the model as fits its free memory; the
/// CPU runs the rest.
#[derive(Clone, Default, Debug)]
pub struct Placement {
    /// The devices.
    pub devices: DeviceList,
    /// Threads of the CPU backend. If `None`, one for each core; beside an accelerator one less where there are more than four.
    pub threads: Option<usize>,
    /// The NUMA nodes that the CPU's threads and weights are bound to, on machines with several.
    pub numa: Option<NumaMode>,
    /// Layers on accelerators.
    pub gpu_layers: GpuLayers,
    /// The accelerators' shares of the layers, as proportions; those that are not named get none. Empty: by their rates, as far as it
    /// fits.
    pub tensor_split: Vec<f32>,
    /// Bytes that the model may use on each accelerator. Without a budget, [`GpuLayers::Auto`] uses 95 % of what is
    /// free.
    pub budget: Option<u64>,
    /// Bytes that the model may use on single accelerators, in the order of the devices: in place of [`Placement::budget`] where there
    /// is a number.
    pub device_budgets: Vec<Option<u64>>,
    /// Weights that are placed by name, whatever the placement of their layers; of several that match, the first decides. States
    /// stay with their layers.
    pub overrides: Vec<TensorOverride>,
    /// The number of layers, from the first, whose experts are on the CPU.
    pub cpu_expert_layers: usize,
    /// Further layers whose experts are on the CPU.
    pub experts_on_cpu: LayerSet,
    /// Memory of accelerators for experts that the CPU has: those that are used move there while the model runs.
    pub expert_cache: ExpertCache,
    /// Whether accelerators get rows of neurons for what attention and gates leave of their memory, where the CPU has those of all.
    pub hot_neurons: bool,
    /// Whether the rows of neurons that are read only if these are active stay on the CPU.
    pub neurons_on_cpu: bool,
    /// Measured rates of backends, by name. [`GpuLayers::Auto`] and [`Placement::estimate`] assume [those of its
    /// kind](Rates::assumed) for a backend that is not listed.
    pub rates: Vec<(String, Rates)>,
    /// The processes that compute on a device, by its name: each counts on its part of what is free there. Those that are not listed are
    /// of this process alone.
    pub shared_by: Vec<(String, usize)>,
    /// When weights on the CPU are streamed to an accelerator; if `None`, where their copy takes less time than the CPU's matmuls, by
    /// [the rates of both](Placement::rates_of).
    pub streaming: Option<WeightStreaming>,
    /// The largest batch that [`Placement::plan_with_context`] may choose where weights are streamed: a longer batch computes
    /// more with each copy. It is halved until memory suffices; elsewhere, or if it is smaller, the batch is that of the
    /// engine's options.
    pub streaming_batch: usize,
}

/// A model's placement on devices.
#[derive(Clone)]
pub struct PlacedModel {
    /// The scheduler with placement rule and budgets, for [`Engine::new`](crate::Engine::new) or `Generator::on`.
    pub scheduler: Scheduler,
    /// The plan of the largest batch over a full KV cache.
    pub forecast: Plan,
    /// The expressions among [`Placement::overrides`] that match no tensor of the model.
    pub unmatched: Vec<String>,
    /// With [`GpuLayers::Auto`], where not the whole model fits: its parts, in the order in which accelerators are filled.
    pub units: Vec<PlacementUnit>,
    /// The slots of the expert cache, for [`EngineOptions::expert_slots`].
    pub expert_slots: usize,
    /// Their bytes on each backend, which are part of its weights. Empty without slots.
    pub expert_slot_bytes: Vec<u64>,
    /// Bytes on each backend for experts that are on their way to a slot, beside those of the plan. Empty without slots.
    pub expert_staging_bytes: Vec<u64>,
    /// The layers without slots, for [`EngineOptions::resident_experts`].
    pub resident_experts: LayerSet,
    /// Bytes of experts that are uploaded in a step, for [`EngineOptions::upload_bytes`]. 0 without slots.
    pub upload_bytes: u64,
    /// With [`ExpertCache::Auto`], the ways to place experts that were compared.
    pub expert_options: Vec<ExpertOption>,
    /// Rows of neurons on accelerators, for [`Neurons::slots`](crate::models::Neurons::slots).
    pub neuron_slots: usize,
    /// Why [`Placement::hot_neurons`] has no effect; `None` if it has, or is off.
    pub neurons_not_divided: Option<&'static str>,
}

impl PlacedModel {
    /// Options of an engine, with the slots that the plan has room for.
    pub fn engine_options(&self, options: &EngineOptions) -> EngineOptions {
        let mut options = options.clone();
        if self.expert_slots > 0 {
            (options.expert_slots, options.resident_experts) = (self.expert_slots, self.resident_experts);
            options.upload_bytes = self.upload_bytes;
        }
        if self.neuron_slots > 0 {
            options.neurons = Neurons { slots: self.neuron_slots, ..options.neurons };
        }
        options
    }
}

/// The share of a device's free memory that [`GpuLayers::Auto`] uses; the rest is left to the driver and other
/// programs.
const USABLE: f64 = 0.95;

impl Placement {
    /// Opens the devices.
    pub fn open_devices(&self) -> Result<Devices> {
        self.devices.open(CpuOptions { threads: self.threads, numa: self.numa })
    }

    /// Places a model on devices and plans it for an engine with these options. Nothing is loaded yet.
    pub fn plan(&self, model: &Model, devices: &Devices, options: &EngineOptions) -> Result<PlacedModel> {
        let plan = |placement: &Placement| {
            Ok((placement.plan_without_cache(model, devices, options)?, options.clone()))
        };
        let with_cache = |placement: &Placement| placement.with_expert_cache(model, devices, plan);
        self.with_neuron_slots(model, devices, with_cache).map(|(placed, _)| placed)
    }

    /// Places a draft model on the devices of a large one, whose engine has these options: the expert cache is that of the large one.
    pub fn plan_draft(
        &self,
        draft: &Model,
        devices: &Devices,
        options: &EngineOptions,
    ) -> Result<PlacedModel> {
        let (expert_slots, resident_experts) = (0, LayerSet::EMPTY);
        let output_rows = options.sequences;
        let options = EngineOptions { output_rows, expert_slots, resident_experts, ..options.clone() };
        let placement = Placement { expert_cache: ExpertCache::Bytes(0), ..self.clone() };
        placement.plan(draft, devices, &options)
    }

    /// As [`Placement::plan`], without an expert cache.
    fn plan_without_cache(
        &self,
        model: &Model,
        devices: &Devices,
        options: &EngineOptions,
    ) -> Result<PlacedModel> {
        let all = model.hyperparameters().layers.len() + 1;
        let search = self.search(model, devices, options)?;
        let given = self.given_budgets(devices);
        match self.gpu_layers {
            _ if devices.accelerators().is_empty() => search.layers(0, &given),
            GpuLayers::Count(count) => search.layers(count.min(all), &given),
            GpuLayers::All => search.layers(all, &given),
            GpuLayers::Auto => search.best(&self.budgets(devices)),
        }
    }

    fn search<'a>(
        &'a self,
        model: &'a Model,
        devices: &'a Devices,
        options: &'a EngineOptions,
    ) -> Result<Search<'a>> {
        let usable = |share: &f32| share.is_finite() && *share >= 0.0;
        let used = self.tensor_split.iter().take(devices.accelerators().len()).any(|share| *share > 0.0);
        let none = self.tensor_split.is_empty() || devices.accelerators().is_empty();
        if !self.tensor_split.iter().all(usable) || !(none || used) {
            let value = self.tensor_split.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            let wanted = "numbers from 0, of which one is more for an accelerator that is used";
            return Err(Error::Option { name: "the split of layers among accelerators", value, wanted });
        }
        let overrides = Arc::new(Overrides::resolve(self, model, devices)?);
        let streaming = self.streaming.or_else(|| self.streaming_by_rates(model, devices));
        Ok(Search { placement: self, model, devices, options, overrides, streaming })
    }

    /// When it pays to stream weights of the type that most of the model has. The scheduler streams to the first accelerator.
    fn streaming_by_rates(&self, model: &Model, devices: &Devices) -> Option<WeightStreaming> {
        let rates = self.rates_of(devices);
        let (first, cpu) = (rates.first()?, rates.last().filter(|_| rates.len() > 1)?);
        let mut types: Vec<(DType, u64)> = Vec::new();
        for tensor in model.file().tensors() {
            let bytes = tensor.byte_len() as u64;
            match types.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype()) {
                Some((_, sum)) => *sum += bytes,
                None => types.push((tensor.dtype(), bytes)),
            }
        }
        let (most, _) = types.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        WeightStreaming::for_rates(cpu.operations(most), first.link)
    }

    /// The accelerators' shares of a model, as [`Placement::tensor_split`] or their rates and free memory say.
    pub(crate) fn shares(&self, model: &Model, devices: &Devices) -> Vec<f64> {
        self.shares_within(model, devices, &self.budgets(devices))
    }

    /// The same within budgets.
    fn shares_within(&self, model: &Model, devices: &Devices, room: &[Option<u64>]) -> Vec<f64> {
        let bytes = model.file().tensors().map(|tensor| tensor.byte_len() as u64).sum();
        shares(&self.tensor_split, &self.rates_of(devices), room, bytes)
    }

    /// This process's part of what is free on a device.
    fn free_bytes(&self, backend: &dyn Backend) -> Option<u64> {
        let shared = self.shared_by.iter().find(|(name, _)| name == backend.name());
        let processes = shared.map_or(1, |(_, processes)| (*processes).max(1));
        backend.device().free_bytes.map(|free| free / processes as u64)
    }

    /// The bytes that [`GpuLayers::Auto`] may use of each accelerator.
    fn budgets(&self, devices: &Devices) -> Vec<Option<u64>> {
        let free = |backend: &Arc<dyn Backend>| {
            self.free_bytes(&**backend).map(|bytes| (bytes as f64 * USABLE) as u64)
        };
        let given = self.given_budgets(devices).into_iter().zip(devices.accelerators());
        given.map(|(budget, backend)| budget.or_else(|| free(backend))).collect()
    }

    /// The bytes that the caller allows on each accelerator.
    fn given_budgets(&self, devices: &Devices) -> Vec<Option<u64>> {
        let given = |number: usize| self.device_budgets.get(number).copied().flatten().or(self.budget);
        (0..devices.accelerators().len()).map(given).collect()
    }
}
