//! The folder in which the parts of a model are written before they get their names.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

/// A hidden folder beside the parts; it is removed in the end, and by a later run if this one was killed.
pub(crate) struct WorkFolder {
    folder: TempDir,
    /// By the lock other runs see that somebody works in it.
    _lock: File,
}

/// What could not be done with a folder or a part.
#[derive(Debug)]
pub(crate) struct FolderError {
    pub(crate) action: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) source: io::Error,
}

impl FolderError {
    fn of(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FolderError {
        move |source| FolderError { action, path: path.to_owned(), source }
    }
}

/// The file in the folder that is locked.
const LOCK: &str = "lock";
const SUFFIX: &str = ".split.tmp";
/// The age from which a folder that nobody has locked was left behind: a new one is locked within this time.
const STALE: Duration = Duration::from_secs(10);

impl WorkFolder {
    /// Creates a folder for parts of this name, and removes those that killed runs left behind.
    pub(crate) fn create(parent: &Path, name: &str) -> Result<WorkFolder, FolderError> {
        let failed = || FolderError::of("create a folder in", parent);
        let prefix = format!(".{name}.");
        remove_stale(parent, &prefix);
        let folder = tempfile::Builder::new().prefix(&prefix).suffix(SUFFIX).tempdir_in(parent);
        let folder = folder.map_err(failed())?;
        let lock = File::create(folder.path().join(LOCK)).map_err(failed())?;
        // Where files have no locks, folders are left alone.
        let _ = lock.try_lock();
        Ok(WorkFolder { folder, _lock: lock })
    }

    /// The folder of a part.
    pub(crate) fn parent(part: &Path) -> &Path {
        part.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Where a part is written.
    pub(crate) fn part(&self, path: &Path) -> PathBuf {
        self.folder.path().join(path.file_name().unwrap_or_default())
    }

    /// Gives all parts their names. The first is missing until all others are there: what a killed run leaves is no model, rather
    /// than one of old and new parts.
    pub(crate) fn publish(&self, paths: &[PathBuf]) -> Result<(), FolderError> {
        let Some((first, others)) = paths.split_first() else { return Ok(()) };
        let folder = WorkFolder::parent(first);
        let sync = || sync_folder(folder).map_err(FolderError::of("sync", folder));
        let rename =
            |path: &PathBuf| fs::rename(self.part(path), path).map_err(FolderError::of("rename", path));
        if !others.is_empty() {
            match fs::remove_file(first) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(FolderError::of("remove", first)(error));
                }
                _ => sync()?,
            }
            others.iter().try_for_each(rename)?;
            sync()?;
        }
        rename(first)?;
        sync()
    }
}

fn remove_stale(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(SUFFIX));
        let is_own =
            random.is_some_and(|text| text.len() == 6 && text.bytes().all(|b| b.is_ascii_alphanumeric()));
        if is_own && is_abandoned(&entry.path()) {
            // If it cannot be removed, it stays.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether nobody works in a folder: its process holds a lock, which ends with it.
fn is_abandoned(folder: &Path) -> bool {
    let old = |time: SystemTime| time.elapsed().is_ok_and(|age| age >= STALE);
    let lock = folder.join(LOCK);
    let is_old =
        fs::symlink_metadata(&lock).is_ok_and(|found| found.is_file() && found.modified().is_ok_and(old));
    is_old && File::open(&lock).is_ok_and(|file| file.try_lock().is_ok())
}

/// Makes the names in a folder survive a power failure.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Elsewhere a folder cannot be opened for this, and renaming is durable by itself.
#[cfg(not(unix))]
fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_killed_runs_left_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - Duration::from_secs(60);
        let put = |name: &str, time: SystemTime| {
            let folder = parent.path().join(name);
            fs::create_dir(&folder).unwrap();
            let lock = File::create(folder.join(LOCK)).unwrap();
            lock.set_modified(time).unwrap();
            lock
        };
        drop(put(".part.aB3dE6.split.tmp", old));
        let busy = put(".part.bbbbbb.split.tmp", old);
        busy.lock().unwrap();
        drop(put(".part.cccccc.split.tmp", SystemTime::now()));
        drop(put(".other.aB3dE6.split.tmp", old));
        let work = WorkFolder::create(parent.path(), "part").unwrap();
        let left = |name: &str| parent.path().join(name).exists();
        assert!(!left(".part.aB3dE6.split.tmp"));
        for name in [".part.bbbbbb.split.tmp", ".part.cccccc.split.tmp", ".other.aB3dE6.split.tmp"] {
            assert!(left(name), "{name}");
        }
        assert!(work.folder.path().exists());
    }
}
