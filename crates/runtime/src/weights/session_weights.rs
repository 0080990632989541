//! The weights of one session: loading them, and setting those that a graph has no data for.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use quadriga_graph::{Data, Graph, Op, Tensor, TensorId, TensorKind};
use rustc_hash::{FxHashMap, FxHashSet};

use super::layout::{BufferPlan, Residency, WeightRead, plan_buffers, residency};
use super::resident::{KnownUses, PlanWeights, ResidentWeight, WeightGroup};
use super::store::{WeightIndex, WeightStore};
use super::uses::WeightUses;
use crate::allocation_lock::lock_allocation;
use crate::memory::PlacedTensor;
use crate::{Backend, BackendError, Buffer, Layout, Region, RuntimeError, TensorPlace, Usage, WeightLayout};

/// How far the loading of weights is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes loaded so far.
    pub done: u64,
    /// Bytes to load in all.
    pub total: u64,
}

/// The weights of a session. Weights with data are shared with other sessions through the store; weights without are
/// the session's own, one of each name.
pub(crate) struct SessionWeights {
    store: Arc<WeightStore>,
    /// Weights with data that plans of this session use.
    held: WeightIndex,
    /// Weights without data.
    own: HashMap<WeightKey, Arc<ResidentWeight>>,
    /// The bytes that were set, for another layout or another backend.
    values: HashMap<String, Arc<[u8]>>,
}

/// The name of a weight, and its backend.
type WeightKey = (String, usize);

/// The weights of a plan, before they become the session's.
pub(crate) struct Loaded {
    pub(crate) weights: PlanWeights,
    /// Weights whose layout did not serve the new plan, each with the one that took its place.
    replaced: Vec<(Arc<ResidentWeight>, Arc<ResidentWeight>)>,
    /// Weights that the session is to find again.
    keep: Vec<(WeightKey, Arc<ResidentWeight>)>,
}

/// A weight that a plan reads.
struct WantedWeight<'g> {
    key: WeightKey,
    read: WeightRead,
    tensor: &'g Tensor,
    data: Option<&'g Data>,
    backend: &'g dyn Backend,
    operations: Vec<(&'g Op, usize)>,
}

/// A weight that has to be loaded.
struct Load<'g> {
    key: WeightKey,
    id: TensorId,
    tensor: &'g Tensor,
    data: Option<&'g Data>,
    held: Residency,
    uses: KnownUses,
    replaces: Option<Arc<ResidentWeight>>,
}

/// Where the bytes of a weight come from.
enum WeightSource<'g> {
    /// From the graph; pieces are joined only while they are loaded.
    Data(&'g Data),
    /// From the caller.
    Value(&'g [u8]),
}

impl WeightSource<'_> {
    fn bytes(&self) -> Cow<'_, [u8]> {
        match self {
            WeightSource::Data(data) => data.bytes(),
            WeightSource::Value(bytes) => Cow::Borrowed(bytes),
        }
    }
}

/// A weight that has its memory, but perhaps not its bytes: those that another session is loading, too.
struct PendingWeight<'g> {
    name: String,
    weight: Arc<ResidentWeight>,
    backend: &'g dyn Backend,
    /// `None` if the caller sets them later.
    bytes: Option<WeightSource<'g>>,
    /// Bytes to count as progress.
    size: usize,
}

/// Memory for a weight.
enum Reserved {
    /// Its bytes are read where they are.
    Mapped(Region),
    /// Its bytes are to be loaded there.
    Buffer(Region, Arc<WeightGroup>),
}

impl WantedWeight<'_> {
    /// The uses that a resident weight must serve, and the way to hold it then.
    fn residency(&self, graph: &Graph, known: &KnownUses) -> (KnownUses, Residency) {
        let uses = known.clone().with(&self.operations, self.read.viewed);
        let operations: Vec<(&Op, usize)> = uses.operations.iter().map(|(op, at)| (op, *at)).collect();
        let read = WeightRead { viewed: uses.viewed, ..self.read };
        let held = residency(graph, self.backend, read, &operations);
        (uses, held)
    }

    /// Whether the layout of a resident weight serves this use of it, too.
    fn is_served_by(&self, graph: &Graph, weight: &ResidentWeight) -> bool {
        let known = weight.uses().clone();
        known.cover(&self.operations, self.read.viewed)
            || self.residency(graph, &known).1.layout.layout == weight.place.layout
    }
}

impl SessionWeights {
    pub(crate) fn new(store: Arc<WeightStore>) -> SessionWeights {
        SessionWeights { store, held: WeightIndex::default(), own: HashMap::new(), values: HashMap::new() }
    }

