//! Errors of saving and restoring states.

use std::io;
use std::path::Path;

use thiserror::Error;

/// Why states could not be saved or restored. After a failed restore all states are as they were.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Reading or writing failed.
    #[error("cannot {action} the saved states{}: {reason}", path_text(.path))]
    Io {
        /// "read", "write", "create", …
        action: &'static str,
        /// The file, if there is one.
        path: Option<String>,
        /// The system's kind of failure.
        kind: io::ErrorKind,
        /// The system's message.
        reason: String,
    },
    /// The bytes do not begin as saved states do.
    #[error("these are no saved states: the file begins with other bytes")]
    NotSavedStates,
    /// The format is of another version.
    #[error(
        "the states were saved in version {found} of the format; this version of the library reads {known}"
    )]
    Version {
        /// The version of the file.
        found: u32,
        /// The version that this library reads and writes.
        known: u32,
    },
    /// The bytes end too early.
    #[error("the saved states are incomplete")]
    Truncated,
    /// Something follows the saved states in a file.
    #[error("the file has further bytes after the saved states")]
    TrailingBytes,
    /// A checksum or a number is wrong.
    #[error("the saved states are damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
    /// The session has no such state.
    #[error(
        "state {name} was saved, but the session has none of this name; prepare the graphs that use it first"
    )]
    Unknown {
        /// The name.
        name: String,
    },
    /// The session has a state that was not saved.
    #[error("state {name} of the session was not saved")]
    Missing {
        /// The name.
        name: String,
    },
    /// A state has another type or shape than the saved one.
    #[error("state {name} is {here} in the session, but was saved as {saved}")]
    Differs {
        /// The name.
        name: String,
        /// Type and shape in the session.
        here: String,
        /// Type and shape of the saved state.
        saved: String,
    },
    /// A range to save is not inside its state, or ranges overlap or are out of order.
    #[error(
        "bytes {start}..{end} of state {name} cannot be saved: it has {bytes}, and ranges must be in order"
    )]
    Range {
        /// The name.
        name: String,
        /// The first byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// The state's bytes.
        bytes: usize,
    },
}

impl SnapshotError {
    pub(crate) fn io(action: &'static str, path: Option<&Path>, error: &io::Error) -> SnapshotError {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return SnapshotError::Truncated;
        }
        let path = path.map(|path| path.display().to_string());
        SnapshotError::Io { action, path, kind: error.kind(), reason: error.to_string() }
    }
}

fn path_text(path: &Option<String>) -> String {
    path.as_ref().map_or_else(String::new, |path| format!(" ({path})"))
}
