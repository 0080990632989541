//! Arenas: the memory of inputs, results and copies, one arena per backend, shared by all plans of a session.

use std::sync::Arc;

use crate::memory::{Arena, MemoryError, purpose};
use crate::schedule::{Plan, Slot};
use crate::{Backend, Buffer, Region, RuntimeError};

/// The arenas of all backends.
pub(crate) struct Arenas {
    all: Vec<Arena>,
    /// Grows whenever a buffer is replaced: programs compiled before point into a buffer that is no longer the arena's.
    pub(crate) generation: u64,
}

impl Arenas {
    pub(crate) fn new(backends: &[Arc<dyn Backend>]) -> Arenas {
        Arenas {
            all: backends.iter().map(|backend| Arena::new(Arc::clone(backend))).collect(),
            generation: 0,
        }
    }

    /// Whether a plan fits into the arenas as they are.
    pub(crate) fn fits(&self, plan: &Plan) -> bool {
        plan.memory().backends.iter().zip(&self.all).all(|(needs, arena)| arena.fits(&needs.chunks))
    }

    /// Replaces buffers that are too small for a plan by larger ones; after an error the arenas are as they were.
    pub(crate) fn grow(&mut self, plan: &Plan) -> Result<(), RuntimeError> {
        let memory = plan.memory();
        let mut grown = Vec::with_capacity(self.all.len());
        for (number, (arena, needs)) in self.all.iter().zip(&memory.backends).enumerate() {
            let fresh = arena.prepare(&needs.chunks, &|chunk| purpose(plan.graph(), memory, number, chunk));
            grown.push(fresh.map_err(|error| match error {
                MemoryError::Allocation { purpose, source, .. } => {
                    RuntimeError::device(*source).at(|| format!("the arena's {purpose}"))
                }
                error => error.into(),
            })?);
        }
        for (arena, grown) in self.all.iter_mut().zip(grown) {
            self.generation += u64::from(arena.commit(grown));
        }
        Ok(())
    }

    /// Frees all buffers and allocates those of a plan. If that fails, buffers of the old sizes are allocated again. No
    /// compiled program may point into them any more. The caller holds the [allocation lock](crate::allocation_lock), so
    /// that arenas, weights and states of other sessions do not take the memory in between; another process can, and so
    /// can what allocates without the lock (see there).
    pub(crate) fn replace(&mut self, plan: &Plan) -> Result<(), RuntimeError> {
        let sized = |chunk: &Arc<dyn Buffer>| (Arc::downgrade(chunk), chunk.bytes());
        let old: Vec<Vec<_>> =
            self.all.iter().map(|arena| arena.chunks().iter().map(sized).collect()).collect();
        self.release();
        let grown = self.grow(plan);
        if grown.is_err() {
            for (arena, old) in self.all.iter_mut().zip(&old) {
                // What cannot be had now is requested again when a plan needs it.
                let _ = arena.restore(old);
            }
        }
        grown
    }

    /// Whether a plan may fit if all buffers are freed first.
    pub(crate) fn may_hold(&self, plan: &Plan) -> bool {
        self.all.iter().enumerate().all(|(number, arena)| arena.may_hold(plan.memory().arena_bytes(number)))
    }

    /// Frees all buffers. No compiled program may point into them any more.
    pub(crate) fn release(&mut self) {
        self.all.iter_mut().for_each(Arena::release);
        self.generation += 1;
    }

    /// Gives up what is in all buffers, which stay.
    pub(crate) fn discard(&self) {
        self.all.iter().for_each(Arena::discard);
    }

    /// The bytes at an offset.
    pub(crate) fn region(&self, slot: Slot, bytes: usize) -> Option<Region> {
        self.all.get(usize::from(slot.backend))?.region(slot.chunk, slot.offset, bytes)
    }

    /// The buffers of a backend.
    pub(crate) fn buffers(&self, backend: usize) -> &[Arc<dyn Buffer>] {
        self.all.get(backend).map_or(&[], Arena::chunks)
    }
}
