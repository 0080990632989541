//! State: tensors that outlive a run, one of each name in a session.

use std::sync::Arc;

use quadriga_graph::{Tensor, TensorKind};
use rustc_hash::FxHashMap;

use crate::memory::PlacedTensor;
use crate::schedule::Plan;
use crate::{Backend, Region, RuntimeError, Usage};

/// A state with its memory.
pub(crate) struct State {
    pub(crate) backend: usize,
    placed: PlacedTensor,
}

/// All states of a session, by name.
#[derive(Default)]
pub(crate) struct States {
    all: FxHashMap<String, State>,
}

impl States {
    /// Memory for the states of a plan that the session does not have yet: zeros.
    pub(crate) fn add(&mut self, plan: &Plan) -> Result<(), RuntimeError> {
        let graph = plan.graph();
        for id in graph.of_kind(TensorKind::State) {
            let Some((tensor, home)) = graph.get(id).zip(plan.home(id)) else { continue };
            let Some(backend) = plan.backends().get(home) else { continue };
            let name = graph.name(id);
            if let Some(old) = self.all.get(&name) {
                old.check(&name, tensor, home, plan.backends())?;
                continue;
            }
            let failed = |error| RuntimeError::device(error).at(|| name.clone());
            let bytes = backend.storage_bytes(tensor);
            let buffer = backend.allocate_zeroed(bytes.max(1), Usage::State).map_err(failed)?;
            let region = Region::new(buffer, 0, tensor.bytes()).map_err(failed)?;
            let placed = PlacedTensor::new(backend, tensor, region).map_err(failed)?;
            self.all.insert(name, State { backend: home, placed });
        }
        Ok(())
    }

    /// The state of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&State> {
        self.all.get(name)
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
        let here = self.all.values().filter(|state| state.backend == backend);
        here.map(|state| state.region().buffer.bytes() as u64).sum()
    }
}

impl State {
    /// Where it is.
    pub(crate) fn region(&self) -> &Region {
        self.placed.region()
    }

    fn check(
        &self,
        name: &str,
        tensor: &Tensor,
        home: usize,
        backends: &[Arc<dyn Backend>],
    ) -> Result<(), RuntimeError> {
        let before = self.placed.tensor();
        if before.dtype() == tensor.dtype() && before.dims4() == tensor.dims4() && self.backend == home {
            return Ok(());
        }
        let describe = |tensor: &Tensor, home: usize| {
            let backend = backends.get(home).map_or("", |b| b.name());
            format!("{} {} on {backend}", tensor.dtype(), tensor.shape())
        };
        Err(RuntimeError::Conflict {
            what: "state",
            name: name.to_owned(),
            before: describe(before, self.backend),
            after: describe(tensor, home),
        })
    }
}
