//! The cache: contents by their SHA-256, and repositories as folders of links to them.
//!
//! ```text
//! CACHE/blobs/SHA256                       a content
//! CACHE/blobs/SHA256.partial               one that is not complete; .state: what is there, .of: what it is, .lock: who gets it
//! CACHE/hub/ORG/REPO/refs/REVISION         the commit of a branch or tag when it was last pulled
//! CACHE/hub/ORG/REPO/COMMIT/FILE           a link to a content, here or in a cache of Hugging Face's libraries
//! CACHE/.hub.lock                          held while contents get names, alone while those without one are deleted
//! ```
//!
//! A content of several repositories or commits is there once. Hugging Face's own caches
//! (`models--ORG--REPO/{blobs,refs,snapshots}`) are read and never changed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use quadriga_llm::default_model::SMOLLM2;

use super::error::{HubError, HubResult, io_error};
use super::name::{MAIN, RepositoryName};
use super::partial::{PartialDownload, PartialFiles};
use super::revisions::{
    MAX_DEPTH, REFS, TEMPORARY, commit_of, commits_in, entries, is_plain, revision_of, revisions,
};
use super::selection::{ModelChoice, choices, find_choice, incomplete};

/// A cache of models.
#[derive(Clone, Debug)]
pub struct ModelCache {
    pub(super) root: PathBuf,
    shared: Vec<PathBuf>,
}

/// A file in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedFile {
    /// The path in the repository.
    pub name: String,
    /// The path under which it is opened.
    pub path: PathBuf,
    /// The size in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, where the cache knows it.
    pub sha256: Option<String>,
    /// Whether the content is in a cache of Hugging Face's libraries.
    pub is_shared: bool,
}

/// Files in the cache that take space and that no command can run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherFiles {
    /// `ORG/REPO`.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// As [`CachedModel::revision`].
    pub revision: Option<String>,
    /// What they are.
    pub kind: OtherKind,
    /// The files.
    pub files: Vec<CachedFile>,
    /// Their total size.
    pub bytes: u64,
}

/// What [`OtherFiles`] are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherKind {
    /// Parts of a model in several files, of which others were not downloaded.
    Parts {
        /// The type of quantization, or the name of the file.
        quant: String,
        /// The number of all parts.
        count: usize,
    },
    /// What `quadriga convert` makes a model of, with the files beside it.
    Safetensors,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// `ORG/REPO`, or `default` for the default model.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// The branch, tag or first digits of the commit by which it is named, unless that is what `main` is.
    pub revision: Option<String>,
    /// The type of quantization.
    pub quant: String,
    /// The files, the first part first.
    pub files: Vec<CachedFile>,
    /// The total size.
    pub bytes: u64,
}

/// The name of the default model in lists.
pub const DEFAULT: &str = "default";

impl ModelCache {
    /// A cache in `root`, beside caches in Hugging Face's layout.
    pub fn new(root: &Path, shared: &[PathBuf]) -> ModelCache {
        ModelCache { root: root.to_owned(), shared: shared.to_vec() }
    }

    /// The path of a content.
    pub(super) fn blob(&self, sha256: &str) -> PathBuf {
        self.root.join("blobs").join(sha256)
    }

    /// The folder of a repository.
    pub(super) fn repository(&self, name: &RepositoryName) -> PathBuf {
        self.root.join("hub").join(name.owner()).join(name.name())
    }

    /// The folder of a repository at a commit, in which its files have their names.
    pub fn snapshot(&self, name: &RepositoryName, commit: &str) -> PathBuf {
        self.repository(name).join(commit)
    }

