//! Which tensors are in memory of the caller, by name.

use quadriga_graph::{Graph, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use crate::schedule::{BoundStorage, BoundStorages, Plan};
use crate::{LeafUse, Region, RuntimeError};

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
        let mut used: Vec<BoundUse<'_>> = Vec::new();
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
            let bytes = place.backend.storage_bytes(storage);
            if place.region.bytes < bytes {
                let (expected, found) = (bytes, place.region.bytes);
                return Err(RuntimeError::WrongSize { name: name.clone(), expected, found });
            }
            let region = &place.region;
            let written = storage.kind() != TensorKind::Input;
            let new = BoundUse { name, storage: tensor.storage(), region, bytes, written };
            used.iter().try_for_each(|other| new.check_beside(other))?;
            used.push(new);
            bound.insert(tensor.storage(), place.clone());
        }
        Ok(bound)
    }
}

/// A tensor of a graph in the caller's memory.
struct BoundUse<'a> {
    name: &'a str,
    storage: TensorId,
    region: &'a Region,
    /// How many bytes of the region the graph uses.
    bytes: usize,
    /// Whether a run writes it.
    written: bool,
}

impl BoundUse<'_> {
    /// An error if one graph cannot use both.
    fn check_beside(&self, other: &BoundUse<'_>) -> Result<(), RuntimeError> {
        let (a, b) = (self.region, other.region);
        let one_buffer = std::ptr::addr_eq(&raw const *a.buffer, &raw const *b.buffer);
        let names = || {
            let (first, second) = (self.name.min(other.name), self.name.max(other.name));
            (first.to_owned(), second.to_owned())
        };
        if self.storage == other.storage {
            if one_buffer && a.offset == b.offset {
                return Ok(());
            }
            let (name, other) = names();
            return Err(RuntimeError::BoundTwice { name, other });
        }
        let overlap = one_buffer && a.offset < b.offset + other.bytes && b.offset < a.offset + self.bytes;
        if overlap && (self.written || other.written) {
            let (name, other) = names();
            return Err(RuntimeError::BoundOverlap { name, other });
        }
        Ok(())
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
