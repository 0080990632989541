//! What the process takes of the machine, where the system says so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::exposition::Exposition;
use crate::app::App;

/// Bytes of a page of memory in `/proc/self/statm`.
const PAGE_BYTES: u64 = 4096;

/// Bytes of memory that the process has, without what it only mapped.
pub fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * PAGE_BYTES)
}

/// Open files and sockets.
pub fn open_descriptors() -> Option<usize> {
    // The folder itself is open, too.
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1))
}

/// Writes them under the names that client libraries of Prometheus use.
pub(crate) fn write(out: &mut Exposition) {
    if let Some(bytes) = resident_bytes() {
        out.sample("process_resident_memory_bytes", "gauge", "Memory of the process", "", bytes);
    }
    if let Some(count) = open_descriptors() {
        out.sample("process_open_fds", "gauge", "Open files and sockets", "", count);
    }
}

/// Growth of memory from which some of it is worth giving back.
const MUCH: u64 = 4 << 20;

/// The time after which threads that requests needed have ended, and left their memory.
const LAST_THREADS: Duration = Duration::from_secs(15);

/// Gives memory back that was needed for requests, once there are none: an allocator keeps it for the next ones, the most that any
/// moment ever needed.
#[derive(Debug, Default)]
pub(crate) struct MemoryKeeper {
    /// Bytes of the process after memory was given back.
    least: u64,
    /// When there may be more of it, although nothing was asked.
    again: Option<Instant>,
}

impl MemoryKeeper {
    /// Looks whether there is memory to give back. This waits for no request: one that comes meanwhile is answered beside it.
    pub(crate) async fn look(&mut self, app: &Arc<App>) {
        let is_idle = app.requests().active() == 0 && !app.is_starting();
        if app.memory_release().is_none() || !is_idle {
            return;
        }
        let Some(bytes) = resident_bytes() else { return };
        let (has_grown, is_due) =
            (bytes > self.least + MUCH, self.again.is_some_and(|at| at <= Instant::now()));
        if has_grown || is_due {
            let app = Arc::clone(app);
            let release = move || app.memory_release().map(|release| release());
            // If the thread was lost, so is what it should have done.
            let _ = tokio::task::spawn_blocking(release).await;
            self.least = resident_bytes().unwrap_or(bytes);
            self.again = has_grown.then(|| Instant::now() + LAST_THREADS);
        }
    }
}
