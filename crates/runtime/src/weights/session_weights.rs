//! The weights of one session: loading them, and setting those that a graph has no data for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use quadriga_graph::{Data, Graph, Op, Tensor, TensorId, TensorKind};

use super::layout::{BufferPlan, Residency, WeightRead, plan_buffers, residency};
use super::resident::{KnownUses, PlanWeights, ResidentWeight};
use super::store::{SharedWeights, WeightStore};
use super::uses::WeightUses;
use crate::memory::PlacedTensor;
use crate::{Backend, BackendError, Layout, Region, RuntimeError, TensorPlace, Usage};

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
    own: HashMap<(String, usize), (Arc<ResidentWeight>, KnownUses)>,
}

/// The weights of a plan that was added to a session.
pub(crate) struct Loaded {
    pub(crate) weights: PlanWeights,
    /// Weights whose layout did not serve the new plan, each with the one that took its place.
    pub(crate) replaced: Vec<(Arc<ResidentWeight>, Arc<ResidentWeight>)>,
}

/// A weight that has to be loaded.
struct Load<'g> {
    key: (String, usize),
    id: TensorId,
    tensor: &'g Tensor,
    data: Option<&'g Data>,
    held: Residency,
    uses: KnownUses,
    replaces: Option<Arc<ResidentWeight>>,
}

/// Memory for a weight.
enum Reserved {
    /// Its bytes are read where they are.
    Mapped(Region),
    /// Its bytes are to be loaded there.
    Buffer(Region),
}

impl SessionWeights {
    pub(crate) fn new(store: Arc<WeightStore>) -> SessionWeights {
        SessionWeights { store, own: HashMap::new() }
    }

