//! Arenas: the buffers of one backend that memory plans use.

use quadriga_graph::Graph;
use std::sync::{Arc, Weak};

use super::MemoryError;
use super::plan::{MemoryPlan, StorageOwner};
use crate::{Backend, BackendError, Buffer, Region, Usage};

/// New chunks with their indices, not yet part of an arena.
pub(crate) type Grown = Vec<(usize, Arc<dyn Buffer>)>;

/// The buffers (*chunks*) of one backend that hold the tensors of memory plans. All plans of a session share one arena
/// per backend, as large as the largest of them needs. An arena grows on demand and never shrinks by itself.
#[derive(Clone, Debug)]
pub struct Arena {
    backend: Arc<dyn Backend>,
    chunks: Vec<Arc<dyn Buffer>>,
}

impl Arena {
    /// An arena without chunks.
    pub fn new(backend: Arc<dyn Backend>) -> Arena {
        Arena { backend, chunks: Vec::new() }
    }

    /// The backend that owns the memory.
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

    /// Whether its chunks are at least as large as these sizes.
    pub fn fits(&self, sizes: &[u64]) -> bool {
        sizes.len() <= self.chunks.len()
            && self.chunks.iter().zip(sizes).all(|(chunk, size)| chunk.bytes() as u64 >= *size)
    }

    /// Allocates the chunks that are missing or too small, without changing the arena. `purpose` describes a chunk in
    /// the error of a refused allocation.
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

    /// Puts new chunks in place; true if one of them replaces a smaller one.
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

    /// Gives up what is in the chunks, which stay; see [`Buffer::discard`](crate::Buffer::discard).
    pub(crate) fn discard(&self) {
        self.chunks.iter().for_each(|chunk| chunk.discard());
    }

    /// Drops all chunks. Their memory is freed when nothing else refers to it.
    pub fn release(&mut self) {
        self.chunks.clear();
    }

    /// Whether a plan that needs these bytes can have them once the arena is released, as far as the backend knows.
    pub(crate) fn may_hold(&self, bytes: u64) -> bool {
        let free = self.backend.device().free_bytes;
        free.is_none_or(|free| bytes <= free.saturating_add(self.bytes()))
    }

    /// Allocates chunks of the sizes of released ones; those that something else still refers to are used again.
    pub(crate) fn restore(&mut self, released: &[(Weak<dyn Buffer>, usize)]) -> Result<(), BackendError> {
        self.chunks.clear();
        for (chunk, bytes) in released {
            let chunk = match chunk.upgrade() {
                Some(chunk) => chunk,
                None => self.backend.allocate(*bytes, Usage::Compute)?,
            };
            self.chunks.push(chunk);
        }
        Ok(())
    }

    /// `bytes` bytes from `offset` on in a chunk.
    pub(crate) fn region(&self, chunk: u32, offset: u64, bytes: usize) -> Option<Region> {
        let buffer = self.chunks.get(chunk as usize)?;
        Region::new(Arc::clone(buffer), usize::try_from(offset).ok()?, bytes).ok()
    }
}

/// A description of a plan's chunk for error messages: its index and its largest storage.
pub(crate) fn purpose(graph: &Graph, plan: &MemoryPlan, backend: usize, chunk: usize) -> String {
    match plan.largest_in(backend, chunk) {
        Some(StorageOwner::Tensor(tensor)) => format!("chunk {chunk} with {}", graph.name(tensor)),
        Some(StorageOwner::Extra(extra)) => format!("chunk {chunk} with extra {extra}"),
        None => format!("chunk {chunk}"),
    }
}
