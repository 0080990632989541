//! The models of a server: those that are loaded, and those that can be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use crate::error::{ApiError, ErrorKind};
use crate::model::ServedModel;
use crate::model_changes::{ModelChange, ModelChanges, Subscription};
use crate::model_loader::{LoadError, ModelEntry, ModelLoader};
use crate::observed::ObservedModel;
use crate::operation::metrics::ModelMetrics;

pub use crate::model_changes::ModelState;

/// A model of a server, loaded or not.
#[derive(Clone)]
pub struct ListedModel {
    /// The name by which clients ask for it.
    pub name: String,
    /// What it is doing.
    pub state: ModelState,
    /// The model, if it is loaded.
    pub served: Option<ObservedModel>,
    /// Its file, if it can be loaded (again).
    pub entry: Option<ModelEntry>,
    /// When it will be unloaded unless it is used; `None`: not by time.
    pub expires: Option<SystemTime>,
    /// Why it could not be loaded the last time.
    pub failure: Option<String>,
}

/// How many models are kept, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelPolicy {
    /// The most models that are loaded at a time; of those that are idle, the one that was used least recently makes room.
    pub most: usize,
    /// After so long without a request a model is unloaded; `None`: never.
    pub keep_alive: Option<Duration>,
    /// Why loaded models stay until the server ends, whoever asks for something else, and none is loaded again; `None` if they do not
    /// have to.
    pub stays: Option<&'static str>,
}

impl Default for ModelPolicy {
    fn default() -> ModelPolicy {
        ModelPolicy { most: 4, keep_alive: None, stays: None }
    }
}

type LoadResult = Result<Arc<ServedModel>, ApiError>;

enum Slot {
    /// Everybody who asks for it waits for one attempt.
    Loading {
        attempt: watch::Receiver<Option<LoadResult>>,
        /// It was told to be unloaded meanwhile: whoever waits for it gets it, and it goes with the last of them.
        unload: bool,
    },
    Loaded {
        served: Arc<ServedModel>,
        keep_alive: Option<Duration>,
    },
    Failed(String),
}

/// For so long a list of the loader's models is used: a folder is not read again for each request.
const ENTRIES_KEPT: Duration = Duration::from_secs(1);

/// The loader's models as they were found the last time.
#[derive(Default)]
struct FoundEntries {
    /// With the time at which the loader began to look for them.
    latest: Mutex<Option<(Instant, Vec<ModelEntry>)>>,
    /// Whoever waits for it shares the next look.
    turn: tokio::sync::Mutex<()>,
}

impl FoundEntries {
    /// Those that were found since then.
    fn since(&self, time: Instant) -> Option<Vec<ModelEntry>> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.as_ref().filter(|(began, _)| *began >= time).map(|(_, entries)| entries.clone())
    }

    /// Looks for them, which may take a while.
    fn look(&self, loader: &dyn ModelLoader) -> Vec<ModelEntry> {
        let began = Instant::now();
        let entries = loader.entries();
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.as_ref().is_none_or(|(before, _)| *before <= began) {
            *latest = Some((began, entries.clone()));
        }
        entries
    }
}

/// The models of a server by name. Models that a [`ModelLoader`] knows are loaded when the first request for them comes.
#[derive(Clone, Default)]
pub struct ModelRegistry {
    loader: Option<Arc<dyn ModelLoader>>,
    policy: ModelPolicy,
    slots: Arc<Mutex<BTreeMap<String, Slot>>>,
    found: Arc<FoundEntries>,
    /// All models that were loaded, as long as somebody uses them.
    used: Arc<Mutex<Vec<Weak<ServedModel>>>>,
    /// The counters of all models that were loaded, by name: they go on when a model is loaded again.
    metrics: Arc<Mutex<BTreeMap<String, Arc<ModelMetrics>>>>,
    /// One model is loaded at a time: each plan must see the memory that the one before it took.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// What becomes of models, for those who follow it. It is told under the lock of the slots, so that its order is theirs.
    changes: ModelChanges,
}

impl ModelRegistry {
    /// A registry with one model, which answers whatever name a client uses.
    pub fn with(model: ServedModel) -> ModelRegistry {
        let registry = ModelRegistry::default();
        registry.insert(model);
        registry
    }

