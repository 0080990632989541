//! Weights: loaded once per backend, shared by all sessions of a scheduler.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use quadriga_graph::{DType, Kind, Op, Shape, Tensor, TensorId};
use rustc_hash::FxHashMap;

use crate::schedule::{Plan, Uses};
use crate::{Backend, BackendError, Layout, Place, Region, RuntimeError, Usage};

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
    pub(crate) place: Place,
    dtype: DType,
    shape: Shape,
    /// All uses in the graphs seen so far: the layout serves them.
    uses: Vec<(Op, usize)>,
    viewed: bool,
    /// Whether its bytes are there.
    ready: AtomicBool,
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
    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    fn describe(&self) -> String {
        format!("{} {}", self.dtype, self.shape)
    }
}

impl WeightStore {
    /// Brings all weights and constants of a plan to the backends that read them.
    pub(crate) fn load(
        &self,
        plan: &Plan,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Weights, RuntimeError> {
        let graph = plan.graph();
        let uses = Uses::of(graph);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Weights::default();
        let mut wanted = Vec::new();
        for leaf in &plan.splits().leaves {
            let id = TensorId::from_index(leaf.tensor);
            let Some(tensor) = graph.get(id).filter(|t| matches!(t.kind(), Kind::Weight | Kind::Constant))
            else {
                continue;
            };
            let key = (leaf.tensor as u32, leaf.backend as u16);
            let name = graph.name(id);
            let here = uses.of_tensor(graph, id);
            let is_weight = tensor.kind() == Kind::Weight;
            let old = if is_weight { all.get(&(name.clone(), leaf.backend)) } else { None };
            let mut union: Vec<(Op, usize)> = old.map_or_else(Vec::new, |old| old.uses.clone());
            let mut viewed = leaf.viewed;
            if let Some(old) = old {
                if old.dtype != tensor.dtype() || old.shape.dims4() != tensor.dims4() {
                    return Err(RuntimeError::Conflict {
                        what: "weight",
                        name,
                        before: old.describe(),
                        after: format!("{} {}", tensor.dtype(), tensor.shape()),
                    });
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
            if let Some(old) = old.filter(|old| old.place.layout == layout.layout) {
                let same = Loaded {
                    place: old.place.clone(),
                    dtype: old.dtype,
                    shape: old.shape,
                    uses: union,
                    viewed,
                    ready: AtomicBool::new(old.is_ready()),
                };
                found.insert(key, keep(&mut all, &name, leaf.backend, same));
                continue;
            }
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
        Ok(found)
    }

    fn bring(
        &self,
        plan: &Plan,
        wanted: Vec<Wanted<'_>>,
        all: &mut HashMap<(String, usize), Arc<Loaded>>,
        found: &mut Weights,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RuntimeError> {
        let mut count = Progress { done: 0, total: wanted.iter().map(|w| w.layout.bytes as u64).sum() };
        let regions = reserve(plan, &wanted)?;
        for (want, region) in wanted.into_iter().zip(regions) {
            let Some(backend) = plan.backends().get(want.backend) else { continue };
            let failed = |error| RuntimeError::device(error).at(|| want.name.clone());
            let data = plan.graph().data(want.id);
            let layout = want.layout.layout;
            let region = match region {
                Reserved::Mapped(region) => region,
                Reserved::Memory(region) => {
                    backend.placed(want.tensor, &region).map_err(failed)?;
                    if let Some(data) = data {
                        backend.load_weight(want.tensor, layout, data.bytes(), &region).map_err(failed)?;
                    }
                    region
                }
            };
            count.done += want.layout.bytes as u64;
            progress(count);
            let loaded = Loaded {
                place: Place { region, layout },
                dtype: want.tensor.dtype(),
                shape: *want.tensor.shape(),
                uses: want.uses,
                viewed: want.viewed,
                ready: AtomicBool::new(data.is_some()),
            };
            let loaded = if want.tensor.kind() == Kind::Weight {
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
                let Place { region, layout } = &loaded.place;
                backend
                    .load_weight(tensor, *layout, data, region)
                    .map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))?;
                loaded.ready.store(true, Ordering::Release);
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

/// Memory for all weights: a few large buffers for each backend.
fn reserve(plan: &Plan, wanted: &[Wanted<'_>]) -> Result<Vec<Reserved>, RuntimeError> {
    let mut out: Vec<Option<Reserved>> = wanted.iter().map(|_| None).collect();
    for (number, backend) in plan.backends().iter().enumerate() {
        let facts = backend.memory();
        let failed =
            |want: &Wanted<'_>, error: BackendError| RuntimeError::device(error).at(|| want.name.clone());
        // What goes into the buffer that is being filled, with offsets; and its size.
        let mut batch: Vec<(usize, usize)> = Vec::new();
        let mut size = 0usize;
        let mine = wanted.iter().enumerate().filter(|(_, want)| want.backend == number);
        for (index, want) in mine {
            let mapped = plan.graph().data(want.id).filter(|_| want.maps).and_then(|data| backend.map(data));
            if let Some(buffer) = mapped {
                let region = Region::new(buffer, 0, want.tensor.bytes()).map_err(|e| failed(want, e))?;
                if let Some(slot) = out.get_mut(index) {
                    *slot = Some(Reserved::Mapped(region));
                }
                continue;
            }
            let start = size.next_multiple_of(facts.alignment.max(1));
            let end = start.saturating_add(want.layout.bytes);
            if !batch.is_empty() && facts.max_buffer.is_some_and(|max| end > max) {
                fill(&**backend, wanted, &batch, size, &mut out)?;
                batch.clear();
                batch.push((index, 0));
                size = want.layout.bytes;
            } else {
                batch.push((index, start));
                size = end;
            }
        }
        fill(&**backend, wanted, &batch, size, &mut out)?;
    }
    Ok(out.into_iter().flatten().collect())
}

fn fill(
    backend: &dyn Backend,
    wanted: &[Wanted<'_>],
    batch: &[(usize, usize)],
    size: usize,
    out: &mut [Option<Reserved>],
) -> Result<(), RuntimeError> {
    let Some(first) = batch.first().and_then(|(index, _)| wanted.get(*index)) else { return Ok(()) };
    let failed = |error| RuntimeError::device(error).at(|| first.name.clone());
    let buffer = backend.allocate(size, Usage::Weights).map_err(failed)?;
    for (index, offset) in batch {
        if let (Some(slot), Some(want)) = (out.get_mut(*index), wanted.get(*index)) {
            let bytes = match want.layout.layout {
                Layout::Plain => want.tensor.bytes(),
                Layout::Packed(_) => want.layout.bytes,
            };
            *slot = Some(Reserved::Memory(Region::new(Arc::clone(&buffer), *offset, bytes).map_err(failed)?));
        }
    }
    Ok(())
}
