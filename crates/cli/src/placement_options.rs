//! The options that place a model's layers and tensors on devices.

use std::str::FromStr;
use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};
use quadriga_llm::placement::{Devices, ExpertCache, GpuLayers, Placement, TensorOverride};
use quadriga_llm::{Adapter, Model};
use quadriga_runtime::{BackendBytes, Plan};
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::{size, values};

/// Heading of the help text.
pub(crate) const DEVICE: &str = "Device options";

/// Layers, tensors and memory of accelerators.
#[derive(Clone, clap::Args)]
pub(crate) struct PlacementOptions {
    /// Number of layers on the GPU, the output matrix counted as one, also -ngl: a number, all, or auto for the parts of the model that save the most time and fit
    #[arg(
        long,
        alias = "n-gpu-layers",
        value_name = "N",
        default_value = "auto",
        allow_negative_numbers = true,
        value_parser = gpu_layers,
        help_heading = DEVICE
    )]
    gpu_layers: GpuLayers,
    /// How several GPUs divide the model, also -sm: layer (each has layers), row (each has a part of every layer) or none (one has all)
    #[arg(long, value_name = "MODE", default_value = "layer", value_parser = SplitMode::from_str, help_heading = DEVICE)]
    split_mode: SplitMode,
    /// Proportions of the GPUs, in the order of --device, also -ts: such as 3,1 [default: by their rates, as far as it fits]
    #[arg(long, value_name = "LIST", value_parser = tensor_split, allow_negative_numbers = true, help_heading = DEVICE)]
    tensor_split: Option<TensorSplit>,
    /// The GPU that has all with --split-mode none, by its place in --device, also -mg [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole, help_heading = DEVICE)]
    main_gpu: Option<usize>,
    /// Memory budget per GPU, such as 6G [default: free memory]
    #[arg(
        long,
        value_name = "BYTES",
        allow_negative_numbers = true,
        value_parser = size::parse,
        help_heading = DEVICE
    )]
    vram_budget: Option<u64>,
    #[command(flatten)]
    rules: TensorRules,
    /// GPU memory for experts of the CPU, which move there as they are used: bytes such as 4G, 0 for none, or auto for what
    /// is left
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "auto",
        allow_negative_numbers = true,
        value_parser = expert_cache,
        help_heading = DEVICE
    )]
    expert_cache: ExpertCache,
}

/// Tensors that are placed whatever the layers are, in the order of the command line, as llama.cpp takes them.
#[derive(Clone, Default)]
struct TensorRules {
    options: TensorRuleOptions,
    /// Each option in its order: its place on the command line, and what it says.
    in_order: Vec<TensorRule>,
}

#[derive(Clone)]
enum TensorRule {
    /// The experts of so many layers stay on the CPU.
    Experts(usize),
    /// A list of regular expressions and devices.
    Expressions(String),
}

#[derive(Clone, Default, clap::Args)]
struct TensorRuleOptions {
    /// Keep the experts of all layers on the CPU, also -cmoe. With -ngl auto, free GPU memory is for those in use (see --expert-cache)
    #[arg(long, help_heading = DEVICE)]
    cpu_moe: bool,
    /// Keep the experts of the first N layers on the CPU, also -ncmoe
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::whole,
        help_heading = DEVICE
    )]
    n_cpu_moe: Option<usize>,
    /// Place tensors whose names match, also -ot: REGEX=DEVICE[,REGEX=DEVICE…]; repeatable. Of these, --cpu-moe and --n-cpu-moe, the first on the command line that matches decides
    #[arg(long, value_name = "RULES", help_heading = DEVICE)]
    override_tensor: Vec<String>,
}

impl clap::Args for TensorRules {
    fn augment_args(command: Command) -> Command {
        TensorRuleOptions::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        TensorRuleOptions::augment_args_for_update(command)
    }
}

