//! The options that all commands with a model share, and the way from them to a model that is ready.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_graph::DType;
use quadriga_llm::placement::{Devices, GpuLayers, PlacedModel, Placement};
use quadriga_llm::{Engine, EngineOptions, Generator, GeneratorOptions, Model};
use quadriga_runtime::{Plan, Progress, Scheduler};

use crate::failure::{Failure, Outcome};
use crate::{backends, fetch, interrupt, size};

/// Which model, and how it is run.
#[derive(clap::Args)]
pub(crate) struct ModelOptions {
    /// The GGUF file [the default model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Tokens of context; 0: the model's own, at most 4096
    #[arg(short = 'c', long = "ctx-size", value_name = "N", default_value_t = 0)]
    pub(crate) context: usize,
    /// Threads of the CPU [one for each core]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// The most tokens that are computed at once
    #[arg(short, long = "batch-size", value_name = "N", default_value_t = 512)]
    batch: usize,
    /// Layers on the accelerator, also -ngl: a number, all, or auto for what fits
    #[arg(long, alias = "n-gpu-layers", value_name = "N", default_value = "auto", value_parser = gpu_layers)]
    gpu_layers: GpuLayers,
    /// Devices, separated by commas: cpu, sim, cuda:0 … [the first GPU]; the CPU always takes the rest
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    device: Vec<String>,
    /// The most memory to use on each accelerator, such as 6G
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    vram_budget: Option<u64>,
    /// The type of the cache: f16, f32 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = cache_type)]
    cache_type: DType,
    /// Where the default model is kept [QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// No progress, no summary
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

fn gpu_layers(text: &str) -> Result<GpuLayers, &'static str> {
    text.parse().map_err(|_| "a number of layers, all or auto")
}

fn cache_type(name: &str) -> Result<DType, String> {
    let found =
        [DType::F16, DType::F32, DType::Q8_0].into_iter().find(|t| t.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| "the types are f16, f32 and q8_0".to_owned())
}

/// A model that is open and planned; its weights are not loaded yet.
pub(crate) struct Prepared {
    pub(crate) model: Model,
    pub(crate) devices: Devices,
    pub(crate) scheduler: Scheduler,
    /// What the largest batch over a full cache takes.
    pub(crate) forecast: Plan,
    quiet: bool,
    /// The time that opening and planning took.
    opening: Duration,
}

impl ModelOptions {
    /// A model with all layers on one device; the default model, if no file is given.
    pub(crate) fn on(device: &str, threads: Option<usize>, model: Option<PathBuf>) -> ModelOptions {
        ModelOptions {
            model,
            context: 0,
            threads,
            batch: 512,
            gpu_layers: if device == "cpu" { GpuLayers::Count(0) } else { GpuLayers::All },
            device: vec![device.to_owned()],
            vram_budget: None,
            cache_type: DType::F16,
            cache_dir: None,
            quiet: true,
        }
    }

    /// The model's path; the default model is fetched if it must be.
    fn path(&self) -> Outcome<PathBuf> {
        match &self.model {
            Some(path) => Ok(path.clone()),
            None => {
                let gentle = interrupt::gently();
                let fetched = fetch::default_model(self.cache_dir.as_deref(), self.quiet, gentle.flag());
                match fetched {
                    // A terminal sends Ctrl-C to pip as well, which may be the first to fail.
                    Err(_) if gentle.is_interrupted() => Err(Failure::Interrupted),
                    fetched => Ok(fetched?),
                }
            }
        }
    }

    /// Where the default model and measured limits are kept, if not in the usual folder.
    pub(crate) fn cache_dir(&self) -> Option<&std::path::Path> {
        self.cache_dir.as_deref()
    }

    /// The room that the options ask for.
    pub(crate) fn engine(&self) -> EngineOptions {
        EngineOptions {
            context: self.context,
            batch: self.batch,
            cache: self.cache_type,
            ..EngineOptions::default()
        }
    }

    /// Opens and plans the model.
    pub(crate) fn prepare(&self, options: &EngineOptions) -> Outcome<Prepared> {
        let path = self.path()?;
        let started = Instant::now();
        let model = Model::open(&path).map_err(|error| name_file(error, &path))?;
        let devices = backends::open(&self.device, self.threads)?;
        if devices.accelerators().is_empty()
            && matches!(self.gpu_layers, GpuLayers::All | GpuLayers::Count(1..))
            && !self.quiet
        {
            note!("quadriga: there is no accelerator: all layers are on the CPU (see `quadriga devices`)");
        }
        let placement =
            Placement { gpu_layers: self.gpu_layers, budget: self.vram_budget, ..Placement::default() };
        let PlacedModel { scheduler, forecast } = placement.plan(&model, &devices, options)?;
        backends::warn_if_short(&forecast, devices.backends());
        let opening = started.elapsed();
        Ok(Prepared { model, devices, scheduler, forecast, quiet: self.quiet, opening })
    }
}

/// Errors about a file's contents do not all say which file.
fn name_file(error: quadriga_llm::Error, path: &std::path::Path) -> Failure {
    let text = error.to_string();
    let name = path.display().to_string();
    Failure::Message(if text.contains(&name) { text } else { format!("{name}: {text}") })
}

impl Prepared {
    /// What the model is called: its file without the ending.
    pub(crate) fn title(&self) -> String {
        let name = self.model.file().paths().next().and_then(|path| path.file_stem());
        name.map_or_else(|| "the model".to_owned(), |name| name.to_string_lossy().into_owned())
    }

    /// Loads the model for the engine alone. Also the seconds that it took from the start.
    pub(crate) fn engine(&self, options: EngineOptions) -> Outcome<(Engine, f64)> {
        self.load(|progress| Engine::new(self.model.clone(), &self.scheduler, options, progress))
    }

    /// Loads the model for text. Also the seconds that it took from the start.
    pub(crate) fn generator(&self, options: GeneratorOptions) -> Outcome<(Generator, f64)> {
        self.load(|progress| Generator::on(self.model.clone(), &self.scheduler, options, progress))
    }

    fn load<T>(
        &self,
        load: impl FnOnce(&mut dyn FnMut(Progress)) -> quadriga_llm::Result<T>,
    ) -> Outcome<(T, f64)> {
        let started = Instant::now();
        // Drawn only where standard error is a terminal.
        let bar = if self.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let style = ProgressStyle::with_template("loading [{wide_bar}] {bytes}/{total_bytes}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let loaded = load(&mut |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
        });
        bar.finish_and_clear();
        Ok((loaded?, (self.opening + started.elapsed()).as_secs_f64()))
    }

    /// What the model takes of each device, in words.
    pub(crate) fn memory(&self) -> String {
        let parts: Vec<String> = self
            .forecast
            .bytes()
            .iter()
            .filter(|bytes| bytes.total() + bytes.mapped > 0)
            .map(|bytes| {
                let mapped = match bytes.mapped {
                    0 => String::new(),
                    mapped => format!(" and {} in the file map", size::text(mapped)),
                };
                format!(
                    "{} {} (weights {}{mapped}, cache {}, compute {})",
                    bytes.backend,
                    size::text(bytes.total()),
                    size::text(bytes.weights),
                    size::text(bytes.state),
                    size::text(bytes.compute)
                )
            })
            .collect();
        parts.join("; ")
    }
}
