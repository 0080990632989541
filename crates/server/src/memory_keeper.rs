//! Memory that requests needed, given back to the system when there are none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::app::App;
use crate::operation::process::anonymous_bytes;

/// Growth of memory from which some of it is worth giving back.
const MUCH: u64 = 4 << 20;

/// The time without requests after which threads that those needed have ended, and engines keep less for the next ones.
const QUIET: Duration = Duration::from_secs(15);

/// Gives memory back that was needed for requests, once there are none: an allocator keeps it for the next ones, the most that any
/// moment ever needed. Engines keep plans for every size of step that requests have come to, and pages that any of them has computed
/// in; after a quiet time most of the plans and all of these pages go, too, so that memory does not depend on which requests there
/// ever were.
#[derive(Debug, Default)]
pub(crate) struct MemoryKeeper {
    /// The least bytes of the process since memory was given back; `None` if it never was.
    least: Option<u64>,
    /// When there may be more of it, although nothing was asked.
    again: Option<Instant>,
}

/// What is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Release {
    /// What the allocator keeps.
    Allocator,
    /// What engines keep for requests, too.
    Engines,
}

impl MemoryKeeper {
    /// Looks whether there is memory to give back. This waits for no request: one that comes meanwhile is answered beside it.
    pub(crate) async fn look(&mut self, app: &Arc<App>) {
        if app.memory_release().is_none() {
            return;
        }
        // Those who follow what becomes of models need none.
        if app.requests().active() > app.models().subscribers() || app.is_starting() {
            return self.note_requests(Instant::now());
        }
        let Some(bytes) = anonymous_bytes() else { return };
        if let Some(what) = self.due(bytes, Instant::now()) {
            let app = Arc::clone(app);
            let release = move || {
                if what == Release::Engines {
                    release_engines(&app);
                }
                app.memory_release().map(|release| release())
            };
            // If the thread was lost, so is what it should have done.
            let _ = tokio::task::spawn_blocking(release).await;
            self.least = Some(anonymous_bytes().unwrap_or(bytes));
        }
    }

    /// It is not quiet.
    fn note_requests(&mut self, now: Instant) {
        self.again = self.again.map(|_| now + QUIET);
    }

    /// What is to be given back by a process of so many bytes.
    fn due(&mut self, bytes: u64, now: Instant) -> Option<Release> {
        if self.again.is_some_and(|at| at <= now) {
            self.again = None;
            return Some(Release::Engines);
        }
        // What went by itself counts: the next growth begins there.
        self.least = self.least.map(|least| least.min(bytes));
        if self.least.is_some_and(|least| bytes <= least + MUCH) {
            return None;
        }
        self.again = Some(now + QUIET);
        Some(Release::Allocator)
    }
}

/// Tells all engines to keep less. One that computes again goes on with what it has.
fn release_engines(app: &App) {
    for served in app.models().loaded() {
        if let Ok(service) = served.service()
            && let Err(error) = service.release_memory()
        {
            tracing::debug!(model = served.name, %error, "no memory was given back");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_after_each_growth_and_that_of_engines_when_it_stays_quiet() {
        let (mut keeper, start) = (MemoryKeeper::default(), Instant::now());
        let look = |keeper: &mut MemoryKeeper, bytes, seconds| {
            let due = keeper.due(bytes, start + Duration::from_secs(seconds));
            // As if nothing could be given back.
            keeper.least = if due.is_some() { Some(bytes) } else { keeper.least };
            due
        };
        assert_eq!(look(&mut keeper, 100 << 20, 0), Some(Release::Allocator));
        assert_eq!(look(&mut keeper, 104 << 20, 1), None);
        keeper.note_requests(start + Duration::from_secs(10));
        assert_eq!(look(&mut keeper, 104 << 20, 24), None, "there were requests");
        assert_eq!(look(&mut keeper, 104 << 20, 25), Some(Release::Engines));
        assert_eq!(look(&mut keeper, 104 << 20, 60), None, "once");
        // Less by itself, and then more than that.
        assert_eq!(look(&mut keeper, 50 << 20, 61), None);
        assert_eq!(look(&mut keeper, 55 << 20, 62), Some(Release::Allocator));
        assert_eq!(look(&mut keeper, 60 << 20, 63), Some(Release::Allocator));
        assert_eq!(look(&mut keeper, 60 << 20, 78), Some(Release::Engines));
        // Requests that came before there was anything to give back delay nothing.
        keeper.note_requests(start + Duration::from_secs(80));
        assert_eq!(look(&mut keeper, 60 << 20, 200), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn parts_of_files_are_not_counted() {
        let resident = crate::operation::process::resident_bytes().unwrap();
        // The program itself is a file.
        assert!(anonymous_bytes().is_some_and(|bytes| bytes > 0 && bytes < resident));
    }
}
