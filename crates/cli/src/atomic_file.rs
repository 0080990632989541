//! Output files that appear under their names only once they are complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use crate::failure::{Failure, Outcome};

/// A temporary file in the target's folder; dropping it before [`AtomicFile::publish`] removes it. A target that is a pipe or a
/// device is written directly, since renaming would replace it.
pub(crate) struct AtomicFile {
    output: Output,
    target: PathBuf,
}

enum Output {
    Temporary(NamedTempFile),
    Direct(File),
}

impl AtomicFile {
    /// Creates an empty file with a hidden name beside the target.
    pub(crate) fn create(target: &Path) -> Outcome<AtomicFile> {
        if fs::metadata(target).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            let direct = OpenOptions::new().write(true).open(target);
            let direct = direct.map_err(|error| Failure::file("open", target, &error))?;
            return Ok(AtomicFile { output: Output::Direct(direct), target: target.to_owned() });
        }
        // The file that a link names is replaced, not the link.
        let target = &fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
        if is_model(target) {
            let why =
                io::Error::new(io::ErrorKind::AlreadyExists, "it is a model (GGUF); choose another name");
            return Err(Failure::file("write", target, &why));
        }
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = Builder::new();
        builder.prefix(".quadriga-").suffix(".tmp");
        // Readable by others, as the umask allows: temporary files are private by default.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let temporary =
            builder.tempfile_in(folder).map_err(|error| Failure::file("create", target, &plain(error)))?;
        Ok(AtomicFile { output: Output::Temporary(temporary), target: target.to_owned() })
    }

    /// Writes a file in one go.
    pub(crate) fn write_text(target: &Path, text: &str) -> Outcome {
        let mut file = AtomicFile::create(target)?;
        file.write_all(text.as_bytes()).map_err(|error| Failure::file("write", target, &error))?;
        file.publish()
    }

    /// Syncs the content and renames the file to the target's name.
    pub(crate) fn publish(self) -> Outcome {
        let failed = |error: &io::Error| Failure::file("write", &self.target, error);
        match self.output {
            Output::Temporary(temporary) => {
                temporary.as_file().sync_all().map_err(|error| failed(&error))?;
                temporary.persist(&self.target).map_err(|error| failed(&error.error))?;
            }
            Output::Direct(mut file) => file.flush().map_err(|error| failed(&error))?,
        }
        Ok(())
    }
}

/// Whether there is a file that starts as models do. No output of the command is one, so replacing it must be a mistake:
/// `plan --json model.gguf` for `plan --json plan.json model.gguf`.
pub(crate) fn is_model(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
}

/// The error without the name of the temporary file, which means nothing to the user.
fn plain(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" at path ") {
        Some((plain, _)) => io::Error::new(error.kind(), plain.to_owned()),
        None => error,
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.output {
            Output::Temporary(file) => file.write(bytes),
            Output::Direct(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.output {
            Output::Temporary(file) => file.flush(),
            Output::Direct(file) => file.flush(),
        }
    }
}
