//! Weights: loaded once per backend, shared by all sessions of a scheduler.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use quadriga_graph::{Op, Tensor, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use crate::memory::PlacedTensor;
use crate::schedule::{Plan, Uses};
use crate::{Backend, BackendError, Layout, MemoryFacts, Region, RuntimeError, TensorPlace, Usage};

/// How far the loading of weights is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes that are in place.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// A weight on one backend.
pub(crate) struct Loaded {
    home: Arc<Home>,
    /// All uses in the graphs seen so far: the layout serves them.
    uses: Vec<(Op, usize)>,
    viewed: bool,
}

/// The memory of a weight.
struct Home {
    tensor: Tensor,
    place: TensorPlace,
    /// Whether its bytes are there.
    ready: AtomicBool,
    /// None where the bytes are used in a file map.
    _placed: Option<PlacedTensor>,
}

/// The weights of all sessions of a scheduler, by name and backend.
#[derive(Default)]
pub struct WeightStore {
    all: Mutex<HashMap<(String, usize), Arc<Loaded>>>,
}

/// A weight that has yet to be brought to a backend.
struct Wanted<'p> {
    name: String,
    id: TensorId,
    tensor: &'p Tensor,
    backend: usize,
    layout: crate::WeightLayout,
    uses: Vec<(Op, usize)>,
    viewed: bool,
    maps: bool,
}

/// The places of a plan's weights and constants, by tensor and backend.
pub(crate) type Weights = FxHashMap<(u32, u16), Arc<Loaded>>;

impl Loaded {
    /// Where it is, and how it is arranged.
    pub(crate) fn place(&self) -> &TensorPlace {
        &self.home.place
    }

    fn is_ready(&self) -> bool {
        self.home.ready.load(Ordering::Acquire)
    }
}

fn describe(tensor: &Tensor) -> String {
    format!("{} {}", tensor.dtype(), tensor.shape())
}

impl WeightStore {
    /// Brings all weights and constants of a plan to the backends that read them. Also says whether a weight that was
    /// there before had to be arranged anew, so that earlier plans should [be refreshed](WeightStore::refresh).
    pub(crate) fn load(
        &self,
        plan: &Plan,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(Weights, bool), RuntimeError> {
        let graph = plan.graph();
        let uses = Uses::of(graph);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Weights::default();
        let mut wanted = Vec::new();
        let mut moved = false;
        for leaf in &plan.splits().leaves {
            let id = TensorId::from_index(leaf.tensor);
            let Some(tensor) =
                graph.get(id).filter(|t| matches!(t.kind(), TensorKind::Weight | TensorKind::Constant))
            else {
                continue;
            };
            let key = (leaf.tensor as u32, leaf.backend as u16);
            let name = graph.name(id);
            let here = uses.of_tensor(graph, id);
            let is_weight = tensor.kind() == TensorKind::Weight;
            let old = if is_weight { all.get(&(name.clone(), leaf.backend)) } else { None };
            let mut union: Vec<(Op, usize)> = old.map_or_else(Vec::new, |old| old.uses.clone());
            let mut viewed = leaf.viewed;
            if let Some(old) = old {
                let before = &old.home.tensor;
                if before.dtype() != tensor.dtype() || before.dims4() != tensor.dims4() {
                    let (before, after) = (describe(before), describe(tensor));
                    return Err(RuntimeError::Conflict { what: "weight", name, before, after });
                }
                let known = here.iter().all(|(op, at)| old.uses.iter().any(|(o, a)| o == *op && a == at));
                if known && (old.viewed || !viewed) {
                    found.insert(key, Arc::clone(old));
                    continue;
                }
                viewed |= old.viewed;
            }
            for (op, at) in here {
                if !union.iter().any(|(o, a)| o == op && *a == at) {
                    union.push((op.clone(), at));
                }
            }
            let borrowed: Vec<(&Op, usize)> = union.iter().map(|(op, at)| (op, *at)).collect();
            let (layout, maps) = plan.weight_layout(id, leaf.backend, viewed, &borrowed);
            if let Some(old) = old.filter(|old| old.place().layout == layout.layout) {
                let same = Loaded { home: Arc::clone(&old.home), uses: union, viewed };
                found.insert(key, keep(&mut all, &name, leaf.backend, same));
                continue;
            }
            moved |= old.is_some();
            wanted.push(Wanted {
                name,
                id,
                tensor,
                backend: leaf.backend,
                layout,
                uses: union,
                viewed,
                maps,
            });
        }
        self.bring(plan, wanted, &mut all, &mut found, progress)?;
        Ok((found, moved))
    }

    /// Brings an earlier plan's weights up to date with what has been arranged anew; true if some have been.
    pub(crate) fn refresh(&self, plan: &Plan, weights: &mut Weights) -> bool {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = false;
        for ((tensor, backend), loaded) in weights {
            let id = TensorId::from_index(*tensor as usize);
            let graph = plan.graph();
            if graph.get(id).is_some_and(|t| t.kind() == TensorKind::Weight)
                && let Some(now) = all.get(&(graph.name(id), usize::from(*backend)))
                && !Arc::ptr_eq(&now.home, &loaded.home)
            {
                *loaded = Arc::clone(now);
                changed = true;
            }
        }
        changed
    }

    fn bring(
        &self,
        plan: &Plan,
        wanted: Vec<Wanted<'_>>,
        all: &mut HashMap<(String, usize), Arc<Loaded>>,
        found: &mut Weights,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RuntimeError> {
        let regions = reserve(plan, &wanted)?;
        let mut count = Progress { done: 0, total: wanted.iter().map(|w| w.layout.bytes as u64).sum() };
        for (want, region) in wanted.into_iter().zip(regions) {
            let Some(backend) = plan.backends().get(want.backend) else { continue };
            let failed = |error| RuntimeError::device(error).at(|| want.name.clone());
            let data = plan.graph().data(want.id);
            let layout = want.layout.layout;
            let (region, placed) = match region {
                Reserved::Mapped(region) => (region, None),
                Reserved::Memory(region) => {
                    let placed = PlacedTensor::new(backend, want.tensor, region.clone()).map_err(failed)?;
                    if let Some(data) = data {
                        backend.load_weight(want.tensor, layout, data.bytes(), &region).map_err(failed)?;
                    }
                    (region, Some(placed))
                }
            };
            count.done += want.layout.bytes as u64;
            progress(count);
            let home = Home {
                tensor: want.tensor.clone(),
                place: TensorPlace { region, layout },
                ready: AtomicBool::new(data.is_some()),
                _placed: placed,
            };
            let loaded = Loaded { home: Arc::new(home), uses: want.uses, viewed: want.viewed };
            let loaded = if want.tensor.kind() == TensorKind::Weight {
                keep(all, &want.name, want.backend, loaded)
            } else {
                Arc::new(loaded)
            };
            found.insert((want.id.index() as u32, want.backend as u16), loaded);
        }
        Ok(())
    }

    /// Gives the bytes of a weight that the graph did not carry, on every backend that reads it.
    pub(crate) fn set(
        &self,
        backends: &[Arc<dyn Backend>],
        name: &str,
        tensor: &Tensor,
        data: &[u8],
    ) -> Result<(), RuntimeError> {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, backend) in backends.iter().enumerate() {
            if let Some(loaded) = all.get(&(name.to_owned(), index)) {
                let TensorPlace { region, layout } = loaded.place();
                backend
                    .load_weight(tensor, *layout, data, region)
                    .map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))?;
                loaded.home.ready.store(true, Ordering::Release);
            }
        }
        Ok(())
    }
}