    /// The model in the cache that a name stands for: without a quantization the largest that is quantized.
    pub fn find(&self, name: &RepositoryName) -> HubResult<Option<CachedModel>> {
        let mut known = Vec::new();
        for (commit, folder) in self.snapshots(name) {
            let models = models_in(&folder, &name.path(), &commit)?;
            let choices: Vec<ModelChoice<CachedFile>> = models
                .iter()
                .map(|model| ModelChoice {
                    quant: model.quant.clone(),
                    files: model.files.clone(),
                    bytes: model.bytes,
                })
                .collect();
            let found = match name.quant() {
                Some(quant) => find_choice(&choices, quant, |file| &file.name),
                None => choices.iter().find(|choice| !choice.is_unquantized()).or(choices.first()),
            };
            if let Some(found) = found {
                let revision = name.explicit_revision().map(str::to_owned);
                let model = models.into_iter().find(|model| model.files == found.files);
                return Ok(model.map(|model| CachedModel { revision, ..model }));
            }
            known.extend(models.into_iter().map(|model| model.quant));
        }
        match name.quant().filter(|_| !known.is_empty()) {
            Some(quant) => {
                Err(HubError::QuantNotCached { repository: name.path(), quant: quant.to_owned(), known })
            }
            None => Ok(None),
        }
    }

    /// The folder of a repository with a file of this name, at the commit that its revision had when it was last pulled.
    pub fn find_folder(&self, name: &RepositoryName, file: &str) -> Option<PathBuf> {
        self.snapshots(name).into_iter().map(|(_, folder)| folder).find(|folder| folder.join(file).is_file())
    }

    /// The folders of a repository: that of the revision first, own ones before those of shared caches. A name without a
    /// revision means `main` as it is or was; a revision means that one and no other.
    fn snapshots(&self, name: &RepositoryName) -> Vec<(String, PathBuf)> {
        let mut found = Vec::new();
        let own = self.repository(name);
        let shared =
            self.shared.iter().map(|cache| cache.join(format!("models--{}--{}", name.owner(), name.name())));
        let shared = shared.map(|folder| (folder.join(REFS), folder.join("snapshots")));
        for (refs, snapshots) in std::iter::once((own.join(REFS), own)).chain(shared) {
            let mut commits = commits_in(&snapshots);
            let current = commit_of(&refs, &commits, name.revision());
            if name.explicit_revision().is_some() {
                commits.retain(|commit| Some(commit) == current.as_ref());
            } else {
                let others: BTreeSet<String> = revisions(&refs)
                    .into_iter()
                    .filter(|(revision, _)| revision != MAIN)
                    .map(|(_, commit)| commit)
                    .collect();
                commits.retain(|commit| Some(commit) == current.as_ref() || !others.contains(commit));
                commits.sort_by_key(|commit| Some(commit) != current.as_ref());
            }
            found.extend(commits.into_iter().map(|commit| (commit.clone(), snapshots.join(&commit))));
        }
        found
    }

    /// Every model of this cache, the default model, and those of shared caches that are not linked here.
    pub fn models(&self) -> HubResult<Vec<CachedModel>> {
        let mut found = Vec::new();
        let default = self.root.join(SMOLLM2.file);
        if let Ok(metadata) = fs::metadata(&default) {
            let file = CachedFile {
                name: SMOLLM2.file.to_owned(),
                path: default,
                bytes: metadata.len(),
                sha256: Some(SMOLLM2.sha256.to_owned()),
                is_shared: false,
            };
            found.push(CachedModel {
                repository: DEFAULT.to_owned(),
                commit: SMOLLM2.version.to_owned(),
                revision: None,
                quant: "Q4_1".to_owned(),
                bytes: file.bytes,
                files: vec![file],
            });
        }
        for (owner, folder) in entries(&self.root.join("hub")) {
            for (name, folder) in entries(&folder) {
                found.extend(models_of(&folder, &folder.join(REFS), &format!("{owner}/{name}"))?);
            }
        }
        for cache in &self.shared {
            for (name, folder) in entries(cache) {
                // The names of organizations have no two dashes in a row.
                let Some((owner, name)) =
                    name.strip_prefix("models--").and_then(|name| name.split_once("--"))
                else {
                    continue;
                };
                let repository = format!("{owner}/{name}");
                let models = models_of(&folder.join("snapshots"), &folder.join(REFS), &repository)?;
                let is_new = |model: &CachedModel| {
                    !found.iter().any(|own| {
                        (&own.repository, &own.commit, &own.quant)
                            == (&model.repository, &model.commit, &model.quant)
                    })
                };
                let new: Vec<CachedModel> = models.into_iter().filter(is_new).collect();
                found.extend(new);
            }
        }
        found.sort_by(|a, b| (&a.repository, &a.quant, &a.commit).cmp(&(&b.repository, &b.quant, &b.commit)));
        Ok(found)
    }

