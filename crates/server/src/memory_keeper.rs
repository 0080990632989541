//! Memory that requests needed, given back to the system when there are none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::app::App;
use crate::operation::process::resident_bytes;

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
