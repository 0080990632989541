//! A file that is seen under its name only once it is whole and on the disk.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::error::{Error, Result};

/// Tells apart the files that one process writes at the same time.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A new file beside its target; removed again when dropped before [`Temporary::publish`].
#[derive(Debug)]
pub struct Temporary {
    file: fs::File,
    path: PathBuf,
    target: PathBuf,
}

impl Temporary {
    /// A new, empty file in the target's folder, under a hidden name.
    pub fn create(target: &Path) -> Result<Temporary> {
        let Some(name) = target.file_name() else {
            return Err(Error::NotAFile { path: target.to_owned() });
        };
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{}.tmp", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let path = target.with_file_name(hidden);
        match fs::File::create_new(&path) {
            Ok(file) => Ok(Temporary { file, path, target: target.to_owned() }),
            Err(source) => Err(Error::Io { action: "create", path, source }),
        }
    }

    /// The file, to write to.
    pub fn file(&self) -> &fs::File {
        &self.file
    }

    pub(crate) fn failed(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { action, path: self.path.clone(), source }
    }

    /// Puts the file under its name: its bytes first, then the name, then the folder's record of the name.
    pub fn publish(mut self) -> Result<()> {
        self.file.sync_all().map_err(|source| self.failed("sync", source))?;
        fs::rename(&self.path, &self.target).map_err(|source| self.failed("rename", source))?;
        // From here on there is nothing left to remove.
        self.path = PathBuf::new();
        sync_folder(&self.target)
    }
}

impl io::Write for Temporary {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // Nobody is left to tell; the name says what the file is.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(unix)]
fn sync_folder(target: &Path) -> Result<()> {
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let sync = fs::File::open(folder).and_then(|folder| folder.sync_all());
    sync.map_err(|source| Error::Io { action: "sync", path: folder.to_owned(), source })
}

/// Elsewhere a folder cannot be opened for this, and renaming is durable by itself.
#[cfg(not(unix))]
fn sync_folder(_target: &Path) -> Result<()> {
    Ok(())
}