    /// What takes space in this cache beside models and downloads that were not completed.
    pub fn other_files(&self) -> HubResult<Vec<OtherFiles>> {
        let mut found = Vec::new();
        for (owner, folder) in entries(&self.root.join("hub")) {
            for (name, folder) in entries(&folder) {
                let commits = commits_in(&folder);
                for commit in &commits {
                    let others = others_in(&folder.join(commit))?;
                    found.extend(others.into_iter().map(|(kind, files)| OtherFiles {
                        repository: format!("{owner}/{name}"),
                        commit: commit.clone(),
                        revision: revision_of(&folder.join(REFS), &commits, commit),
                        kind,
                        bytes: files.iter().map(|file| file.bytes).sum(),
                        files,
                    }));
                }
            }
        }
        found.sort_by(|a, b| (&a.repository, &a.commit).cmp(&(&b.repository, &b.commit)));
        Ok(found)
    }

    /// The downloads that were not completed.
    pub fn partial_downloads(&self) -> Vec<PartialDownload> {
        let files = PartialFiles::all(&self.root.join("blobs"));
        files.iter().filter_map(PartialFiles::download).collect()
    }

    /// The lock of the names of contents; `None` where there is no cache, or no locks.
    pub(super) fn lock(&self, is_shared: bool) -> Option<File> {
        let file = self.lock_file()?;
        let locked = if is_shared { file.lock_shared() } else { file.lock() };
        locked.ok().map(|()| file)
    }

    pub(super) fn try_lock_alone(&self) -> Option<File> {
        let file = self.lock_file()?;
        file.try_lock().ok().map(|()| file)
    }

    fn lock_file(&self) -> Option<File> {
        let path = self.root.join(".hub.lock");
        File::options().create(true).truncate(false).write(true).open(path).ok()
    }

    /// A content of this size that is already on this machine: here, as the default model, or in a shared cache.
    pub(super) fn existing(&self, name: &RepositoryName, id: &str, bytes: u64) -> Option<PathBuf> {
        let has_size =
            |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == bytes);
        let own = self.blob(id);
        if has_size(&own) {
            return Some(own);
        }
        let folder = format!("models--{}--{}", name.owner(), name.name());
        self.shared.iter().map(|cache| cache.join(&folder).join("blobs").join(id)).find(has_size)
    }

    /// Gives a content its name in the folder of a commit, in place of an older link.
    pub(super) fn link(&self, content: &Path, target: &Path) -> HubResult<()> {
        let _shared = self.lock(true);
        self.link_locked(content, target)
    }

    /// Moves a content to its place and gives it its name: no other process takes it for unused between.
    #[cfg(feature = "network")]
    pub(super) fn publish(&self, partial: &Path, content: &Path, target: &Path) -> HubResult<()> {
        let _shared = self.lock(true);
        fs::rename(partial, content).map_err(io_error("rename", content))?;
        self.link_locked(content, target)
    }

    fn link_locked(&self, content: &Path, target: &Path) -> HubResult<()> {
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        }
        let content = fs::canonicalize(content).map_err(io_error("open", content))?;
        replace(target, |new| link(&content, new)).map_err(io_error("link", target))
    }

    /// Records the commit of a revision.
    #[cfg(feature = "network")]
    pub(super) fn set_commit(&self, name: &RepositoryName, commit: &str) -> HubResult<()> {
        let _shared = self.lock(true);
        let path = self.repository(name).join(REFS).join(name.revision());
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        }
        replace(&path, |new| fs::write(new, commit)).map_err(io_error("write", &path))
    }
}

