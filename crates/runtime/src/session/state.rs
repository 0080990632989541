//! State: tensors that outlive a run, one of each name in a session.

use std::sync::Arc;

use quadriga_graph::{DType, Kind, Shape};
use rustc_hash::FxHashMap;

use crate::schedule::Plan;
use crate::{Backend, Region, RuntimeError, Usage};

/// A state with its memory.
pub(crate) struct State {
    pub(crate) backend: usize,
    pub(crate) region: Region,
    dtype: DType,
    shape: Shape,
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
        for id in graph.of_kind(Kind::State) {
            let Some((tensor, home)) = graph.get(id).zip(plan.home(id)) else { continue };
            let Some(backend) = plan.backends().get(home) else { continue };
            let name = graph.name(id);
            if let Some(old) = self.all.get(&name) {
                old.check(&name, tensor.dtype(), tensor.shape(), home, plan.backends())?;
                continue;
            }
            let failed = |error| RuntimeError::device(error).at(|| name.clone());
            let bytes = backend.storage_bytes(tensor);
            let buffer = backend.allocate(bytes.max(1), Usage::State).map_err(failed)?;
            let region = Region::new(buffer, 0, tensor.bytes()).map_err(failed)?;
            backend.placed(tensor, &region).map_err(failed)?;
            region.buffer.clear(0, region.bytes).map_err(failed)?;
            let state = State { backend: home, region, dtype: tensor.dtype(), shape: *tensor.shape() };
            self.all.insert(name, state);
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
            let cleared = state.region.buffer.clear(state.region.offset, state.region.bytes);
            cleared.map_err(|error| RuntimeError::device(error).at(|| name.clone()))?;
        }
        Ok(())
    }

    /// Bytes of all states on a backend.
    pub(crate) fn bytes(&self, backend: usize) -> u64 {
        let here = self.all.values().filter(|state| state.backend == backend);
        here.map(|state| state.region.buffer.bytes() as u64).sum()
    }
}

impl State {
    fn check(
        &self,
        name: &str,
        dtype: DType,
        shape: &Shape,
        home: usize,
        backends: &[Arc<dyn Backend>],
    ) -> Result<(), RuntimeError> {
        let describe = |dtype: DType, shape: &Shape, home: usize| {
            format!("{dtype} {shape} on {}", backends.get(home).map_or("", |b| b.name()))
        };
        if self.dtype == dtype && self.shape.dims4() == shape.dims4() && self.backend == home {
            return Ok(());
        }
        Err(RuntimeError::Conflict {
            what: "state",
            name: name.to_owned(),
            before: describe(self.dtype, &self.shape, self.backend),
            after: describe(dtype, shape, home),
        })
    }
}
