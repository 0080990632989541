//! The hub: lists repositories, and downloads their files into the cache.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quadriga_llm::default_model::SMOLLM2;

use super::cache::{ModelCache, OWNER};
use super::checksum;
use super::download::{Download, state_path};
use super::error::{HubError, HubResult, io_error};
use super::http::Http;
use super::listing::{Listing, RemoteChecksum, RemoteFile, check_file_name};
use super::name::RepositoryName;
use super::selection::ModelChoice;
use super::settings::HubSettings;

/// A hub and the cache of its files.
///
/// ```no_run
/// use std::ops::ControlFlow;
/// use quadriga_models::hub::{Hub, HubSettings, choices, find_choice};
///
/// let hub = Hub::new(HubSettings::from_environment(None)?)?;
/// let name = "Qwen/Qwen3-0.6B-GGUF:Q8_0".parse()?;
/// let listing = hub.list(&name)?;
/// let choices = choices(&listing.files, |file| &file.name, |file| file.bytes);
/// if let Some(choice) = find_choice(&choices, "Q8_0", |file| &file.name) {
///     let paths = hub.pull(&name, &listing, &choice.files, &mut |_| ControlFlow::Continue(()))?;
///     println!("{}", paths[0].display());
/// }
/// # Ok::<(), quadriga_models::hub::HubError>(())
/// ```
pub struct Hub {
    settings: HubSettings,
    http: Http,
    cache: ModelCache,
}

/// The progress of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullProgress<'a> {
    /// The file, by its path in the repository.
    pub file: &'a str,
    /// What happens to it.
    pub stage: PullStage,
    /// Bytes of all files so far.
    pub bytes: u64,
    /// Bytes of all files.
    pub total: u64,
}

/// What happens to a file that is pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullStage {
    /// Another process downloads it, and this one waits.
    Waiting,
    /// It is downloaded.
    Downloading,
    /// Its checksum is computed.
    Verifying,
}

/// A function that is told of progress; returning `Break` cancels the pull, which a later one resumes.
pub type PullObserver<'a> = dyn FnMut(PullProgress<'_>) -> ControlFlow<()> + 'a;

/// The first and the most bytes of a file that are read for its header.
const HEADER: (u64, u64) = (1 << 20, 256 << 20);

impl Hub {
    /// A hub with these settings.
    pub fn new(settings: HubSettings) -> HubResult<Hub> {
        let http = Http::new(&settings)?;
        let cache = ModelCache::new(&settings.cache, &settings.shared_caches);
        Ok(Hub { settings, http, cache })
    }

    /// The cache.
    pub fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// The files of a repository at its revision.
    pub fn list(&self, name: &RepositoryName) -> HubResult<Listing> {
        let repository = name.path();
        if self.settings.offline {
            return Err(HubError::Offline { repository });
        }
        let endpoint = &self.settings.endpoint;
        let url = format!("{endpoint}/api/models/{repository}/revision/{}?blobs=true", name.revision());
        let bytes = self.http.get_small(&url, &repository)?;
        Listing::from_json(&repository, &url, &bytes)
    }

    /// Gets files into the cache, as far as they are not there, and returns their paths in order.
    ///
    /// Every downloaded file is compared with the checksum that the hub gives. A download that was cut off is resumed. The
    /// files of one call are in one folder, with the names of the repository.
    pub fn pull(
        &self,
        name: &RepositoryName,
        listing: &Listing,
        files: &[RemoteFile],
        observer: &mut PullObserver<'_>,
    ) -> HubResult<Vec<PathBuf>> {
        let folder = self.cache.snapshot(name, &listing.commit);
        let total = files.iter().map(|file| file.bytes).sum();
        let mut before = 0;
        let mut paths = Vec::new();
        for file in files {
            check_file_name(&listing.repository, &file.name)?;
        }
        for file in files {
            let target = folder.join(&file.name);
            if !fs::metadata(&target).is_ok_and(|found| found.len() == file.bytes) {
                let mut report = |stage, bytes: u64| {
                    let progress = PullProgress { file: &file.name, stage, bytes: before + bytes, total };
                    match observer(progress) {
                        ControlFlow::Continue(()) => Ok(()),
                        ControlFlow::Break(()) => Err(HubError::Cancelled),
                    }
                };
                let content = self.content(name, listing, file, &mut report)?;
                self.cache.link(&content, &target)?;
            }
            before += file.bytes;
            paths.push(target);
        }
        self.cache.set_commit(name, &listing.commit)?;
        Ok(paths)
    }