/// A weight of the plan whose bytes nobody has given yet.
pub(crate) fn missing(weights: &Weights) -> Option<TensorId> {
    let bare = weights.iter().find(|(_, loaded)| !loaded.is_ready());
    bare.map(|((tensor, _), _)| TensorId::from_index(*tensor as usize))
}

fn keep(
    all: &mut HashMap<(String, usize), Arc<Loaded>>,
    name: &str,
    backend: usize,
    loaded: Loaded,
) -> Arc<Loaded> {
    let loaded = Arc::new(loaded);
    all.insert((name.to_owned(), backend), Arc::clone(&loaded));
    loaded
}

/// Memory for a weight.
enum Reserved {
    /// Its bytes are used where they are.
    Mapped(Region),
    /// Its bytes are to be put there.
    Memory(Region),
}

/// How weights of these sizes are laid out in as few buffers as may be: for each the number of its buffer and its
/// offset there; and the bytes of each buffer. What is forecast and what is allocated both come from here.
pub(crate) fn lay_out(
    sizes: impl IntoIterator<Item = usize>,
    facts: MemoryFacts,
) -> (Vec<(usize, usize)>, Vec<usize>) {
    let (mut places, mut buffers) = (Vec::new(), Vec::<usize>::new());
    for size in sizes {
        let fits = |used: &usize| {
            let start = used.checked_next_multiple_of(facts.alignment.max(1))?;
            let end = start.checked_add(size)?;
            facts.max_buffer.is_none_or(|max| end <= max).then_some((start, end))
        };
        let number = buffers.len();
        match buffers.last_mut().and_then(|used| fits(used).map(|(start, end)| (used, start, end))) {
            Some((used, start, end)) => {
                *used = end;
                places.push((number - 1, start));
            }
            None => {
                buffers.push(size);
                places.push((number, 0));
            }
        }
    }
    (places, buffers)
}

/// Memory for all weights: a few large buffers for each backend.
fn reserve(plan: &Plan, wanted: &[Wanted<'_>]) -> Result<Vec<Reserved>, RuntimeError> {
    let mut out: Vec<Option<Reserved>> = wanted.iter().map(|_| None).collect();
    for (number, backend) in plan.backends().iter().enumerate() {
        let failed =
            |want: &Wanted<'_>, error: BackendError| RuntimeError::device(error).at(|| want.name.clone());
        let mut batch: Vec<(&Wanted<'_>, &mut Option<Reserved>)> = Vec::new();
        for (want, slot) in wanted.iter().zip(&mut out).filter(|(want, _)| want.backend == number) {
            let mapped = plan.graph().data(want.id).filter(|_| want.maps).and_then(|data| backend.map(data));
            match mapped {
                Some(buffer) => {
                    let region = Region::new(buffer, 0, want.tensor.bytes()).map_err(|e| failed(want, e))?;
                    *slot = Some(Reserved::Mapped(region));
                }
                None => batch.push((want, slot)),
            }
        }
        let (places, sizes) = lay_out(batch.iter().map(|(want, _)| want.layout.bytes), backend.memory());
        let mut buffers = Vec::with_capacity(sizes.len());
        for ((want, slot), (buffer, offset)) in batch.into_iter().zip(places) {
            if buffer == buffers.len() {
                let size = sizes.get(buffer).copied().unwrap_or(0);
                buffers.push(backend.allocate(size, Usage::Weights).map_err(|e| failed(want, e))?);
            }
            let Some(buffer) = buffers.get(buffer) else { continue };
            let bytes = match want.layout.layout {
                Layout::Plain => want.tensor.bytes(),
                Layout::Packed(_) => want.layout.bytes,
            };
            let region = Region::new(Arc::clone(buffer), offset, bytes).map_err(|e| failed(want, e))?;
            *slot = Some(Reserved::Memory(region));
        }
    }
    Ok(out.into_iter().flatten().collect())
}
