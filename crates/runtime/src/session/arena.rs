//! Arenas: the memory that all plans of a session share, one for each backend.

use std::sync::Arc;

use crate::schedule::{Plan, Slot};
use crate::{Backend, Buffer, Region, RuntimeError, Usage};

/// The arenas of all backends.
#[derive(Default)]
pub(crate) struct Arenas {
    /// For each backend its chunks.
    chunks: Vec<Vec<Arc<dyn Buffer>>>,
    /// Grows whenever a chunk is replaced: what was compiled before points to memory that is no longer shared.
    pub(crate) generation: u64,
}

impl Arenas {
    pub(crate) fn new(backends: usize) -> Arenas {
        Arenas { chunks: vec![Vec::new(); backends], generation: 0 }
    }

    /// Whether a plan fits as things are.
    pub(crate) fn fits(&self, plan: &Plan) -> bool {
        plan.memory().backends.iter().zip(&self.chunks).all(|(needs, have)| {
            needs.chunks.len() <= have.len()
                && needs.chunks.iter().zip(have).all(|(need, have)| *need <= have.bytes() as u64)
        })
    }

    /// Makes room for a plan. Chunks that are too small are replaced by larger ones; after an error they are as they
    /// were.
    pub(crate) fn grow(&mut self, plan: &Plan) -> Result<(), RuntimeError> {
        let mut fresh: Vec<(usize, usize, Arc<dyn Buffer>)> = Vec::new();
        for (number, (needs, backend)) in plan.memory().backends.iter().zip(plan.backends()).enumerate() {
            for (index, need) in needs.chunks.iter().enumerate() {
                let have = self.chunks.get(number).and_then(|chunks| chunks.get(index));
                if have.is_some_and(|have| *need <= have.bytes() as u64) {
                    continue;
                }
                fresh.push((number, index, allocate(&**backend, *need)?));
            }
        }
        for (number, index, buffer) in fresh {
            if let Some(chunks) = self.chunks.get_mut(number) {
                match chunks.get_mut(index) {
                    Some(old) => {
                        *old = buffer;
                        self.generation += 1;
                    }
                    None => chunks.push(buffer),
                }
            }
        }
        Ok(())
    }

    /// Gives all memory back. Whoever still points into it must be gone.
    pub(crate) fn release(&mut self) {
        self.chunks.iter_mut().for_each(Vec::clear);
        self.generation += 1;
    }

    /// The bytes of a tensor at a place.
    pub(crate) fn region(&self, slot: Slot, bytes: usize) -> Option<Region> {
        let buffer = self.chunks.get(usize::from(slot.backend))?.get(slot.chunk as usize)?;
        Region::new(Arc::clone(buffer), usize::try_from(slot.offset).ok()?, bytes).ok()
    }

    /// The buffers of a backend.
    pub(crate) fn buffers(&self, backend: usize) -> &[Arc<dyn Buffer>] {
        self.chunks.get(backend).map_or(&[], Vec::as_slice)
    }
}

fn allocate(backend: &dyn Backend, bytes: u64) -> Result<Arc<dyn Buffer>, RuntimeError> {
    let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
    let buffer = backend.allocate(wanted, Usage::Compute);
    buffer.map_err(|error| RuntimeError::device(error).at(|| "the arena".to_owned()))
}
