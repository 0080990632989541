//! The options of all commands that load a model; opening and planning it.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quadriga_gguf::File;
use quadriga_graph::DType;
use quadriga_llm::models::{NeuronMode, Neurons};
use quadriga_llm::placement::{CpuOptions, Devices, GpuLayers, NumaMode, Placement};
use quadriga_llm::{CacheRows, EngineOptions, Link, Model, NeuronCounts, Parallelism, RequestLoad};
use quadriga_models::hub::DEFAULT;
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::hub::HubAccess;
use crate::kv_pages::pages_of;
use crate::llama_options::LlamaOptions;
use crate::placement_options::{DEVICE, PlacementOptions};
use crate::prepared_model::Prepared;
use crate::{backends, fetch, file_hint, interrupt, known_limits, lora, ranks, values};

/// Options of the model and the devices.
#[derive(Clone, clap::Args)]
pub(crate) struct ModelOptions {
    /// GGUF file; of a split model, any of its parts; or the word default [default: SmolLM2 135M]
    #[arg(short, long, value_name = "FILE", help_heading = MODEL)]
    model: Option<PathBuf>,
    /// Read the weights into memory instead of mapping the file, which may change on disk then; a rank reads its part only
    #[arg(long, help_heading = MODEL)]
    no_mmap: bool,
    /// Context size in tokens, 0 for what the model was trained with, or less where memory is short
    #[arg(
        short = 'c',
        long = "ctx-size",
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = values::whole,
        help_heading = MODEL
    )]
    pub(crate) context: usize,
    /// Number of CPU threads [default: number of cores; beside a GPU one less of more than four]
    #[arg(
        short,
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::threads,
        help_heading = DEVICE
    )]
    pub(crate) threads: Option<usize>,
    /// Bind CPU threads and weights to NUMA nodes: distribute over all, isolate on the current one, or numactl for those that
    /// numactl chose
    #[arg(long, value_name = "MODE", value_parser = NumaMode::from_str, help_heading = DEVICE)]
    numa: Option<NumaMode>,
    /// How the ranks that mpirun started divide the model: tensor (heads, columns and experts of each layer), pipeline (layers), both
    /// (tensor=N,pipeline=M), or auto
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = Parallelism::from_str, help_heading = DEVICE)]
    pub(crate) parallelism: Parallelism,
    /// Link between the ranks, by which --parallelism auto decides: bits per second with their unit and perhaps a latency, such as 25G or
    /// 100G,2us, or memory [default: memory where all ranks are on one machine, else 25G]
    #[arg(long, value_name = "RATE", value_parser = Link::from_str, help_heading = DEVICE)]
    pub(crate) link: Option<Link>,
    /// Seconds without a heartbeat after which a rank is lost [default: 10]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600), help_heading = DEVICE)]
    pub(crate) rank_timeout: Option<u64>,
    /// Seconds that ranks wait in one step for one that sends heartbeats and does not take part; 0 waits for ever [default: 300]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=86_400), help_heading = DEVICE)]
    pub(crate) rank_step_timeout: Option<u64>,
    /// Seconds that ranks wait for one that sends heartbeats to open and load its part of the model; 0 waits for ever [default: 1800]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=604_800), help_heading = DEVICE)]
    pub(crate) rank_load_timeout: Option<u64>,
    /// Maximum number of tokens per batch [default: 512, or up to 4096 where weights are streamed to the GPU]
    #[arg(
        short,
        long = "batch-size",
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        help_heading = MODEL
    )]
    batch: Option<usize>,
    #[command(flatten)]
    placement: PlacementOptions,
    /// Comma-separated devices: cpu, cuda:N, sim; the CPU is always added last [default: first GPU, else cpu]
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = DEVICE)]
    device: Vec<String>,
    /// KV cache data type: f32, f16, bf16, q8_0, q5_1 or q4_0; -ctk and -ctv for keys and values apart [default: f16]
    #[arg(long, value_name = "TYPE", value_parser = cache_type, help_heading = MODEL)]
    cache_type: Option<DType>,
    /// Data type of the keys, also -ctk
    #[arg(long, value_name = "TYPE", value_parser = cache_type, hide = true)]
    cache_type_k: Option<DType>,
    /// Data type of the values, also -ctv
    #[arg(long, value_name = "TYPE", value_parser = cache_type, hide = true)]
    cache_type_v: Option<DType>,
    /// Keep the whole context in layers with a sliding window, too: going back is free, but takes memory
    #[arg(long, help_heading = MODEL)]
    swa_full: bool,
    /// Saved states to go back to, for models that forget (sliding windows, recurrent layers); `serve` and `batch` have so many for
    /// all requests, and of recurrent layers one more for each [default: 4]
    #[arg(long, alias = "ctx-checkpoints", value_name = "N", help_heading = MODEL)]
    checkpoints: Option<usize>,
    /// Neurons of rectified feed-forward networks: exact skips those that are inactive, predicted those that the file's
    /// predictors take for inactive, dense none
    #[arg(long, value_name = "MODE", default_value = "exact", value_parser = neuron_mode, help_heading = MODEL)]
    neurons: NeuronMode,
    /// Take gates of smaller magnitude for 0 and skip their neurons, in models with other gates, too; prints the KL
    /// divergence that this costs [default: 0, none]
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true, value_parser = gate_threshold, hide_default_value = true, help_heading = MODEL)]
    gate_threshold: f32,
    /// Rows of neurons on the GPU beside attention and gates: off, auto for those that turn out to be active, or a FILE of counts
    /// by `quadriga neurons` or of PowerInfer's hot neurons [default: off]
    #[arg(long, value_name = "MODE", default_value = "off", hide_default_value = true, help_heading = DEVICE)]
    hot_neurons: String,
    /// llama.cpp's option, also -fa: attention is always computed without a matrix of scores
    #[arg(
        long,
        value_name = "MODE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "auto",
        value_parser = ["on", "off", "auto", "1", "0", "-1", "true", "false"],
        hide = true
    )]
    flash_attn: Option<String>,
    /// Model of Hugging Face's hub, also -hf: downloaded once into the cache; without :QUANT, or where the repository does not
    /// have it, the best that fits in this machine's memory
    #[arg(long, value_name = "ORG/REPO[:QUANT]", conflicts_with = "model", help_heading = MODEL)]
    hf_repo: Option<String>,
    /// LoRA adapter (GGUF, or a folder of PEFT) that is added to the model while it runs, with an optional scale; repeatable
    #[arg(long, value_name = "FILE[=SCALE]", help_heading = MODEL)]
    lora: Vec<String>,
    /// Use models in the cache only [default: HF_HUB_OFFLINE]
    #[arg(long, help_heading = MODEL)]
    offline: bool,
    /// Folder of the default model, compiled kernels and measured rates [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER", help_heading = MODEL)]
    cache_dir: Option<PathBuf>,
    /// Print neither progress nor summary
    #[arg(short, long)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) llama: LlamaOptions,
}

