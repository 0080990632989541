//! Files that are being written beside the ones that they will replace, and those that killed processes left.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tempfile::{Builder, NamedTempFile};

/// The beginning and the end of their names, and the characters between them.
const NAME: (&str, &str, usize) = (".quadriga-", ".tmp", 6);

/// The age from which a file that nobody has locked was left behind: a new one is locked within this time.
const STALE: Duration = Duration::from_secs(10);

/// Creates an empty file in a folder, which is removed when it is dropped. Those of processes that were killed are removed first.
pub(super) fn create(folder: &Path) -> io::Result<NamedTempFile> {
    remove_stale(folder);
    let (prefix, suffix, random) = NAME;
    let file = Builder::new().prefix(prefix).suffix(suffix).rand_bytes(random).tempfile_in(folder)?;
    // By the lock others see that somebody writes it. Where files have none, none is removed.
    let _ = file.as_file().try_lock();
    Ok(file)
}

/// Removes files that killed processes left: whoever writes one holds its lock.
fn remove_stale(folder: &Path) {
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = file.file_name();
        let (prefix, suffix, length) = NAME;
        let random = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(suffix));
        let is_own = random.is_some_and(|random| {
            random.len() == length && random.bytes().all(|byte| byte.is_ascii_alphanumeric())
        });
        let is_old = |time: SystemTime| time.elapsed().is_ok_and(|age| age >= STALE);
        let is_plain = || {
            let found = fs::symlink_metadata(file.path());
            found.is_ok_and(|found| found.is_file() && found.modified().is_ok_and(is_old))
        };
        if is_own && is_plain() && File::open(file.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(file.path()); // If it cannot be removed, it stays.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_nobody_writes_any_more_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - 2 * STALE;
        let make = |name: &str, time: SystemTime| {
            let file = File::create(folder.path().join(name)).unwrap();
            file.set_modified(time).unwrap();
            file
        };
        let kept =
            [".quadriga-aB3dE6.tmp.gguf", ".quadriga-12-0.tmp", "quadriga-aB3dE6.tmp", ".quadriga-a.tmp"];
        for name in kept {
            make(name, old);
        }
        make(".quadriga-aB3dE6.tmp", old);
        make(".quadriga-young1.tmp", SystemTime::now());
        let written = make(".quadriga-locked.tmp", old);
        written.try_lock().unwrap();
        let own = create(folder.path()).unwrap();
        let has = |name: &str| folder.path().join(name).exists();
        assert!(!has(".quadriga-aB3dE6.tmp"), "left by a process that is gone");
        assert!(has(".quadriga-young1.tmp") && has(".quadriga-locked.tmp") && own.path().exists());
        for name in kept {
            assert!(has(name), "{name}");
        }
        // This one is locked, too, however old it gets.
        own.as_file().set_modified(old).unwrap();
        remove_stale(folder.path());
        assert!(own.path().exists());
        drop(written);
        remove_stale(folder.path());
        assert!(!has(".quadriga-locked.tmp"));
    }
}