    /// A registry whose models are loaded when they are needed.
    pub fn loading(loader: impl ModelLoader, policy: ModelPolicy) -> ModelRegistry {
        ModelRegistry { loader: Some(Arc::new(loader)), policy, ..ModelRegistry::default() }
    }

    /// Adds a model, in place of one of the same name.
    pub fn insert(&self, mut model: ServedModel) {
        model.metrics = self.metrics_of(&model.name);
        let slot = Slot::Loaded { served: Arc::new(model), keep_alive: self.policy.keep_alive };
        if let Slot::Loaded { served, .. } = &slot {
            let name = served.name.clone();
            self.note_used(served);
            let mut slots = self.lock();
            self.changes.tell(ModelChange::new(&name, ModelState::Loaded));
            slots.insert(name, slot);
        }
    }

    /// Whether there are several models, or may be.
    pub fn is_router(&self) -> bool {
        let grows = self.loader.as_ref().is_some_and(|loader| loader.finds_models());
        let names = || self.known().into_values().collect::<BTreeSet<String>>();
        grows || names().len() > 1
    }

    /// Follows what becomes of the models from now on. `None` if too many do.
    pub(crate) fn subscribe(&self) -> Option<Subscription> {
        let _slots = self.lock();
        self.changes.subscribe()
    }

    /// How many follow what becomes of the models.
    pub(crate) fn subscribers(&self) -> usize {
        self.changes.subscribers()
    }

    /// The models that are loaded.
    pub fn loaded(&self) -> Vec<ObservedModel> {
        self.lock().values().filter_map(Slot::served).map(ObservedModel::of).collect()
    }

    /// The models that answer requests, those included that were unloaded meanwhile.
    pub(crate) fn in_use(&self) -> Vec<ObservedModel> {
        // Under which idle models are chosen: until an observer is counted, it is taken for a user.
        let _slots = self.lock();
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.iter().filter_map(Weak::upgrade).map(ObservedModel::new).collect()
    }