/// Tokens of a batch, and the most where weights are streamed.
const DEFAULT_BATCH: usize = 512;
const STREAMING_BATCH: usize = 4096;
/// The longest context that ranks expect where none is given.
const MOST_EXPECTED_CONTEXT: usize = 32_768;
/// Saved states of a model that forgets.
const DEFAULT_CHECKPOINTS: usize = 4;

/// Heading of the help text.
const MODEL: &str = "Model options";

fn neuron_mode(text: &str) -> Result<NeuronMode, String> {
    text.parse().map_err(|_| "must be exact, predicted or dense".to_owned())
}

fn gate_threshold(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number: &f32| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "must be a number from 0".to_owned())
}

fn cache_type(name: &str) -> Result<DType, String> {
    let found = DType::all().find(|t| t.is_cache_type() && t.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| "must be f32, f16, bf16, q8_0, q5_1 or q4_0".to_owned())
}

impl ModelOptions {
    /// Options for a model with all layers on one device; the default model, if no file is given.
    pub(crate) fn on(
        device: &str,
        threads: Option<usize>,
        model: Option<PathBuf>,
        cache_dir: Option<PathBuf>,
    ) -> ModelOptions {
        ModelOptions {
            model,
            no_mmap: false,
            context: 0,
            threads,
            numa: None,
            parallelism: Parallelism::AUTO,
            link: None,
            rank_timeout: None,
            rank_step_timeout: None,
            rank_load_timeout: None,
            batch: None,
            placement: PlacementOptions::new(if device == "cpu" {
                GpuLayers::Count(0)
            } else {
                GpuLayers::All
            }),
            device: vec![device.to_owned()],
            cache_type: None,
            cache_type_k: None,
            cache_type_v: None,
            swa_full: false,
            checkpoints: None,
            neurons: NeuronMode::Exact,
            gate_threshold: 0.0,
            hot_neurons: "off".to_owned(),
            flash_attn: None,
            hf_repo: None,
            lora: Vec::new(),
            offline: false,
            cache_dir,
            quiet: true,
            llama: LlamaOptions::default(),
        }
    }

