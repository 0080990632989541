//! Finds, plans and loads the models that are served.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use quadriga_llm::placement::Devices;
use quadriga_llm::{EmbedderOptions, EngineOptions, GeneratorOptions, Model};
use quadriga_server::{LoadError, ModelEntry, ModelLoader, PlanPictures, ServedModel, check_memory};
use quadriga_view::Picture;

use super::{ServeArgs, memory};
use crate::failure::{Failure, Outcome};
use crate::model_options::{ModelOptions, Prepared};

/// Finds, plans and loads models.
pub(super) struct Loader {
    arguments: ServeArgs,
    /// The model of `-m`, or the default one where no folder is given.
    first: Option<ModelEntry>,
    /// The file of that model, once it was opened: it may have been fetched.
    first_file: OnceLock<PathBuf>,
    /// All models run on the same devices. They are opened with the first.
    devices: Mutex<Option<Devices>>,
    /// Why the first model was not loaded, with its exit code.
    failure: std::sync::Arc<Mutex<Option<Failure>>>,
}

/// A model that is planned but not loaded.
enum LoadFailure {
    DoesNotFit(String),
    Failed(Failure),
}

impl From<Failure> for LoadFailure {
    fn from(failure: Failure) -> LoadFailure {
        LoadFailure::Failed(failure)
    }
}

impl From<quadriga_llm::Error> for LoadFailure {
    fn from(error: quadriga_llm::Error) -> LoadFailure {
        LoadFailure::Failed(error.into())
    }
}

impl Loader {
    pub(super) fn new(arguments: &ServeArgs) -> Loader {
        let named = arguments.model.has_file() || arguments.models_dir.is_none();
        let first = named.then(|| first_entry(arguments));
        Loader {
            arguments: arguments.clone(),
            first,
            first_file: OnceLock::new(),
            devices: Mutex::default(),
            failure: std::sync::Arc::default(),
        }
    }

    /// The name of the model that is loaded at the start.
    pub(super) fn first(&self) -> Option<String> {
        self.first.as_ref().map(|entry| entry.name.clone())
    }

    /// Where the reason is kept why the first model was not loaded.
    pub(super) fn failure(&self) -> std::sync::Arc<Mutex<Option<Failure>>> {
        std::sync::Arc::clone(&self.failure)
    }

    /// On ranks after the first: loads their part of the model, and computes until the first has ended.
    pub(super) fn follow(&self) -> Outcome {
        let entry = self.first.as_ref().ok_or_else(|| {
            Failure::Usage("--models-dir needs a model for all ranks, too: name one with -m".to_owned())
        })?;
        match self.try_load(entry) {
            Ok(_) => Ok(()),
            Err(LoadFailure::Failed(failure)) => Err(failure),
            Err(LoadFailure::DoesNotFit(reason)) => Err(Failure::Message(reason)),
        }
    }

    fn try_load(&self, entry: &ModelEntry) -> Result<ServedModel, LoadFailure> {
        let is_first = self.first.as_ref().is_some_and(|first| first.name == entry.name);
        let mut options = match is_first {
            true => self.arguments.model.clone(),
            false => self.arguments.model.of_other_file(&entry.path),
        };
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // What the notes say was said with the first model.
        options.quiet |= devices.is_some();
        let (model, opening) = options.open()?;
        if let Some(path) = model.file().paths().next().filter(|_| is_first) {
            let _ = self.first_file.set(path.to_owned());
        }
        let load = Load { loader: self, entry, options, opening, devices, is_first };
        match model.hyperparameters().encoder {
            true => load.encoder(model),
            false => load.generator(model),
        }
    }
}

/// One attempt to load a model.
struct Load<'l> {
    loader: &'l Loader,
    entry: &'l ModelEntry,
    options: ModelOptions,
    opening: Duration,
    devices: Option<Devices>,
    is_first: bool,
}

impl Load<'_> {
    /// Plans a model. One that does not fit is refused.
    fn place(&self, model: Model, engine: &EngineOptions, devices: Devices) -> Result<Prepared, LoadFailure> {
        // Those of the first part are fewer, where GPUs divide every layer.
        let opened = devices.clone();
        let prepared = self.options.place_on(model, self.opening, engine, Some(devices))?;
        if self.devices.is_some() || !self.is_first || self.loader.arguments.models_dir.is_some() {
            prepared.check_plans(check_memory).map_err(LoadFailure::DoesNotFit)?;
        } else {
            self.check_first(&prepared)?;
        }
        let mut devices = self.loader.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.get_or_insert(opened);
        Ok(prepared)
    }

    /// Whether the only model fits. A KV cache of a size that nobody chose is memory that is taken as it is used: it is only warned of.
    fn check_first(&self, prepared: &Prepared) -> Result<(), LoadFailure> {
        let chosen = self.options.context != 0 || self.loader.arguments.serving.chooses_sizes();
        prepared
            .check_plans(|plan, backends| memory::check_fit(plan, backends, chosen))
            .map_err(LoadFailure::DoesNotFit)
    }

    /// The devices of the models before, or those that the options name.
    fn open_devices(&self) -> Outcome<Devices> {
        self.devices.clone().map_or_else(|| self.options.open_devices(), Ok)
    }

    fn generator(&self, model: Model) -> Result<ServedModel, LoadFailure> {
        let arguments = &self.loader.arguments;
        let options = arguments.answer.generator(&self.options)?;
        if let Some(grammar) = &options.grammar {
            let compiled = model.constraints().and_then(|engine| engine.compile(grammar));
            compiled.map_err(|error| Failure::Usage(error.to_string()))?;
        }
        let devices = self.open_devices()?;
        let mut batching = arguments.serving.batcher(&model, options.engine.clone(), &devices)?;
        batching.queue = arguments.queue;
        if !self.is_first {
            // The file belongs to one model.
            batching.cache_file = None;
        }
        let mut prepared = self.place(model, &batching.engine, devices)?;
        arguments.answer.set_template(&mut prepared)?;
        let options = GeneratorOptions {
            template_variables: arguments.answer.template_variables(&prepared.model),
            ..options
        };
        let (batcher, _) = arguments.serving.load(&self.options, &prepared, batching)?;
        let pictures = self.pictures(&prepared);
        let served = ServedModel::start(self.entry.name.clone(), batcher, options, Some(pictures))?;
        Ok(served.with_seed(arguments.answer.fixed_seed()))
    }

    fn encoder(&self, model: Model) -> Result<ServedModel, LoadFailure> {
        let embedding = EmbedderOptions { engine: self.options.engine(), ..EmbedderOptions::default() };
        let engine = embedding.engine(&model);
        let prepared = self.place(model, &engine, self.open_devices()?)?;
        let (embedder, _) = prepared.embedder(embedding)?;
        let (model, pictures) = (prepared.model.clone(), self.pictures(&prepared));
        let served = ServedModel::encoder(self.entry.name.clone(), model, engine, Some(pictures));
        Ok(served.with_embedder(Box::new(move || Ok(embedder))))
    }

    fn pictures(&self, prepared: &Prepared) -> PlanPictures {
        let picture = Picture::new(self.entry.name.clone(), prepared.placed.forecast.explain());
        PlanPictures { svg: picture.svg(), html: picture.html() }
    }
}

