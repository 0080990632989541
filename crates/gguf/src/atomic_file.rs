//! A file that appears under its name only once it is complete and on disk.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use tempfile::{Builder, NamedTempFile};

use crate::error::{Error, Result};

/// A temporary file in the target's folder; dropping it before [`AtomicFile::publish`] removes it.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    temporary: NamedTempFile,
    target: PathBuf,
}

impl AtomicFile {
    /// Creates an empty file with a hidden name beside the target.
    ///
    /// A link is followed. What is there and is no file is not replaced: renaming would turn a device into a file.
    pub(crate) fn create(target: &Path) -> Result<AtomicFile> {
        let target = &fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
        if fs::metadata(target).is_ok_and(|found| !found.is_file()) {
            return Err(Error::NotAFile { path: target.to_owned() });
        }
        let Some(name) = target.file_name() else {
            return Err(Error::NotAFile { path: target.to_owned() });
        };
        let mut prefix = OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        remove_stale(folder_of(target), &prefix);
        let mut builder = Builder::new();
        builder.prefix(&prefix).suffix(".tmp");
        // Readable by others, as the umask allows: temporary files are private by default.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        match builder.tempfile_in(folder_of(target)) {
            Ok(temporary) => {
                // By the lock others see that somebody writes it. Where files have none, they are left alone.
                let _ = temporary.as_file().try_lock();
                Ok(AtomicFile { temporary, target: target.to_owned() })
            }
            Err(error) => {
                Err(Error::Io { action: "create", path: target.to_owned(), source: without_path(error) })
            }
        }
    }

    /// The file, to write to.
    pub(crate) fn file(&self) -> &fs::File {
        self.temporary.as_file()
    }

    /// Syncs the content, renames the file to the target's name, then syncs the folder.
    pub(crate) fn publish(self) -> Result<()> {
        let failed = |action, source| Error::Io { action, path: self.target.clone(), source };
        self.file().sync_all().map_err(|source| failed("sync", source))?;
        self.temporary.persist(&self.target).map_err(|error| failed("rename", error.error))?;
        sync_folder(&self.target)
    }
}

/// The age from which a temporary file that nobody has locked was left behind: a new one is locked within this time.
const STALE: Duration = Duration::from_secs(10);

/// Removes temporary files of the same target that runs left behind that were killed.
fn remove_stale(folder: &Path, prefix: &OsStr) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    for file in files {
        let name = file.file_name();
        let (name, prefix) = (name.as_encoded_bytes(), prefix.as_encoded_bytes());
        let is_own = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(b".tmp"));
        // The part between is random, and has no dots.
        if is_own.is_some_and(|random| random.len() == 6 && random.iter().all(u8::is_ascii_alphanumeric))
            && is_abandoned(&file.path())
        {
            // If it cannot be removed, it stays.
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Whether nobody writes a file: its process holds a lock, which ends with it.
fn is_abandoned(path: &Path) -> bool {
    let old = |time: SystemTime| time.elapsed().is_ok_and(|age| age >= STALE);
    let is_old =
        fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.modified().is_ok_and(old));
    is_old && fs::File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

/// The operating system's error without the name of the temporary file.
fn without_path(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" at path ") {
        Some((plain, _)) => io::Error::new(error.kind(), plain.to_owned()),
        None => error,
    }
}

/// The folder that a path is in.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(unix)]
fn sync_folder(target: &Path) -> Result<()> {
    let folder = folder_of(target);
    let sync = fs::File::open(folder).and_then(|folder| folder.sync_all());
    sync.map_err(|source| Error::Io { action: "sync", path: folder.to_owned(), source })
}

/// Elsewhere a folder cannot be opened for this, and renaming is durable by itself.
#[cfg(not(unix))]
fn sync_folder(_target: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_killed_runs_left_behind_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model.gguf");
        let old = SystemTime::now() - Duration::from_secs(60);
        let put = |name: &str, time: SystemTime| {
            let file = fs::File::create(folder.path().join(name)).unwrap();
            file.set_modified(time).unwrap();
            file
        };
        drop(put(".model.gguf.aB3dE6.tmp", old));
        // Another run writes this one, another has just begun, and these are none of ours.
        let busy = put(".model.gguf.aaaaaa.tmp", old);
        busy.lock().unwrap();
        drop(put(".model.gguf.bbbbbb.tmp", SystemTime::now()));
        // Not six letters or digits.
        let others = [".model.gguf.x.y.tmp", ".model.gguf.x.y.zz.tmp", ".model.gguf.abcdefg.tmp"];
        others.iter().for_each(|name| drop(put(name, old)));
        drop(put(".other.gguf.aB3dE6.tmp", old));
        let file = AtomicFile::create(&target).unwrap();
        let left = |name: &str| folder.path().join(name).exists();
        assert!(others.iter().all(|name| left(name)));
        assert!(!left(".model.gguf.aB3dE6.tmp"));
        for name in [".model.gguf.aaaaaa.tmp", ".model.gguf.bbbbbb.tmp", ".other.gguf.aB3dE6.tmp"] {
            assert!(left(name), "{name}");
        }
        // Its own is locked as long as it is written.
        let own = file.temporary.path().to_owned();
        assert!(fs::File::open(&own).unwrap().try_lock().is_err());
        file.publish().unwrap();
        assert!(target.exists());
    }

    #[test]
    fn a_bare_file_name_is_in_the_current_folder() {
        for (path, folder) in
            [("model.gguf", "."), ("./model.gguf", "."), ("a/b/model.gguf", "a/b"), ("/model", "/")]
        {
            assert_eq!(folder_of(Path::new(path)), Path::new(folder), "{path}");
        }
    }
}
