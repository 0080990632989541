//! Finds, plans and loads the models that are served.

use std::cell::Cell;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use quadriga_llm::placement::Devices;
use quadriga_llm::{EmbedderOptions, EngineOptions, GeneratorOptions, Model, Pooling, RequestLoad, can_rank};
use quadriga_server::generation::ReasoningEffort;
use quadriga_server::{
    LoadError, ModelEntry, ModelLoader, PlanPictures, ServedModel, check_capacity, check_memory, device_bytes,
};
use quadriga_view::Picture;

use super::{ServeArgs, memory};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;

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

    /// Whether every model that has an alias is there.
    ///
    /// # Errors
    /// Which is not.
    pub(super) fn check_aliases(&self) -> Outcome {
        let entries = self.entries();
        let is_missing = |model: &str| entries.iter().all(|entry| entry.name != model);
        match aliases_of_models(&self.arguments).find(|(_, model)| is_missing(model)) {
            Some((alias, model)) => {
                Err(Failure::Usage(format!("--alias {alias}={model}: there is no model {model}")))
            }
            None => Ok(()),
        }
    }

    /// Where the reason is kept why the first model was not loaded.
    pub(super) fn failure(&self) -> std::sync::Arc<Mutex<Option<Failure>>> {
        std::sync::Arc::clone(&self.failure)
    }

    /// On ranks after the first: loads their part of the model, and computes until the first has ended.
    pub(super) fn follow(&self) -> Outcome {
        let Some(entry) = &self.first else { return Ok(()) };
        match self.attempt(entry, true) {
            Ok(_) => Ok(()),
            Err(LoadFailure::Failed(failure)) => Err(failure),
            Err(LoadFailure::DoesNotFit(reason)) => Err(Failure::Message(reason)),
        }
    }

    /// Opens and plans a model, and loads it or, if it is only checked, not.
    fn attempt(&self, entry: &ModelEntry, loads: bool) -> Result<Option<ServedModel>, LoadFailure> {
        let is_first = self.first.as_ref().is_some_and(|first| first.name == entry.name);
        let mut options = match is_first {
            true => self.arguments.model.clone(),
            false => self.arguments.model.of_other_file(&entry.path),
        };
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // What the notes say was said with the first model.
        options.quiet |= devices.is_some();
        // How many ask at once is not known.
        let options = options.with_load(RequestLoad::up_to(self.arguments.serving.parallel));
        let (model, opening) = options.open()?;
        if let Some(path) = model.file().paths().next().filter(|_| is_first) {
            let _ = self.first_file.set(path.to_owned());
        }
        let load = Load { loader: self, entry, options, opening, devices, is_first, loads };
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
    /// Whether it is loaded once it is planned.
    loads: bool,
}

