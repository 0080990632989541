//! What is checked about an output before anything is computed.

use std::path::{Path, PathBuf};

use quadriga_gguf::File;

use crate::failure::{Failure, Outcome};

/// The files of a model: all parts of one that is split.
pub(crate) fn model_files(path: &Path) -> Vec<PathBuf> {
    let mut files = vec![path.to_owned()];
    if let Ok(file) = File::open(path) {
        files.extend(file.paths().map(Path::to_owned));
    }
    files
}

/// An error if the folder of an output is not there: before the work, not after it.
pub(crate) fn check_folder(output: &Path) -> Outcome {
    match output.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        Some(folder) => Err(Failure::Message(format!(
            "cannot write {}: there is no folder {}",
            output.display(),
            folder.display()
        ))),
        None => Ok(()),
    }
}
