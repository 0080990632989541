//! Real memory: the chunks of one backend, and a plan bound to them.

use quadriga_graph::{Graph, TensorId};
use std::sync::Arc;

use super::plan::{MemoryPlan, Spot, Tenant};
use super::tenancy::Tenancy;
use super::{Memory, MemoryError, Planner, Request};
use crate::{Backend, Buffer, Region, Usage};

/// New chunks with their numbers, not yet in place.
pub(crate) type Grown = Vec<(usize, Arc<dyn Buffer>)>;

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
    pub(crate) fn prepare(
        &self,
        sizes: &[u64],
        purpose: &dyn Fn(usize) -> String,
    ) -> Result<Grown, MemoryError> {
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

    /// Puts new chunks in place; true if one of them replaces an old one.
    pub(crate) fn commit(&mut self, grown: Grown) -> bool {
        let mut replaced = false;
        for (chunk, buffer) in grown {
            match self.chunks.get_mut(chunk) {
                Some(old) => {
                    *old = buffer;
                    replaced = true;
                }
                None => self.chunks.push(buffer),
            }
        }
        replaced
    }

    /// Gives all memory back, as far as nobody else holds it.
    pub fn release(&mut self) {
        self.chunks.clear();
    }

    /// The bytes from `offset` on of a chunk.
    pub(crate) fn region(&self, chunk: u32, offset: u64, bytes: usize) -> Option<Region> {
        let buffer = self.chunks.get(chunk as usize)?;
        Region::new(Arc::clone(buffer), usize::try_from(offset).ok()?, bytes).ok()
    }
}

/// What a chunk of a plan is for: the largest that lies in it.
pub(crate) fn purpose(graph: &Graph, plan: &MemoryPlan, backend: usize, chunk: usize) -> String {
    match plan.largest_in(backend, chunk) {
        Some(Tenant::Tensor(tensor)) => format!("chunk {chunk} with {}", graph.name(tensor)),
        Some(Tenant::Extra(extra)) => format!("chunk {chunk} with extra {extra}"),
        None => format!("chunk {chunk}"),
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
    /// As they were when the plan was bound.
    arenas: Vec<Arena>,
    tenants: Vec<Tenancy>,
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
            grown.push(arena.prepare(&backend.chunks, &|chunk| purpose(graph, plan, number, chunk))?);
        }
        for (arena, grown) in arenas.iter_mut().zip(grown) {
            arena.commit(grown);
        }
        let mut binding = Binding {
            graph: Arc::clone(graph),
            plan: Arc::clone(plan),
            arenas: arenas.to_vec(),
            tenants: Vec::new(),
        };
        for (id, tensor) in graph.tensor_ids().zip(graph.tensors()) {
            if let Some((backend, region)) = binding.at(plan.spot(id), tensor.bytes()) {
                let tenancy = Tenancy::new(backend, tensor, region)?;
                binding.tenants.push(tenancy);
            }
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
        let bytes = self.graph.get(tensor)?.bytes();
        self.at(self.plan.spot(tensor), bytes).map(|(_, region)| region)
    }

    /// Where an extra is.
    pub fn extra(&self, extra: usize) -> Option<Region> {
        let bytes = usize::try_from(self.plan.extras.get(extra)?.bytes).ok()?;
        self.at(self.plan.extra_spot(extra), bytes).map(|(_, region)| region)
    }

    fn at(&self, spot: Spot, bytes: usize) -> Option<(&Arc<dyn Backend>, Region)> {
        let Spot::Arena { backend, chunk, offset } = spot else { return None };
        let arena = self.arenas.get(usize::from(backend))?;
        Some((&arena.backend, arena.region(chunk, offset, bytes)?))
    }
}
