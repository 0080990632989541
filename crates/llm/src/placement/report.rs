//! The residence of a planned model by class of tensors.

use std::collections::BTreeSet;

use quadriga_graph::layer_of;
use quadriga_runtime::{Explanation, StorageUse};
use serde::Serialize;

use super::TensorClass;

/// The weights or states of one class on one backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ClassResidence {
    /// The class.
    pub class: TensorClass,
    /// The backend's number.
    pub backend: usize,
    /// Bytes, in the layout of the backend; also those in the file map.
    pub bytes: u64,
    /// The layers that they belong to.
    pub layers: Vec<usize>,
}

/// The residence of all weights and states of a plan, by class and backend; without classes that the model lacks.
pub fn residence(plan: &Explanation) -> Vec<ClassResidence> {
    let mut found = Vec::new();
    for class in TensorClass::ALL {
        for backend in 0..plan.backends.len() {
            let mut layers = BTreeSet::new();
            let mut bytes = 0u64;
            for storage in plan.storages.iter().filter(|storage| storage.backend == backend) {
                let own = match storage.usage {
                    StorageUse::Weight => TensorClass::of_weight(&storage.name),
                    StorageUse::State => TensorClass::KvCache,
                    _ => continue,
                };
                if own == class {
                    bytes = bytes.saturating_add(storage.bytes);
                    layers.extend(layer_of(&storage.name));
                }
            }
            if bytes > 0 {
                found.push(ClassResidence { class, backend, bytes, layers: layers.into_iter().collect() });
            }
        }
    }
    found
}
