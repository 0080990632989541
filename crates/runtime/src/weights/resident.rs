//! A weight in the memory of one backend.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quadriga_graph::{Data, Op, Tensor, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use crate::memory::PlacedTensor;
use crate::{Backend, BackendError, Queue, Region, TensorPlace};

/// A weight in the memory of one backend. Plans share it; the memory is freed with the last one that uses it.
pub(crate) struct ResidentWeight {
    pub(super) tensor: Tensor,
    pub(super) place: TensorPlace,
    /// The bytes that were loaded; `None` for a weight that is set by the caller. Kept, so that no other bytes can have
    /// their address while this weight is identified by it.
    pub(super) data: Option<Data>,
    /// Whether its bytes are there.
    pub(super) ready: AtomicBool,
    /// `None` where the bytes are read in the file map.
    pub(super) registration: Option<PlacedTensor>,
    /// The weights that share its buffer; `None` where the bytes are read in the file map.
    pub(super) group: Option<Arc<WeightGroup>>,
    /// The uses that its layout was chosen for.
    pub(super) uses: Mutex<KnownUses>,
}

/// Weights that were loaded into one buffer, which is freed with the last of them. Sessions share whole groups only: if
/// one used a few weights of another's group, it would keep the memory of all when the other is dropped.
#[derive(Default)]
pub(super) struct WeightGroup {
    /// How many of its weights are in use.
    members: AtomicUsize,
}

impl WeightGroup {
    /// How many of its weights are in use.
    pub(super) fn members(&self) -> usize {
        self.members.load(Ordering::Acquire)
    }

    /// Adds a weight.
    pub(super) fn add(self: &Arc<WeightGroup>) -> Arc<WeightGroup> {
        self.members.fetch_add(1, Ordering::AcqRel);
        Arc::clone(self)
    }
}

impl Drop for ResidentWeight {
    fn drop(&mut self) {
        if let Some(group) = &self.group {
            group.members.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The weights and constants of a plan, by tensor and backend.
pub(crate) type PlanWeights = FxHashMap<(u32, u16), Arc<ResidentWeight>>;

/// The uses that the layout of a resident weight was chosen for.
#[derive(Clone, Default)]
pub(super) struct KnownUses {
    pub(super) operations: Vec<(Op, usize)>,
    pub(super) viewed: bool,
}

impl ResidentWeight {
    /// Where it is, and in which layout.
    pub(crate) fn place(&self) -> &TensorPlace {
        &self.place
    }

    /// The kind of its tensor: a weight, or a constant.
    pub(crate) fn kind(&self) -> TensorKind {
        self.tensor.kind()
    }

    /// Bytes that were allocated for it: none where they are read in the file map.
    pub(crate) fn loaded_bytes(&self) -> usize {
        if self.is_mapped() { 0 } else { self.place.region.bytes }
    }

    /// Whether its bytes are there.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Whether its bytes are read in the file map.
    pub(super) fn is_mapped(&self) -> bool {
        self.registration.is_none()
    }

    /// The uses that its layout was chosen for.
    pub(super) fn uses(&self) -> MutexGuard<'_, KnownUses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has the type and the shape of a tensor.
    pub(super) fn has_shape_of(&self, tensor: &Tensor) -> bool {
        self.tensor.dtype() == tensor.dtype() && self.tensor.dims4() == tensor.dims4()
    }

    /// Replaces its bytes, which are given as a file would have them.
    pub(super) fn write(&self, backend: &dyn Backend, bytes: &[u8]) -> Result<(), BackendError> {
        let TensorPlace { region, layout } = &self.place;
        backend.load_weight(&self.tensor, *layout, bytes, region)?;
        self.ready.store(true, Ordering::Release);
        Ok(())
    }

    /// The number of its slices along the first dimension, and the bytes of each as a file has them.
    pub(crate) fn slices(&self) -> (usize, usize) {
        let count = self.tensor.shape().dims().first().copied().unwrap_or(0);
        (count, self.tensor.bytes() / count.max(1))
    }

    /// Lets a queue of its backend replace a slice with bytes that a file would have, from a region of the backend.
    pub(crate) fn write_slice(
        &self,
        queue: &mut dyn Queue,
        index: usize,
        from: &Region,
    ) -> Result<(), BackendError> {
        let TensorPlace { region, layout } = &self.place;
        queue.load_slice(&self.tensor, *layout, index, from, region)?;
        self.ready.store(true, Ordering::Release);
        Ok(())
    }
}

impl KnownUses {
    /// Whether a layout for these uses serves those, too.
    pub(super) fn cover(&self, operations: &[(&Op, usize)], viewed: bool) -> bool {
        (self.viewed || !viewed) && operations.iter().all(|(op, at)| self.has(op, *at))
    }

    /// These uses and those.
    pub(super) fn with(mut self, operations: &[(&Op, usize)], viewed: bool) -> KnownUses {
        for (op, at) in operations {
            if !self.has(op, *at) {
                self.operations.push(((*op).clone(), *at));
            }
        }
        self.viewed |= viewed;
        self
    }

    fn has(&self, op: &Op, at: usize) -> bool {
        self.operations.iter().any(|(known, input)| known == op && *input == at)
    }
}

/// A weight of a plan whose bytes have not been set.
pub(crate) fn unset(weights: &PlanWeights) -> Option<TensorId> {
    let unset = weights.iter().find(|(_, weight)| !weight.is_ready());
    unset.map(|((tensor, _), _)| TensorId::from_index(*tensor as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_covers_the_uses_that_it_was_chosen_for() {
        let matmul: [(&Op, usize); 1] = [(&Op::MulMat, 0)];
        let known = KnownUses::default().with(&matmul, false);
        assert!(known.cover(&matmul, false) && known.cover(&[], false));
        assert!(!known.cover(&matmul, true), "not through views");
        assert!(!known.cover(&[(&Op::MulMat, 1)], false), "not as another input");
        assert!(!known.cover(&[(&Op::MulMat, 0), (&Op::GetRows, 0)], false));
        let more = known.with(&[(&Op::MulMat, 0), (&Op::GetRows, 0)], true);
        assert_eq!(more.operations.len(), 2, "a use is noted once");
        assert!(more.cover(&matmul, true) && more.cover(&[(&Op::GetRows, 0)], false));
        assert!(more.clone().with(&[], false).cover(&matmul, true), "what was viewed stays so");
    }
}
