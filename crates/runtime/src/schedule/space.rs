//! Space: asks the memory planner for the bytes of results, inputs and copies.
//!
//! Steps of the memory planner are node numbers. A backend's nodes run in the graph's order, and each backend has
//! memory of its own, so that is the right clock for all that its lane does. What other lanes do is added:
//!
//! - A result that is copied elsewhere is held until the end of the first split of its own lane that knows the copy to
//!   be done, because it waited for it or for something that came after; or to the end of the run.
//! - A copy has its place from the start of the split *before* the one that reads it, so that it can travel while that
//!   split computes. It starts once the split before that one is done ([`Copy::after`](super::Copy)): whatever had the
//!   place until then is gone, copies out of it included, because these are held to the *end* of a split.
//! - What a program works in has its place from the first node of its split to the last.
//! - An input has its place for the whole run; two, on a backend that works while the host prepares the next run.
#![expect(clippy::indexing_slicing, reason = "splits, lanes and copies are numbered by the same plan")]

use std::sync::Arc;

use quadriga_graph::{Graph, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use super::NO_BACKEND;
use super::assign::Homes;
use super::split::Splits;
use crate::flow::Flow;
use crate::memory::packing::Effort;
use crate::memory::{
    BackendMemory, Extra, Hold, Lifetime, MemoryPlan, MemoryRequest, Planner, TensorLocation,
};
use crate::{Backend, RuntimeError};

/// A place in a backend's arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slot {
    pub(crate) backend: u16,
    pub(crate) chunk: u32,
    pub(crate) offset: u64,
}

/// The bytes of everything that lives for a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Space {
    pub(crate) memory: MemoryPlan,
    /// For each leaf use that is an input, by its number: the first of its extras.
    pub(crate) inputs: FxHashMap<(u32, u16), u32>,
    /// The number of the first copy among the extras.
    pub(crate) first_copy: usize,
    /// Splits whose programs have memory to work in, in order, each with the number of its extra.
    pub(crate) scratches: Vec<(u32, u32)>,
    /// For each backend how many places an input has.
    pub(crate) banks: Vec<u8>,
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
        homes: &Homes,
        splits: &Splits,
        asynchronous: &[bool],
        effort: Effort,
        planner: &mut Planner,
    ) -> Result<Space, RuntimeError> {
        let memories: Vec<BackendMemory<'_>> = backends.iter().map(|b| BackendMemory::of(&**b)).collect();
        let mut space = Space {
            banks: asynchronous.iter().map(|asynchronous| if *asynchronous { 2 } else { 1 }).collect(),
            ..Space::default()
        };
        let mut extras = Vec::new();
        let mut placed = Vec::new();
        for leaf in &splits.leaves {
            let id = TensorId::from_index(leaf.tensor);
            if graph[id].kind() != TensorKind::Input {
                continue;
            }
            placed.push(id);
            let backend = leaf.backend as u16;
            space.inputs.insert((leaf.tensor as u32, backend), extras.len() as u32);
            for _ in 0..space.banks[leaf.backend] {
                let bytes = memories[leaf.backend].storage_bytes(&graph[id]);
                extras.push(Extra { backend, bytes, lifetime: Lifetime::WHOLE });
            }
        }
        space.first_copy = extras.len();
        for copy in &splits.copies {
            let bytes = memories[copy.to].storage_bytes(&graph[TensorId::from_index(copy.tensor)]);
            let lifetime = Lifetime { start: start_of(splits, copy.reader), end: copy.last_node as u32 + 1 };
            extras.push(Extra { backend: copy.to as u16, bytes, lifetime });
        }
        for (number, split) in splits.splits.iter().enumerate() {
            let nodes = splits.nodes_of(number);
            let bytes = backends[split.backend].scratch_bytes(graph, nodes) as u64;
            if let (1.., Some(first), Some(last)) = (bytes, nodes.first(), nodes.last()) {
                space.scratches.push((number as u32, extras.len() as u32));
                let lifetime = Lifetime { start: first.index() as u32, end: last.index() as u32 + 1 };
                extras.push(Extra { backend: split.backend as u16, bytes, lifetime });
            }
        }
        let holds: Vec<Hold> = splits
            .remote_reads
            .iter()
            .map(|(tensor, copy)| Hold { tensor: *tensor, until: release(graph, splits, *copy as usize) })
            .collect();
        // A result's node runs at the home of its storage; a leaf without a home takes no part.
        let somewhere = |home: &u16| if *home == NO_BACKEND { 0 } else { *home };
        let mut of_tensor: Vec<u16> = homes.home.iter().map(somewhere).collect();
        for lodger in &flow.lodgers {
            of_tensor[lodger.tensor.index()] = of_tensor[lodger.storage.index()];
        }
        let request = MemoryRequest {
            backends: &of_tensor,
            holds: &holds,
            extras: &extras,
            external: &placed,
            effort,
            ..MemoryRequest::new(graph, &memories)
        };
        planner.plan_flow(&request, flow, &mut space.memory)?;
        Ok(space)
    }

    /// Where a computed tensor is on its home.
    pub(crate) fn result(&self, tensor: TensorId) -> Option<Slot> {
        slot(self.memory.location(tensor))
    }

    /// Where an input is on a backend.
    pub(crate) fn input(&self, tensor: TensorId, backend: u16, bank: usize) -> Option<Slot> {
        let first = *self.inputs.get(&(tensor.index() as u32, backend))? as usize;
        let bank = bank % usize::from(*self.banks.get(usize::from(backend))?).max(1);
        slot(self.memory.extra_location(first + bank))
    }

    /// Where a split's program works, and how many bytes that are.
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
