//! Space: requests memory for results, inputs, copies and scratch from the memory planner.
//!
//! Steps of the memory planner are node numbers. A backend's nodes run in the graph's order, and each backend has memory
//! of its own, so node numbers are the clock of its lane. Accesses of other lanes are added:
//!
//! - A result that is copied to another backend is held until the end of the first split of its own lane that starts
//!   after the copy is known to be done, or to the end of the run.
//! - A copy has memory from the start of the split *before* the one that reads it, so that the copy overlaps with that
//!   split. It starts when the split before that one is done ([`Copy::after`](super::Copy)): no tensor that had the
//!   memory is in use then, copies out of it included, because those hold it to the *end* of a split.
//! - In a graph with barriers, nodes between two barriers share a step: memory is reused only at a barrier.
//! - The scratch memory of a program is its own from the first node of its split to the last.
//! - An input has memory for the whole run; twice, on an asynchronous backend, where the host sets the inputs of the
//!   next run while the device computes.
#![expect(clippy::indexing_slicing, reason = "splits, lanes and copies are numbered by the same plan")]

use std::sync::Arc;

use quadriga_graph::{Graph, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use super::bound::BoundStorages;
use super::placement::{NO_BACKEND, Placements};
use super::splits::{Copy, Splits};
use crate::flow::Flow;
use crate::memory::packing::Effort;
use crate::memory::{
    self, BackendMemory, Extra, Hold, Lifetime, MemoryPlan, MemoryRequest, Planner, TensorLocation,
};
use crate::weights::WeightUses;
use crate::{Backend, RuntimeError, WeightLayout};

/// An offset in a backend's arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slot {
    pub(crate) backend: u16,
    pub(crate) chunk: u32,
    pub(crate) offset: u64,
}

/// The memory of every tensor that lives for one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Space {
    pub(crate) memory: MemoryPlan,
    /// For each input and backend that reads it: the first of its extras.
    pub(crate) inputs: FxHashMap<(u32, u16), u32>,
    /// The number of the first copy among the extras.
    pub(crate) first_copy: usize,
    /// Splits whose programs need scratch memory, in order, each with the number of its extra.
    pub(crate) scratches: Vec<(u32, u32)>,
    /// For each backend how many banks of inputs it has.
    pub(crate) banks: Vec<u8>,
    /// Storages in memory of the caller.
    pub(crate) bound: BoundStorages,
    /// For each copy of selected slices its layout.
    pub(crate) layouts: FxHashMap<u32, WeightLayout>,
}

fn slot(location: TensorLocation) -> Option<Slot> {
    match location {
        TensorLocation::Arena { backend, chunk, offset } => Some(Slot { backend, chunk, offset }),
        TensorLocation::Unused | TensorLocation::External { .. } => None,
    }
}

impl Space {
    pub(crate) fn plan(
        (graph, flow): (&Graph, &Flow),
        backends: &[Arc<dyn Backend>],
        placements: &Placements,
        splits: &Splits,
        asynchronous: &[bool],
        (effort, checked): (Effort, bool),
        (planner, bound): (&mut Planner, &BoundStorages),
    ) -> Result<Space, RuntimeError> {
        let memories: Vec<BackendMemory<'_>> = backends.iter().map(|b| BackendMemory::of(&**b)).collect();
        let mut space = Space {
            banks: asynchronous.iter().map(|asynchronous| if *asynchronous { 2 } else { 1 }).collect(),
            bound: bound.clone(),
            ..Space::default()
        };
        let steps = BarrierSteps::new(graph);
        let mut extras = Vec::new();
        let mut placed: Vec<TensorId> =
            bound.keys().copied().filter(|id| matches!(graph[*id].kind(), TensorKind::Computed(_))).collect();
        placed.sort_unstable();
        for leaf in &splits.leaves {
            let id = TensorId::from_index(leaf.tensor);
            if graph[id].kind() != TensorKind::Input {
                continue;
            }
            placed.push(id);
            if bound.contains_key(&id) {
                continue;
            }
            let backend = leaf.backend as u16;
            space.inputs.insert((leaf.tensor as u32, backend), extras.len() as u32);
            for _ in 0..space.banks[leaf.backend] {
                let bytes = memories[leaf.backend].storage_bytes(&graph[id]);
                extras.push(Extra { backend, bytes, lifetime: Lifetime::WHOLE });
            }
        }
        space.first_copy = extras.len();
        space.layouts = streamed_layouts(graph, backends, splits);
        for (number, copy) in splits.copies.iter().enumerate() {
            let bytes = match space.layouts.get(&(number as u32)) {
                Some(layout) => layout.bytes as u64,
                None => memories[copy.to].storage_bytes(&graph[TensorId::from_index(copy.tensor)]),
            };
            let lifetime = steps.lifetime(start_of(splits, copy.reader), copy.last_node as u32);
            extras.push(Extra { backend: copy.to as u16, bytes, lifetime });
        }
        for (number, split) in splits.splits.iter().enumerate() {
            let nodes = splits.nodes_of(number);
            let bytes = backends[split.backend].scratch_bytes(graph, nodes) as u64;
            if let (1.., Some(first), Some(last)) = (bytes, nodes.first(), nodes.last()) {
                space.scratches.push((number as u32, extras.len() as u32));
                let lifetime = steps.lifetime(first.index() as u32, last.index() as u32);
                extras.push(Extra { backend: split.backend as u16, bytes, lifetime });
            }
        }
        let holds: Vec<Hold> = splits
            .remote_reads
            .iter()
            .map(|(tensor, copy)| Hold {
                tensor: *tensor,
                until: steps.of(release(graph, splits, *copy as usize)),
            })
            .collect();
        // Leaves that are not assigned are not the memory planner's: any number will do.
        let number = |backend: &u16| if *backend == NO_BACKEND { 0 } else { *backend };
        let mut of_tensor: Vec<u16> = placements.backend.iter().map(number).collect();
        for alias in &flow.aliases {
            of_tensor[alias.tensor.index()] = of_tensor[alias.storage.index()];
        }
        let request = MemoryRequest {
            backends: &of_tensor,
            holds: &holds,
            extras: &extras,
            external: &placed,
            effort,
            steps: &steps.of_node,
            ..MemoryRequest::new(graph, &memories)
        };
        planner.plan_flow(&request, flow, &mut space.memory)?;
        if checked {
            let valid = memory::check(&request, &space.memory);
            valid.map_err(|violation| RuntimeError::BadPlan(violation.to_string()))?;
        }
        Ok(space)
    }