    /// Loads the weights and constants of a graph to the backends that hold them, unless they are there already. The
    /// session has them once they are [kept](SessionWeights::keep).
    ///
    /// The callback may use the scheduler, and load weights itself: no lock is held while it runs. A session that needs
    /// weights of another that has not loaded them all yet loads the rest itself, and waits for none but the one that is
    /// being written.
    pub(crate) fn load<'g>(
        &'g self,
        graph: &'g Graph,
        backends: &'g [Arc<dyn Backend>],
        reads: impl Iterator<Item = WeightRead>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Loaded, RuntimeError> {
        let uses = WeightUses::of(graph);
        let wanted = reads.filter_map(|read| {
            let (tensor, backend) = (graph.get(read.tensor)?, &**backends.get(read.backend)?);
            let (key, data) = ((graph.name(read.tensor), read.backend), graph.data(read.tensor));
            Some(WantedWeight {
                key,
                read,
                tensor,
                data,
                backend,
                operations: uses.of_tensor(graph, read.tensor),
            })
        });
        let wanted: Vec<WantedWeight<'g>> = wanted.collect();
        // Until all weights have their memory, so that other sessions find every one of them.
        let mut shared = self.store.lock();
        let whole = whole_groups(graph, &shared, &wanted);
        let mut loaded = Loaded { weights: PlanWeights::default(), replaced: Vec::new(), keep: Vec::new() };
        let (mut loads, mut pending) = (Vec::new(), Vec::new());
        for wanted in wanted {
            let (own, theirs) = match (wanted.tensor.kind(), wanted.data) {
                (TensorKind::Weight, Some(data)) => {
                    let of = |index: &WeightIndex, of_group: &dyn Fn(&ResidentWeight) -> bool| {
                        let mut all = index.find(&wanted.key, wanted.tensor, data);
                        all.find(|weight| of_group(weight) && wanted.is_served_by(graph, weight))
                    };
                    let own = of(&self.held, &|_| true);
                    let is_whole = |weight: &ResidentWeight| match &weight.group {
                        Some(group) => whole.contains(&Arc::as_ptr(group)),
                        None => true,
                    };
                    let theirs = if own.is_none() { of(&shared, &is_whole) } else { None };
                    (own.or_else(|| self.held.find(&wanted.key, wanted.tensor, data).next()), theirs)
                }
                (TensorKind::Weight, None) => (self.own(&wanted.key, wanted.tensor)?, None),
                _ => (None, None),
            };
            let place = (wanted.read.tensor.index() as u32, wanted.read.backend as u16);
            let known = own.as_ref().map(|own| own.uses().clone()).unwrap_or_default();
            let served = own.iter().chain(&theirs).find(|weight| wanted.is_served_by(graph, weight));
            if let Some(weight) = served {
                let uses = weight.uses().clone().with(&wanted.operations, wanted.read.viewed);
                *weight.uses() = uses;
                if let (false, Some(data)) = (weight.is_ready(), wanted.data) {
                    let (name, size) = (wanted.key.0.clone(), weight.loaded_bytes());
                    let (weight, bytes) = (Arc::clone(weight), Some(WeightSource::Data(data)));
                    pending.push(PendingWeight { name, weight, backend: wanted.backend, bytes, size });
                }
                loaded.weights.insert(place, Arc::clone(weight));
                loaded.keep.push((wanted.key, Arc::clone(weight)));
                continue;
            }
            let (uses, held) = wanted.residency(graph, &known);
            let WantedWeight { key, read, tensor, data, .. } = wanted;
            loads.push(Load { key, id: read.tensor, tensor, data, held, uses, replaces: own });
        }
        self.make_room(backends, loads, &mut loaded, &mut pending)?;
        // The store keeps nothing alive: if the plan fails later, these are gone.
        for (key, weight) in loaded.keep.iter().filter(|(_, weight)| weight.data.is_some()) {
            shared.insert(key, weight);
        }
        shared.prune();
        drop(shared);
        self.fill(&pending, progress)?;
        Ok(loaded)
    }

