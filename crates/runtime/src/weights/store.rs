//! The weights that sessions share, each identified by its data.
//!
//! A weight is the same as another if both have the same name, type, shape and backend, and the same bytes: bytes of
//! one owner at one address, or, where the owners differ, equal bytes. Two models may name their tensors alike.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use quadriga_graph::{Data, Tensor};

use super::resident::ResidentWeight;
use crate::{Backend, BackendError};

/// The weights of all sessions of a scheduler and its clones. It owns none of them: each is freed with the last plan
/// of a session that uses it.
#[derive(Default)]
pub(crate) struct WeightStore {
    weights: Mutex<WeightIndex>,
    /// Held while bytes of a weight are written.
    writing: Mutex<()>,
}

/// Weights by name and backend; of one name there are as many as there are different data, and more where sessions have
/// their own.
#[derive(Default)]
pub(super) struct WeightIndex {
    all: HashMap<(String, usize), Vec<Weak<ResidentWeight>>>,
}

impl WeightStore {
    pub(super) fn lock(&self) -> MutexGuard<'_, WeightIndex> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the bytes of a weight, unless another session has done it.
    pub(super) fn write_once(
        &self,
        weight: &ResidentWeight,
        backend: &dyn Backend,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if weight.is_ready() { Ok(()) } else { weight.write(backend, bytes) }
    }
}

impl WeightIndex {
    /// The resident weights with this data.
    pub(super) fn find<'i>(
        &'i self,
        key: &(String, usize),
        tensor: &'i Tensor,
        data: &'i Data,
    ) -> impl Iterator<Item = Arc<ResidentWeight>> + use<'i> {
        let all = self.all.get(key).into_iter().flatten().filter_map(Weak::upgrade);
        all.filter(|weight| is(weight, tensor, data))
    }

    /// Adds a weight, unless it is there.
    pub(super) fn insert(&mut self, key: &(String, usize), weight: &Arc<ResidentWeight>) {
        let same = self.all.entry(key.clone()).or_default();
        same.retain(|other| other.strong_count() > 0);
        if !same.iter().any(|other| other.as_ptr() == Arc::as_ptr(weight)) {
            same.push(Arc::downgrade(weight));
        }
    }

    /// Forgets weights that no plan uses any more.
    pub(super) fn prune(&mut self) {
        self.all.retain(|_, weights| {
            weights.retain(|weight| weight.strong_count() > 0);
            !weights.is_empty()
        });
    }
}

/// Whether a resident weight is this one. To share mapped bytes saves nothing, so those are not compared one by one.
fn is(weight: &ResidentWeight, tensor: &Tensor, data: &Data) -> bool {
    let Some(own) = weight.data.as_ref().filter(|_| weight.has_shape_of(tensor)) else { return false };
    if weight.is_mapped() { own.same(data) } else { same_bytes(own, data) }
}

/// Whether two handles stand for the same bytes. Those of one owner are compared by address.
pub(crate) fn same_bytes(a: &Data, b: &Data) -> bool {
    a.same(b) || a.bytes() == b.bytes()
}
