//! The weights that sessions share, each identified by its data.
//!
//! A weight is the same as another if both have the same name, type, shape and backend, and the same bytes: bytes of
//! one owner at one address, or, where the owners differ, equal bytes. Two models may name their tensors alike.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use quadriga_graph::{Data, Tensor};

use super::resident::{KnownUses, ResidentWeight};

/// The weights of all sessions of a scheduler and its clones. It owns none of them: each is freed with the last plan
/// of a session that uses it.
#[derive(Default)]
pub(crate) struct WeightStore {
    weights: Mutex<SharedWeights>,
}

/// Weights by name and backend; of one name there are as many as there are different data.
#[derive(Default)]
pub(super) struct SharedWeights {
    all: HashMap<(String, usize), Vec<SharedWeight>>,
}

struct SharedWeight {
    weight: Weak<ResidentWeight>,
    uses: KnownUses,
}

impl WeightStore {
    pub(super) fn lock(&self) -> MutexGuard<'_, SharedWeights> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedWeights {
    /// The resident weight with this data, and the uses it serves.
    pub(super) fn find(
        &self,
        key: &(String, usize),
        tensor: &Tensor,
        data: &Data,
    ) -> Option<(Arc<ResidentWeight>, KnownUses)> {
        self.all.get(key)?.iter().find_map(|shared| {
            let weight = shared.weight.upgrade().filter(|weight| is(weight, tensor, data))?;
            Some((weight, shared.uses.clone()))
        })
    }

    /// Shares a weight, in place of one with the same data that was there before.
    pub(super) fn insert(&mut self, key: (String, usize), weight: &Arc<ResidentWeight>, uses: KnownUses) {
        let Some(data) = &weight.data else { return };
        let same = self.all.entry(key).or_default();
        same.retain(|shared| {
            let other = shared.weight.upgrade();
            other.is_some_and(|other| !is(&other, &weight.tensor, data))
        });
        same.push(SharedWeight { weight: Arc::downgrade(weight), uses });
    }

    /// Forgets weights that no plan uses any more.
    pub(super) fn prune(&mut self) {
        self.all.retain(|_, weights| {
            weights.retain(|shared| shared.weight.strong_count() > 0);
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
