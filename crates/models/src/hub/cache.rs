//! The cache: contents by their SHA-256, and repositories as folders of links to them.
//!
//! ```text
//! CACHE/blobs/SHA256                       a content
//! CACHE/blobs/SHA256.partial               one that is not complete; .state: what is there, .of: the repository and the file
//! CACHE/hub/ORG/REPO/refs/REVISION         the commit of a branch or tag when it was last pulled
//! CACHE/hub/ORG/REPO/COMMIT/FILE           a link to a content, here or in a cache of Hugging Face's libraries
//! ```
//!
//! A content of several repositories or commits is there once. Hugging Face's own caches
//! (`models--ORG--REPO/{blobs,refs,snapshots}`) are read and never changed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quadriga_llm::default_model::SMOLLM2;

use super::error::{HubError, HubResult, io_error};
use super::name::RepositoryName;
use super::selection::{ModelChoice, choices, find_choice, quant_of};

/// A cache of models.
#[derive(Clone, Debug)]
pub struct ModelCache {
    root: PathBuf,
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

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// `ORG/REPO`, or `default` for the default model.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// The type of quantization.
    pub quant: String,
    /// The files, the first part first.
    pub files: Vec<CachedFile>,
    /// The total size.
    pub bytes: u64,
}

/// The extension of a file beside an incomplete content that has the repository and the name of its file.
pub(super) const OWNER: &str = "of";

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
    fn repository(&self, name: &RepositoryName) -> PathBuf {
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
                return Ok(models.into_iter().find(|model| model.files == found.files));
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

    /// The folders of a repository: that of the revision first, own ones before those of shared caches.
    fn snapshots(&self, name: &RepositoryName) -> Vec<(String, PathBuf)> {
        let mut found = Vec::new();
        let own = self.repository(name);
        let shared =
            self.shared.iter().map(|cache| cache.join(format!("models--{}--{}", name.owner(), name.name())));
        let shared = shared.map(|folder| (folder.join("refs"), folder.join("snapshots")));
        for (refs, snapshots) in std::iter::once((own.join("refs"), own)).chain(shared) {
            let current = fs::read_to_string(refs.join(name.revision())).unwrap_or_default();
            let current = Some(current.trim()).filter(|commit| is_plain(commit)).unwrap_or(name.revision());
            let mut commits: Vec<String> = entries(&snapshots)
                .filter(|(commit, path)| commit != "refs" && path.is_dir())
                .map(|(commit, _)| commit)
                .collect();
            commits.sort_by_key(|commit| commit != current);
            // An explicit revision means that one and no other.
            commits.retain(|commit| name.revision() == super::name::MAIN || commit == current);
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
                quant: "Q4_1".to_owned(),
                bytes: file.bytes,
                files: vec![file],
            });
        }
        for (owner, folder) in entries(&self.root.join("hub")) {
            for (name, folder) in entries(&folder) {
                for (commit, folder) in entries(&folder).filter(|(commit, _)| commit != "refs") {
                    found.extend(models_in(&folder, &format!("{owner}/{name}"), &commit)?);
                }
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
                for (commit, folder) in entries(&folder.join("snapshots")) {
                    let models = models_in(&folder, &format!("{owner}/{name}"), &commit)?;
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
        }
        found.sort_by(|a, b| (&a.repository, &a.quant, &a.commit).cmp(&(&b.repository, &b.quant, &b.commit)));
        Ok(found)
    }

    /// Removes the models of a name, all of its commits; without a quantization the whole repository; also what was not
    /// downloaded to its end. Contents that nothing links to any more are deleted; those in shared caches stay. The bytes that
    /// became free.
    pub fn remove(&self, name: &RepositoryName) -> HubResult<u64> {
        let missing = || HubError::NotCached { name: name.to_string() };
        let folder = self.repository(name);
        let partial = self.remove_partial(name)?;
        match name.quant() {
            None if folder.is_dir() => fs::remove_dir_all(&folder).map_err(io_error("remove", &folder))?,
            None if partial.is_some() => {}
            None => return Err(missing()),
            Some(quant) => {
                let mut removed = partial.is_some();
                for (commit, folder) in entries(&folder).filter(|(commit, _)| commit != "refs") {
                    for model in models_in(&folder, &name.path(), &commit)? {
                        let one = [ModelChoice { quant: model.quant, files: model.files, bytes: 0 }];
                        if find_choice(&one, quant, |file| &file.name).is_none() {
                            continue;
                        }
                        for file in one.iter().flat_map(|choice| &choice.files) {
                            fs::remove_file(&file.path).map_err(io_error("remove", &file.path))?;
                            removed = true;
                        }
                    }
                }
                if !removed {
                    return Err(missing());
                }
            }
        }
        Ok(self.remove_unused()? + partial.unwrap_or(0))
    }

    /// Removes incomplete downloads of a name that nobody goes on with; their bytes, `None` if there are none.
    fn remove_partial(&self, name: &RepositoryName) -> HubResult<Option<u64>> {
        let mut freed = None;
        for (_, owner) in entries(&self.root.join("blobs")) {
            if owner.extension().is_none_or(|extension| extension != OWNER) {
                continue;
            }
            let text = fs::read_to_string(&owner).unwrap_or_default();
            let (repository, file) = text.split_once('\n').unwrap_or_default();
            let label = quant_of(file.trim_end_matches(".gguf"));
            let is_meant =
                name.quant().is_none_or(|quant| label.is_some_and(|label| label.eq_ignore_ascii_case(quant)));
            let lock = owner.with_extension("lock");
            let is_busy = fs::File::open(&lock).is_ok_and(|file| file.try_lock().is_err());
            if repository != name.path() || !is_meant || is_busy {
                continue;
            }
            let partial = owner.with_extension("partial");
            let bytes = fs::metadata(&partial).map_or(0, |found| found.len());
            for path in [partial, owner.with_extension("state"), lock] {
                let _ = fs::remove_file(path); // Not all are there at all times.
            }
            fs::remove_file(&owner).map_err(io_error("remove", &owner))?;
            freed = Some(freed.unwrap_or(0) + bytes);
        }
        Ok(freed)
    }

    /// Removes the default model; its size.
    pub fn remove_default(&self) -> HubResult<u64> {
        let path = self.root.join(SMOLLM2.file);
        let bytes = fs::metadata(&path).map_err(|_| HubError::NotCached { name: DEFAULT.to_owned() })?.len();
        fs::remove_file(&path).map_err(io_error("remove", &path))?;
        let _ = fs::remove_file(self.root.join(format!("{}.verified", SMOLLM2.file)));
        Ok(bytes)
    }

    /// Deletes contents that no repository links to; the bytes that became free.
    fn remove_unused(&self) -> HubResult<u64> {
        let mut used = BTreeSet::new();
        for (_, owner) in entries(&self.root.join("hub")) {
            for (_, repository) in entries(&owner) {
                for (_, commit) in entries(&repository) {
                    for (_, path) in files_below(&commit)? {
                        used.extend(fs::canonicalize(&path).ok());
                    }
                }
            }
        }
        let mut freed = 0;
        for (name, path) in entries(&self.root.join("blobs")) {
            let is_used = name.len() != 64 || fs::canonicalize(&path).is_ok_and(|path| used.contains(&path));
            if !is_used {
                freed += fs::metadata(&path).map_or(0, |metadata| metadata.len());
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(freed)
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

    /// Gives a content its name in the folder of a commit.
    pub(super) fn link(&self, content: &Path, target: &Path) -> HubResult<()> {
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        }
        let content = fs::canonicalize(content).map_err(io_error("open", content))?;
        let _ = fs::remove_file(target); // A link to a content that was removed.
        link(&content, target).map_err(io_error("link", target))
    }

    /// Records the commit of a revision.
    pub(super) fn set_commit(&self, name: &RepositoryName, commit: &str) -> HubResult<()> {
        let folder = self.repository(name).join("refs");
        fs::create_dir_all(&folder).map_err(io_error("create", &folder))?;
        let path = folder.join(name.revision());
        fs::write(&path, commit).map_err(io_error("write", path))
    }
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

fn is_plain(commit: &str) -> bool {
    !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Names and paths in a folder, in order; none if it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> =
        found.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect();
    found.sort();
    found.into_iter()
}

/// The files below a folder, with their paths in it, down to a few levels.
fn files_below(folder: &Path) -> HubResult<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut open = vec![(String::new(), folder.to_owned(), 0)];
    while let Some((prefix, folder, depth)) = open.pop() {
        for (name, path) in entries(&folder) {
            let name = format!("{prefix}{name}");
            if path.is_dir() {
                if depth < 8 {
                    open.push((format!("{name}/"), path, depth + 1));
                }
            } else if path.exists() {
                found.push((name, path));
            }
        }
    }
    Ok(found)
}

/// The models in a folder of a commit.
fn models_in(folder: &Path, repository: &str, commit: &str) -> HubResult<Vec<CachedModel>> {
    let files = files_below(folder)?.into_iter().filter(|(name, _)| name.ends_with(".gguf"));
    let files: Vec<CachedFile> = files.filter_map(|(name, path)| cached_file(name, path)).collect();
    let found = choices(&files, |file| &file.name, |file| file.bytes);
    Ok(found
        .into_iter()
        .map(|choice| CachedModel {
            repository: repository.to_owned(),
            commit: commit.to_owned(),
            quant: choice.quant,
            files: choice.files,
            bytes: choice.bytes,
        })
        .collect())
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