    /// Loads the weights and constants of a graph to the backends that hold them, unless they are there already.
    pub(crate) fn load(
        &mut self,
        graph: &Graph,
        backends: &[Arc<dyn Backend>],
        reads: impl Iterator<Item = WeightRead>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Loaded, RuntimeError> {
        let uses = WeightUses::of(graph);
        let store = Arc::clone(&self.store);
        // Held while loading, so that another session that needs the same weights waits for them.
        let mut shared = store.lock();
        let mut weights = PlanWeights::default();
        let mut loads = Vec::new();
        for read in reads {
            let (Some(tensor), Some(backend)) = (graph.get(read.tensor), backends.get(read.backend)) else {
                continue;
            };
            let (key, data) = ((graph.name(read.tensor), read.backend), graph.data(read.tensor));
            let operations = uses.of_tensor(graph, read.tensor);
            let known = match (tensor.kind(), data) {
                (TensorKind::Weight, Some(data)) => shared.find(&key, tensor, data),
                (TensorKind::Weight, None) => self.own(&key, tensor)?,
                _ => None,
            };
            let place = (read.tensor.index() as u32, read.backend as u16);
            let (old, known) = known.map_or((None, KnownUses::default()), |(old, uses)| (Some(old), uses));
            if let Some(old) = &old
                && known.cover(&operations, read.viewed)
            {
                weights.insert(place, Arc::clone(old));
                continue;
            }
            let uses = known.with(&operations, read.viewed);
            let operations: Vec<(&Op, usize)> = uses.operations.iter().map(|(op, at)| (op, *at)).collect();
            let read = WeightRead { viewed: uses.viewed, ..read };
            let held = residency(graph, &**backend, read, &operations);
            if let Some(old) = old.as_ref().filter(|old| old.place.layout == held.layout.layout) {
                weights.insert(place, Arc::clone(old));
                self.keep(&mut shared, key, old, uses);
                continue;
            }
            loads.push(Load { key, id: read.tensor, tensor, data, held, uses, replaces: old });
        }
        let mut loaded = Loaded { weights, replaced: Vec::new() };
        self.load_all(backends, loads, &mut shared, &mut loaded, progress)?;
        shared.prune();
        Ok(loaded)
    }

    fn load_all(
        &mut self,
        backends: &[Arc<dyn Backend>],
        loads: Vec<Load<'_>>,
        shared: &mut SharedWeights,
        loaded: &mut Loaded,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RuntimeError> {
        let reserved = reserve(backends, &loads)?;
        let mut count = Progress { done: 0, total: loads.iter().map(|l| l.held.layout.bytes as u64).sum() };
        for (load, reserved) in loads.into_iter().zip(reserved) {
            let Some(backend) = backends.get(load.key.1) else { continue };
            let failed = |error| RuntimeError::device(error).at(|| load.key.0.clone());
            let layout = load.held.layout.layout;
            let (region, registration) = match reserved {
                Reserved::Mapped(region) => (region, None),
                Reserved::Buffer(region) => {
                    let registration =
                        PlacedTensor::new(backend, load.tensor, region.clone()).map_err(failed)?;
                    if let Some(data) = load.data {
                        backend.load_weight(load.tensor, layout, data.bytes(), &region).map_err(failed)?;
                    }
                    (region, Some(registration))
                }
            };
            count.done += load.held.layout.bytes as u64;
            progress(count);
            let weight = Arc::new(ResidentWeight {
                tensor: load.tensor.clone(),
                place: TensorPlace { region, layout },
                data: load.data.cloned(),
                ready: AtomicBool::new(load.data.is_some()),
                registration,
            });
            let place = (load.id.index() as u32, load.key.1 as u16);
            loaded.replaced.extend(load.replaces.map(|old| (old, Arc::clone(&weight))));
            if load.tensor.kind() == TensorKind::Weight {
                self.keep(shared, load.key, &weight, load.uses);
            }
            loaded.weights.insert(place, weight);
        }
        Ok(())
    }

    /// Remembers a weight for later plans: of all sessions if it has data, else of this one.
    fn keep(
        &mut self,
        shared: &mut SharedWeights,
        key: (String, usize),
        weight: &Arc<ResidentWeight>,
        uses: KnownUses,
    ) {
        if weight.data.is_some() {
            shared.insert(key, weight, uses);
        } else {
            self.own.insert(key, (Arc::clone(weight), uses));
        }
    }

    /// The weight of this name that has no data, if an earlier graph has one.
    fn own(
        &self,
        key: &(String, usize),
        tensor: &Tensor,
    ) -> Result<Option<(Arc<ResidentWeight>, KnownUses)>, RuntimeError> {
        let Some((weight, uses)) = self.own.get(key) else { return Ok(None) };
        if !weight.has_shape_of(tensor) {
            let describe = |tensor: &Tensor| format!("{} {}", tensor.dtype(), tensor.shape());
            let (before, after) = (describe(&weight.tensor), describe(tensor));
            return Err(RuntimeError::Conflict { what: "weight", name: key.0.clone(), before, after });
        }
        Ok(Some((Arc::clone(weight), uses.clone())))
    }

    /// Sets the bytes of a weight without data, on every backend that holds it.
    pub(crate) fn set(
        &mut self,
        backends: &[Arc<dyn Backend>],
        name: &str,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        for (index, backend) in backends.iter().enumerate() {
            if let Some((weight, _)) = self.own.get(&(name.to_owned(), index)) {
                let written = weight.write(&**backend, bytes);
                written.map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))?;
            }
        }
        Ok(())
    }
}

impl Loaded {
    /// Lets an earlier plan of the session use the weights that took the place of its own; true if there are any.
    pub(crate) fn replace_in(&self, weights: &mut PlanWeights) -> bool {
        let mut changed = false;
        for weight in weights.values_mut() {
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
        let mut buffers = Vec::with_capacity(sizes.len());
        for ((load, slot), (buffer, offset)) in batch.into_iter().zip(places) {
            if buffer == buffers.len() {
                let size = sizes.get(buffer).copied().unwrap_or(0);
                buffers.push(backend.allocate(size, Usage::Weights).map_err(|e| failed(load, e))?);
            }
            let Some(buffer) = buffers.get(buffer) else { continue };
            let bytes = match load.held.layout.layout {
                Layout::Plain => load.tensor.bytes(),
                Layout::Packed(_) => load.held.layout.bytes,
            };
            let region = Region::new(Arc::clone(buffer), offset, bytes).map_err(|e| failed(load, e))?;
            *slot = Some(Reserved::Buffer(region));
        }
    }
    Ok(out.into_iter().flatten().collect())
}
