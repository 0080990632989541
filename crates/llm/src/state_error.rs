//! The reasons why a saved KV cache cannot be written or used.

use std::io;

use quadriga_graph::DType;

/// The reason why a saved KV cache cannot be written or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// It does not begin as one.
    #[error("it is not a saved KV cache")]
    Unknown,
    /// It has a version of the format that is not supported.
    #[error("its format has version {found}, supported is {known}")]
    Version {
        /// The version.
        found: u32,
        /// The supported version.
        known: u32,
    },
    /// It was saved with a model that has other hyperparameters, tensors or weights. Weights are compared by samples, see
    /// [`Model::identity`](crate::Model::identity): a change of only a few weights is not noticed.
    #[error("it was saved with another model")]
    OtherModel,
    /// It was saved with another type of the KV cache.
    #[error("it has type {found}, this KV cache has type {wanted}")]
    CacheType {
        /// The saved type.
        found: String,
        /// The engine's type.
        wanted: DType,
    },
    /// It has more tokens than the context.
    #[error("its {tokens} tokens do not fit the context of {context}")]
    TooLong {
        /// Saved tokens.
        tokens: u64,
        /// The context size.
        context: usize,
    },
    /// It ends too early.
    #[error("it is incomplete")]
    Truncated,
    /// Its contents contradict each other.
    #[error("it is damaged: {what}")]
    Damaged {
        /// The contradiction.
        what: &'static str,
    },
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Read(#[source] io::Error),
    /// It cannot be written.
    #[error("it cannot be written: {0}")]
    Write(#[source] io::Error),
}

impl StateError {
    pub(crate) fn read(error: io::Error) -> StateError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => StateError::Truncated,
            _ => StateError::Read(error),
        }
    }

    pub(crate) fn write(error: io::Error) -> StateError {
        StateError::Write(error)
    }
}
