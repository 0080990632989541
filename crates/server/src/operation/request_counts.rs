//! The requests of a server, by their status.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::exposition::Exposition;

/// The requests of a server.
#[derive(Debug, Default)]
pub struct RequestCounts {
    active: AtomicUsize,
    connections: AtomicUsize,
    /// Answers by status.
    answered: Mutex<BTreeMap<u16, u64>>,
}

impl RequestCounts {
    /// Requests whose answers are not complete.
    pub fn active(&self) -> usize {
        self.active.load(Ordering::Acquire)
    }

    /// Open connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }

    pub(crate) fn connect(&self) {
        self.connections.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn disconnect(&self) {
        self.connections.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn begin(&self) {
        self.active.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end(&self, status: Option<u16>) {
        self.active.fetch_sub(1, Ordering::AcqRel);
        if let Some(status) = status {
            let mut answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
            *answered.entry(status).or_default() += 1;
        }
    }

    /// Writes them in the text format of Prometheus.
    pub(crate) fn write(&self, out: &mut Exposition) {
        let answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        for (status, count) in answered.iter() {
            let labels = format!("status=\"{status}\"");
            out.sample("quadriga:http_requests_total", "counter", "Answers by HTTP status", &labels, count);
        }
        let help = "Requests whose answers are not complete";
        out.sample("quadriga:http_requests_active", "gauge", help, "", self.active());
        out.sample("quadriga:http_connections_open", "gauge", "Open connections", "", self.connections());
    }
}