    /// The counters of a model, which are those of its earlier loads.
    fn metrics_of(&self, name: &str) -> Arc<ModelMetrics> {
        let mut all = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(name.to_owned()).or_default())
    }

    /// The counters of all models that are or were loaded, by name.
    pub(crate) fn metrics(&self) -> Vec<(String, Arc<ModelMetrics>)> {
        let all = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(name, metrics)| (name.clone(), Arc::clone(metrics))).collect()
    }

    fn note_used(&self, served: &Arc<ServedModel>) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|other| other.strong_count() > 0);
        used.push(Arc::downgrade(served));
    }

    /// Looks for the models that can be loaded, beside the threads that serve connections, unless that was done a moment ago.
    pub async fn refresh(&self) {
        let now = Instant::now();
        self.refresh_since(now.checked_sub(ENTRIES_KEPT).unwrap_or(now)).await;
    }

    /// The same for a model of this name, whose file may have come a moment ago.
    async fn refresh_for(&self, name: &str) {
        let asked = Instant::now();
        self.refresh().await;
        if spelled(name, &self.known()).is_none() {
            self.refresh_since(asked).await;
        }
    }

    /// Looks for them unless that was done since then.
    async fn refresh_since(&self, time: Instant) {
        let Some(loader) = self.loader.as_ref().filter(|_| self.found.since(time).is_none()) else { return };
        let _turn = self.found.turn.lock().await;
        if self.found.since(time).is_none() {
            let (loader, found) = (Arc::clone(loader), Arc::clone(&self.found));
            // If it fails, whoever needs them looks again.
            let _ = tokio::task::spawn_blocking(move || found.look(&*loader).len()).await;
        }
    }

    /// All models, loaded or not, by name. [`ModelRegistry::refresh`] before it makes it quick.
    pub fn list(&self) -> Vec<ListedModel> {
        let mut all: BTreeMap<String, ListedModel> = BTreeMap::new();
        for entry in self.entries() {
            let listed = ListedModel {
                name: entry.name.clone(),
                state: ModelState::Unloaded,
                served: None,
                entry: Some(entry),
                expires: None,
                failure: None,
            };
            all.insert(listed.name.clone(), listed);
        }
        for (name, slot) in self.lock().iter() {
            let entry = all.get(name).and_then(|listed| listed.entry.clone());
            let mut listed = ListedModel {
                name: name.clone(),
                state: ModelState::Unloaded,
                served: None,
                entry,
                expires: None,
                failure: None,
            };
            match slot {
                Slot::Loading { .. } => listed.state = ModelState::Loading,
                Slot::Failed(reason) => listed.failure = Some(reason.clone()),
                Slot::Loaded { served, keep_alive } => {
                    listed.state = ModelState::Loaded;
                    let left = keep_alive.map(|time| time.saturating_sub(served.last_used().elapsed()));
                    listed.expires = left.and_then(|left| SystemTime::now().checked_add(left));
                    listed.served = Some(ObservedModel::of(served));
                }
            }
            all.insert(name.clone(), listed);
        }
        all.into_values().collect()
    }

    /// The model that a request names, which is loaded if it has to be. If there is only one, it answers to every name, and to
    /// none.
    ///
    /// # Errors
    /// There is no model of that name, or it cannot be loaded now.
    pub async fn find(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let name = self.resolve(name).await?;
        self.load(&name).await
    }

    /// The model that a request names, if it is loaded: whoever only looks at models loads none, for which others might have to go.
    ///
    /// # Errors
    /// There is no model of that name, or it is not loaded.
    pub async fn find_loaded(&self, name: Option<&str>) -> Result<ObservedModel, ApiError> {
        let name = self.resolve(name).await?;
        let found = self.lock().get(&name).and_then(Slot::served).map(ObservedModel::of);
        let message =
            || format!("{name} is not loaded; a request for an answer or POST /models/load loads it");
        found.ok_or_else(|| ApiError::new(ErrorKind::Unavailable, message()))
    }

    /// What is known of the model that a request names, which is not loaded for that.
    ///
    /// # Errors
    /// There is no model of that name.
    pub async fn describe(&self, name: Option<&str>) -> Result<ListedModel, ApiError> {
        let name = self.resolve(name).await?;
        let found = self.list().into_iter().find(|listed| listed.name == name);
        found.ok_or_else(|| ApiError::model_not_found(&name))
    }

    /// Loads the model that a request names exactly, but for a tag or the end of a file's name: no other one answers to it.
    ///
    /// # Errors
    /// There is no model of that name, or it cannot be loaded now.
    pub async fn load_named(&self, name: &str) -> Result<Arc<ServedModel>, ApiError> {
        self.refresh_for(name).await;
        let name = self.named(name)?;
        self.load(&name).await
    }

    /// Loads a model of this very name, unless it is loaded.
    ///
    /// # Errors
    /// There is none, it cannot be loaded, or there is no memory for it.
    pub async fn load(&self, name: &str) -> Result<Arc<ServedModel>, ApiError> {
        let mut attempt = {
            let mut slots = self.lock();
            match slots.get(name) {
                Some(Slot::Loaded { served, .. }) => match served.failure() {
                    None => {
                        served.touch();
                        return Ok(Arc::clone(served));
                    }
                    Some(reason) if !self.can_load_again() => {
                        return Err(ApiError::new(
                            ErrorKind::Unavailable,
                            format!("the model {name} cannot be used any more: {reason}; restart the server"),
                        ));
                    }
                    // Its device was lost: it is loaded again.
                    Some(_) => {
                        if let Some(loader) = &self.loader {
                            loader.device_lost();
                        }
                        self.begin(name, &mut slots)
                    }
                },
                Some(Slot::Loading { attempt, .. }) => {
                    let attempt = attempt.clone();
                    // Whoever asks now wants it to stay.
                    if let Some(Slot::Loading { unload, .. }) = slots.get_mut(name) {
                        *unload = false;
                    }
                    attempt
                }
                Some(Slot::Failed(_)) | None => self.begin(name, &mut slots),
            }
        };
        let lost = || ApiError::new(ErrorKind::Internal, format!("loading {name} was interrupted"));
        let result = attempt.wait_for(Option::is_some).await.map_err(|_| lost())?;
        result.clone().unwrap_or_else(|| Err(lost()))
    }

    /// Begins to load a model. The attempt goes on if whoever asked for it goes away.
    fn begin(&self, name: &str, slots: &mut BTreeMap<String, Slot>) -> watch::Receiver<Option<LoadResult>> {
        let (report, attempt) = watch::channel(None);
        let before = slots.insert(name.to_owned(), Slot::Loading { attempt: attempt.clone(), unload: false });
        self.changes.tell(ModelChange::new(name, ModelState::Loading));
        let (registry, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            let _turn = registry.turn.lock().await;
            let (worker, wanted) = (registry.clone(), name.clone());
            let work = move || {
                // A model whose device was lost goes first.
                if let Some(Slot::Loaded { served, .. }) = before {
                    ObservedModel::free(served);
                }
                worker.load_now(&wanted)
            };
            let result = tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
                Err(ApiError::new(ErrorKind::Internal, format!("loading {name} failed unexpectedly")))
            });
            let result = registry.note(&name, result);
            report.send_replace(Some(result));
            // Before another load, which may need the memory of this one.
            drop(report);
        });
        attempt
    }

    fn note(&self, name: &str, result: Result<ServedModel, ApiError>) -> LoadResult {
        let keep_alive = self.policy.keep_alive.filter(|_| self.policy.stays.is_none());
        let mut slots = self.lock();
        match result {
            Ok(mut model) => {
                tracing::info!(model = name, "loaded");
                model.metrics = self.metrics_of(name);
                let served = Arc::new(model);
                self.note_used(&served);
                if matches!(slots.get(name), Some(Slot::Loading { unload: true, .. })) {
                    slots.remove(name);
                    self.note_unloaded(name);
                    return Ok(served);
                }
                self.changes.tell(ModelChange::new(name, ModelState::Loaded));
                slots.insert(name.to_owned(), Slot::Loaded { served: Arc::clone(&served), keep_alive });
                Ok(served)
            }
            Err(error) => {
                tracing::debug!(model = name, error = error.message, "not loaded");
                self.changes
                    .tell(ModelChange { failed: true, ..ModelChange::new(name, ModelState::Unloaded) });
                slots.insert(name.to_owned(), Slot::Failed(error.message.clone()));
                Err(error)
            }
        }
    }

    /// Loads a model, and unloads idle ones until there is room for it. If it cannot be loaded, they are loaded again.
    fn load_now(&self, name: &str) -> Result<ServedModel, ApiError> {
        let Some(loader) = &self.loader else { return Err(ApiError::model_not_found(name)) };
        let mut gone = Vec::new();
        let result = self.load_with_room(&**loader, name, &mut gone);
        if result.is_err() {
            gone.into_iter().for_each(|(name, keep_alive)| self.load_again(name, keep_alive));
        }
        result
    }

    /// The same; `gone` are the models that made room, with their times.
    fn load_with_room(
        &self,
        loader: &dyn ModelLoader,
        name: &str,
        gone: &mut Vec<(String, Option<Duration>)>,
    ) -> Result<ServedModel, ApiError> {
        let unavailable = |reason: String| {
            let message = format!("{name} cannot be loaded now: {reason}");
            ApiError::new(ErrorKind::Unavailable, message).retry_after(Duration::from_secs(5))
        };
        let failed =
            |reason: String| ApiError::new(ErrorKind::Internal, format!("{name} cannot be loaded: {reason}"));
        let refused = |error: LoadError| match error {
            LoadError::DoesNotFit(reason) => unavailable(reason),
            LoadError::Failed(reason) => failed(reason),
        };
        let count = || self.lock().values().filter(|slot| slot.served().is_some()).count();
        while count() >= self.policy.most.max(1) {
            if gone.is_empty() && self.has_idle() {
                loader.check(name).map_err(refused)?;
            }
            let Some(idle) = self.unload_idle() else {
                let most = self.policy.most;
                return Err(unavailable(format!(
                    "{most} models are loaded, the most that are allowed (--models-max), and all are in use"
                )));
            };
            gone.push(idle);
        }
        loop {
            let reason = match loader.load(name) {
                Ok(model) => return Ok(model),
                Err(LoadError::Failed(reason)) => return Err(failed(reason)),
                Err(LoadError::DoesNotFit(reason)) => reason,
            };
            if gone.is_empty() && self.has_idle() {
                loader.check(name).map_err(refused)?;
            }
            gone.push(self.unload_idle().ok_or_else(|| unavailable(reason))?);
        }
    }

    /// Whether a model that is loaded can be unloaded and loaded again.
    fn can_load_again(&self) -> bool {
        self.loader.is_some() && self.policy.stays.is_none()
    }

    /// Whether a model could make room.
    fn has_idle(&self) -> bool {
        self.policy.stays.is_none()
            && self.lock().values().filter_map(Slot::served).any(ObservedModel::is_idle)
    }

    /// Loads a model again that made room in vain, unless somebody did so meanwhile.
    fn load_again(&self, name: String, keep_alive: Option<Duration>) {
        let registry = self.clone();
        tokio::spawn(async move {
            if registry.load(&name).await.is_ok() {
                registry.keep_alive(&name, keep_alive);
            }
        });
    }

    /// Unloads the idle model that was used least recently, and returns its name and how long it would have been kept. `None` if
    /// none is idle.
    fn unload_idle(&self) -> Option<(String, Option<Duration>)> {
        if self.policy.stays.is_some() {
            return None;
        }
        let model = {
            let mut slots = self.lock();
            let idle = slots.iter().filter_map(|(name, slot)| {
                // Whoever uses it has a reference, and gets one under this lock only.
                slot.served().filter(|served| ObservedModel::is_idle(served)).map(|served| (name, served))
            });
            let oldest = idle.min_by_key(|(_, served)| served.last_used()).map(|(name, _)| name.clone());
            let removed = oldest.and_then(|name| slots.remove_entry(&name));
            removed.inspect(|(name, _)| self.note_unloaded(name))
        };
        let (name, slot) = model?;
        match slot {
            Slot::Loaded { served, keep_alive } => {
                // The next model needs its memory.
                ObservedModel::free(served);
                Some((name, keep_alive))
            }
            Slot::Loading { .. } | Slot::Failed(_) => None,
        }
    }

    /// Unloads a model, after it was loaded if that has begun. Answers that are being generated are finished; its memory is free
    /// after the last of them. The name is
    /// exact, but for a tag or the end of a file's name.
    ///
    /// # Errors
    /// There is no such model, or models [stay](ModelPolicy::stays).
    pub fn unload(&self, name: &str) -> Result<(), ApiError> {
        let name = self.named(name)?;
        if let Some(reason) = self.policy.stays {
            let message = format!("the model {name} is not unloaded: {reason}");
            return Err(ApiError::new(ErrorKind::Unsupported, message));
        }
        let mut slots = self.lock();
        if let Some(Slot::Loading { unload, .. }) = slots.get_mut(&name) {
            *unload = true;
            return Ok(());
        }
        if slots.get(&name).is_some_and(|slot| slot.served().is_some()) {
            let slot = slots.remove(&name);
            self.note_unloaded(&name);
            drop(slots);
            drop(slot);
        }
        Ok(())
    }

    /// Says that a model is not loaded any more. Its slot is locked.
    fn note_unloaded(&self, name: &str) {
        tracing::info!(model = name, "unloaded");
        self.changes.tell(ModelChange::new(name, ModelState::Unloaded));
    }

    /// How long a loaded model is kept after its last request, from now on; `None`: for ever. With a time of 0 it is unloaded
    /// once it is idle. The name is as in [`ModelRegistry::unload`]; that of no model changes nothing, nor does any where models
    /// [stay](ModelPolicy::stays).
    pub fn keep_alive(&self, name: &str, time: Option<Duration>) {
        if self.policy.stays.is_some() {
            return;
        }
        let Ok(name) = self.named(name) else { return };
        if let Some(Slot::Loaded { keep_alive, .. }) = self.lock().get_mut(&name) {
            *keep_alive = time;
        }
    }

    /// Unloads models whose time is over, and those whose device was lost. Returns when to look again.
    pub(crate) fn sweep(&self) -> Duration {
        let now = Instant::now();
        let mut gone = Vec::new();
        let mut next = Duration::from_secs(1);
        {
            let mut slots = self.lock();
            let (stays, can_load) = (self.policy.stays.is_some(), self.can_load_again());
            slots.retain(|name, slot| {
                let Slot::Loaded { served, keep_alive } = slot else { return true };
                if stays {
                    return true;
                }
                let idle = ObservedModel::is_idle(served);
                let left = keep_alive.map(|time| time.saturating_sub(now - served.last_used()));
                let over = left.is_some_and(|left| left.is_zero());
                let lost = served.failure().is_some();
                if let Some(loader) = self.loader.as_ref().filter(|_| idle && lost) {
                    loader.device_lost();
                }
                if idle && (over || (can_load && lost)) {
                    self.note_unloaded(name);
                    gone.push(Arc::clone(served));
                    return false;
                }
                if let Some(left) = left {
                    next = next.min(left.max(Duration::from_millis(50)));
                }
                true
            });
        }
        drop(gone);
        next
    }

    /// Why a model cannot be used until the server is restarted, if that is so.
    pub(crate) fn unusable(&self) -> Option<String> {
        let failed = |slot: &Slot| slot.served().and_then(|served| served.failure().map(str::to_owned));
        self.lock().values().find_map(failed).filter(|_| !self.can_load_again())
    }

    /// The name of the model that a client means.
    async fn resolve(&self, name: Option<&str>) -> Result<String, ApiError> {
        if let Some(name) = name.filter(|name| self.is_loaded(name)) {
            return Ok(name.to_owned());
        }
        if let Some(name) = name {
            self.refresh_for(name).await;
        } else {
            self.refresh().await;
        }
        let known = self.known();
        let mut names: Vec<&String> = known.values().collect();
        names.sort_unstable();
        names.dedup();
        match (name.and_then(|name| spelled(name, &known)), names.as_slice(), name) {
            (Some(found), ..) => Ok(found.to_owned()),
            (None, [only], _) => Ok((*only).clone()),
            (None, _, Some(name)) => Err(not_among(name, &names)),
            (None, [], None) => Err(ApiError::new(ErrorKind::Unavailable, "no model is loaded")),
            (None, _, None) => Err(ApiError::field(
                "model",
                format!("is required: there are several models ({})", listed(&names)),
            )),
        }
    }

    /// The name of the model that a client names, and not of the only one whatever its name is.
    fn named(&self, name: &str) -> Result<String, ApiError> {
        if self.is_loaded(name) {
            return Ok(name.to_owned());
        }
        let known = self.known();
        spelled(name, &known).map(str::to_owned).ok_or_else(|| ApiError::model_not_found(name))
    }

    /// Whether a model of this very name is loaded.
    fn is_loaded(&self, name: &str) -> bool {
        self.lock().get(name).is_some_and(|slot| slot.served().is_some())
    }

    /// The names of models that are or can be loaded, by themselves and by their aliases.
    fn known(&self) -> BTreeMap<String, String> {
        let mut known = BTreeMap::new();
        let entries = self.entries();
        for entry in &entries {
            known.extend(entry.aliases.iter().map(|alias| (alias.clone(), entry.name.clone())));
        }
        // A name is stronger than another model's alias.
        known.extend(entries.into_iter().map(|entry| (entry.name.clone(), entry.name)));
        let slots = self.lock();
        let loaded = slots.iter().filter(|(_, slot)| !matches!(slot, Slot::Failed(_)));
        known.extend(loaded.map(|(name, _)| (name.clone(), name.clone())));
        known
    }

    /// The models that can be loaded, which are looked for if that was not done a moment ago.
    fn entries(&self) -> Vec<ModelEntry> {
        let Some(loader) = &self.loader else { return Vec::new() };
        let now = Instant::now();
        let kept = self.found.since(now.checked_sub(ENTRIES_KEPT).unwrap_or(now));
        kept.unwrap_or_else(|| self.found.look(&**loader))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn served(&self) -> Option<&Arc<ServedModel>> {
        match self {
            Slot::Loaded { served, .. } => Some(served),
            Slot::Loading { .. } | Slot::Failed(_) => None,
        }
    }
}

/// There is no model of this name among several.
fn not_among(name: &str, names: &[&String]) -> ApiError {
    let error = ApiError::model_not_found(name);
    match names {
        [] => error,
        names => ApiError { message: format!("{}; there are {}", error.message, listed(names)), ..error },
    }
}

/// The names of models, of many the first.
fn listed(names: &[&String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(|name| name.as_str()).collect();
    let more = if names.len() > SHOWN { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// Which of the known names a client means: Ollama's clients add a tag, and others name the file.
fn spelled<'k>(name: &str, known: &'k BTreeMap<String, String>) -> Option<&'k str> {
    let bare = name.strip_suffix(":latest").or(name.strip_suffix(".gguf"));
    known.get(name).or_else(|| known.get(bare?)).map(String::as_str)
}
