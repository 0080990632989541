//! What can go wrong on a device.

use thiserror::Error;

/// A failure of a backend. What worked before still works, unless the device is [lost](BackendError::Lost).
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Memory could not be had.
    #[error("{backend}: {wanted} bytes of memory are wanted{}", free_text(.free))]
    OutOfMemory {
        /// The backend's name.
        backend: String,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free, if known.
        free: Option<u64>,
    },
    /// A transfer would reach outside its buffer.
    #[error("{backend}: {bytes} bytes at offset {offset} do not fit a buffer of {size}")]
    OutOfBounds {
        /// The backend's name.
        backend: String,
        /// The first byte.
        offset: usize,
        /// How many.
        bytes: usize,
        /// The buffer's size.
        size: usize,
    },
    /// The two sides of a copy differ in size.
    #[error("{backend}: {from} bytes cannot be copied to {to}")]
    SizeMismatch {
        /// The backend's name.
        backend: String,
        /// Bytes of the source.
        from: usize,
        /// Bytes of the target.
        to: usize,
    },
    /// Something of another backend was handed in: a buffer, an event, a program.
    #[error("{backend}: the {what} was not made by this backend")]
    Foreign {
        /// The backend's name.
        backend: String,
        /// What it was.
        what: &'static str,
    },
    /// A node cannot be computed here.
    #[error("{backend}: {node}: {reason}")]
    Unsupported {
        /// The backend's name.
        backend: String,
        /// The node's name.
        node: String,
        /// Why.
        reason: String,
    },
    /// A node met data it cannot work with, such as a row index out of range.
    #[error("{backend}: {node}: {reason}")]
    Node {
        /// The backend's name.
        backend: String,
        /// The node's name.
        node: String,
        /// What was wrong.
        reason: String,
    },
    /// An operation of the device failed; it can be tried again.
    #[error("{backend}: {what} failed: {reason}")]
    Failed {
        /// The backend's name.
        backend: String,
        /// What was tried.
        what: &'static str,
        /// What the device said.
        reason: String,
    },
    /// The device is gone; everything on it is lost, and nothing more will work there.
    #[error("{backend}: the device is lost: {reason}")]
    Lost {
        /// The backend's name.
        backend: String,
        /// What the device said.
        reason: String,
    },
}

impl BackendError {
    /// The name of the backend that failed.
    pub fn backend(&self) -> &str {
        match self {
            BackendError::OutOfMemory { backend, .. }
            | BackendError::OutOfBounds { backend, .. }
            | BackendError::SizeMismatch { backend, .. }
            | BackendError::Foreign { backend, .. }
            | BackendError::Unsupported { backend, .. }
            | BackendError::Node { backend, .. }
            | BackendError::Failed { backend, .. }
            | BackendError::Lost { backend, .. } => backend,
        }
    }
}

fn free_text(free: &Option<u64>) -> String {
    free.map_or_else(String::new, |free| format!(", {free} are free"))
}