    /// Options for whatever devices this machine has, to plan models with.
    pub(crate) fn detected(cache_dir: Option<PathBuf>) -> ModelOptions {
        let options = ModelOptions::on("cpu", None, None, cache_dir);
        ModelOptions { device: Vec::new(), placement: PlacementOptions::new(GpuLayers::Auto), ..options }
    }

    /// Whether a model fits in the free memory of the devices: its weights, its KV cache and what it computes with.
    pub(crate) fn fits(&self, model: &std::path::Path) -> Outcome<bool> {
        let options =
            ModelOptions { model: Some(model.to_owned()), hf_repo: None, quiet: true, ..self.clone() };
        let (whole, opening) = options.open_whole()?;
        if ranks::are_several() {
            // A rank that has the file looks for none: this must not wait for it.
            let free = options.open_devices()?;
            let free = free.backends().iter().map(|backend| backend.device().free_bytes);
            let free = free.sum::<Option<u64>>().map(|free| free.saturating_mul(ranks::count() as u64));
            return Ok(free.is_none_or(|free| whole.file().byte_len() <= free));
        }
        let prepared = options.place(whole, opening, &options.engine())?;
        let needed = prepared.placed.forecast.bytes();
        let enough = needed.iter().zip(prepared.devices.backends()).all(|(bytes, backend)| {
            backend.device().free_bytes.is_none_or(|free| bytes.total() + bytes.mapped <= free)
        });
        Ok(enough)
    }

    /// The same options with a model file that was given without `-m`, which takes precedence over `-hf`.
    pub(crate) fn with_file(&self, file: Option<&std::path::Path>) -> ModelOptions {
        let hf_repo = self.hf_repo.clone().filter(|_| file.is_none());
        let model = file.map(std::path::Path::to_owned).or(self.model.clone());
        ModelOptions { model, hf_repo, ..self.clone() }
    }

    /// The same options for so many requests at once, by which ranks choose how they divide the model.
    pub(crate) fn with_load(&self, load: RequestLoad) -> ModelOptions {
        ModelOptions { parallelism: Parallelism { load, ..self.parallelism }, ..self.clone() }
    }

    /// The same options without notes.
    pub(crate) fn silent(&self) -> ModelOptions {
        ModelOptions { quiet: true, ..self.clone() }
    }

    /// The same options with a model of the hub that was given without `-hf`.
    pub(crate) fn with_repository(&self, name: &str) -> ModelOptions {
        ModelOptions { hf_repo: Some(name.to_owned()), ..self.clone() }
    }

    /// The same options with another number of layers on the GPU.
    pub(crate) fn with_gpu_layers(&self, layers: GpuLayers) -> ModelOptions {
        ModelOptions { placement: self.placement.with_gpu_layers(layers), ..self.clone() }
    }

    /// The number of layers on the GPU as the command line has it.
    pub(crate) fn gpu_layers_text(&self) -> String {
        self.placement.gpu_layers_text()
    }

    /// The same options without `--no-warmup`, which has an effect on a benchmark, and whether that is to warm up.
    pub(crate) fn without_no_warmup(&self) -> (ModelOptions, bool) {
        let mut options = self.clone();
        options.llama.no_warmup = false;
        (options, !self.llama.no_warmup)
    }

    /// The file given with `-m`.
    pub(crate) fn file(&self) -> Option<&std::path::Path> {
        self.model.as_deref().filter(|path| !fetch::is_default(path))
    }

    /// The repository given with `-hf`.
    pub(crate) fn repository(&self) -> Option<&str> {
        self.hf_repo.as_deref().filter(|name| *name != DEFAULT)
    }

