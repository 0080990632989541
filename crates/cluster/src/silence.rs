//! Output of ranks that nobody reads.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};

/// Sends everything that this process writes to standard output and standard error to nowhere: of several ranks, only the
/// first has a terminal. Nothing happens where there is no `/dev/null`. Returns what standard error was, for a last word.
pub fn silence() -> Option<File> {
    let before = std::io::stderr().as_fd().try_clone_to_owned().ok().map(File::from);
    if let Ok(nowhere) = OpenOptions::new().write(true).open("/dev/null") {
        for stream in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
            // SAFETY: both are open file descriptors; the streams are replaced in one step, so that no writer sees them closed.
            unsafe { libc::dup2(nowhere.as_raw_fd(), stream) };
        }
    }
    before
}
