//! Removes models, and what killed runs left, from the cache.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use quadriga_llm::default_model::SMOLLM2;

use super::cache::{CachedFile, DEFAULT, ModelCache, OtherKind, files_below, models_in, others_in};
use super::error::{HubError, HubResult, io_error};
use super::locks;
use super::name::RepositoryName;
use super::partial::PartialFiles;
use super::revisions::{MAX_DEPTH, REFS, commit_of, commits_in, entries, is_temporary, revisions};
use super::selection::{ModelChoice, find_choice};

impl ModelCache {
    /// Removes the models of a name: with a revision those of its commit, unless another revision is at it, too, else of all
    /// commits; without a quantization all of them; also what was not downloaded to its end. Contents that nothing links to any
    /// more are deleted; those in shared caches stay. The bytes that became free.
    pub fn remove(&self, name: &RepositoryName) -> HubResult<u64> {
        let _alone = self.lock(false);
        let repository = self.repository(name);
        let refs = repository.join(REFS);
        let mut commits = commits_in(&repository);
        if let Some(revision) = name.explicit_revision() {
            let meant = commit_of(&refs, &commits, revision);
            commits.retain(|commit| Some(commit) == meant.as_ref());
            if name.quant().is_none() && is_shared_commit(&refs, revision, meant.as_deref()) {
                // The files are those of another revision, too.
                let path = refs.join(revision);
                fs::remove_file(&path).map_err(io_error("remove", path))?;
                return Ok(0);
            }
        }
        // One label for all commits: that of one of them may look like another model's in the next.
        let label = match name.quant() {
            Some(quant) => {
                let mut all = Vec::new();
                for commit in &commits {
                    all.extend(choices_in(&repository.join(commit), name, commit)?);
                }
                find_choice(&all, quant, |file| &file.name).map(|choice| choice.quant.clone())
            }
            None => None,
        };
        let partial = self.remove_partial(name);
        let mut removed = partial.is_some();
        for commit in &commits {
            let folder = repository.join(commit);
            let Some(quant) = name.quant() else {
                fs::remove_dir_all(&folder).map_err(io_error("remove", &folder))?;
                removed = true;
                continue;
            };
            // Of those with that label the one that the name stands for, as where a model is run.
            let mut choices = choices_in(&folder, name, commit)?;
            choices.retain(|choice| Some(&choice.quant) == label.as_ref());
            for file in
                find_choice(&choices, quant, |file| &file.name).iter().flat_map(|choice| &choice.files)
            {
                fs::remove_file(&file.path).map_err(io_error("remove", &file.path))?;
                removed = true;
            }
            // Parts whose others were not downloaded are no model, and of no use.
            for file in parts_of(&folder, quant)? {
                fs::remove_file(&file.path).map_err(io_error("remove", &file.path))?;
                removed = true;
            }
            remove_empty(&folder);
        }
        if !removed {
            return Err(match self.find_shared(name) {
                Some(path) => HubError::Shared { name: name.to_string(), path },
                None => HubError::NotCached { name: name.to_string() },
            });
        }
        let left = commits_in(&repository);
        if left.is_empty() && repository.is_dir() {
            fs::remove_dir_all(&repository).map_err(io_error("remove", &repository))?;
        }
        for (revision, _) in revisions(&refs).into_iter().filter(|(_, commit)| !left.contains(commit)) {
            let _ = fs::remove_file(refs.join(revision)); // It names nothing, which does no harm.
        }
        Ok(self.remove_unused()? + partial.unwrap_or(0))
    }

    /// The file of a model that is in a shared cache only.
    fn find_shared(&self, name: &RepositoryName) -> Option<PathBuf> {
        let model = self.find(name).ok().flatten()?;
        model.files.into_iter().next().filter(|file| file.is_shared).map(|file| file.path)
    }

    /// Removes incomplete downloads of a name that nobody goes on with; their bytes, `None` if there are none.
    fn remove_partial(&self, name: &RepositoryName) -> Option<u64> {
        let mut freed = None;
        for files in PartialFiles::all(&self.root.join("blobs")) {
            if !files.owner().is_of(name) {
                continue;
            }
            if let Ok(Some(_lock)) = locks::try_lock(&files.lock) {
                let bytes = fs::metadata(&files.content).map_or(0, |found| found.len());
                files.remove();
                freed = Some(freed.unwrap_or(0) + bytes);
            }
        }
        freed
    }

    /// Removes files of runs that were killed, which nobody can use any more: links and revisions that were being made, and
    /// what is left of downloads without their content. Those of running processes stay.
    pub(super) fn remove_stale(&self) {
        for files in PartialFiles::all(&self.root.join("blobs")) {
            files.remove_stale();
        }
        // Links are made while the lock is shared.
        let Some(_alone) = self.try_lock_alone() else { return };
        let mut folders = vec![(self.root.join("hub"), 0)];
        while let Some((folder, depth)) = folders.pop() {
            for (name, path) in entries(&folder) {
                if is_temporary(&name) {
                    let _ = fs::remove_file(path); // One that cannot be removed does no harm.
                } else if depth < MAX_DEPTH && fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
                    folders.push((path, depth + 1));
                }
            }
        }
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
                for commit in commits_in(&repository) {
                    for (_, path) in files_below(&repository.join(commit))? {
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
}

/// The models in a folder of a commit, for [`find_choice`].
fn choices_in(folder: &Path, name: &RepositoryName, commit: &str) -> HubResult<Vec<ModelChoice<CachedFile>>> {
    let models = models_in(folder, &name.path(), commit)?.into_iter();
    Ok(models
        .map(|model| ModelChoice { quant: model.quant, files: model.files, bytes: model.bytes })
        .collect())
}

/// The parts in a folder of a commit of models that are not complete, by their type of quantization.
fn parts_of(folder: &Path, wanted: &str) -> HubResult<Vec<CachedFile>> {
    let is_wanted = |kind: &OtherKind| match kind {
        OtherKind::Parts { quant, .. } => quant.eq_ignore_ascii_case(wanted),
        OtherKind::Safetensors => false,
    };
    Ok(others_in(folder)?
        .into_iter()
        .filter(|(kind, _)| is_wanted(kind))
        .flat_map(|(_, files)| files)
        .collect())
}

/// Whether a branch or tag is at a commit at which another one is.
fn is_shared_commit(refs: &Path, revision: &str, commit: Option<&str>) -> bool {
    let at_commit: Vec<String> = revisions(refs)
        .into_iter()
        .filter(|(_, own)| Some(own.as_str()) == commit)
        .map(|(name, _)| name)
        .collect();
    at_commit.len() > 1 && at_commit.iter().any(|name| name == revision)
}

/// Removes a folder and those in it that have no files; others stay.
fn remove_empty(folder: &Path) {
    for (_, path) in entries(folder) {
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
            remove_empty(&path);
        }
    }
    let _ = fs::remove_dir(folder); // It is not empty then.
}
