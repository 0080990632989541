//! Output of ranks that nobody reads.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;

/// Sends everything that this process writes to standard output and standard error to nowhere: of several ranks, only the
/// first has a terminal. Nothing happens where there is no `/dev/null`.
pub fn silence() {
    if let Ok(nowhere) = OpenOptions::new().write(true).open("/dev/null") {
        for stream in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
            // SAFETY: both are open file descriptors; the streams are replaced in one step, so that no writer sees them closed.
            unsafe { libc::dup2(nowhere.as_raw_fd(), stream) };
        }
    }
}
