//! Failures of devices.

use thiserror::Error;

use crate::byte_text::{byte_text, free_text};

/// A failure of a backend. The backend can be used further, unless the device is [lost](BackendError::Lost).
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BackendError {
    /// An allocation failed.
    #[error("{backend}: cannot allocate {}{}", byte_text(*.requested), free_text(.free))]
    OutOfMemory {
        /// The backend's name.
        backend: String,
        /// Bytes requested.
        requested: u64,
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
        /// The number of bytes.
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
    /// A buffer, event or program of another backend was passed in.
    #[error("{backend}: the {what} belongs to another backend")]
    Foreign {
        /// The backend's name.
        backend: String,
        /// The kind of object.
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
    /// A node's input has values that it cannot compute with, such as a row index out of range.
    #[error("{backend}: {node}: {reason}")]
    Node {
        /// The backend's name.
        backend: String,
        /// The node's name.
        node: String,
        /// Which values.
        reason: String,
    },
    /// An operation of the device failed; it may be retried.
    #[error("{backend}: {what} failed: {reason}")]
    Failed {
        /// The backend's name.
        backend: String,
        /// The operation.
        what: &'static str,
        /// The device's message.
        reason: String,
    },
    /// The device is lost with everything on it; every later call fails.
    #[error("{backend}: the device is lost: {reason}")]
    Lost {
        /// The backend's name.
        backend: String,
        /// The device's message.
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
