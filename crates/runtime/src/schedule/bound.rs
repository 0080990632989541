//! Storages in memory of the caller.

use std::sync::Arc;

use quadriga_graph::TensorId;
use rustc_hash::FxHashMap;

use crate::{Backend, Region};

/// The place of a storage in memory of the caller.
#[derive(Clone, Debug)]
pub(crate) struct BoundStorage {
    /// The number of its backend.
    pub(crate) number: usize,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) region: Region,
}

/// All storages of a graph that are in memory of the caller.
pub(crate) type BoundStorages = FxHashMap<TensorId, BoundStorage>;