impl FromArgMatches for TensorRules {
    fn from_arg_matches(matches: &ArgMatches) -> Result<TensorRules, clap::Error> {
        let options = TensorRuleOptions::from_arg_matches(matches)?;
        let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let places = |id: &str| {
            matches.indices_of(id).filter(|_| is_given(id)).into_iter().flatten().collect::<Vec<_>>()
        };
        let mut found: Vec<(usize, TensorRule)> = Vec::new();
        found.extend(places("cpu_moe").into_iter().map(|at| (at, TensorRule::Experts(usize::MAX))));
        let layers = options.n_cpu_moe.unwrap_or(0);
        found.extend(places("n_cpu_moe").into_iter().map(|at| (at, TensorRule::Experts(layers))));
        let lists = options.override_tensor.iter().cloned().map(TensorRule::Expressions);
        found.extend(places("override_tensor").into_iter().zip(lists));
        found.sort_by_key(|(at, _)| *at);
        Ok(TensorRules { options, in_order: found.into_iter().map(|(_, rule)| rule).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = TensorRules::from_arg_matches(matches)?;
        Ok(())
    }
}

/// How several GPUs divide a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SplitMode {
    /// One of them has all of it.
    None,
    /// Each has layers.
    Layer,
    /// Each has a part of every layer.
    Row,
}

impl FromStr for SplitMode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<SplitMode, &'static str> {
        match text {
            "none" => Ok(SplitMode::None),
            "layer" => Ok(SplitMode::Layer),
            "row" | "tensor" => Ok(SplitMode::Row),
            _ => Err("must be none, layer or row"),
        }
    }
}

/// Proportions of GPUs.
#[derive(Clone, Debug)]
pub(crate) struct TensorSplit(Vec<f32>);

/// Parses proportions, with commas or slashes between them as in llama.cpp.
fn tensor_split(text: &str) -> Result<TensorSplit, &'static str> {
    let share =
        |text: &str| text.trim().parse().ok().filter(|share: &f32| share.is_finite() && *share >= 0.0);
    let shares: Option<Vec<f32>> = text.split([',', '/']).map(share).collect();
    let shares = shares.filter(|shares| shares.iter().any(|share| *share > 0.0));
    shares.map(TensorSplit).ok_or("must be numbers from 0, such as 3,1, of which one is more")
}

/// Parses a size, or auto.
fn expert_cache(text: &str) -> Result<ExpertCache, String> {
    match text {
        "auto" => Ok(ExpertCache::Auto),
        text => size::parse(text).map(ExpertCache::Bytes).map_err(|error| error.to_string()),
    }
}

/// Parses a number of layers; -1 and -2 are llama.cpp's numbers for auto and all.
pub(crate) fn gpu_layers(text: &str) -> Result<GpuLayers, &'static str> {
    match text {
        "-1" => Ok(GpuLayers::Auto),
        "-2" => Ok(GpuLayers::All),
        text => text.parse().map_err(|_| "must be a number of layers, all or auto"),
    }
}

/// Whether an adapter has matrices of experts.
fn changes_experts(adapter: &Adapter) -> bool {
    adapter.pairs().any(|(_, pair)| pair.experts().is_some())
}

impl PlacementOptions {
    /// A number of layers, and nothing else.
    pub(crate) fn new(gpu_layers: GpuLayers) -> PlacementOptions {
        PlacementOptions {
            gpu_layers,
            split_mode: SplitMode::Layer,
            tensor_split: None,
            main_gpu: None,
            vram_budget: None,
            rules: TensorRules::default(),
            expert_cache: ExpertCache::Auto,
        }
    }

    /// The same options with another number of layers.
    pub(crate) fn with_gpu_layers(&self, gpu_layers: GpuLayers) -> PlacementOptions {
        PlacementOptions { gpu_layers, ..self.clone() }
    }

    /// The number of layers as the command line has it.
    pub(crate) fn gpu_layers_text(&self) -> String {
        match self.gpu_layers {
            GpuLayers::All => "all".to_owned(),
            GpuLayers::Count(count) => count.to_string(),
            GpuLayers::Auto => "auto".to_owned(),
        }
    }

    /// The placement that the options describe.
    pub(crate) fn placement(&self) -> Outcome<Placement> {
        let mut overrides = Vec::new();
        for rule in &self.rules.in_order {
            match rule {
                TensorRule::Experts(layers) => overrides.push(TensorOverride::experts_on_cpu(*layers)),
                TensorRule::Expressions(list) => overrides.extend(TensorOverride::parse_list(list)?),
            }
        }
        Ok(Placement {
            gpu_layers: self.gpu_layers,
            tensor_split: self.tensor_split.as_ref().map_or_else(Vec::new, |split| split.0.clone()),
            budget: self.vram_budget,
            overrides,
            expert_cache: self.expert_cache,
            ..Placement::default()
        })
    }

    /// Whether several GPUs divide every layer.
    pub(crate) fn splits_rows(&self) -> bool {
        self.split_mode == SplitMode::Row
    }

