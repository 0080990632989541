//! Notices that the process is a fork of the one that made an object: threads do not survive a fork.

use crate::failure::{Failure, Outcome};

/// The process in which an object was made.
#[derive(Clone, Copy)]
pub(crate) struct ProcessMark(u32);

impl ProcessMark {
    /// This process.
    pub(crate) fn new() -> ProcessMark {
        ProcessMark(std::process::id())
    }

    /// Whether this is still that process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// An error in a fork.
    pub(crate) fn check(self, what: &str) -> Outcome {
        if self.is_here() {
            return Ok(());
        }
        let advice = "make it after os.fork(), or start processes with the method \"spawn\"";
        Err(Failure::new("Closed", format!("the {what} was made before this process was forked; {advice}")))
    }
}
