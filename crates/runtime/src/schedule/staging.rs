//! Staging memory: how much of it copies and reads will take.

use quadriga_graph::{TensorId, TensorKind};

use super::plan::Plan;
use super::splits::Copy;

/// How many reads may be pending: one that is waited for, and one of the next run.
pub(crate) const MAX_PENDING_READS: usize = 2;

impl Plan {
    /// For each backend the bytes of staging memory that its copies take.
    pub(super) fn staging_bytes(&self) -> Vec<u64> {
        let mut all = vec![0u64; self.backends().len()];
        for copy in &self.splits().copies {
            if let Some(bytes) = self.stages_copy(copy).and_then(|backend| all.get_mut(backend)) {
                *bytes = bytes.saturating_add(copy.bytes as u64);
            }
        }
        all
    }

    /// The backend that allocates staging memory for a copy, if it needs some.
    fn stages_copy(&self, copy: &Copy) -> Option<usize> {
        let (from, to) = (self.backends().get(copy.from)?, self.backends().get(copy.to)?);
        let tensor = TensorId::from_index(copy.tensor);
        let is_weight = self.graph().get(tensor).is_some_and(|t| t.kind() == TensorKind::Weight);
        let data = self.graph().data(tensor).filter(|_| is_weight);
        // The owner is asked first: for a device, to map is to lock pages.
        if data.is_some_and(|data| from.map(data).is_none() && to.map(data).is_none()) {
            return Some(copy.to);
        }
        (!to.reaches(&**from) && !from.reaches(&**to)).then_some(copy.from)
    }

    /// For each backend the bytes of staging memory that pending reads of these outputs take
    /// ([`Session::read_async`](crate::Session::read_async)), if two are pending at times. A session keeps the memory for
    /// later reads. Outputs that the graph does not have take none.
    pub fn pending_read_bytes(&self, outputs: &[&str]) -> Vec<u64> {
        let mut all = vec![0u64; self.backends().len()];
        for id in outputs.iter().filter_map(|name| self.graph().output(name)) {
            let Some(tensor) = self.graph().get(id) else { continue };
            if let Some(bytes) = self.output_backend(id).and_then(|backend| all.get_mut(backend)) {
                *bytes = bytes.saturating_add((MAX_PENDING_READS * tensor.bytes()) as u64);
            }
        }
        all
    }

    /// The backend on which an output is read.
    pub(crate) fn output_backend(&self, output: TensorId) -> Option<usize> {
        let storage = self.graph().get(output)?.storage();
        match self.graph().get(storage)?.kind() {
            TensorKind::Weight | TensorKind::Constant | TensorKind::Input => {
                let leaf = self.splits().leaves.iter().find(|leaf| leaf.tensor == storage.index());
                leaf.map(|leaf| leaf.backend)
            }
            TensorKind::State | TensorKind::Computed(_) => self.placement(storage),
        }
    }
}