    /// Gives weights their memory.
    fn make_room<'g>(
        &'g self,
        backends: &'g [Arc<dyn Backend>],
        loads: Vec<Load<'g>>,
        loaded: &mut Loaded,
        pending: &mut Vec<PendingWeight<'g>>,
    ) -> Result<(), RuntimeError> {
        let reserved = reserve(backends, &loads)?;
        for (load, reserved) in loads.into_iter().zip(reserved) {
            let Some(backend) = backends.get(load.key.1) else { continue };
            let failed = |error| RuntimeError::device(error).at(|| load.key.0.clone());
            let WeightLayout { layout, bytes: size, .. } = load.held.layout;
            let is_weight = load.tensor.kind() == TensorKind::Weight;
            let value = self.values.get(&load.key.0).filter(|_| is_weight && load.data.is_none());
            let bytes = load.data.map(WeightSource::Data).or(value.map(|value| WeightSource::Value(value)));
            let (region, registration, group) = match reserved {
                Reserved::Mapped(region) => (region, None, None),
                Reserved::Buffer(region, group) => {
                    let registration =
                        PlacedTensor::new(backend, load.tensor, region.clone()).map_err(failed)?;
                    (region, Some(registration), is_weight.then(|| group.add()))
                }
            };
            let weight = Arc::new(ResidentWeight {
                tensor: load.tensor.clone(),
                place: TensorPlace { region, layout },
                data: load.data.cloned(),
                ready: AtomicBool::new(registration.is_none()),
                registration,
                group,
                uses: Mutex::new(load.uses),
            });
            loaded.replaced.extend(load.replaces.map(|old| (old, Arc::clone(&weight))));
            loaded.weights.insert((load.id.index() as u32, load.key.1 as u16), Arc::clone(&weight));
            let (name, backend) = (load.key.0.clone(), &**backend);
            pending.push(PendingWeight { name, weight: Arc::clone(&weight), backend, bytes, size });
            if is_weight {
                loaded.keep.push((load.key, weight));
            }
        }
        Ok(())
    }

    /// Loads the bytes of weights that have none yet. A file's bytes that were copied or packed give their memory back.
    fn fill(
        &self,
        pending: &[PendingWeight<'_>],
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RuntimeError> {
        let mut count = Progress { done: 0, total: pending.iter().map(|weight| weight.size as u64).sum() };
        for PendingWeight { name, weight, backend, bytes, size } in pending {
            if let Some(bytes) = bytes {
                let written = self.store.write_once(weight, *backend, &bytes.bytes());
                written.map_err(|error| RuntimeError::device(error).at(|| name.clone()))?;
                if let (WeightSource::Data(data), false) = (bytes, weight.is_mapped()) {
                    data.release();
                }
            }
            count.done += *size as u64;
            progress(count);
        }
        Ok(())
    }

    /// Makes the weights of a plan the session's own: later plans find them.
    pub(crate) fn keep(&mut self, loaded: &Loaded) {
        for (key, weight) in &loaded.keep {
            if weight.data.is_some() {
                self.held.insert(key, weight);
            } else {
                self.own.insert(key.clone(), Arc::clone(weight));
            }
        }
        self.held.prune();
    }

    /// Forgets weights that were never set and that no plan uses.
    pub(crate) fn prune(&mut self) {
        self.own.retain(|_, weight| weight.is_ready() || Arc::strong_count(weight) > 1);
        self.held.prune();
    }

    /// The weight of this name that has no data, if an earlier graph has one.
    fn own(&self, key: &WeightKey, tensor: &Tensor) -> Result<Option<Arc<ResidentWeight>>, RuntimeError> {
        // On another backend it is the same weight.
        let mut all = self.own.iter().filter(|((name, _), _)| *name == key.0).map(|(_, weight)| weight);
        if let Some(other) = all.find(|weight| !weight.has_shape_of(tensor)) {
            let describe = |tensor: &Tensor| format!("{} {}", tensor.dtype(), tensor.shape());
            let (before, after) = (describe(&other.tensor), describe(tensor));
            return Err(RuntimeError::Conflict { what: "weight", name: key.0.clone(), before, after });
        }
        Ok(self.own.get(key).cloned())
    }

    /// The bytes of the weight of this name that has no data, if the session has one.
    pub(crate) fn bytes_to_set(&self, name: &str) -> Option<usize> {
        let own = self.own.iter().find(|((own, _), _)| own == name);
        own.map(|(_, weight)| weight.tensor.bytes())
    }

    /// The weight of this name that has no data, and its backend.
    pub(crate) fn to_upload(&self, name: &str) -> Result<(usize, Arc<ResidentWeight>), RuntimeError> {
        let own = self.own.iter().find(|((own, _), _)| own == name);
        let unknown = || RuntimeError::UnknownName {
            what: "weight without data",
            name: name.to_owned(),
            known: Vec::new(),
        };
        own.map(|((_, backend), weight)| (*backend, Arc::clone(weight))).ok_or_else(unknown)
    }

    /// Sets the bytes of a weight without data, on every backend that holds it. After an error all have the earlier bytes;
    /// if those cannot be written, the weight counts as not set.
    pub(crate) fn set(
        &mut self,
        backends: &[Arc<dyn Backend>],
        name: &str,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        let written = self.write_all(backends, name, bytes);
        if written.is_ok() {
            self.values.insert(name.to_owned(), bytes.into());
            return Ok(());
        }
        let restored = self.values.get(name).map(|earlier| self.write_all(backends, name, earlier));
        if restored.is_none_or(|restored| restored.is_err()) {
            self.values.remove(name);
            let own = self.own.iter().filter(|((own, _), _)| own == name);
            own.for_each(|(_, weight)| weight.ready.store(false, Ordering::Release));
        }
        written.map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))
    }

    fn write_all(&self, backends: &[Arc<dyn Backend>], name: &str, bytes: &[u8]) -> Result<(), BackendError> {
        for (index, backend) in backends.iter().enumerate() {
            if let Some(weight) = self.own.get(&(name.to_owned(), index)) {
                weight.write(&**backend, bytes)?;
            }
        }
        Ok(())
    }
}

