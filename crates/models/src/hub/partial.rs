//! Incomplete downloads: their files in the cache.

use std::fs;
use std::path::{Path, PathBuf};

#[cfg(feature = "network")]
use super::error::{HubResult, io_error};
#[cfg(feature = "network")]
use super::listing::Listing;
use super::locks;
use super::name::RepositoryName;
use super::selection::quant_of;

/// An incomplete download, which a pull of the same model continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialDownload {
    /// `ORG/REPO`.
    pub repository: String,
    /// The path of the file in the repository.
    pub file: String,
    /// Bytes that are there.
    pub bytes: u64,
    /// The size of the file.
    pub total: u64,
    /// Whether a process downloads it now.
    pub is_busy: bool,
}

/// The files of an incomplete download.
pub(super) struct PartialFiles {
    /// The content.
    pub(super) content: PathBuf,
    /// What of it is there.
    pub(super) state: PathBuf,
    /// What it is: repository, file, commit and revision, a line each.
    pub(super) owner: PathBuf,
    /// Held by the process that downloads.
    pub(super) lock: PathBuf,
}

/// What an incomplete download is.
#[derive(Default)]
pub(super) struct PartialOwner {
    pub(super) repository: String,
    pub(super) file: String,
    pub(super) commit: String,
    pub(super) revision: String,
}

/// The extension of the state while it is written.
const NEW_STATE: &str = "state.tmp";

impl PartialFiles {
    /// Those of the content with this id.
    pub(super) fn of(blobs: &Path, id: &str) -> PartialFiles {
        let with = |extension: &str| blobs.join(format!("{id}.{extension}"));
        PartialFiles { content: with("partial"), state: with("state"), owner: with("of"), lock: with("lock") }
    }

    /// All in the folder of contents.
    pub(super) fn all(blobs: &Path) -> Vec<PartialFiles> {
        let names = fs::read_dir(blobs).into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        let mut ids: Vec<String> = names
            .filter_map(|name| name.split_once('.').map(|(id, _)| id.to_owned()))
            .filter(|id| !id.is_empty())
            .collect();
        ids.sort();
        ids.dedup();
        ids.iter().map(|id| PartialFiles::of(blobs, id)).collect()
    }

    /// Writes what is downloaded.
    #[cfg(feature = "network")]
    pub(super) fn set_owner(&self, listing: &Listing, name: &RepositoryName, file: &str) -> HubResult<()> {
        let text = format!("{}\n{file}\n{}\n{}\n", listing.repository, listing.commit, name.revision());
        fs::write(&self.owner, text).map_err(io_error("write", &self.owner))
    }

    /// What is downloaded, as far as it is known.
    pub(super) fn owner(&self) -> PartialOwner {
        let text = fs::read_to_string(&self.owner).unwrap_or_default();
        let mut lines = text.lines().map(str::to_owned);
        let mut next = || lines.next().unwrap_or_default();
        PartialOwner { repository: next(), file: next(), commit: next(), revision: next() }
    }

    /// Removes all of them; the caller has the lock.
    pub(super) fn remove(&self) {
        let new_state = self.state.with_extension(NEW_STATE);
        // Not all are there at all times. The lock's file is the last: whoever gets the lock then finds nothing.
        for path in [&self.content, &self.state, &new_state, &self.owner, &self.lock] {
            let _ = fs::remove_file(path);
        }
    }

    /// Removes what is left of a download that has no content, or of which nothing is known: it is not continued. Those of a
    /// running process stay.
    pub(super) fn remove_stale(&self) {
        let new_state = self.state.with_extension(NEW_STATE);
        let is_stale = !self.content.exists() || new_state.exists();
        if !is_stale {
            return;
        }
        if let Ok(Some(_lock)) = locks::try_lock(&self.lock) {
            let _ = fs::remove_file(&new_state);
            if self.content.exists() {
                let _ = fs::remove_file(&self.lock);
            } else {
                self.remove();
            }
        }
    }

    /// The download, if there is one.
    pub(super) fn download(&self) -> Option<PartialDownload> {
        let total = fs::metadata(&self.content).ok()?.len();
        let owner = self.owner();
        let state = fs::read(&self.state).ok();
        let state = state.and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
        let done = state.as_ref().and_then(|state| state.get("done")?.as_array());
        let bytes = done.into_iter().flatten().filter_map(serde_json::Value::as_u64).sum();
        let lock = fs::File::open(&self.lock);
        let is_busy = lock.is_ok_and(|lock| lock.try_lock().is_err());
        Some(PartialDownload { repository: owner.repository, file: owner.file, bytes, total, is_busy })
    }
}

impl PartialOwner {
    /// Whether the download is of the model, or of one of the models, that a name stands for.
    pub(super) fn is_of(&self, name: &RepositoryName) -> bool {
        let label = quant_of(self.file.trim_end_matches(".gguf"));
        let has_quant =
            name.quant().is_none_or(|quant| label.is_some_and(|label| label.eq_ignore_ascii_case(quant)));
        let has_revision = name
            .explicit_revision()
            .is_none_or(|revision| self.revision == revision || self.commit.starts_with(revision));
        self.repository == name.path() && has_quant && has_revision
    }
}
