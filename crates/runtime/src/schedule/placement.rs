//! Placements: the backend that each storage is assigned to, and why.

use quadriga_graph::TensorId;
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

/// In arrays of backend numbers: none.
pub(crate) const NO_BACKEND: u16 = u16::MAX;

/// Why a storage, and with it every node that writes it, is assigned to its backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Reason {
    /// The caller pinned it, or placed it by name.
    Pinned,
    /// A leaf that it is computed from is placed there; of several backends the one with the most bytes.
    HoldsSource {
        /// The largest such leaf (index of the tensor).
        tensor: usize,
    },
    /// A result that it is computed from is there; of several backends the one with the most bytes.
    FollowsSource {
        /// The largest such result (index of the tensor).
        tensor: usize,
    },
    /// A host-resident weight or state that it is computed from is streamed there: the work outweighs the copy.
    Streams {
        /// The first such weight or state (index of the tensor).
        tensor: usize,
    },
    /// Its first reader runs there.
    FollowsConsumer {
        /// The reading node.
        node: usize,
    },
    /// All its readers run there, and copying its inputs takes fewer bytes than copying it.
    SavesCopy {
        /// The first reader.
        node: usize,
    },
    /// Nothing speaks for a backend: the most preferred one that computes it.
    Preferred,
    /// A leaf that was not placed: it is on every backend that reads it.
    WhereRead,
}

/// The placements of all storages.
#[derive(Default)]
pub(crate) struct Placements {
    /// For each tensor that owns its storage the backend; [`NO_BACKEND`] for leaves that are on every backend that
    /// reads them.
    pub(crate) backend: Vec<u16>,
    /// Why.
    pub(crate) reason: Vec<Reason>,
    /// A better backend that refused to compute it.
    pub(crate) refused: FxHashMap<TensorId, u16>,
    /// Weights that are copied from their backend to readers on others in every run.
    pub(crate) streamed: FxHashSet<TensorId>,
    /// The device that weights are streamed to.
    pub(crate) streaming_device: u16,
    /// Host-resident states that the device reads: writes to them are mirrored on its copy.
    pub(crate) mirrored_states: FxHashSet<TensorId>,
}