/// Makes a file under another name and renames it, so that others see the old one or the new one.
fn replace(target: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (count, process) = (COUNT.fetch_add(1, Ordering::Relaxed), std::process::id());
    let new = target.with_file_name(format!("{}{process}-{count}{}", TEMPORARY.0, TEMPORARY.1));
    let _ = fs::remove_file(&new); // Of an earlier process with the same number.
    let made = make(&new).and_then(|()| fs::rename(&new, target));
    if made.is_err() {
        let _ = fs::remove_file(&new);
    }
    made
}

#[cfg(unix)]
fn link(content: &Path, target: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(content, target)
}

/// Elsewhere symbolic links need a privilege, and hard links do not.
#[cfg(not(unix))]
fn link(content: &Path, target: &Path) -> io::Result<()> {
    fs::hard_link(content, target).or_else(|_| fs::copy(content, target).map(|_| ()))
}

/// The files below a folder, with their paths in it, down to a few levels.
pub(super) fn files_below(folder: &Path) -> HubResult<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut open = vec![(String::new(), folder.to_owned(), 0)];
    while let Some((prefix, folder, depth)) = open.pop() {
        for (name, path) in entries(&folder) {
            let name = format!("{prefix}{name}");
            if path.is_dir() {
                if depth < MAX_DEPTH {
                    open.push((format!("{name}/"), path, depth + 1));
                }
            } else if path.exists() {
                found.push((name, path));
            }
        }
    }
    Ok(found)
}

/// The models of all commits of a repository, with the names of their revisions.
fn models_of(snapshots: &Path, refs: &Path, repository: &str) -> HubResult<Vec<CachedModel>> {
    let mut found = Vec::new();
    let commits = commits_in(snapshots);
    for commit in &commits {
        let revision = revision_of(refs, &commits, commit);
        let models = models_in(&snapshots.join(commit), repository, commit)?;
        found.extend(models.into_iter().map(|model| CachedModel { revision: revision.clone(), ..model }));
    }
    Ok(found)
}

/// The models in a folder of a commit.
pub(super) fn models_in(folder: &Path, repository: &str, commit: &str) -> HubResult<Vec<CachedModel>> {
    let files = files_below(folder)?.into_iter().filter(|(name, _)| name.ends_with(".gguf"));
    let files: Vec<CachedFile> = files.filter_map(|(name, path)| cached_file(name, path)).collect();
    let found = choices(&files, |file| &file.name, |file| file.bytes);
    Ok(found
        .into_iter()
        .map(|choice| CachedModel {
            repository: repository.to_owned(),
            commit: commit.to_owned(),
            revision: None,
            quant: choice.quant,
            files: choice.files,
            bytes: choice.bytes,
        })
        .collect())
}

/// Parts of models and safetensors in a folder of a commit.
pub(super) fn others_in(folder: &Path) -> HubResult<Vec<(OtherKind, Vec<CachedFile>)>> {
    let files = files_below(folder)?.into_iter();
    let files: Vec<CachedFile> = files.filter_map(|(name, path)| cached_file(name, path)).collect();
    let parts = incomplete(&files, |file| &file.name, |file| file.bytes).into_iter();
    let mut found: Vec<_> = parts
        .map(|(count, choice)| (OtherKind::Parts { quant: choice.quant, count }, choice.files))
        .collect();
    if files.iter().any(|file| file.name.ends_with(".safetensors")) {
        let files = files.into_iter().filter(|file| !file.name.ends_with(".gguf")).collect();
        found.push((OtherKind::Safetensors, files));
    }
    Ok(found)
}

fn cached_file(name: String, path: PathBuf) -> Option<CachedFile> {
    let bytes = fs::metadata(&path).ok()?.len();
    let content = fs::canonicalize(&path).ok()?;
    let id = content.file_name()?.to_str()?.to_owned();
    let sha256 = Some(id).filter(|id| id.len() == 64 && is_plain(id));
    let is_shared = content.ancestors().any(|folder| {
        folder.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("models--"))
    });
    Some(CachedFile { name, path, bytes, sha256, is_shared })
}
