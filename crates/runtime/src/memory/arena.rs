//! Real memory: the chunks of one backend, and a plan bound to them.

use quadriga_graph::{Graph, TensorId};
use std::sync::Arc;

use super::plan::{MemoryPlan, Spot, Tenant};
use super::{Memory, MemoryError, Planner, Request};
use crate::{Backend, Buffer, Region, Usage};

/// New chunks with their numbers, not yet in place.
type Grown = Vec<(usize, Arc<dyn Buffer>)>;

/// The chunks of memory that plans use on one backend. It grows on need and never shrinks on its own.
#[derive(Clone, Debug)]
pub struct Arena {
    backend: Arc<dyn Backend>,
    chunks: Vec<Arc<dyn Buffer>>,
}

impl Arena {
    /// An arena without memory.
    pub fn new(backend: Arc<dyn Backend>) -> Arena {
        Arena { backend, chunks: Vec::new() }
    }

    /// The backend whose memory it is.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Its chunks.
    pub fn chunks(&self) -> &[Arc<dyn Buffer>] {
        &self.chunks
    }

    /// Bytes of all its chunks.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.bytes() as u64).sum()
    }

    /// Whether chunks of these sizes are there already.
    pub fn fits(&self, sizes: &[u64]) -> bool {
        sizes.len() <= self.chunks.len()
            && self.chunks.iter().zip(sizes).all(|(chunk, size)| chunk.bytes() as u64 >= *size)
    }

    /// The chunks that are missing or too small, allocated but not yet in place; nothing changes when one is refused.
    /// `purpose` says what a chunk is for, should it be refused.
    fn prepare(&self, sizes: &[u64], purpose: &dyn Fn(usize) -> String) -> Result<Grown, MemoryError> {
        let mut grown = Vec::new();
        for (chunk, size) in sizes.iter().enumerate() {
            if self.chunks.get(chunk).is_some_and(|have| have.bytes() as u64 >= *size) {
                continue;
            }
            let refused = |source| MemoryError::Allocation {
                backend: self.backend.name().to_owned(),
                purpose: purpose(chunk),
                wanted: *size,
                free: self.backend.device().free_bytes,
                source: Box::new(source),
            };
            let bytes = usize::try_from(*size).unwrap_or(usize::MAX);
            grown.push((chunk, self.backend.allocate(bytes, Usage::Compute).map_err(refused)?));
        }
        Ok(grown)
    }

    fn commit(&mut self, grown: Grown) {
        for (chunk, buffer) in grown {
            match self.chunks.get_mut(chunk) {
                Some(old) => *old = buffer,
                None => self.chunks.push(buffer),
            }
        }
    }
}

/// A plan with memory behind it: where every tensor really is.
///
/// While it lives the backends know each tensor's place; when it is dropped they are told that the places are released.
/// It keeps the chunks that it was bound to, even if the arena has grown into others since.
#[derive(Debug)]
pub struct Binding {
    graph: Arc<Graph>,
    plan: Arc<MemoryPlan>,
    backends: Vec<Arc<dyn Backend>>,
    chunks: Vec<Vec<Arc<dyn Buffer>>>,
    /// How many tensors, counted from the first, the backends have been told of.
    told: usize,
}

impl Binding {
    /// Binds a plan to arenas, one for each of the plan's backends. Arenas that are too small grow first: all of them,
    /// or, if memory is refused, none.
    pub fn new(
        graph: &Arc<Graph>,
        plan: &Arc<MemoryPlan>,
        arenas: &mut [Arena],
    ) -> Result<Binding, MemoryError> {
        let strangers = |(arena, plan): (&Arena, &super::BackendPlan)| arena.backend.name() != plan.name;
        if plan.graph != graph.fingerprint()
            || plan.spots.len() != graph.tensors().len()
            || arenas.len() != plan.backends.len()
            || arenas.iter().zip(&plan.backends).any(strangers)
        {
            return Err(MemoryError::Stale);
        }
        let mut grown = Vec::new();
        for (number, (arena, backend)) in arenas.iter().zip(&plan.backends).enumerate() {
            let purpose = |chunk: usize| match plan.largest_in(number, chunk) {
                Some(Tenant::Tensor(tensor)) => format!("chunk {chunk} with {}", graph.name(tensor)),
                Some(Tenant::Extra(extra)) => format!("chunk {chunk} with extra {extra}"),
                None => format!("chunk {chunk}"),
            };
            grown.push(arena.prepare(&backend.chunks, &purpose)?);
        }
        for (arena, grown) in arenas.iter_mut().zip(grown) {
            arena.commit(grown);
        }
        let mut binding = Binding {
            graph: Arc::clone(graph),
            plan: Arc::clone(plan),
            backends: arenas.iter().map(|arena| Arc::clone(&arena.backend)).collect(),
            chunks: arenas.iter().map(|arena| arena.chunks.clone()).collect(),
            told: 0,
        };
        // On an error the drop of the binding takes back what was told so far.
        for (id, tensor) in graph.tensor_ids().zip(graph.tensors()) {
            if let Some((backend, region)) = binding.home(id) {
                backend.placed(tensor, &region)?;
            }
            binding.told = id.index() + 1;
        }
        Ok(binding)
    }

    /// Plans a graph for one backend and allocates it, in one go. Weights, constants and state are left to the caller.
    pub fn allocate(graph: &Arc<Graph>, backend: &Arc<dyn Backend>) -> Result<Binding, MemoryError> {
        let memories = [Memory::of(&**backend)];
        let plan = Planner::default().plan(&Request::new(graph, &memories))?;
        Binding::new(graph, &Arc::new(plan), &mut [Arena::new(Arc::clone(backend))])
    }

    /// The graph.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<MemoryPlan> {
        &self.plan
    }

    /// Where a tensor is; `None` if nobody uses it, or its memory is not the arena's.
    pub fn region(&self, tensor: TensorId) -> Option<Region> {
        self.home(tensor).map(|(_, region)| region)
    }

    /// Where an extra is.
    pub fn extra(&self, extra: usize) -> Option<Region> {
        let bytes = self.plan.extras.get(extra)?.bytes;
        self.at(self.plan.extra_spot(extra), usize::try_from(bytes).ok()?).map(|(_, region)| region)
    }

    fn home(&self, tensor: TensorId) -> Option<(&dyn Backend, Region)> {
        self.at(self.plan.spot(tensor), self.graph.get(tensor)?.bytes())
    }

    fn at(&self, spot: Spot, bytes: usize) -> Option<(&dyn Backend, Region)> {
        let Spot::Arena { backend, chunk, offset } = spot else { return None };
        let backend = usize::from(backend);
        let buffer = self.chunks.get(backend)?.get(chunk as usize)?;
        let region = Region::new(Arc::clone(buffer), usize::try_from(offset).ok()?, bytes).ok()?;
        Some((&**self.backends.get(backend)?, region))
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        for (id, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()).take(self.told) {
            if let Some((backend, region)) = self.home(id) {
                backend.released(tensor, &region);
            }
        }
    }
}