impl ModelLoader for Loader {
    fn device_lost(&self) {
        *self.devices.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn entries(&self) -> Vec<ModelEntry> {
        let opened = |first: &ModelEntry| match self.first_file.get() {
            Some(path) => entry(first.name.clone(), path.clone()),
            None => first.clone(),
        };
        let mut all: Vec<ModelEntry> = self.first.iter().map(opened).collect();
        if let Some(folder) = &self.arguments.models_dir {
            let found = model_files(folder);
            all.extend(
                found
                    .into_iter()
                    .filter(|entry| self.first.as_ref().is_none_or(|first| first.name != entry.name)),
            );
        }
        all
    }

    fn load(&self, name: &str) -> Result<ServedModel, LoadError> {
        let Some(entry) = self.entries().into_iter().find(|entry| entry.name == name) else {
            return Err(LoadError::Failed(format!("there is no model {name}")));
        };
        self.try_load(&entry).map_err(|failure| match failure {
            LoadFailure::DoesNotFit(reason) => LoadError::DoesNotFit(reason),
            LoadFailure::Failed(failure) => {
                let text = failure.text().to_owned();
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
                LoadError::Failed(text)
            }
        })
    }
}

/// The model of `-m`, or the default one, which is fetched when it is loaded.
fn first_entry(arguments: &ServeArgs) -> ModelEntry {
    let default = Path::new(quadriga_llm::default_model::SMOLLM2.file);
    let path = arguments.model.file().unwrap_or(default);
    // Of OWNER/NAME, the name.
    let repository = arguments.model.repository().and_then(|name| name.rsplit('/').next());
    let name = || repository.map_or_else(|| model_name(path), str::to_owned);
    entry(arguments.alias.clone().unwrap_or_else(name), path.to_owned())
}

fn entry(name: String, path: PathBuf) -> ModelEntry {
    let found = std::fs::metadata(&path).ok();
    ModelEntry {
        name,
        bytes: found.as_ref().map_or(0, std::fs::Metadata::len),
        modified: found.and_then(|found| found.modified().ok()),
        path,
    }
}

/// The name of a file without `.gguf` and without the number of its part.
fn model_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    match part_of(&stem) {
        Some((name, _)) => name.to_owned(),
        None => stem,
    }
}

/// The name of a split model, and the number of the part: `name-00001-of-00003`.
fn part_of(stem: &str) -> Option<(&str, u32)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    count.parse::<u32>().ok().filter(|_| count.len() == 5)?;
    Some((name, number.parse().ok().filter(|_| number.len() == 5)?))
}

/// The models of a folder and of those in it, by name. Of a split model, the first part stands for all.
fn model_files(folder: &Path) -> Vec<ModelEntry> {
    let files = |folder: &Path| {
        let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
        all.map(|file| file.path()).collect::<Vec<PathBuf>>()
    };
    let mut all = files(folder);
    let inner: Vec<PathBuf> = all.iter().filter(|path| path.is_dir()).flat_map(|path| files(path)).collect();
    all.extend(inner);
    let is_model = |path: &PathBuf| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
            && part_of(&stem).is_none_or(|(_, number)| number == 1)
            // The vision part of another model.
            && !stem.starts_with("mmproj")
            && path.is_file()
    };
    let mut entries: Vec<ModelEntry> =
        all.into_iter().filter(is_model).map(|path| entry(model_name(&path), path)).collect();
    entries.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
    entries.dedup_by(|a, b| a.name == b.name);
    entries
}

/// Folder given with `--models-dir`, or an error.
pub(super) fn check_folder(folder: &Path) -> Outcome {
    match std::fs::read_dir(folder) {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::Usage(format!("--models-dir {}: {error}", folder.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_split_model_are_one() {
        assert_eq!(part_of("a-b-00002-of-00003"), Some(("a-b", 2)));
        assert_eq!(part_of("a-2-of-3"), None);
        assert_eq!(model_name(Path::new("/x/Model-Q4_K_M.gguf")), "Model-Q4_K_M");
        assert_eq!(model_name(Path::new("big-00001-of-00009.gguf")), "big");
    }
}
