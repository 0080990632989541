//! What `quadriga devices --measure` found out, kept in the cache folder.

use std::io::Write;
use std::path::{Path, PathBuf};

use quadriga_llm::default_model::cache_folder;
use quadriga_view::Limits;

use crate::atomic_file::AtomicFile;
use crate::failure::{Failure, Outcome};

fn path(folder: Option<&Path>) -> Option<PathBuf> {
    let folder = folder.map(Path::to_owned).or_else(|| cache_folder().ok())?;
    Some(folder.join("limits.json"))
}

/// The limits that were measured on this machine; none where nobody measured, or the file is not readable.
pub(crate) fn load(folder: Option<&Path>) -> Vec<Limits> {
    let text = path(folder).and_then(|path| std::fs::read_to_string(path).ok());
    text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// Keeps limits; those of other devices stay. Returns where.
pub(crate) fn store(folder: Option<&Path>, fresh: &[Limits]) -> Outcome<PathBuf> {
    let Some(path) = path(folder) else {
        return Err(Failure::Message("there is no cache folder; name one with --cache-dir".into()));
    };
    let mut all = load(folder);
    all.retain(|old| !fresh.iter().any(|new| (&new.backend, &new.device) == (&old.backend, &old.device)));
    all.extend_from_slice(fresh);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|error| Failure::file("create", parent, &error))?;
    }
    let mut file = AtomicFile::create(&path)?;
    let text = serde_json::to_string_pretty(&all)?;
    file.write_all(text.as_bytes()).map_err(|error| Failure::file("write", &path, &error))?;
    file.publish()?;
    Ok(path)
}