    /// The same options for another model: neither `-hf` nor the adapters are meant for it.
    pub(crate) fn of_other_file(&self, file: &std::path::Path) -> ModelOptions {
        ModelOptions { model: Some(file.to_owned()), hf_repo: None, lora: Vec::new(), ..self.clone() }
    }

    /// Whether `--lora` was given.
    pub(crate) fn has_adapters(&self) -> bool {
        !self.lora.is_empty()
    }

    /// Whether a model was given with `-m` or `-hf`.
    pub(crate) fn has_file(&self) -> bool {
        self.model.is_some() || self.hf_repo.is_some()
    }

    /// The option that names the model, as it is given.
    pub(crate) fn model_option(&self) -> String {
        match (&self.hf_repo, &self.model) {
            (Some(name), _) => format!("-hf {name}"),
            (None, Some(path)) => format!("-m {}", path.display()),
            (None, None) => "-m".to_owned(),
        }
    }

    /// The path of a model of the hub, which is downloaded if it is not cached.
    pub(crate) fn hub_path(&self, name: &str) -> Outcome<PathBuf> {
        let access = HubAccess { cache: self.cache_dir.as_deref(), offline: self.offline, quiet: self.quiet };
        access.model(name, &|outline| self.fits(outline))
    }

    /// The model's path; downloads the default model if it is not cached.
    pub(crate) fn path(&self) -> Outcome<PathBuf> {
        if let Some(name) = self.hf_repo.as_ref().filter(|name| *name != DEFAULT) {
            return self.hub_path(name);
        }
        match self.model.as_ref().filter(|path| !fetch::is_default(path)) {
            Some(path) => Ok(path.clone()),
            None => {
                let ctrl_c = interrupt::catch();
                let cache = self.cache_dir.as_deref();
                let fetched = fetch::default_model(cache, self.offline, self.quiet, ctrl_c.flag());
                match fetched {
                    // A terminal sends Ctrl-C to pip as well, which may be the first to fail.
                    Err(_) if ctrl_c.is_pressed() => Err(Failure::Interrupted),
                    fetched => Ok(fetched?),
                }
            }
        }
    }

    /// The folder given with `--cache-dir`.
    pub(crate) fn cache_dir(&self) -> Option<&std::path::Path> {
        self.cache_dir.as_deref()
    }

    /// Engine options with the requested context, batch and KV-cache type.
    pub(crate) fn engine(&self) -> EngineOptions {
        EngineOptions {
            context: self.context,
            batch: match (self.llama.ubatch_size, self.batch) {
                (Some(at_once), batch) => at_once.min(batch.unwrap_or(DEFAULT_BATCH)),
                (None, batch) => batch.unwrap_or(DEFAULT_BATCH),
            },
            cache_keys: self.cache_type_k.or(self.cache_type).unwrap_or(DType::F16),
            cache_values: self.cache_type_v.or(self.cache_type).unwrap_or(DType::F16),
            window_slots: if self.swa_full { usize::MAX } else { 0 },
            checkpoints: self.checkpoints.unwrap_or(DEFAULT_CHECKPOINTS),
            neurons: Neurons { mode: self.neurons, ..Neurons::default() }.cut(self.gate_threshold),
            ..EngineOptions::default()
        }
    }

