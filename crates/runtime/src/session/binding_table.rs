//! Which tensors are in memory of the caller, by name.

use quadriga_graph::{Graph, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use crate::schedule::{BoundStorage, BoundStorages, Plan};
use crate::{LeafUse, RuntimeError};

/// The caller's memory, by the names of leaves and outputs.
#[derive(Default)]
pub(crate) struct Bindings {
    pub(super) leaves: FxHashMap<String, BoundStorage>,
    pub(super) outputs: FxHashMap<String, BoundStorage>,
}

impl Bindings {
    /// The storages of a graph that are in the caller's memory.
    pub(crate) fn of(&self, graph: &Graph) -> Result<BoundStorages, RuntimeError> {
        let mut bound = BoundStorages::default();
        let leaves = self.leaves.iter().filter_map(|(name, place)| Some((name, graph.leaf(name)?, place)));
        let outputs =
            self.outputs.iter().filter_map(|(name, place)| Some((name, graph.output(name)?, place)));
        for (name, id, place) in leaves.chain(outputs) {
            let Some((tensor, storage)) = graph.get(id).and_then(|t| Some((t, graph.get(t.storage())?)))
            else {
                continue;
            };
            let allowed = match storage.kind() {
                TensorKind::Input | TensorKind::State => {
                    tensor.node().is_none() && self.leaves.contains_key(name)
                }
                TensorKind::Computed(_) => true,
                TensorKind::Weight | TensorKind::Constant => false,
            };
            if !allowed {
                let expected = "an input, a state or a computed output";
                return Err(RuntimeError::WrongKind { name: name.clone(), expected });
            }
            if place.region.bytes < place.backend.storage_bytes(storage) {
                let (expected, found) = (place.backend.storage_bytes(storage), place.region.bytes);
                return Err(RuntimeError::WrongSize { name: name.clone(), expected, found });
            }
            bound.insert(tensor.storage(), place.clone());
        }
        Ok(bound)
    }
}

/// An error if an input in the caller's memory is read on another backend.
pub(crate) fn check_readers(plan: &Plan) -> Result<(), RuntimeError> {
    let (graph, bound) = (plan.graph(), &plan.space().bound);
    let is_elsewhere = |leaf: &&LeafUse| {
        let id = TensorId::from_index(leaf.tensor);
        bound.get(&id).is_some_and(|place| place.number != leaf.backend)
    };
    let Some(leaf) = plan.splits().leaves.iter().filter(|_| !bound.is_empty()).find(is_elsewhere) else {
        return Ok(());
    };
    let id = TensorId::from_index(leaf.tensor);
    let name = |number: usize| plan.backends().get(number).map_or("", |backend| backend.name());
    Err(RuntimeError::Conflict {
        what: "input",
        name: graph.name(id),
        before: format!("bound to memory of {}", bound.get(&id).map_or("", |place| name(place.number))),
        after: format!("read on {}", name(leaf.backend)),
    })
}
