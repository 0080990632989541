//! The memory behind plans: the chunks of one backend.

use quadriga_graph::Graph;
use std::sync::Arc;

use super::MemoryError;
use super::plan::{MemoryPlan, Tenant};
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