    /// The options of the KV cache that were given.
    fn cache_options(&self) -> impl Iterator<Item = &'static str> {
        [
            (self.cache_type.is_some(), "--cache-type"),
            (self.cache_type_k.is_some(), "-ctk"),
            (self.cache_type_v.is_some(), "-ctv"),
            (self.swa_full, "--swa-full"),
            (self.checkpoints.is_some(), "--checkpoints"),
        ]
        .into_iter()
        .filter_map(|(is_given, option)| is_given.then_some(option))
    }

    /// Opens the model, places its layers and plans the largest batch.
    pub(crate) fn prepare(&self, options: &EngineOptions) -> Outcome<Prepared> {
        let (model, opening) = self.open()?;
        self.place(model, opening, options)
    }

    /// Says so if the model is to be divided, and there are no ranks.
    pub(crate) fn explain_parallelism(&self) {
        let is_given = self.parallelism.tensor.is_some() || self.parallelism.pipeline.is_some();
        if is_given && !ranks::are_several() && !self.quiet {
            note!("quadriga: --parallelism has no effect: there is one rank; mpirun -n 2 starts two");
        }
        if self.link.is_some() && !ranks::are_several() && !self.quiet {
            note!("quadriga: --link has no effect: there is one rank; mpirun -n 2 starts two");
        }
    }

    /// Opens the model, of which each of several ranks gets its part; the time that it took.
    pub(crate) fn open(&self) -> Outcome<(Model, Duration)> {
        let (model, opening) = self.open_whole()?;
        if !ranks::are_several() {
            return Ok((model, opening));
        }
        let started = Instant::now();
        if self.placement.splits_rows() {
            let gpus = self.silent().open_devices()?.accelerators().len();
            if gpus > 1 {
                return Err(Failure::Usage(format!(
                    "--split-mode row divides the model among the {gpus} GPUs of one process, and ranks divide it already; start a rank for each GPU"
                )));
            }
        }
        let own = || {
            let devices = self.silent().open_devices()?;
            let measured = known_limits::rates(self.cache_dir(), &devices);
            Ok((devices, measured))
        };
        let parallelism =
            Parallelism { cache: Some(self.expected_cache(&model)?), link: self.link, ..self.parallelism };
        let model = ranks::divide(model, parallelism, &own, self.quiet)?;
        Ok((model, opening + started.elapsed()))
    }

    /// Opens the model as one process has it.
    fn open_whole(&self) -> Outcome<(Model, Duration)> {
        if matches!(self.flash_attn.as_deref(), Some("off" | "0" | "false")) && !self.quiet {
            note!("quadriga: -fa off has no effect: attention never stores a matrix of scores");
        }
        if !self.quiet {
            self.llama.without_effect().for_each(|reason| note!("quadriga: {reason}"));
        }
        // Wrong options are reported before the model is fetched.
        self.placement.placement()?;
        let path = self.path()?;
        let started = Instant::now();
        let file = if self.no_mmap { File::read_on_demand(&path) } else { File::open(&path) };
        let model = file.map_err(Into::into).and_then(Model::from_file);
        let mut model = model.map_err(|error| name_file(error, &path))?;
        if !self.lora.is_empty() {
            let adapters = lora::open(&self.lora, model.file())?;
            model = model
                .with_adapters(&adapters)
                .map_err(|error| Failure::Message(format!("--lora: {error}")))?;
        }
        Ok((model, started.elapsed()))
    }

    /// The KV cache that ranks divide beside the weights, as far as it is known before they do: with a context that is left open, what
    /// the model was trained with, up to a limit, and for several requests as many tokens as they have by default.
    fn expected_cache(&self, model: &Model) -> Outcome<CacheRows> {
        let trained = model.hyperparameters().context.min(MOST_EXPECTED_CONTEXT);
        let engine = self.engine();
        let context = if engine.context == 0 { trained } else { engine.context };
        let requests = self.parallelism.load.most;
        let one = EngineOptions { context, ..engine };
        let paged = pages_of(context, requests, None);
        let options = match requests {
            1 => one,
            _ => EngineOptions { sequences: requests, pages: paged, ..one },
        };
        Ok(options.cache_rows(model)?)
    }

    /// Opens the devices that the options name.
    pub(crate) fn open_devices(&self) -> Outcome<Devices> {
        self.placement.select(backends::open(&self.device, self.cpu(), self.quiet)?, self.quiet)
    }

    fn cpu(&self) -> CpuOptions {
        CpuOptions { threads: self.threads.or_else(ranks::default_threads), numa: self.numa }
    }

    /// Places the layers of an opened model and plans the largest batch.
    pub(crate) fn place(
        &self,
        model: Model,
        opening: Duration,
        options: &EngineOptions,
    ) -> Outcome<Prepared> {
        self.place_on(model, opening, options, None)
    }

    /// As [`ModelOptions::place`], on devices that are open already, if any.
    pub(crate) fn place_on(
        &self,
        model: Model,
        opening: Duration,
        options: &EngineOptions,
        devices: Option<Devices>,
    ) -> Outcome<Prepared> {
        let hyper = model.hyperparameters();
        if hyper.encoder && self.context > hyper.context {
            return Err(Failure::Usage(format!(
                "-c {}: the encoder was trained with texts of up to {}",
                self.context,
                plural(hyper.context, "token", "tokens")
            )));
        }
        if self.cache_type_v.is_some() && hyper.has_latent_cache() && !self.quiet {
            note!(
                "quadriga: -ctv has no effect: latent attention caches one vector for keys and values, of the type of -ctk"
            );
        }
        if hyper.encoder && !self.quiet {
            self.cache_options().for_each(|option| {
                note!("quadriga: {option} has no effect: an encoder has no KV cache");
            });
        }
        let started = Instant::now();
        let devices = match devices {
            Some(devices) => devices,
            None => self.open_devices()?,
        };
        if let Some(mode) = self.numa.filter(|_| devices.cpu().numa().is_none() && !self.quiet) {
            note!("quadriga: --numa {mode} has no effect: this machine has one NUMA node");
        }
        let rates = known_limits::rates(self.cache_dir(), &devices);
        let placement = Placement {
            hot_neurons: self.hot_neurons != "off",
            rates,
            shared_by: ranks::sharing(),
            streaming_batch: match (self.llama.ubatch_size, self.batch) {
                (None, None) => STREAMING_BATCH,
                _ => 0,
            },
            ..self.placement.placement()?
        };
        let mut options = options.clone();
        if !matches!(self.hot_neurons.as_str(), "off" | "auto") {
            let path = std::path::Path::new(&self.hot_neurons);
            let counts = NeuronCounts::open(path, &model).map_err(|error| name_file(error, path))?;
            options.neuron_counts = Some(Arc::new(counts));
        }
        let (mut model, mut devices, mut others) = (model, devices, Vec::new());
        let (placed, options) = if self.placement.splits_rows() && devices.accelerators().len() > 1 {
            let mut ranks = placement.plan_device_ranks(&model, &devices, self.cpu(), &options)?.into_iter();
            let Some(first) = ranks.next() else {
                return Err(Failure::Message("no GPU has a part of the model".into()));
            };
            others.extend(ranks);
            for rank in std::iter::once(&first).chain(&others).filter(|_| !self.quiet) {
                note!("quadriga: {}", rank.describe());
            }
            (model, devices) = (first.model, first.devices);
            (first.placed, first.options)
        } else {
            let (placed, own) = placement.plan_with_context(&model, &devices, &options)?;
            // Ranks compute with one context and batch: what the one with least memory has room for.
            let mut agreed = [own.context, own.batch];
            if model.ranks().is_some() {
                ranks::least(&mut agreed)?;
            }
            if agreed == [own.context, own.batch] {
                (placed, own)
            } else {
                let [context, batch] = agreed;
                let fixed = EngineOptions { context, batch, ..options };
                Placement { streaming_batch: 0, ..placement.clone() }
                    .plan_with_context(&model, &devices, &fixed)?
            }
        };
        if !self.quiet {
            let trained = model.hyperparameters().context;
            if options.context > trained && !model.hyperparameters().encoder {
                let context = match self.context {
                    0 => format!("a context of {} tokens", options.context),
                    context => format!("-c {context}"),
                };
                note!(
                    "quadriga: {context} is past the {trained} tokens that the model was trained with; answers may get worse beyond them"
                );
            }
            self.placement.explain(&model, &devices, &self.device, (&placed.forecast, options.expert_slots));
            if let Some(reason) = placed.neurons_not_divided {
                note!("quadriga: --hot-neurons has no effect: {reason}");
            }
            for pattern in &placed.unmatched {
                note!(
                    "quadriga: -ot {pattern} has no effect: no tensor has such a name (see `quadriga inspect`)"
                );
            }
            backends::warn_if_short(&placed.forecast, devices.backends());
        }
        let opening = opening + started.elapsed();
        let (quiet, prefill_bar, others) = (self.quiet, Arc::default(), Mutex::new(others));
        Ok(Prepared { model, devices, placement, placed, options, others, quiet, prefill_bar, opening })
    }
}

/// Adds the path to errors about a file's contents that do not name it, and what the file is if it is no model.
fn name_file(error: quadriga_llm::Error, path: &std::path::Path) -> Failure {
    let text = error.to_string();
    let name = path.display().to_string();
    let text = if text.contains(&name) { text } else { format!("{name}: {text}") };
    Failure::Message(match file_hint::hint(path).filter(|_| matches!(error, quadriga_llm::Error::File(_))) {
        Some(hint) => format!("{text}; {hint}"),
        None => text,
    })
}
