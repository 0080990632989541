//! An output may not be one of the inputs: it would be read while it is replaced, and its content be lost.

use std::path::{Path, PathBuf};

/// The file that a command was to write is one that it reads.
#[derive(Debug, thiserror::Error)]
#[error("{} would be overwritten, but it is read: it is {}; name another file for the output", output.display(), input.display())]
pub struct OutputIsInput {
    /// The file to write.
    pub output: PathBuf,
    /// The input that it is.
    pub input: PathBuf,
}

/// An error if `output` is one of the inputs: by its path, through symbolic links, or as another name of the same file.
///
/// ```
/// use quadriga_models::check_output;
///
/// assert!(check_output("new.gguf", ["model.gguf"]).is_ok());
/// ```
pub fn check_output<P: AsRef<Path>>(
    output: impl AsRef<Path>,
    inputs: impl IntoIterator<Item = P>,
) -> Result<(), OutputIsInput> {
    let output = output.as_ref();
    // What is not there yet overwrites nothing.
    let Some(own) = Identity::of(output) else { return Ok(()) };
    for input in inputs {
        let input = input.as_ref();
        if Identity::of(input).is_some_and(|input| input.is_same(&own)) {
            return Err(OutputIsInput { output: output.to_owned(), input: input.to_owned() });
        }
    }
    Ok(())
}

/// What tells files apart.
struct Identity {
    path: PathBuf,
    /// The file system and the number in it, where there are such numbers.
    #[cfg(unix)]
    number: (u64, u64),
}

impl Identity {
    /// Of a plain file; devices and pipes are no inputs that could be lost.
    fn of(path: &Path) -> Option<Identity> {
        let metadata = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
        #[cfg(unix)]
        let number = {
            use std::os::unix::fs::MetadataExt;
            (metadata.dev(), metadata.ino())
        };
        #[cfg(not(unix))]
        drop(metadata);
        Some(Identity {
            path: std::fs::canonicalize(path).ok()?,
            #[cfg(unix)]
            number,
        })
    }

    fn is_same(&self, other: &Identity) -> bool {
        #[cfg(unix)]
        if self.number == other.number {
            return true;
        }
        self.path == other.path
    }
}