    /// Those of the opened devices that the model is for.
    pub(crate) fn select(&self, devices: Devices, quiet: bool) -> Outcome<Devices> {
        let gpus = devices.accelerators();
        let named = self.tensor_split.as_ref().map_or(0, |split| split.0.len());
        if named > gpus.len() && !gpus.is_empty() {
            let gpus = plural(gpus.len(), "GPU", "GPUs");
            return Err(Failure::Usage(format!(
                "--tensor-split has {named} numbers for {gpus}; --device names the GPUs"
            )));
        }
        let note = |option: &str, reason: &str| {
            if !quiet {
                note!("quadriga: {option} has no effect: {reason}");
            }
        };
        if self.main_gpu.is_some() && self.split_mode != SplitMode::None {
            note("--main-gpu", "all GPUs of --device are used (see --split-mode none)");
        }
        if gpus.len() < 2 {
            let reason = "fewer than two GPUs are used (see --device)";
            if self.splits_rows() {
                note("--split-mode row", reason);
            }
            if self.tensor_split.is_some() {
                note("--tensor-split", reason);
            }
        }
        if self.split_mode != SplitMode::None || gpus.is_empty() {
            return Ok(devices);
        }
        let main = self.main_gpu.unwrap_or(0);
        let Some(gpu) = gpus.get(main) else {
            let gpus = plural(gpus.len(), "GPU", "GPUs");
            return Err(Failure::Usage(format!("--main-gpu {main}: --device has {gpus}, counted from 0")));
        };
        Ok(Devices::new([Arc::clone(gpu)], Arc::clone(devices.cpu()))?)
    }

    /// Prints which options have no effect, and why no layer is on a GPU if they ask for one. `named` are the devices as the
    /// command line has them.
    pub(crate) fn explain(
        &self,
        model: &Model,
        devices: &Devices,
        named: &[String],
        (forecast, slots): (&Plan, usize),
    ) {
        let wanted = format!("-ngl {}", self.gpu_layers_text());
        let TensorRuleOptions { cpu_moe, n_cpu_moe, .. } = self.rules.options;
        if cpu_moe || n_cpu_moe.is_some_and(|layers| layers > 0) {
            let option = if cpu_moe { "--cpu-moe" } else { "--n-cpu-moe" };
            if model.hyperparameters().layers.iter().all(|layer| layer.experts.is_none()) {
                note!("quadriga: {option} has no effect: the model has no experts");
            } else if devices.accelerators().is_empty() {
                note!("quadriga: {option} has no effect: no GPU is used (see `quadriga devices`)");
            }
        }
        if slots == 0 && matches!(self.expert_cache, ExpertCache::Bytes(1..)) {
            let reason = match () {
                () if devices.accelerators().is_empty() => "no GPU is used (see `quadriga devices`)",
                () if model.hyperparameters().layers.iter().all(|layer| layer.experts.is_none()) => {
                    "the model has no experts"
                }
                () if model.ranks().is_some() => "several ranks divide the experts",
                () if model.adapters().iter().any(changes_experts) => "a LoRA adapter changes the experts",
                () => {
                    "no expert fits beside the rest of the model, or experts are on the GPU already (see --cpu-moe)"
                }
            };
            note!("quadriga: --expert-cache has no effect: {reason}");
        }
        let asks = matches!(self.gpu_layers, GpuLayers::All | GpuLayers::Count(1..));
        if devices.accelerators().is_empty() && self.vram_budget.is_some() {
            note!(
                "quadriga: --vram-budget has no effect: no GPU is used (see `quadriga devices`; `--device sim` plans for a GPU of that size)"
            );
        }
        match devices.accelerators() {
            [] if asks && named.is_empty() => {
                note!("quadriga: no GPU found, all layers run on the CPU (see `quadriga devices`)");
            }
            [] if asks => {
                note!("quadriga: {wanted} has no effect: --device {} names no GPU", named.join(","));
            }
            [] => {}
            [first, ..] if self.gpu_layers == GpuLayers::Auto => {
                let is_used = |bytes: &BackendBytes| bytes.backend != quadriga_cpu::NAME && bytes.total() > 0;
                if !forecast.bytes().iter().any(is_used) {
                    let reason = match (self.vram_budget, first.device().free_bytes) {
                        (Some(budget), _) => format!("--vram-budget {} is", size::text(budget)),
                        (None, Some(free)) => {
                            format!("{} of free memory on {} are", size::text(free), first.name())
                        }
                        (None, None) => format!("the memory of {} is", first.name()),
                    };
                    note!("quadriga: {reason} too small for a single layer; all layers run on the CPU");
                }
            }
            _ => {}
        }
    }
}
