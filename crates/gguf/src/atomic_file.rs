//! A file that appears under its name only once it is complete and on disk.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
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
        let mut builder = Builder::new();
        builder.prefix(&prefix).suffix(".tmp");
        // Readable by others, as the umask allows: temporary files are private by default.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        match builder.tempfile_in(folder_of(target)) {
            Ok(temporary) => Ok(AtomicFile { temporary, target: target.to_owned() }),
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
    fn a_bare_file_name_is_in_the_current_folder() {
        for (path, folder) in
            [("model.gguf", "."), ("./model.gguf", "."), ("a/b/model.gguf", "a/b"), ("/model", "/")]
        {
            assert_eq!(folder_of(Path::new(path)), Path::new(folder), "{path}");
        }
    }
}
