//! The memory of a session: weights, states and arenas.

use std::sync::Arc;

use super::arena::Arenas;
use super::binding_table::Bindings;
use super::places::SplitPlaces;
use super::state::States;
use crate::Buffer;
use crate::schedule::{Plan, Scheduler};
use crate::weights::{PlanWeights, SessionWeights};

/// The memory of a session, for tools that look inside.
pub struct SessionMemory {
    pub(super) weights: SessionWeights,
    pub(super) states: States,
    pub(super) arenas: Arenas,
    pub(super) bindings: Bindings,
}

impl SessionMemory {
    pub(super) fn new(scheduler: &Scheduler) -> SessionMemory {
        SessionMemory {
            weights: SessionWeights::new(scheduler.weight_store()),
            states: States::default(),
            arenas: Arenas::new(scheduler.backends()),
            bindings: Bindings::default(),
        }
    }

    /// Where the tensors of a plan are.
    pub(super) fn places<'m>(&'m self, plan: &'m Plan, weights: &'m PlanWeights) -> SplitPlaces<'m> {
        SplitPlaces { plan, arenas: &self.arenas, states: &self.states, weights }
    }

    /// The buffers of a backend's arena.
    pub fn arena(&self, backend: usize) -> &[Arc<dyn Buffer>] {
        self.arenas.buffers(backend)
    }

    /// Bytes of state and arena on a backend; weights, which sessions share, are not counted.
    pub fn bytes(&self, backend: usize) -> u64 {
        let arena: u64 = self.arena(backend).iter().map(|buffer| buffer.bytes() as u64).sum();
        arena + self.states.bytes(backend)
    }
}
