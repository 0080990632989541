//! State: tensors that outlive a run, one of each name in a session.

use std::sync::Arc;

use quadriga_graph::{Tensor, TensorKind};
use rustc_hash::FxHashMap;

use crate::allocation_lock::lock_allocation;
use crate::memory::PlacedTensor;
use crate::schedule::Plan;
use crate::{Backend, Region, RuntimeError, Usage};

/// A state with its memory.
pub(crate) struct SessionState {
    pub(crate) backend: usize,
    registration: PlacedTensor,
    /// Whether it is in memory of the caller.
    bound: bool,
}

/// All states of a session, by name.
#[derive(Default)]
pub(crate) struct States {
    all: FxHashMap<String, SessionState>,
}

impl States {
    /// An error if a state of a plan is not what the session has under its name.
    pub(crate) fn check(&self, plan: &Plan) -> Result<(), RuntimeError> {
        let graph = plan.graph();
        for id in graph.of_kind(TensorKind::State) {
            let Some((tensor, number)) = graph.get(id).zip(plan.placement(id)) else { continue };
            let name = graph.name(id);
            if let Some(old) = self.all.get(&name) {
                old.check(&name, tensor, number, plan.backends())?;
            }
        }
        Ok(())
    }

    /// Allocates the states of a plan that the session does not have yet, filled with zeros: all or none. Their names.
    pub(crate) fn add(&mut self, plan: &Plan) -> Result<Vec<String>, RuntimeError> {
        let graph = plan.graph();
        let _alone = lock_allocation();
        let mut added = Vec::new();
        for id in graph.of_kind(TensorKind::State) {
            let Some((tensor, number)) = graph.get(id).zip(plan.placement(id)) else { continue };
            let Some(backend) = plan.backends().get(number) else { continue };
            let name = graph.name(id);
            if self.all.contains_key(&name) {
                continue;
            }
            let failed = |error| RuntimeError::device(error).at(|| name.clone());
            let bound = plan.space().bound.get(&id);
            let region = match bound {
                Some(bound) => bound.region.part(0, tensor.bytes()),
                None => {
                    let bytes = backend.storage_bytes(tensor);
                    let buffer = backend.allocate_zeroed(bytes.max(1), Usage::State).map_err(failed)?;
                    Region::new(buffer, 0, tensor.bytes())
                }
            };
            let registration = PlacedTensor::new(backend, tensor, region.map_err(failed)?).map_err(failed)?;
            let state = SessionState { backend: number, registration, bound: bound.is_some() };
            added.push((name, state));
        }
        let names = added.iter().map(|(name, _)| name.clone()).collect();
        self.all.extend(added);
        Ok(names)
    }

    /// Frees states.
    pub(crate) fn remove(&mut self, names: &[String]) {
        for name in names {
            self.all.remove(name);
        }
    }

    /// The state of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&SessionState> {
        self.all.get(name)
    }

    /// All states with their names, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &SessionState)> {
        self.all.iter().map(|(name, state)| (name.as_str(), state))
    }

    /// Sets all states to zero.
    pub(crate) fn clear(&self) -> Result<(), RuntimeError> {
        for (name, state) in &self.all {
            let Region { buffer, offset, bytes } = state.region();
            let cleared = buffer.clear(*offset, *bytes);
            cleared.map_err(|error| RuntimeError::device(error).at(|| name.clone()))?;
        }
        Ok(())
    }

    /// Bytes of all states on a backend.
    pub(crate) fn bytes(&self, backend: usize) -> u64 {
        let here = self.all.values().filter(|state| state.backend == backend && !state.bound);
        here.map(|state| state.region().buffer.bytes() as u64).sum()
    }
}

impl SessionState {
    /// Its type and shape.
    pub(crate) fn tensor(&self) -> &Tensor {
        self.registration.tensor()
    }

    /// Where it is.
    pub(crate) fn region(&self) -> &Region {
        self.registration.region()
    }

    fn check(
        &self,
        name: &str,
        tensor: &Tensor,
        backend: usize,
        backends: &[Arc<dyn Backend>],
    ) -> Result<(), RuntimeError> {
        let before = self.registration.tensor();
        if before.dtype() == tensor.dtype() && before.dims4() == tensor.dims4() && self.backend == backend {
            return Ok(());
        }
        let describe = |tensor: &Tensor, number: usize| {
            let backend = backends.get(number).map_or("", |b| b.name());
            format!("{} {} on {backend}", tensor.dtype(), tensor.shape())
        };
        Err(RuntimeError::Conflict {
            what: "state",
            name: name.to_owned(),
            before: describe(before, self.backend),
            after: describe(tensor, backend),
        })
    }
}
