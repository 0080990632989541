//! The revisions and commits of a repository in a cache, ours or Hugging Face's.

use std::fs;
use std::path::{Path, PathBuf};

use super::name::MAIN;

/// The folder of a repository's revisions.
pub(super) const REFS: &str = "refs";

/// The fewest digits of a commit that stand for it, and those that are shown.
const SHORT_COMMIT: (usize, usize) = (7, 8);

/// The most folders within each other that are searched.
pub(super) const MAX_DEPTH: usize = 8;

/// The beginning and the end of the names of links and revisions that are being made.
pub(super) const TEMPORARY: (&str, &str) = (".quadriga-", ".tmp");

pub(super) fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1)
}

/// The commits of a repository, by their folders.
pub(super) fn commits_in(snapshots: &Path) -> Vec<String> {
    let folders = entries(snapshots).filter(|(commit, path)| commit != REFS && path.is_dir());
    folders.map(|(commit, _)| commit).collect()
}

/// The revisions of a repository and their commits.
pub(super) fn revisions(refs: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = vec![(String::new(), refs.to_owned(), 0)];
    while let Some((prefix, folder, depth)) = open.pop() {
        for (name, path) in entries(&folder).filter(|(name, _)| !is_temporary(name)) {
            if path.is_dir() {
                if depth < MAX_DEPTH {
                    open.push((format!("{prefix}{name}/"), path, depth + 1));
                }
            } else if let Ok(commit) = fs::read_to_string(&path) {
                found.push((format!("{prefix}{name}"), commit.trim().to_owned()));
            }
        }
    }
    found
}

/// The commit of a revision among these: what it was when it was last pulled, or the commit itself, of which the first digits are
/// enough.
pub(super) fn commit_of(refs: &Path, commits: &[String], revision: &str) -> Option<String> {
    let recorded = fs::read_to_string(refs.join(revision)).unwrap_or_default();
    let recorded = Some(recorded.trim()).filter(|commit| is_plain(commit));
    let exact = |wanted: &str| commits.iter().find(|commit| *commit == wanted).cloned();
    recorded.and_then(exact).or_else(|| exact(revision)).or_else(|| {
        let is_short = revision.len() >= SHORT_COMMIT.0 && is_plain(revision);
        let mut fitting = commits.iter().filter(|commit| is_short && commit.starts_with(revision));
        fitting.next().filter(|_| fitting.next().is_none()).cloned()
    })
}

/// The name of a commit among these, unless it is what `main` is: a branch or tag, else its first digits.
pub(super) fn revision_of(refs: &Path, commits: &[String], commit: &str) -> Option<String> {
    let main = commit_of(refs, commits, MAIN);
    if main.as_deref() == Some(commit) {
        return None;
    }
    let short = || commit.get(..SHORT_COMMIT.1).unwrap_or(commit).to_owned();
    let mut named = revisions(refs).into_iter().filter(|(name, own)| own == commit && name != commit);
    // Of a repository without a revision nothing tells its commits apart.
    named.next().map(|(name, _)| name).or_else(|| (main.is_some() || refs.join(commit).exists()).then(short))
}

/// Whether a text is one of hexadecimal digits, as commits are.
pub(super) fn is_plain(commit: &str) -> bool {
    !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Names and paths in a folder, in order; none if it cannot be read.
pub(super) fn entries(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> =
        found.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect();
    found.sort();
    found.into_iter()
}
