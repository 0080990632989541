//! The hub: lists repositories, and downloads their files into the cache.

use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quadriga_llm::default_model::SMOLLM2;

use super::cache::ModelCache;
use super::checksum;
use super::download::Download;
use super::error::{HubError, HubResult, io_error};
use super::http::Http;
use super::listing::{Listing, RemoteChecksum, RemoteFile, check_file_name};
use super::locks;
use super::name::RepositoryName;
use super::partial::PartialFiles;
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
    http: Arc<Http>,
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
        let http = Arc::new(Http::new(&settings)?);
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
        let revision: String = name.revision().bytes().map(|byte| encoded(byte, "")).collect();
        let url = format!("{endpoint}/api/models/{repository}/revision/{revision}?blobs=true");
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
        self.cache.remove_stale();
        for file in files {
            let target = folder.join(&file.name);
            if !has_size(&target, file.bytes) {
                let mut report = |stage, bytes: u64| {
                    let progress = PullProgress { file: &file.name, stage, bytes: before + bytes, total };
                    match observer(progress) {
                        ControlFlow::Continue(()) => Ok(()),
                        ControlFlow::Break(()) => Err(HubError::Cancelled),
                    }
                };
                self.get(name, listing, (file, &target), &mut report)?;
            }
            before += file.bytes;
            paths.push(target);
        }
        self.cache.set_commit(name, &listing.commit)?;
        Ok(paths)
    }

    /// Gives a file its name in the folder of its commit; its content is downloaded if it is not on this machine.
    fn get(
        &self,
        name: &RepositoryName,
        listing: &Listing,
        (file, target): (&RemoteFile, &Path),
        report: &mut dyn FnMut(PullStage, u64) -> HubResult<()>,
    ) -> HubResult<()> {
        let Some(checksum) = &file.checksum else {
            return Err(HubError::NoChecksum { file: file.name.clone() });
        };
        let id = match checksum {
            RemoteChecksum::Sha256(id) | RemoteChecksum::GitBlob(id) => id,
        };
        if self.link_existing(name, (id, file.bytes), target)? {
            return Ok(());
        }
        let blobs = self.settings.cache.join("blobs");
        fs::create_dir_all(&blobs).map_err(io_error("create", &blobs))?;
        let partial = PartialFiles::of(&blobs, id);
        let _lock = locks::wait(&partial.lock, &mut || report(PullStage::Waiting, 0))?;
        // Another process may have got it meanwhile.
        if has_size(target, file.bytes) || self.link_existing(name, (id, file.bytes), target)? {
            partial.remove();
            return Ok(());
        }
        if let Some(found) = self.default_model(checksum) {
            partial.remove();
            return self.cache.link(&found, target);
        }
        partial.set_owner(listing, name, &file.name)?;
        let download = Download {
            http: Arc::clone(&self.http),
            url: self.url(listing, file),
            name: file.name.clone(),
            bytes: file.bytes,
            path: partial.content.clone(),
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
        let verified = checksum::verify(&partial.content, &file.name, checksum, &mut progress);
        if matches!(verified, Err(HubError::Checksum { .. })) {
            partial.remove();
        }
        let content = self.cache.blob(&verified?);
        self.cache.publish(&partial.content, &content, target)?;
        // Only now: whoever waits for the lock finds the content.
        partial.remove();
        if let Ok(folder) = File::open(&blobs) {
            let _ = folder.sync_all(); // So that the rename survives a power failure; not every system can do this.
        }
        Ok(())
    }

    /// Gives a content that is on this machine a name; false if there is none.
    fn link_existing(
        &self,
        name: &RepositoryName,
        (id, bytes): (&str, u64),
        target: &Path,
    ) -> HubResult<bool> {
        match self.cache.existing(name, id, bytes) {
            Some(found) => match self.cache.link(&found, target) {
                Ok(()) => Ok(true),
                // It was removed meanwhile.
                Err(_) if !found.exists() => Ok(false),
                Err(error) => Err(error),
            },
            None => Ok(false),
        }
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
        let path: String = file.name.bytes().map(|byte| encoded(byte, "/")).collect();
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

/// Whether there is a file of this size.
fn has_size(path: &Path, bytes: u64) -> bool {
    fs::metadata(path).is_ok_and(|found| found.len() == bytes)
}

/// A byte of a part of an address, in which some characters have a meaning.
fn encoded(byte: u8, kept: &str) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        other if kept.as_bytes().contains(&other) => char::from(other).to_string(),
        other => format!("%{other:02X}"),
    }
}