    /// Where a computed tensor is on its own backend.
    pub(crate) fn result(&self, tensor: TensorId) -> Option<Slot> {
        slot(self.memory.location(tensor))
    }

    /// Where an input is on a backend.
    pub(crate) fn input(&self, tensor: TensorId, backend: u16, bank: usize) -> Option<Slot> {
        let first = *self.inputs.get(&(tensor.index() as u32, backend))? as usize;
        let bank = bank % usize::from(*self.banks.get(usize::from(backend))?).max(1);
        slot(self.memory.extra_location(first + bank))
    }

    /// The scratch memory of a split's program, and its bytes.
    pub(crate) fn scratch(&self, split: usize) -> Option<(Slot, usize)> {
        let at = self.scratches.binary_search_by_key(&(split as u32), |(split, _)| *split).ok()?;
        let extra = self.scratches.get(at)?.1 as usize;
        Some((slot(self.memory.extra_location(extra))?, self.memory.extras.get(extra)?.bytes as usize))
    }

    /// Where a copy is on the backend that reads it.
    pub(crate) fn copy(&self, copy: usize) -> Option<Slot> {
        slot(self.memory.extra_location(self.first_copy + copy))
    }
}

/// The layouts of the copies of selected slices.
fn streamed_layouts(
    graph: &Graph,
    backends: &[Arc<dyn Backend>],
    splits: &Splits,
) -> FxHashMap<u32, WeightLayout> {
    let selected = |(_, copy): &(u32, &Copy)| copy.selected_by.is_some();
    let copies = || (0..).zip(&splits.copies).filter(selected);
    if copies().next().is_none() {
        return FxHashMap::default();
    }
    let uses = WeightUses::of(graph);
    let layout = |copy: &Copy| {
        let weight = TensorId::from_index(copy.tensor);
        backends[copy.to].streamed_layout(&graph[weight], &uses.of_tensor(graph, weight))
    };
    copies().map(|(number, copy)| (number, layout(copy))).collect()
}

/// The steps of a graph with barriers: nodes between two barriers share one. Without barriers a node's step is its number.
struct BarrierSteps {
    /// For each node its step; empty without barriers.
    of_node: Vec<u32>,
}

impl BarrierSteps {
    fn new(graph: &Graph) -> BarrierSteps {
        let mut barriers = graph.barriers().iter().peekable();
        if barriers.peek().is_none() {
            return BarrierSteps { of_node: Vec::new() };
        }
        let mut step = 0;
        let of_node = graph.node_ids().map(|node| {
            while barriers.next_if(|barrier| **barrier <= node).is_some() {
                step += 1;
            }
            step
        });
        BarrierSteps { of_node: of_node.collect() }
    }

    /// The step of a node, or of the end of the run.
    fn of(&self, node: u32) -> u32 {
        match self.of_node.last() {
            None => node,
            Some(last) => self.of_node.get(node as usize).copied().unwrap_or(last + 1),
        }
    }

    /// From the step of one node to that of another.
    fn lifetime(&self, first: u32, last: u32) -> Lifetime {
        Lifetime { start: self.of(first), end: self.of(last) + 1 }
    }
}

/// The first node of the split before `split` in its lane, or of the run.
fn start_of(splits: &Splits, split: usize) -> u32 {
    let lane = &splits.lanes[splits.splits[split].backend];
    let place = lane.partition_point(|s| (*s as usize) < split);
    match place.checked_sub(1) {
        Some(before) if before > 0 => splits.nodes_of(lane[before] as usize)[0].index() as u32,
        _ => 0,
    }
}

/// The last step at which the source of a copy is still needed.
fn release(graph: &Graph, splits: &Splits, number: usize) -> u32 {
    let copy = &splits.copies[number];
    let lane = &splits.lanes[copy.from];
    let knows = lane.partition_point(|s| splits.done_before(*s as usize)[copy.to] <= copy.reader as u32);
    let waits = splits.released.get(&(number as u32)).map(|split| lane.partition_point(|s| s < split));
    match lane
        .get(waits.map_or(knows, |waits| waits.min(knows)))
        .and_then(|split| splits.nodes_of(*split as usize).last())
    {
        Some(last) => last.index() as u32,
        None => graph.nodes().len() as u32,
    }
}
