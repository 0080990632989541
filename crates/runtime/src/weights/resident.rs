//! A weight in the memory of one backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quadriga_graph::{Data, Op, Tensor, TensorId};
use rustc_hash::FxHashMap;

use crate::memory::PlacedTensor;
use crate::{Backend, BackendError, TensorPlace};

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

    /// Whether its bytes are there.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Whether its bytes are read in the file map.
    pub(super) fn is_mapped(&self) -> bool {
        self.registration.is_none()
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
