//! The state of a device that its buffers, queues, events and programs share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use quadriga_graph::{Fingerprint, Graph};
use quadriga_runtime::BackendError;

use crate::faults::{DeviceFaults, unordered};
use crate::order::Unordered;
use crate::settings::SimSettings;

/// Settings, faults, counters and clock of a device.
pub(crate) struct DeviceInner {
    pub(crate) settings: SimSettings,
    pub(crate) faults: DeviceFaults,
    /// Allocated bytes.
    pub(crate) used: AtomicU64,
    /// Tensors that were placed and not yet released.
    pub(crate) tensors: AtomicU64,
    /// The latest time that any queue has reached, as the bits of an `f64` that is never negative.
    latest: AtomicU64,
    /// The latest time that the host has waited for, in the same form.
    host: AtomicU64,
    /// The next address that no buffer has had.
    next_address: AtomicU64,
    /// When the device was created.
    pub(crate) created: Instant,
    /// The graphs of living programs, each kept once.
    graphs: Mutex<HashMap<Fingerprint, Weak<Graph>>>,
}

impl DeviceInner {
    pub(crate) fn new(settings: SimSettings) -> DeviceInner {
        DeviceInner {
            settings,
            faults: DeviceFaults::default(),
            used: AtomicU64::new(0),
            tensors: AtomicU64::new(0),
            latest: AtomicU64::new(0),
            host: AtomicU64::new(0),
            next_address: AtomicU64::new(1 << 32),
            created: Instant::now(),
            graphs: Mutex::default(),
        }
    }

    /// Bytes that can still be allocated.
    pub(crate) fn free(&self) -> u64 {
        self.settings.capacity.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Refuses an access that is not ordered after those it conflicts with, and every operation after it.
    pub(crate) fn refuse(&self, access: &Unordered) -> BackendError {
        let reason = access.to_string();
        self.faults.note_unordered(reason.clone());
        unordered(&self.settings.name, reason)
    }

    /// The address of a new buffer: no two buffers overlap, also not with those that are gone.
    pub(crate) fn new_address(&self, bytes: usize) -> u64 {
        let alignment = self.settings.alignment.max(1) as u64;
        self.next_address
            .fetch_add((bytes as u64 + 1).next_multiple_of(alignment), Ordering::Relaxed)
            .next_multiple_of(alignment)
    }

    /// Advances the device's clock to the time that a queue has reached.
    pub(crate) fn advance_clock(&self, seconds: f64) {
        // The bits of positive floats are ordered like the floats.
        self.latest.fetch_max(seconds.max(0.0).to_bits(), Ordering::Relaxed);
    }

    /// The latest time that any queue has reached, in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        f64::from_bits(self.latest.load(Ordering::Relaxed))
    }

    /// The host has waited for what ended at a time.
    pub(crate) fn host_reaches(&self, seconds: f64) {
        self.host.fetch_max(seconds.max(0.0).to_bits(), Ordering::Relaxed);
    }

    /// The latest time that the host has waited for, in seconds.
    pub(crate) fn host_seconds(&self) -> f64 {
        f64::from_bits(self.host.load(Ordering::Relaxed))
    }

    /// An owned copy of a graph, shared by all programs of graphs with this fingerprint.
    pub(crate) fn graph(&self, graph: &Graph) -> Arc<Graph> {
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = graphs.get(&graph.fingerprint()).and_then(Weak::upgrade) {
            return known;
        }
        graphs.retain(|_, graph| graph.strong_count() > 0);
        let owned = Arc::new(graph.clone());
        graphs.insert(graph.fingerprint(), Arc::downgrade(&owned));
        owned
    }
}