    /// The path of a file's content; it is downloaded if it is not on this machine.
    fn content(
        &self,
        name: &RepositoryName,
        listing: &Listing,
        file: &RemoteFile,
        report: &mut dyn FnMut(PullStage, u64) -> HubResult<()>,
    ) -> HubResult<PathBuf> {
        let Some(checksum) = &file.checksum else {
            return Err(HubError::NoChecksum { file: file.name.clone() });
        };
        let id = match checksum {
            RemoteChecksum::Sha256(id) | RemoteChecksum::GitBlob(id) => id,
        };
        if let Some(found) = self.cache.existing(name, id, file.bytes) {
            return Ok(found);
        }
        let blobs = self.settings.cache.join("blobs");
        fs::create_dir_all(&blobs).map_err(io_error("create", &blobs))?;
        let lock_path = blobs.join(format!("{id}.lock"));
        let _lock = lock(&lock_path, &mut || report(PullStage::Waiting, 0))?;
        if let Some(found) = self.cache.existing(name, id, file.bytes) {
            return Ok(found);
        }
        if let Some(found) = self.default_model(checksum) {
            return Ok(found);
        }
        let partial = blobs.join(format!("{id}.partial"));
        let owner = blobs.join(format!("{id}.{OWNER}"));
        let text = format!("{}\n{}", listing.repository, file.name);
        fs::write(&owner, text).map_err(io_error("write", &owner))?;
        let url = self.url(listing, file);
        let download = Download {
            http: &self.http,
            url: &url,
            name: &file.name,
            bytes: file.bytes,
            path: &partial,
            connections: self.settings.connections,
            part_bytes: self.settings.part_bytes,
        };
        let mut progress = |bytes| report(PullStage::Downloading, bytes);
        match download.run(&mut progress) {
            // A resumed file of which there is a new version on the server.
            Err(HubError::Changed { .. }) => download.run(&mut progress)?,
            result => result?,
        }
        let mut progress = |bytes| report(PullStage::Verifying, bytes);
        let verified = checksum::verify(&partial, &file.name, checksum, &mut progress);
        let sha256 = match verified {
            Err(error @ HubError::Checksum { .. }) => {
                let _ = fs::remove_file(&partial);
                let _ = fs::remove_file(state_path(&partial));
                let _ = fs::remove_file(&owner);
                return Err(error);
            }
            result => result?,
        };
        let content = self.cache.blob(&sha256);
        fs::rename(&partial, &content).map_err(io_error("rename", &content))?;
        let _ = fs::remove_file(state_path(&partial));
        let _ = fs::remove_file(&owner);
        // Only now: whoever waits for the lock finds the content.
        let _ = fs::remove_file(&lock_path);
        if let Ok(folder) = File::open(&blobs) {
            let _ = folder.sync_all(); // So that the rename survives a power failure; not every system can do this.
        }
        Ok(content)
    }

    /// The default model, if that is the content; it stays where it is.
    fn default_model(&self, checksum: &RemoteChecksum) -> Option<PathBuf> {
        let path = self.settings.cache.join(SMOLLM2.file);
        let is_it = matches!(checksum, RemoteChecksum::Sha256(sum) if sum == SMOLLM2.sha256);
        let content = self.cache.blob(SMOLLM2.sha256);
        let verified = is_it && checksum::verify(&path, SMOLLM2.file, checksum, &mut |_| Ok(())).is_ok();
        (verified && fs::hard_link(&path, &content).is_ok()).then_some(content)
    }

    fn url(&self, listing: &Listing, file: &RemoteFile) -> String {
        let path: String = file.name.bytes().map(encoded).collect();
        format!("{}/{}/resolve/{}/{path}", self.settings.endpoint, listing.repository, listing.commit)
    }

    /// Writes files of a model's size that have its header and no weights into a folder, so that the model can be planned
    /// before it is downloaded. The path of the first.
    pub fn outline(
        &self,
        listing: &Listing,
        choice: &ModelChoice<RemoteFile>,
        folder: &Path,
    ) -> HubResult<PathBuf> {
        let mut first = None;
        for file in &choice.files {
            check_file_name(&listing.repository, &file.name)?;
            let base = file.name.rsplit('/').next().unwrap_or(&file.name);
            let path = folder.join(base);
            let mut bytes = HEADER.0;
            loop {
                let header = self.head(&self.url(listing, file), bytes.min(file.bytes), &file.name)?;
                let mut output = File::create(&path).map_err(io_error("create", &path))?;
                output.write_all(&header).map_err(io_error("write", &path))?;
                output.set_len(file.bytes).map_err(io_error("write", &path))?;
                if is_header(&path) || bytes >= file.bytes || bytes >= HEADER.1 {
                    break;
                }
                bytes *= 4;
            }
            first.get_or_insert(path);
        }
        first.ok_or_else(|| HubError::NoModel { repository: listing.repository.clone(), files: Vec::new() })
    }

    /// The first bytes of a file.
    fn head(&self, url: &str, bytes: u64, what: &str) -> HubResult<Vec<u8>> {
        use std::io::Read;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        self.http.retrying(|| {
            let answer = self.http.get(url, Some((0, bytes - 1)), what)?;
            let mut head = Vec::new();
            let read = answer.body.take(bytes).read_to_end(&mut head);
            read.map_err(|error| super::http::cut(url, &error))?;
            Ok(head)
        })
    }
}

/// Whether a file has a complete header. Of the parts of a split model, the others may not be there yet.
fn is_header(path: &Path) -> bool {
    match quadriga_gguf::File::open(path) {
        Ok(_) => true,
        Err(quadriga_gguf::Error::Io { path: other, .. }) => other != path,
        Err(_) => false,
    }
}

/// A byte of a path in an address.
fn encoded(byte: u8) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    }
}

/// Waits for a lock, which the system releases however the process ends.
fn lock(path: &Path, waiting: &mut dyn FnMut() -> HubResult<()>) -> HubResult<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(io_error("open", path))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                waiting()?;
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(TryLockError::Error(error)) => return Err(io_error("lock", path)(error)),
        }
    }
}