/// The groups of other sessions of which a plan uses every weight.
fn whole_groups(
    graph: &Graph,
    shared: &WeightIndex,
    wanted: &[WantedWeight<'_>],
) -> FxHashSet<*const WeightGroup> {
    let mut found: FxHashMap<*const WeightGroup, (usize, usize)> = FxHashMap::default();
    for wanted in wanted.iter().filter(|wanted| wanted.tensor.kind() == TensorKind::Weight) {
        let Some(data) = wanted.data else { continue };
        for weight in shared.find(&wanted.key, wanted.tensor, data) {
            if let Some(group) = weight.group.as_ref().filter(|_| wanted.is_served_by(graph, &weight)) {
                let (count, _) = found.entry(Arc::as_ptr(group)).or_insert((0, group.members()));
                *count += 1;
            }
        }
    }
    found.into_iter().filter(|(_, (count, members))| count == members).map(|(group, _)| group).collect()
}

impl Loaded {
    /// Lets an earlier plan of the session use the weights that took the place of its own; true if there are any.
    pub(crate) fn replace_in(&self, weights: &mut PlanWeights) -> bool {
        let mut changed = false;
        for weight in weights.values_mut().filter(|_| !self.replaced.is_empty()) {
            if let Some((_, new)) = self.replaced.iter().find(|(old, _)| Arc::ptr_eq(old, weight)) {
                *weight = Arc::clone(new);
                changed = true;
            }
        }
        changed
    }
}

/// Memory for all weights: a few large buffers for each backend.
fn reserve(backends: &[Arc<dyn Backend>], loads: &[Load<'_>]) -> Result<Vec<Reserved>, RuntimeError> {
    let _alone = lock_allocation();
    let mut out: Vec<Option<Reserved>> = loads.iter().map(|_| None).collect();
    for (number, backend) in backends.iter().enumerate() {
        let failed =
            |load: &Load<'_>, error: BackendError| RuntimeError::device(error).at(|| load.key.0.clone());
        let mut batch: Vec<(&Load<'_>, &mut Option<Reserved>)> = Vec::new();
        for (load, slot) in loads.iter().zip(&mut out).filter(|(load, _)| load.key.1 == number) {
            let mapped = load.data.filter(|_| load.held.mapped).and_then(|data| backend.map(data));
            match mapped {
                Some(buffer) => {
                    let region = Region::new(buffer, 0, load.tensor.bytes()).map_err(|e| failed(load, e))?;
                    *slot = Some(Reserved::Mapped(region));
                }
                None => batch.push((load, slot)),
            }
        }
        let sizes = batch.iter().map(|(load, _)| load.held.layout.bytes);
        let BufferPlan { places, buffers: sizes } = plan_buffers(sizes, backend.memory());
        let mut buffers: Vec<(Arc<dyn Buffer>, Arc<WeightGroup>)> = Vec::with_capacity(sizes.len());
        for ((load, slot), (buffer, offset)) in batch.into_iter().zip(places) {
            if buffer == buffers.len() {
                let size = sizes.get(buffer).copied().unwrap_or(0);
                let allocated = backend.allocate(size, Usage::Weights).map_err(|e| failed(load, e))?;
                buffers.push((allocated, Arc::default()));
            }
            let Some((buffer, group)) = buffers.get(buffer) else { continue };
            let bytes = match load.held.layout.layout {
                Layout::Plain => load.tensor.bytes(),
                Layout::Packed(_) => load.held.layout.bytes,
            };
            let region = Region::new(Arc::clone(buffer), offset, bytes).map_err(|e| failed(load, e))?;
            *slot = Some(Reserved::Buffer(region, Arc::clone(group)));
        }
    }
    Ok(out.into_iter().flatten().collect())
}
