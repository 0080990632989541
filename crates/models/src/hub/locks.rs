//! Locks of files, which the system releases however a process ends.

use std::fs::{File, TryLockError};
use std::path::Path;
#[cfg(feature = "network")]
use std::time::Duration;

use super::error::{HubResult, io_error};

/// Waits for a lock; `waiting` is called meanwhile, and its error ends the wait.
#[cfg(feature = "network")]
pub(super) fn wait(path: &Path, waiting: &mut dyn FnMut() -> HubResult<()>) -> HubResult<File> {
    loop {
        if let Some(lock) = try_lock(path)? {
            return Ok(lock);
        }
        waiting()?;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The lock of a file, which is made if it is not there; `None` if another process has it.
pub(super) fn try_lock(path: &Path) -> HubResult<Option<File>> {
    loop {
        let file = File::options().create(true).truncate(false).write(true).open(path);
        let file = file.map_err(io_error("open", path))?;
        match file.try_lock() {
            // Whoever had the lock may have removed its file: others would make another one.
            Ok(()) if !is_at(&file, path) => {}
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(io_error("lock", path)(error)),
        }
    }
}

/// Whether an open file is the one with this path.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let of = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata().map(of), std::fs::metadata(path).map(of)), (Ok(open), Ok(there)) if open == there)
}

/// Elsewhere an open file cannot be removed.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> bool {
    true
}
