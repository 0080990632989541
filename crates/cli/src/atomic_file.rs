//! Output files that appear under their names only once they are complete.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

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
        let Some(name) = target.file_name() else {
            let why = io::Error::new(io::ErrorKind::InvalidInput, "it is not the name of a file");
            return Err(Failure::file("write", target, &why));
        };
        let mut prefix = OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        remove_stale(folder, &prefix);
        let mut builder = Builder::new();
        builder.prefix(&prefix).suffix(".tmp");
        // Readable by others, as the umask allows: temporary files are private by default.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let temporary =
            builder.tempfile_in(folder).map_err(|error| Failure::file("create", target, &plain(error)))?;
        // By the lock others see that somebody writes it. Where files have none, they are left alone.
        let _ = temporary.as_file().try_lock();
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
                // The file that it replaces may be private.
                if let Ok(replaced) = fs::metadata(&self.target) {
                    let kept = temporary.as_file().set_permissions(replaced.permissions());
                    kept.map_err(|error| failed(&error))?;
                }
                temporary.as_file().sync_all().map_err(|error| failed(&error))?;
                temporary.persist(&self.target).map_err(|error| failed(&error.error))?;
            }
            Output::Direct(mut file) => file.flush().map_err(|error| failed(&error))?,
        }
        Ok(())
    }
}

/// The age from which a temporary file that nobody has locked was left behind: a new one is locked within this time.
const STALE: Duration = Duration::from_secs(10);

/// Removes temporary files of the same target that killed runs left: their processes hold no lock any more.
fn remove_stale(folder: &Path, prefix: &OsStr) {
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = file.file_name();
        let random = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        let random = random.and_then(|rest| rest.strip_suffix(b".tmp"));
        let is_own =
            random.is_some_and(|random| random.len() == 6 && random.iter().all(u8::is_ascii_alphanumeric));
        let is_old = |time: SystemTime| time.elapsed().is_ok_and(|age| age >= STALE);
        let is_plain = fs::symlink_metadata(file.path())
            .is_ok_and(|found| found.is_file() && found.modified().is_ok_and(is_old));
        if is_own && is_plain && File::open(file.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(file.path()); // If it cannot be removed, it stays.
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_replaced_keeps_its_permissions() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("answer.txt");
        fs::write(&target, "old").unwrap();
        fs::set_permissions(&target, PermissionsExt::from_mode(0o600)).unwrap();
        AtomicFile::write_text(&target, "new").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn files_of_killed_runs_are_removed_and_those_of_running_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, age: u64| {
            let file = File::create(folder.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
            file
        };
        drop(put(".plan.json.aB3dE6.tmp", 60));
        let busy = put(".plan.json.aaaaaa.tmp", 60);
        busy.lock().unwrap();
        for (name, age) in
            [(".plan.json.bbbbbb.tmp", 0), (".other.json.aB3dE6.tmp", 60), (".plan.json.x.tmp", 60)]
        {
            drop(put(name, age));
        }
        AtomicFile::write_text(&folder.path().join("plan.json"), "{}").unwrap();
        let mut left: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(
            left,
            [
                ".other.json.aB3dE6.tmp",
                ".plan.json.aaaaaa.tmp",
                ".plan.json.bbbbbb.tmp",
                ".plan.json.x.tmp",
                "plan.json"
            ]
        );
    }
}