impl Load<'_> {
    /// Plans a model. One that does not fit is refused.
    fn place(&self, model: Model, engine: &EngineOptions, devices: Devices) -> Result<Prepared, LoadFailure> {
        // Those of the first part are fewer, where GPUs divide every layer.
        let opened = devices.clone();
        let prepared = self.options.place_on(model, self.opening, engine, Some(devices))?;
        if !self.loads {
            prepared.check_plans(check_capacity).map_err(LoadFailure::DoesNotFit)?;
        } else if self.devices.is_some() || !self.is_first || self.loader.arguments.models_dir.is_some() {
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

    fn generator(&self, model: Model) -> Result<Option<ServedModel>, LoadFailure> {
        let arguments = &self.loader.arguments;
        check_pooling(&model, arguments.pooling)?;
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
        if !self.loads {
            return Ok(None);
        }
        let template_variables = arguments.answer.keyword_arguments(&prepared.model);
        let reasoning = match arguments.answer.turns_reasoning_off() {
            true => {
                arguments.answer.explain_no_reasoning(&prepared.model);
                ReasoningEffort::Off
            }
            false => ReasoningEffort::Default,
        };
        let options = GeneratorOptions { template_variables, ..options };
        let (batcher, _) = arguments.serving.load(&self.options, &prepared, batching)?;
        let pictures = self.pictures(&prepared);
        let served = ServedModel::start(self.entry.name.clone(), batcher, options, Some(pictures))?;
        let served = served.with_device_bytes(bytes_on_devices(&prepared));
        let served = served.with_seed(arguments.answer.fixed_seed()).with_pooling(arguments.pooling);
        Ok(Some(served.with_reasoning(reasoning).with_reasoning_output(arguments.reasoning_format)))
    }

    fn encoder(&self, model: Model) -> Result<Option<ServedModel>, LoadFailure> {
        let pooling = self.loader.arguments.pooling;
        check_pooling(&model, pooling)?;
        let engine = self.options.engine();
        let embedding = EmbedderOptions { pooling, engine, ..EmbedderOptions::default() };
        let engine = embedding.engine(&model);
        let prepared = self.place(model, &engine, self.open_devices()?)?;
        if !self.loads {
            return Ok(None);
        }
        let (embedder, _) = prepared.embedder(embedding)?;
        let (model, pictures) = (prepared.model.clone(), self.pictures(&prepared));
        let served = ServedModel::encoder(self.entry.name.clone(), model, engine, Some(pictures));
        let served = served.with_device_bytes(bytes_on_devices(&prepared));
        Ok(Some(served.with_pooling(pooling).with_embedder(Box::new(move || Ok(embedder)))))
    }

    fn pictures(&self, prepared: &Prepared) -> PlanPictures {
        let picture = Picture::new(self.entry.name.clone(), prepared.placed.forecast.explain());
        PlanPictures { svg: picture.svg(), html: picture.html() }
    }
}

/// Bytes that the plans of a model take of GPUs.
fn bytes_on_devices(prepared: &Prepared) -> u64 {
    let sum = Cell::new(0_u64);
    let Ok(()) = prepared.check_plans(|plan, backends| -> Result<(), Infallible> {
        sum.set(sum.get().saturating_add(device_bytes(plan, backends)));
        Ok(())
    });
    sum.get()
}

/// Only a classification head gives ranks.
fn check_pooling(model: &Model, pooling: Option<Pooling>) -> Outcome {
    match pooling == Some(Pooling::Rank) && !can_rank(model) {
        true => {
            let reason = "--pooling rank needs a model with a classification head, which this one lacks";
            Err(Failure::Usage(reason.to_owned()))
        }
        false => Ok(()),
    }
}

impl ModelLoader for Loader {
    fn device_lost(&self) {
        *self.devices.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn entries(&self) -> Vec<ModelEntry> {
        let opened = |first: &ModelEntry| match self.first_file.get() {
            Some(path) => {
                ModelEntry { aliases: first.aliases.clone(), ..entry(first.name.clone(), path.clone()) }
            }
            None => first.clone(),
        };
        let first = self.first.as_ref().map(opened);
        let others = self.arguments.models_dir.as_deref().map(|folder| folder_models(folder, first.as_ref()));
        let mut all: Vec<ModelEntry> = first.into_iter().chain(others.into_iter().flatten()).collect();
        for (alias, model) in aliases_of_models(&self.arguments) {
            let named = all.iter_mut().find(|entry| entry.name == model);
            named.into_iter().for_each(|entry| entry.aliases.push(alias.to_owned()));
        }
        all
    }

    fn finds_models(&self) -> bool {
        self.arguments.models_dir.is_some()
    }

    fn load(&self, name: &str) -> Result<ServedModel, LoadError> {
        let missing = || LoadError::Failed(format!("there is no model {name}"));
        self.named(name, true)?.ok_or_else(missing)
    }

    fn check(&self, name: &str) -> Result<(), LoadError> {
        self.named(name, false).map(drop)
    }
}

impl Loader {
    /// Opens and plans the model of a name, and loads it or, if it is only checked, not.
    fn named(&self, name: &str, loads: bool) -> Result<Option<ServedModel>, LoadError> {
        let Some(entry) = self.entries().into_iter().find(|entry| entry.name == name) else {
            return Err(LoadError::Failed(format!("there is no model {name}")));
        };
        self.attempt(&entry, loads).map_err(|failure| match failure {
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
    let mut aliases = arguments.alias.iter().filter(|alias| !alias.contains('=')).cloned();
    let first = entry(aliases.next().unwrap_or_else(name), path.to_owned());
    ModelEntry { aliases: aliases.collect(), ..first }
}

/// The aliases of `--alias NAME=MODEL`, each with its model.
fn aliases_of_models(arguments: &ServeArgs) -> impl Iterator<Item = (&str, &str)> {
    arguments.alias.iter().filter_map(|alias| alias.split_once('='))
}

fn entry(name: String, path: PathBuf) -> ModelEntry {
    let found = std::fs::metadata(&path).ok();
    ModelEntry {
        name,
        bytes: found.as_ref().map_or(0, std::fs::Metadata::len),
        modified: found.and_then(|found| found.modified().ok()),
        path,
        aliases: Vec::new(),
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

/// The models of a folder but the first of the server, each with a name of its own: that of its file; where another file has it,
/// too, the path in the folder; and if that is not enough, the path with the file's ending.
fn folder_models(folder: &Path, first: Option<&ModelEntry>) -> Vec<ModelEntry> {
    let same = |path: &Path, other: &Path| match (path.canonicalize(), other.canonicalize()) {
        (Ok(path), Ok(other)) => path == other,
        _ => path == other,
    };
    let mut paths = model_files(folder);
    paths.retain(|path| first.is_none_or(|first| !same(path, &first.path)));
    let relative = |path: &Path| path.strip_prefix(folder).unwrap_or(path).to_string_lossy().into_owned();
    let within = |path: &Path| match path.strip_prefix(folder).ok().and_then(Path::parent) {
        Some(parent) if parent != Path::new("") => format!("{}/{}", parent.display(), model_name(path)),
        _ => model_name(path),
    };
    let names =
        |spell: &dyn Fn(&Path) -> String| -> Vec<String> { paths.iter().map(|path| spell(path)).collect() };
    let spellings = [names(&model_name), names(&within), names(&relative)];
    let is_single = |names: &[String], name: &String| {
        let taken = first.is_some_and(|first| first.name == *name);
        !taken && names.iter().filter(|other| *other == name).count() == 1
    };
    let mut entries: Vec<ModelEntry> = (0..)
        .zip(&paths)
        .filter_map(|(at, path): (usize, _)| {
            let mut own = spellings.iter().filter_map(|names| Some((names, names.get(at)?)));
            let last = own.clone().next_back();
            let (_, name) = own.find(|(names, name)| is_single(names, name)).or(last)?;
            Some(entry(name.clone(), path.clone()))
        })
        .collect();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    entries
}

/// The files of a folder and of those in it that are models. Of a split model, the first part stands for all.
fn model_files(folder: &Path) -> Vec<PathBuf> {
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
    all.retain(is_model);
    all.sort_unstable();
    all
}

/// Folder given with `--models-dir`, or an error.
pub(super) fn check_folder(folder: &Path) -> Outcome {
    match std::fs::read_dir(folder) {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::Usage(format!("--models-dir {}: {error}", folder.display()))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_same_name_are_all_there() {
        let folder = tempfile::tempdir().unwrap();
        let files = [
            "m.gguf",
            "a/m.gguf",
            "b/m.gguf",
            "b/m-00001-of-00002.gguf",
            "b/m-00002-of-00002.gguf",
            "c/n.gguf",
        ];
        for file in files {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let names = |first: Option<&ModelEntry>| -> Vec<String> {
            folder_models(folder.path(), first).into_iter().map(|entry| entry.name).collect()
        };
        let all = ["a/m", "b/m-00001-of-00002.gguf", "b/m.gguf", "m", "n"];
        assert_eq!(names(None), all);
        // The server's own model is not listed twice, and hides no other one.
        assert_eq!(names(Some(&entry("n".to_owned(), folder.path().join("c/n.gguf")))), all[..4]);
        let other = entry("n".to_owned(), "elsewhere/n.gguf".into());
        assert_eq!(names(Some(&other)).last().unwrap(), "m");
        assert!(names(Some(&other)).contains(&"c/n".to_owned()));
    }

    #[test]
    fn parts_of_a_split_model_are_one() {
        assert_eq!(part_of("a-b-00002-of-00003"), Some(("a-b", 2)));
        assert_eq!(part_of("a-2-of-3"), None);
        assert_eq!(model_name(Path::new("/x/Model-Q4_K_M.gguf")), "Model-Q4_K_M");
        assert_eq!(model_name(Path::new("big-00001-of-00009.gguf")), "big");
    }
}
